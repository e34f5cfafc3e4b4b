"""A worker: a process that serves the connections that the supervisor hands over.

It is the whole service but for the listener. Signals do not reach it: the supervisor tells it when
to drain. If the supervisor ends, the worker ends too.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NoReturn

from sightline.base.errors import EXIT_FAILED
from sightline.service.app import create_app
from sightline.service.inference import changes
from sightline.service.inference.service import Service
from sightline.service.loading import load_backend
from sightline.service.logs import configure_logging
from sightline.service.metrics import Texts, texts_of
from sightline.service.peers import Handler, spawn
from sightline.service.runtime.thread_counts import ThreadPlan
from sightline.service.server import DrainingServer, explain_bus_errors
from sightline.service.settings import Settings
from sightline.service.workers.channel import ALIVE_S, Channel, ChannelClosedError
from sightline.service.workers.handover import Handover

RETIRE_CHECK_S = 0.05
LAST_METRICS_S = 1.0  # time in which the supervisor must take the last metrics
logger = logging.getLogger(__name__)


class WorkerServer(DrainingServer):
    """Serves the connections that it receives from the supervisor."""

    # The process ignores these signals from its start, see `run_forked`.
    capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    def __init__(self, settings: Settings, plan: ThreadPlan, handover: Handover, control: socket.socket) -> None:
        """Create the server, see `run_forked`."""
        load = functools.partial(load_backend, plan=plan)
        app = create_app(settings, load, self.end, on_ready=self._report_ready)
        super().__init__(app, settings)
        self._handover = handover
        self._control = control
        self._channel: Channel
        self._running: asyncio.Task[None]
        self._signs: asyncio.Task[None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._channel = await Channel.open(self._control)
        self._service.peers = self._channel
        self._service.not_ready_code = "loading"
        self._running = asyncio.create_task(self._follow_supervisor())
        self._signs = asyncio.create_task(self._show_life())
        await super().startup(sockets=[])
        self._handover.receive(self._accept)

    async def _show_life(self) -> None:
        while True:
            self._channel.notify("alive")
            await asyncio.sleep(ALIVE_S / 2)

    async def _follow_supervisor(self) -> None:
        await self._channel.run(
            {
                "drain": self._begin_drain,
                "retire": self._retire,
                "peers_ready": self._set_peers_ready,
                "metrics": self._metrics,
                **model_calls(self._service),
            }
        )
        if not self.should_exit:
            logger.error("the supervisor has ended; the worker ends with it")
            self.end(EXIT_FAILED)

    def _accept(self, sock: socket.socket, on_end: Callable[[], None], elsewhere: tuple[int, int]) -> None:
        """Serve a connection; `on_end` tells the supervisor that it has ended.

        `elsewhere` counts connections of all other workers, and of the same client to them.
        """
        spawn(self.server_state.tasks, self._serve_connection(sock, on_end, elsewhere))

    async def _serve_connection(
        self, sock: socket.socket, on_end: Callable[[], None], elsewhere: tuple[int, int]
    ) -> None:
        factory = functools.partial(
            self._protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            on_end=on_end,
            elsewhere=elsewhere,
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(factory, sock)
        except OSError:  # the client has gone
            sock.close()
            on_end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._handover.stop_receiving()
        await super().shutdown(sockets)
        with contextlib.suppress(ChannelClosedError, TimeoutError):
            async with asyncio.timeout(LAST_METRICS_S):
                await self._channel.call("last_metrics", await self._metrics())

    # Calls of the supervisor

    def _report_ready(self) -> None:
        service = self._service
        self._channel.notify(
            "ready",
            {name: [model.manifest.digest, model.state] for name, model in service.models.items()},
            {name: dict(model.loaded.model.threads) for name, model in service.models.items() if model.loaded},
            service.failed_models,
        )

    async def _retire(self) -> None:
        """End once each open connection has got its next response, which closes it."""
        self._service.is_retiring = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.shutdown_timeout_s
        while self.server_state.connections and loop.time() < deadline:
            await asyncio.sleep(RETIRE_CHECK_S)
        self._service.drain()
        self.should_exit = True

    def _set_peers_ready(self) -> None:
        if self._service.not_ready_code == "loading":
            self._service.not_ready_code = None

    async def _metrics(self, used: Sequence[str] = ()) -> Texts:
        """Return the metrics, with those of models that only other workers have used."""
        for name in self._service.models.keys() & used:
            self._service.metrics.for_model(name).use()
        return await texts_of(self._service.metrics.registry.collect())


def model_calls(service: Service) -> dict[str, Handler]:
    """Return the calls by which the supervisor changes the models of a worker."""
    loads: dict[str, AsyncGenerator[str | None, bool]] = {}  # loads that wait for the other workers, by model

    async def prepare_load(name: str, only_if_lazy: bool) -> str | None:
        phases = changes.load(service, name, only_if_lazy=only_if_lazy)
        digest = await anext(phases)
        loads[name] = phases
        return digest

    async def finish_load(name: str, is_agreed: bool) -> None:
        await changes.finish(loads.pop(name), is_agreed=is_agreed)

    unload = functools.partial(changes.unload, service)
    return {"prepare_load": prepare_load, "finish_load": finish_load, "unload": unload}


def run_forked(
    settings: Settings, plan: ThreadPlan, number: int, control: socket.socket, handover: socket.socket
) -> NoReturn:
    """Run a worker in a process that was forked from the supervisor, then exit the process.

    `settings` have its share of the limits; `number` is that of the worker in log lines, from 1.
    """
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        discard_descriptors({control.fileno(), handover.fileno()})
        configure_logging(settings.log_level, worker=number)
        explain_bus_errors()
        WorkerServer(settings, plan, Handover(handover), control).run_to_exit()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(EXIT_FAILED)


def discard_descriptors(kept: set[int]) -> None:
    """Replace the inherited descriptors, such as the listeners and the channels of other workers.

    They become /dev/null and are not closed, because objects of the parent process, which this
    process still has, know their numbers.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept and descriptor != null:
            with contextlib.suppress(OSError):  # the one that listed them
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
