"""The process's server: uvicorn with guarded connections, and an end in two stages.

At the first signal new work is refused with 503 `draining` for the drain window, so that whoever balances load can look
elsewhere, while work in flight goes on; then the listener closes and what is left has the shutdown timeout. A second
signal ends the process at once.
"""

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from service.app import EXIT_CANNOT_SERVE, Load, create_app
from service.http.connections import ConnectionLimits
from service.http.dispatch import refusal_logger
from service.http.incoming import IncomingBodies
from service.http.protocol import GuardedProtocol, ReadLimits
from service.inference.service import Backend, Service
from service.loading import load_backend
from service.logs import flush_logs
from service.metrics import ModelMetrics
from service.settings import Settings

EXIT_CUT_SHORT = 1
# The engine needs up to two seconds to give up a call that hangs, and the calls still have to be answered.
ANSWER_S = 4
# An end without a drain takes no longer, so that a supervisor can start the process again. With the logs' `FLUSH_S` it
# stays below two seconds.
END_S = 1.0
logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Serves one app until a signal, or until it is told to end."""

    def __init__(self, app: FastAPI, settings: Settings, end_now: Callable[[int], Any] = os._exit) -> None:
        """`end_now` ends the process with an exit code: a graph that runs or loads would hold up an orderly end."""
        self._end_now = end_now
        self._settings = settings
        self._service: Service = app.state.service
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0
        limits = ReadLimits(settings.header_timeout_s, settings.body_timeout_s, settings.write_timeout_s)
        metrics = self._service.metrics
        self.connections = ConnectionLimits(
            settings.max_connections, settings.max_connections_per_address, metrics.count_limit
        )
        self.bodies = IncomingBodies(settings.max_waiting_bytes, functools.partial(metrics.count_limit, "body_bytes"))
        protocol: Any = functools.partial(
            GuardedProtocol,
            limits=limits,
            connections=self.connections,
            bodies=self.bodies,
            on_refusal=refusal_logger(metrics),
        )
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=int(settings.shutdown_timeout_s) + ANSWER_S,
            )
        )

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def end(self, exit_code: int) -> None:
        """End without a drain, since nothing is left that could serve.

        Calls that have failed get their answers; what is not over after `END_S` is cut off.
        """
        self.exit_code = exit_code
        self.should_exit = True
        # A thread, because the event loop closes before all that the end may have to wait for.
        timer = threading.Timer(END_S, self._end_at_once, (exit_code,))
        timer.daemon = True
        timer.start()

    def _end_at_once(self, exit_code: int) -> None:
        log_end(exit_code)
        self._end_now(exit_code)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        logger.info("listening", extra={"fields": {"host": self._settings.host, "port": self.port}})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at a second signal, end.

        SIGINT comes from somebody at a keyboard, and no load balancer needs time to look away: it has no drain window.
        """
        if self._loop is None or self._service.refusal == "draining" or self.should_exit:
            self._end_at_once(EXIT_CUT_SHORT)
            return
        self._service.drain()
        self._loop.call_soon_threadsafe(self._begin_drain, 0.0 if sig == signal.SIGINT else self._settings.drain_s)

    def _begin_drain(self, drain_s: float) -> None:
        fields = {"drain_s": drain_s, "shutdown_timeout_s": self._settings.shutdown_timeout_s}
        logger.info("draining; a second signal ends at once", extra={"fields": fields})
        assert self._loop is not None
        self._loop.call_later(drain_s, setattr, self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener and wait; the engine fails what does not finish in time, so that it is answered."""
        self._service.drain()
        stopping = asyncio.ensure_future(self._service.stop())
        await super().shutdown(sockets)
        await stopping
        for connection in list(self.server_state.connections):  # whose answers nobody reads to their end
            connection.transport.abort()


def log_end(exit_code: int) -> None:
    """Log the last line of the process."""
    level = logging.WARNING if exit_code else logging.INFO
    advice = "; starting again will not help until the cause is removed" if exit_code == EXIT_CANNOT_SERVE else ""
    logger.log(level, "ended%s", advice, extra={"fields": {"exit_code": exit_code}})
    flush_logs()


def freezing(load: Load) -> Load:
    """Return a function that loads models and then exempts all objects that exist from garbage collection.

    They live as long as the process. Without this a busy service spends a seventh of its time traversing them.
    """

    def load_and_freeze(settings: Settings, observer_of: Callable[[str], ModelMetrics]) -> Backend:
        backend = load(settings, observer_of)
        gc.collect()
        gc.freeze()
        return backend

    return load_and_freeze


def serve(settings: Settings) -> NoReturn:
    """Serve until the end, and end the process."""
    server: DrainingServer

    def end(exit_code: int) -> None:
        server.end(exit_code)

    server = DrainingServer(create_app(settings, freezing(load_backend), end), settings)
    try:
        server.run()
        exit_code = server.exit_code
    except SystemExit as ended:  # the port cannot be had: uvicorn has said so
        exit_code = int(ended.code or 0)
    log_end(exit_code)
    # The interpreter's own end would wait for native threads and their destructors, and so for an engine that hangs.
    os._exit(exit_code)
