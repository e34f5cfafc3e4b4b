"""Random changes of models, in one process and in workers, take every transition of the table."""

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from sightline.base.bundle import BundleError, FileRecord, Manifest
from sightline.service.inference import changes
from sightline.service.inference.changes import RETRY_DELAY_S
from sightline.service.inference.service import Model, Service
from sightline.service.settings import Settings
from sightline.service.workers.channel import Channel, ChannelClosedError
from sightline.service.workers.listener import WorkerConnections
from sightline.service.workers.supervisor import Supervisor, WorkerProcess
from sightline.service.workers.worker_process import model_calls
from tests.service.conftest import MakeBackend, Running, Start

pytestmark = pytest.mark.anyio

NUM_EVENTS = 40
MAX_SCHEDULES = 100  # some ten suffice
SETTINGS: dict[str, Any] = {"lazy_models": "lazy", "model_control": "explicit", "shutdown_timeout_s": 0.2}
STATES = ("absent", "unloaded", "loading", "failed", "ready", "replaced")


def table() -> set[tuple[str, str]]:
    """Return the transitions of the table in the docstring of the module."""
    assert changes.__doc__ is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in changes.__doc__.splitlines() if "|" in line]
    transitions = [(first, cell) for first, *cells in rows for cell in cells if len(cells) == 5 and cell in STATES]
    return {pair for pair in transitions if pair[0] in STATES} | {("absent", "unloaded")}  # at the start


class Slow(threading.Event):
    """Lets loads take some milliseconds."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(random.uniform(0, 0.006))
        return True


class Simulation:
    """Processes with the same folder of bundles, and calls and changes in random order."""

    def __init__(self, start: Start, make_backend: MakeBackend, seed: int, stack: contextlib.AsyncExitStack) -> None:
        self.start, self.make_backend, self.stack = start, make_backend, stack
        self.rng = random.Random(seed)
        self.folder = {manifest.name: manifest for manifest in make_backend("eager", "lazy", "new").manifests}
        self.processes: list[Running] = []
        self.supervisor: Supervisor | None = None
        self.channels: dict[int, Channel] = {}  # by id of the process
        self.tasks: dict[asyncio.Task[None], Running | None] = {}  # with their processes
        self.replacing = asyncio.Lock()
        self.ended: set[Model] = set()  # models of processes that have ended
        self.is_starting = False  # a process
        self.loads: Counter[str] = Counter()  # requests to load a model that are open

    async def add_process(self, *names: str) -> None:
        """Start a process that loads these bundles, as a worker if there is a supervisor."""
        self.is_starting, backend = True, self.make_backend(step_s=0.0002)
        backend.manifests = tuple(self.folder[name] for name in names)
        running = await self.stack.enter_async_context(self.start(backend, default_model="eager", **SETTINGS))
        backend.repository.manifests, backend.repository.wait_for = self.folder, Slow()
        if self.supervisor is not None:
            await self.connect(running, self.supervisor)
        backend.repository.error = self.random_error()
        self.processes.append(running)
        self.is_starting = False

    async def connect(self, running: Running, supervisor: Supervisor) -> None:
        channel, own = [await Channel.open(side) for side in socket.socketpair()]
        service = service_of(running)
        service.peers, self.channels[id(running)] = own, own
        unused: Any = None
        worker = WorkerProcess(0, -1, channel, WorkerConnections(unused))

        async def attend() -> None:
            await channel.run({"load": supervisor._load, "unload": supervisor._unload})
            supervisor._workers.remove(worker)

        async def ignore() -> None:
            pass

        supervisor._workers.append(worker)
        for work in (attend(), own.run({**model_calls(service), "peers_ready": ignore})):
            self.stack.callback(asyncio.create_task(work).cancel)
        models = {name: [model.manifest.digest, model.state] for name, model in service.models.items()}
        await supervisor._on_ready(worker, models, set())
        assert worker.state == "ready"

    async def replace(self, running: Running) -> None:
        """End a worker, and start another one with all bundles of the folder."""
        async with self.replacing:
            if running in self.processes:
                self.processes.remove(running)
                self.ended.update(service_of(running)._known.values())
                self.channels[id(running)].close()
                await self.add_process(*self.folder)

    async def call(self, running: Running, name: str, num_tokens: int) -> None:
        parameters = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        response = await running.post("/v1/generate", {"model": name, "inputs": "a dog", "parameters": parameters})
        if response.status_code != 200 and running in self.processes:
            error = response.json()["error"]
            assert error["code"] in ("model_not_found", "loading") or "failed to load" in error["message"], error

    async def change(self, running: Running, verb: str, name: str) -> None:
        self.loads[name] += verb == "load"
        response = await running.post(f"/v2/repository/models/{name}/{verb}", {})
        self.loads[name] -= verb == "load"
        if response.status_code != 200 and running in self.processes:
            error = response.json()["error"]
            assert verb == "load" and ("failed to load" in error or "has changed while" in error), error

    async def hang(self, running: Running, name: str) -> None:
        """Load a model again, as after a step that did not end; a worker that cannot do it ends."""
        with contextlib.suppress(ChannelClosedError):  # the worker has ended
            if not await changes.reload(service_of(running), name) and self.supervisor is not None:
                self.spawn(self.replace(running))

    def happen(self) -> None:
        """Start a random event."""
        rng, running = self.rng, self.rng.choice(self.processes)
        name, kind = rng.choice([*self.folder, "lazy"]), rng.random()
        if kind < 0.3:
            self.spawn(self.call(running, name, rng.choice((1, 40))), running)
        elif kind < 0.6:
            self.spawn(self.change(running, rng.choice(("load", "load", "load", "unload")), name), running)
        elif kind < 0.68:
            self.spawn(self.hang(running, name), running)
        elif kind < 0.76:
            self.folder[name] = changed(self.folder[name], rng.randrange(1000))
        elif kind < 0.86:
            running.backend.repository.error = self.random_error()
        elif kind < 0.97:
            for model in (model for process in self.processes for model in service_of(process).models.values()):
                model.retry_at = None if model.retry_at is None else model.retry_at - RETRY_DELAY_S
        elif self.supervisor is not None:
            self.spawn(self.replace(running))

    def random_error(self) -> Exception | None:
        return self.rng.choice((None, BundleError("damaged")))

    def spawn(self, work: Coroutine[Any, Any, None], running: Running | None = None) -> None:
        self.tasks[asyncio.create_task(work)] = running

    def is_awaited(self, task: asyncio.Task[None]) -> bool:
        """Return False for work of a process that has ended."""
        running = self.tasks[task]
        return running is None or running in self.processes

    async def run(self) -> None:
        for _ in range(NUM_EVENTS):
            self.happen()
            for running in self.processes:
                check_states(service_of(running))
            await asyncio.sleep(self.rng.choice((0, 0, 0, 0.001, 0.01)))
        async with asyncio.timeout(20):
            while waiting := [task for task in self.tasks if not task.done() and self.is_awaited(task)]:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in self.tasks:
            task.result() if task.done() else task.cancel()
        services = [service_of(running) for running in self.processes]
        for service in services:
            check_states(service)
            assert not service.repository_lock.locked()
            assert not any(model.lock.locked() for model in service._known.values())
            assert all(model.admission.num_calls == 0 for model in service.models.values())
            ready = {name for name, model in service.models.items() if model.state == "ready"}
            assert service.worker._engines.keys() == ready
            assert service.models.keys() == services[0].models.keys()
        for running in self.processes:
            running.backend.repository.error = None
        for name in self.folder:
            await self.change(self.processes[0], "load", name)
            for running in self.processes:
                assert service_of(running).models[name].manifest.digest == self.folder[name].digest
                body = {"model": name, "inputs": "a dog", "parameters": {"max_new_tokens": 1}}
                assert (await running.post("/v1/generate", body)).status_code == 200


def changed(manifest: Manifest, number: int) -> Manifest:
    return manifest.model_copy(update={"files": {"weights.bin": FileRecord(sha256=f"{number:064}", bytes=1)}})


def service_of(running: Running) -> Service:
    service: Service = running.app.state.service
    return service


def check_states(service: Service) -> None:
    assert list(service.models) == sorted(service.models)
    for name, model in service._known.items():
        assert (name in service.models) == (model.state not in ("absent", "replaced"))
        assert (model.loaded is not None) == (model.state == "ready")
        assert model.state != "loading" or model.load is not None
        assert model.state != "failed" or model.retry_at is not None


@pytest.mark.parametrize("num_workers", [0, 2], ids=["one process", "two workers"])
async def test_random_changes_take_every_transition_of_the_table_and_no_other(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    taken: set[tuple[str, str]] = set()

    def note(model: Model, name: str, value: Any) -> None:
        if name == "state" and value != vars(model).get(name, value) and model not in simulation.ended:
            taken.add((model.state, value))
            if (model.state, value) == ("absent", "ready"):  # calls load no model that a request has unloaded
                assert simulation.is_starting or simulation.loads[model.name]
        object.__setattr__(model, name, value)

    monkeypatch.setattr(Model, "__setattr__", note)
    monkeypatch.setattr(os, "kill", None)  # it may end no process
    for seed in range(MAX_SCHEDULES):
        async with contextlib.AsyncExitStack() as stack:
            simulation = Simulation(start, make_backend, seed, stack)
            if num_workers:
                simulation.supervisor = Supervisor(Settings(), num_workers)
                simulation.supervisor._have_all_been_ready = True
            for _ in range(max(1, num_workers)):
                await simulation.add_process("eager", "lazy")
            await simulation.run()
            seen = set(taken)  # the end of the processes is another event
        if seen == table():
            break
        taken &= seen
    assert seen == table(), (seed, seen ^ table())
