"""Random lives of an engine: arrivals, cancellations, deadlines and faults, with the books checked after every step."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from service.engine.engine import Engine
from service.engine.generation import Handle
from service.engine.request import (
    Cancelled,
    DecodingParameters,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Final,
    Generated,
    GenerateRequest,
    TokenEvent,
)
from service.runtime.fake import FakeRunner, Faults, fake_manifest
from service.runtime.protocol import Array, Int32, Int64

POISON, NAN = 46, 47
MAX_ROWS = 3


class CheckedRunner:
    """Passes everything on to a FakeRunner and keeps its own account of which source is in which row."""

    def __init__(self, faults: Faults) -> None:
        self.inner = FakeRunner(fake_manifest(), MAX_ROWS, faults=faults)
        self.manifest, self.max_rows = self.inner.manifest, MAX_ROWS
        self.rows: list[float] = []  # the first token of each row's source; rows that ended last may linger
        self.encoded: list[list[int]] = []  # first tokens of each encoder call's sources
        self.stepped: list[float] = []

    def encode(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        self.encoded.append(source_ids[:, 0].tolist())
        return self.inner.encode(source_ids, source_lengths, outputs)

    def fill(self, row: int, encoded: Mapping[str, Array], index: int) -> None:
        assert 0 <= row <= len(self.rows) and row < MAX_ROWS
        self.rows[row:] = [float(encoded["source_state"][index, 0])]
        self.inner.fill(row, encoded, index)

    def move(self, source: int, target: int) -> None:
        assert target < source < len(self.rows)
        self.rows[target] = self.rows[source]
        del self.rows[source:]
        self.inner.move(source, target)

    def step(
        self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Sequence[str]
    ) -> Mapping[str, NDArray[np.float32]]:
        assert 0 < len(token_ids) == len(lengths) == len(source_lengths) <= len(self.rows)
        del self.rows[len(token_ids) :]
        self.stepped = list(self.rows)
        return self.inner.step(token_ids, lengths, source_lengths, outputs)


@dataclass(eq=False)
class Client:
    """What was asked for, and what came back."""

    request: GenerateRequest | EncodeRequest
    events: list[Event] = field(default_factory=list)
    has_given_up: bool = False

    @property
    def finals(self) -> list[Final]:
        return [event for event in self.events if not isinstance(event, TokenEvent)]


class Simulation:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calls_fail = seed % 3 == 0
        faults = Faults(
            encode_calls=frozenset(self.rng.sample(range(1, 60), 4)) if self.calls_fail else frozenset(),
            step_calls=frozenset(self.rng.sample(range(1, 100), 4)) if self.calls_fail else frozenset(),
            raising_id=POISON,
            nan_id=NAN,
        )
        self.now = 0.0
        self.runner = CheckedRunner(faults)
        self.engine = Engine(self.runner, lambda: self.now, max_batch_tokens=40, queue_timeout_s=15.0)
        self.clients: dict[Handle, Client] = {}
        self.sources: dict[float, Client] = {}  # by first token; no two alike among those alive

    def arrive(self) -> None:
        alive = {source for source, client in self.sources.items() if not client.finals}
        first = self.rng.choice([token for token in range(3, POISON) if token not in alive])
        source = (first, *(self.rng.randrange(3, POISON) for _ in range(self.rng.randint(0, 15))))
        if self.rng.random() < 0.05:
            source = (*source, self.rng.choice([POISON, NAN]))
        deadline = self.now + self.rng.choice([1e6, 1e6, 8.0])
        request: GenerateRequest | EncodeRequest = EncodeRequest("e", source, deadline)
        if self.rng.random() < 0.75:
            parameters = DecodingParameters(max_new_tokens=self.rng.randint(1, 30))
            kinds = frozenset({"cross"}) if self.rng.random() < 0.3 else frozenset[str]()
            stream = self.rng.random() < 0.5
            request = GenerateRequest("g", source, deadline, parameters, attention=kinds, stream=stream)
        client = Client(request)
        self.sources[first] = client
        self.clients[self.engine.submit(request, client.events.append)] = client

    def give_up(self) -> None:
        handle = self.rng.choice(list(self.clients))
        self.engine.cancel(handle)
        self.clients[handle].has_given_up |= not handle.has_ended

    def step(self) -> None:
        before = {handle: len(client.events) for handle, client in self.clients.items()}
        first_call = len(self.runner.encoded)
        self.runner.stepped = []
        self.engine.step()
        self.now += self.rng.random()
        self.check_books(before)
        self.check_order(self.runner.encoded[first_call:])

    def check_books(self, before: Mapping[Handle, int]) -> None:
        open_clients = [client for client in self.clients.values() if not client.finals]
        assert self.engine.num_running + self.engine.num_waiting == len(open_clients)
        assert self.engine.num_running <= MAX_ROWS
        assert all(not client.has_given_up for client in open_clients)
        for handle, client in self.clients.items():
            assert len(client.finals) <= 1
            assert handle.has_ended == bool(client.finals)
            if client.has_given_up:
                assert client.finals == [Cancelled()]
                # Its row was freed before the step: no token came after it.
                assert not any(isinstance(event, TokenEvent) for event in client.events[before[handle] :])
        for source in self.runner.stepped:
            client = self.sources[source]
            assert not client.has_given_up, "a cancelled request was run"

    def check_order(self, calls: list[list[int]]) -> None:
        """The oldest request that could go went."""
        if not calls:
            return
        arrivals = {client: place for place, client in enumerate(self.clients.values())}
        oldest = min(arrivals[self.sources[source]] for source in calls[0])
        passed = [
            client
            for client, place in arrivals.items()
            if place < oldest and not client.finals and not self.runs(client)
        ]
        assert all(isinstance(client.request, GenerateRequest) for client in passed)
        if passed:  # only requests that need no row may pass, and only where rows are full
            taken = [self.sources[source].request for source in calls[0]]
            assert all(isinstance(request, EncodeRequest) for request in taken)

    def runs(self, client: Client) -> bool:
        return float(client.request.source_ids[0]) in self.runner.rows

    def check_answers(self) -> None:
        for client in self.clients.values():
            (final,) = client.finals
            request, source = client.request, client.request.source_ids
            if isinstance(final, Generated):
                assert isinstance(request, GenerateRequest)
                limit = min(request.parameters.max_new_tokens, 24)
                assert [token.id for token in final.tokens] == self.runner.inner.expected(source, limit)
                streamed = [event.token for event in client.events if isinstance(event, TokenEvent)]
                assert streamed == (list(final.tokens) if request.stream else [])
                assert set(final.attention) == request.attention
            elif isinstance(final, Encoded):
                np.testing.assert_array_equal(final.hidden[:, 0], source)
            elif isinstance(final, Failed) and final.code == "internal":
                assert self.calls_fail or {POISON, NAN} & set(source)
            elif isinstance(final, Failed):
                assert final.code in {"queue_timeout", "deadline_exceeded"}
                assert final.code == "queue_timeout" or request.deadline < 1e6
            assert not isinstance(final, Generated | Encoded) or not {POISON, NAN} & set(source)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_and_rightly_whatever_happens(seed: int) -> None:
    simulation = Simulation(seed)
    load = simulation.rng.choice([0.3, 0.6, 0.9])
    for _ in range(120):
        while simulation.rng.random() < load and simulation.engine.num_waiting < 20:
            simulation.arrive()
        if simulation.clients and simulation.rng.random() < 0.15:
            simulation.give_up()
        simulation.step()
    while simulation.engine.has_work:
        simulation.step()
    simulation.check_answers()
    kinds = {type(client.finals[0]) for client in simulation.clients.values()}
    assert kinds >= {Generated, Encoded}
