"""The supervisor: it owns the port, starts the workers and hands connections over to them.

It is a single thread on an event loop and runs no graph. A worker is a fork of it, so that all
processes share the memory of the imported libraries. See docs/adr/0032.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn

from prometheus_client.core import GaugeMetricFamily

from sightline.base.errors import EXIT_CANNOT_SERVE, EXIT_FAILED, EXIT_USAGE
from sightline.base.machine import usable_threads
from sightline.service.api_errors import ApiError
from sightline.service.app import endpoints_of
from sightline.service.http.application import route_of
from sightline.service.metrics import (
    FAILED_WORKERS,
    PREFIX,
    Texts,
    merge,
    texts_of,
    used_models,
    without_gauges,
)
from sightline.service.peers import spawn
from sightline.service.quotas import QuotaStore
from sightline.service.runtime.thread_counts import MAX_BYTES_ALONE, SharedActivity, ThreadPlan
from sightline.service.server import RESPONSE_S, bind, has_terminal, log_draining, log_end, log_listening, log_page
from sightline.service.settings import Settings
from sightline.service.workers.channel import ALIVE_S, Channel, ChannelClosedError
from sightline.service.workers.handover import connected_pair
from sightline.service.workers.listener import Listener, WorkerConnections
from sightline.service.workers.shares import manifests_of, share_of
from sightline.service.workers.worker_process import run_forked

REAP_S = 0.005
END_S = 2.0  # time in which a worker must end after it has closed its channel
MAX_FAILED_STARTS = 3
# Intervals of `ALIVE_S` without a sign of life. Intervals are counted and not seconds, so that a
# pause of the whole machine ends no worker.
SUSPECT = 3  # the worker gets no new connection, and nothing waits for it
MAX_SILENT = 6  # it is ended
MAX_SILENT_AT_START = 60  # while imports and loads may hold Python's global lock
METRICS_S = 2.0  # time in which a worker must report its metrics; otherwise its last ones count
FINAL_CODES = (EXIT_USAGE, EXIT_CANNOT_SERVE)  # exit codes of a worker that no restart can change
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerProcess:
    """A running worker, as the supervisor sees it."""

    slot: int  # index of the worker, from 0
    pid: int
    channel: Channel
    connections: WorkerConnections
    state: Literal["starting", "ready", "retiring"] = "starting"
    has_loaded: bool = False  # its models, although others may have some that it must load
    num_silent: int = 0  # intervals without a sign of life
    has_started: asyncio.Event = field(default_factory=asyncio.Event)  # it is ready, or has ended before
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Texts = field(default_factory=list)  # at the last scrape, or at its end
    exit_code: int | None = None  # negative: the number of the signal that has ended it

    @property
    def name(self) -> str:
        return f"worker {self.slot + 1}"


class Supervisor:
    """Runs the workers of one service until a signal."""

    def __init__(self, settings: Settings, num_workers: int) -> None:
        """`num_workers` is their largest number; fewer run if graphs get several threads."""
        self._settings = settings
        self._num_workers = num_workers
        # Graphs that several workers may run with more than one thread are measured by the first
        # worker alone, before the others start. If those of a large model get several threads,
        # there are fewer workers.
        cores = usable_threads()
        share, most = max(1, cores // num_workers), 1
        if settings.workers == "auto" and any(model.loaded_bytes > MAX_BYTES_ALONE for model in manifests_of(settings)):
            most = cores
        self._plan = ThreadPlan(share, most, cores)
        self._activity = SharedActivity(num_workers)
        self._quotas = QuotaStore(settings.quota_storage_url)
        self._is_measuring = settings.threads == 0 and max(share, most) > 1
        self._workers: list[WorkerProcess] = []  # all that run, retiring ones included
        self._failed_starts: Counter[int] = Counter()  # consecutive ones, by slot
        self._listener = Listener([], self._candidates)  # until the port is bound
        self._served: dict[str, Any] | None = None  # digest and state of the models, by name
        self._former: dict[str, Any] = {}  # the same before the workers are replaced
        self._failed: set[str] = set()  # folders of the bundles that are not served, because they are damaged
        self._changes = asyncio.Lock()  # held while the models of the workers change
        self._replacing = asyncio.Lock()  # held while the workers are replaced
        self._have_all_been_ready = False
        self._ended_metrics: Texts = []  # counters of the workers that have ended
        self._used_models: set[str] = set()  # at the last scrape
        self._has_lost_file = False  # a worker has ended because a file that it maps was changed in place
        self._has_terminal = has_terminal()
        self._is_draining = False
        self._drain_code = 0  # largest exit code of the workers that have ended while draining
        self._exit_code: asyncio.Future[int]
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Serve until a signal or until no worker can run; return the exit code."""
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        try:
            self._listener = Listener(await bind(self._settings), self._candidates)
        except OSError as error:
            logger.error(error)
            return EXIT_CANNOT_SERVE
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        log_listening(self._settings.host, self._listener.port)
        if not self._is_measuring:
            self._log_workers(self._settings.threads or 1)
        spawn(self._tasks, self._end_silent_workers())
        for slot in range(1 if self._is_measuring else self._num_workers):
            await self._start(slot)
        return await self._exit_code

    # Workers

    async def _start(self, slot: int, *, is_replacement: bool = False) -> WorkerProcess:
        """Start a worker. Another one follows its end, unless it is a replacement that fails."""
        worker = await self._fork(slot)
        self._workers.append(worker)
        spawn(self._tasks, self._attend(worker, is_replacement=is_replacement))
        return worker

    async def _attend(self, worker: WorkerProcess, *, is_replacement: bool) -> None:
        """Serve the calls of a worker until it ends, and start the next one."""
        if self._is_draining:
            worker.channel.notify("drain", 0.0)
        self._listener.add(worker.connections)

        async def ready(models: dict[str, Any], threads: dict[str, dict[str, int]], failed: list[str]) -> None:
            worker.has_loaded = True
            await self._on_ready(worker, models, set(failed))
            if self._is_measuring:
                await self._start_others(threads)

        await worker.channel.run(
            {
                "alive": partial(setattr, worker, "num_silent", 0),
                "ready": ready,
                "metrics": self._metrics,
                "last_metrics": partial(setattr, worker, "metrics"),
                "load": self._load,
                "unload": self._unload,
                **self._quotas.handlers(worker.pid),
            }
        )
        self._workers.remove(worker)
        self._listener.remove(worker.connections)
        self._ended_metrics = merge([self._ended_metrics, without_gauges(worker.metrics)])
        worker.exit_code = await self._reap(worker.pid)
        self._activity.clear(worker.slot)
        self._quotas.forget(worker.pid)
        worker.has_started.set()
        worker.has_ended.set()
        self._on_end(worker, is_replacement=is_replacement)

    async def _fork(self, slot: int) -> WorkerProcess:
        control, control_of_worker = socket.socketpair()
        handover, handover_of_worker = connected_pair()
        pid = os.fork()
        if pid == 0:
            share = share_of(self._settings, self._num_workers)
            plan = replace(self._plan, activity=self._activity.of(slot))
            run_forked(share, plan, slot + 1, control_of_worker, handover_of_worker)
        for sock in (control_of_worker, handover_of_worker):
            sock.close()
        return WorkerProcess(slot, pid, await Channel.open(control), WorkerConnections(handover))

    async def _end_silent_workers(self) -> None:
        """End each worker whose event loop hangs; another one follows."""
        while True:
            await asyncio.sleep(ALIVE_S)
            for worker in self._workers:
                worker.num_silent += 1
                limit = MAX_SILENT if worker.has_loaded else MAX_SILENT_AT_START
                if worker.num_silent >= limit:
                    self._end_silent(worker)

    def _end_silent(self, worker: WorkerProcess) -> None:
        logger.error("%s has shown no sign of life for %g s and is ended", worker.name, worker.num_silent * ALIVE_S)
        os.kill(worker.pid, signal.SIGKILL)

    async def _reap(self, pid: int) -> int:
        """Wait for the end of a process; kill it if it does not end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + END_S
        while True:
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                return os.waitstatus_to_exitcode(status)
            if loop.time() > deadline:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(REAP_S)

    async def _on_ready(self, worker: WorkerProcess, models: dict[str, Any], failed: set[str]) -> None:
        """Give connections to a worker once it serves the same models as the others."""
        try:
            async with self._changes:
                if self._served is None:
                    await self._check_former(worker, models, failed)
                    self._served, self._failed = models, failed
                await self._reconcile(worker, models, self._served)
        except (ApiError, ChannelClosedError) as error:
            logger.error("%s cannot serve the models of the others and is ended: %s", worker.name, error)
            os.kill(worker.pid, signal.SIGKILL)
            return
        worker.state = "ready"
        worker.has_started.set()
        self._failed_starts[worker.slot] = 0
        self._listener.update()
        self._tell_if_all_are_ready()

    def _tell_if_all_are_ready(self) -> None:
        """Tell the workers that all of them are ready, once they have been."""
        num_ready = len({worker.slot for worker in self._workers if worker.state == "ready"})
        if not self._have_all_been_ready and num_ready == self._num_workers and not self._is_measuring:
            self._have_all_been_ready = True
            log_page(self._settings, self._listener.port)
        if self._have_all_been_ready:
            for worker in self._workers:
                worker.channel.notify("peers_ready")

    async def _start_others(self, threads: Mapping[str, Mapping[str, int]]) -> None:
        """Start the other workers once the first one has measured the threads of its graphs.

        If graphs get several threads, there are fewer workers: then another one with larger shares
        of the limits replaces the first.
        """
        self._is_measuring = False
        most = max((number for graphs in threads.values() for number in graphs.values()), default=1)
        expected, cores = self._num_workers, usable_threads()
        if self._settings.workers == "auto":
            self._num_workers = max(1, min(expected, cores // most))
        if self._num_workers != expected:  # then there is more than one thread for small models, too
            threads = {name: graphs for name, graphs in threads.items() if any(count > 1 for count in graphs.values())}
        self._plan = ThreadPlan(max(1, cores // self._num_workers), cores=cores, known=threads)
        self._log_workers(most)
        if self._num_workers != expected:
            await self._replace_all()
        for slot in range(1, self._num_workers):
            await self._start(slot)
        self._tell_if_all_are_ready()

    def _log_workers(self, most: int) -> None:
        fields = {"workers": self._num_workers, "max_threads": most}
        logger.info("workers chosen", extra={"fields": fields})

    async def _reconcile(self, worker: WorkerProcess, models: Mapping[str, Any], served: dict[str, Any]) -> None:
        """Load and unload models of a new worker, as requests did in the other workers."""
        for name in models.keys() - served.keys():
            await worker.channel.call("unload", name)
        for name, (digest, state) in list(served.items()):
            own_digest, own_state = models.get(name, (None, None))
            if own_digest is None or (state == "ready" and own_state != "ready"):
                try:
                    own_digest = await worker.channel.call("prepare_load", name, False)
                except ApiError:
                    if not self._has_lost_file:
                        raise
                    logger.error("%s is not served any more: its bundle was changed in place and is damaged", name)
                    del served[name]
                    await self._gather(self._changeable(), "unload", name)
                    continue
                await worker.channel.call("finish_load", name, True)
            if own_digest != digest:
                logger.warning(
                    "%s serves another version of %s than the other workers, because its bundle has changed; send "
                    "SIGHUP to replace all workers",
                    worker.name,
                    name,
                )

    async def _check_former(self, worker: WorkerProcess, models: dict[str, Any], failed: set[str]) -> None:
        """Check that a new worker serves all models that worked before, except removed ones; raises
        `ApiError` if the bundle of one is damaged.
        """
        lost = ", ".join(sorted(self._former.keys() - models.keys()))
        if lost and failed - self._failed:
            bundles = ", ".join(sorted(failed - self._failed))
            raise ApiError("internal", f"{lost} would be lost, because {bundles} cannot be served; repair it first.")
        for name, (_, state) in self._former.items():  # lazy ones that a request has loaded
            if state == "ready" and name in models and models[name][1] != "ready":
                models[name] = [await worker.channel.call("prepare_load", name, True) or models[name][0], "ready"]
                await worker.channel.call("finish_load", name, True)

    def _on_end(self, worker: WorkerProcess, *, is_replacement: bool) -> None:
        """Start the next worker of a slot, unless it was retired or cannot start."""
        code = worker.exit_code
        assert code is not None
        if self._is_draining:
            self._drain_code = max(self._drain_code, EXIT_FAILED if code < 0 else code)
            if not self._workers:
                self._finish(self._drain_code)
            return
        if worker.state == "retiring" or (is_replacement and worker.state == "starting"):
            return
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._has_lost_file |= code == -signal.SIGBUS
        if worker.state == "starting":
            self._failed_starts[worker.slot] += 1
            if code in FINAL_CODES and self._served is None:
                self._finish(code)
                return
            if self._failed_starts[worker.slot] >= MAX_FAILED_STARTS:
                logger.error(
                    "%s has ended at its start %d times in a row (%s) and is not started again",
                    worker.name,
                    MAX_FAILED_STARTS,
                    reason,
                )
                if not self._workers:
                    self._finish(code if code > 0 else EXIT_FAILED)
                return
        logger.error("%s has ended (%s); a new one starts", worker.name, reason)
        spawn(self._tasks, self._start(worker.slot))

    def _finish(self, code: int) -> None:
        """End the supervisor; its workers end with it."""
        if not self._exit_code.done():
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
            self._exit_code.set_result(code)

    async def _replace_all(self) -> None:
        """Replace the workers one after another, each after its successor is ready."""
        async with self._replacing:
            logger.info("replacing the workers")
            async with self._changes:  # the new workers serve the bundles as they are now
                self._former, self._served = self._served or {}, None
            for old in [worker for worker in self._workers if worker.state == "ready"]:
                if self._is_draining:
                    return
                new = await self._start(old.slot, is_replacement=True)
                await new.has_started.wait()
                if new.state != "ready":
                    logger.error("the new %s did not start; the old one goes on, and no other is replaced", old.name)
                    if self._served is None:
                        self._served = self._former
                    return
                old.state = "retiring"
                old.channel.notify("retire")
                await old.has_ended.wait()
            logger.info("replaced the workers")

    # Signals

    def _on_signal(self, number: signal.Signals) -> None:
        """Start to drain; end at the second signal. See `DrainingServer.handle_exit`.

        SIGHUP replaces the workers, unless it means that the terminal of the service has ended.
        """
        if number == signal.SIGHUP and not self._has_terminal:
            spawn(self._tasks, self._replace_all())
            return
        if self._is_draining:
            self._finish(EXIT_FAILED)
            return
        self._is_draining = True
        has_window = number == signal.SIGTERM and any(worker.state == "ready" for worker in self._workers)
        drain_s = self._settings.drain_s if has_window else 0.0
        log_draining(self._settings, drain_s)
        for worker in self._workers:
            worker.channel.notify("drain", drain_s)
        loop = asyncio.get_running_loop()
        loop.call_later(drain_s, self._listener.close)
        loop.call_later(drain_s + self._settings.shutdown_timeout_s + RESPONSE_S + END_S, self._finish, EXIT_FAILED)
        if not self._workers:
            self._finish(0)

    def _candidates(self) -> list[WorkerConnections]:
        """Return the workers that can take a connection, the one with the fewest first.

        While no worker is ready, those that start take connections, and answer that they load.
        """
        ready = [worker for worker in self._workers if worker.state == "ready"]
        usable = ready or [worker for worker in self._workers if worker.state == "starting"]
        usable.sort(key=lambda worker: (worker.num_silent >= SUSPECT, len(worker.connections.networks)))
        return [worker.connections for worker in usable]

    # Calls of the workers

    async def _gather(
        self, workers: Sequence[WorkerProcess], name: str, *arguments: Any
    ) -> list[tuple[WorkerProcess, Any]]:
        """Call a function of several workers; return the results of those that have not ended.

        An `ApiError` is a result, too.
        """
        limit = METRICS_S if name == "metrics" else None  # a load may take long

        async def call(worker: WorkerProcess) -> Any:
            async with asyncio.timeout(limit):
                return await worker.channel.call(name, *arguments)

        results = await asyncio.gather(*map(call, workers), return_exceptions=True)
        return [
            (worker, result)
            for worker, result in zip(workers, results, strict=True)
            if not isinstance(result, ChannelClosedError | TimeoutError)
        ]

    def _changeable(self) -> list[WorkerProcess]:
        """Return the workers whose models change; end those that hang, which would keep theirs."""
        ready = [worker for worker in self._workers if worker.state == "ready"]
        for worker in ready:
            if worker.num_silent >= SUSPECT:
                self._end_silent(worker)
        return [worker for worker in ready if worker.num_silent < SUSPECT]

    async def _metrics(self) -> Texts:
        listening = [worker for worker in self._workers if worker.num_silent < SUSPECT]
        for worker, texts in await self._gather(listening, "metrics", sorted(self._used_models)):
            if not isinstance(texts, ApiError):
                worker.metrics = texts
        num_failed = sum(times >= MAX_FAILED_STARTS for times in self._failed_starts.values())
        own = await texts_of([GaugeMetricFamily(PREFIX + FAILED_WORKERS, "", num_failed)])
        merged = merge([self._ended_metrics, *(worker.metrics for worker in self._workers), own])
        self._used_models = used_models(merged)
        return merged

    async def _load(self, name: str, only_if_lazy: bool) -> None:
        """Load a model in all workers, or in none. Raises `ApiError` if a worker cannot load it."""
        async with self._changes:
            workers = self._changeable()
            prepared = await self._gather(workers, "prepare_load", name, only_if_lazy)
            errors = [result for _, result in prepared if isinstance(result, ApiError)]
            digests = {result for _, result in prepared if isinstance(result, str)}
            if not errors and len(digests) > 1:
                errors.append(ApiError("internal", f"The bundle of {name} has changed while it was loaded. Try again."))
            loaded = [worker for worker, result in prepared if not isinstance(result, ApiError)]
            await self._gather(loaded, "finish_load", name, not errors)
            if errors:
                raise errors[0]
            if digests and self._served is not None:
                self._served[name] = [digests.pop(), "ready"]

    async def _unload(self, name: str) -> None:
        """Unload a model in all workers. Raises `ApiError` with `model_not_found`."""
        async with self._changes:
            for _, result in await self._gather(self._changeable(), "unload", name):
                if isinstance(result, ApiError):
                    raise result
            if self._served is not None:
                self._served.pop(name, None)


def supervise(settings: Settings, num_workers: int) -> NoReturn:
    """Serve with several workers until a signal, then exit the process."""
    for endpoint in endpoints_of(settings):
        route_of(endpoint)  # so that each worker has them without the work
    gc.collect()
    gc.freeze()  # so that the garbage collector of a worker does not copy shared memory
    supervisor = Supervisor(settings, num_workers)
    exit_code = asyncio.run(supervisor.run())
    log_end(exit_code)
    os._exit(exit_code)
