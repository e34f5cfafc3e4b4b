"""Random arrivals, cancellations, deadlines, faults and slow readers, with invariants checked after
each step.
"""

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from sightline.service.engine.engine import Engine
from sightline.service.engine.generation import ActiveRequest
from sightline.service.engine.request import (
    Cancelled,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Final,
    Generated,
    GenerateRequest,
    MapBudget,
    TokenEvent,
)
from sightline.service.parameters import GenerateParameters
from tests.service.engine.conftest import CheckedRunner, StopAtSum, run_alone
from tests.support.fake_runner import Faults, fake_manifest

POISON, NAN = 46, 47
ENCODER_DECODER = fake_manifest()
DECODER_ONLY = fake_manifest(decoder_start="source", max_source_tokens=160, max_target_tokens=200)
# Of decoder-only prompts: nothing, one block of the prefix cache, two blocks, and two with a part.
BEGINNINGS = [tuple(3 + number % 41 for number in range(length)) for length in (0, 32, 64, 75)]
MEMORY = 4_000


@dataclass(eq=False)
class Client:
    """A request and its events."""

    request: GenerateRequest | EncodeRequest
    events: list[Event] = field(default_factory=list)
    has_given_up: bool = False
    budget: MapBudget | None = None

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and not isinstance(self.events[-1], TokenEvent)

    @property
    def finals(self) -> list[Final]:
        return [event for event in self.events if not isinstance(event, TokenEvent)]


class Simulation:
    def __init__(self, seed: int, *, has_many_calls: bool = False, is_decoder_only: bool = False) -> None:
        """Create a simulation with one call, or with one large call and many small ones.

        A decoder-only model has prompts of several chunks, with common beginnings in a prefix cache
        that is too small for them.
        """
        self.rng = random.Random(seed)
        self.is_decoder_only = is_decoder_only
        self.has_many_calls = has_many_calls
        self.calls_fail = seed % 3 == 0
        faults = Faults(
            encode_calls=frozenset(self.rng.sample(range(1, 60), 4)) if self.calls_fail else frozenset(),
            step_calls=frozenset(self.rng.sample(range(1, 100), 4)) if self.calls_fail else frozenset(),
            prefill_calls=frozenset(self.rng.sample(range(1, 60), 4)) if self.calls_fail else frozenset(),
            # A decoder-only model may generate any token, and reads what it has generated.
            raising_id=None if is_decoder_only else POISON,
            nan_id=None if is_decoder_only else NAN,
        )
        self.now = 0.0
        self.runner = CheckedRunner(
            self.rng.randint(16, 40) if has_many_calls else self.rng.randint(3, 6),
            DECODER_ONLY if is_decoder_only else ENCODER_DECODER,
            faults=faults,
            num_prefix_blocks=5 if is_decoder_only else 0,
        )
        self.memory = MEMORY  # bytes for the maps of responses that have not been read yet
        self.engine = Engine(self.runner, lambda: self.now, max_batch_tokens=40)
        self.clients: dict[ActiveRequest, Client] = {}
        self.sources: dict[int, Client] = {}  # by first token; no two alike among those alive

    def arrive(self) -> None:
        alive = {source for source, client in self.sources.items() if not client.has_ended}
        alive |= {
            row.source[0] for row in self.runner.rows if row.source
        }  # of those that ended last some may still be in a row
        first = self.rng.choice([token for token in range(3, POISON) if token not in alive])
        source = (first, *(self.rng.randrange(3, POISON) for _ in range(self.rng.randint(0, 15))))
        if self.is_decoder_only:
            source = (*self.rng.choice(BEGINNINGS), *source)
        elif self.rng.random() < 0.05:
            source = (*source, self.rng.choice([POISON, NAN]))
        deadline = self.now + self.rng.choice([1e6, 1e6, 8.0])
        caller = self.rng.choice(["", "", "a", "b"]) if self.has_many_calls or self.is_decoder_only else ""
        request: GenerateRequest | EncodeRequest = EncodeRequest(self.call(), source, deadline, caller=caller)
        if self.rng.random() < 0.75:
            request = self.generate_request(source, deadline, caller)
        client = Client(request, budget=getattr(request, "map_budget", None))
        self.sources[first] = client
        if isinstance(request, GenerateRequest) and request.stop is not None:  # it keeps state
            request = dataclasses.replace(request, stop=request.stop.copy())
        self.clients[self.engine.submit(request, client.events.append)] = client

    def generate_request(self, source: tuple[int, ...], deadline: float, caller: str) -> GenerateRequest:
        choose, num_beams = self.rng.choice, self.rng.choice([1, 1, 2, 3])
        prefix = tuple(self.rng.randrange(48) for _ in range(choose([0, 0, 1, 5])))
        is_scored = bool(prefix) and num_beams == 1 and self.rng.random() < 0.3
        parameters = GenerateParameters(
            max_new_tokens=None if is_scored else self.rng.randint(1, 30),
            min_new_tokens=choose([0, 0, 0, 12]),
            do_sample=num_beams == 1 and self.rng.random() < 0.3,
            temperature=2.0,
            seed=self.rng.randrange(1000),
            num_beams=num_beams,
            num_return_sequences=self.rng.randint(1, num_beams),
            length_penalty=choose([1.0, 0.0, -1.0]),
            early_stopping=choose([False, True, "never"]),
            repetition_penalty=choose([1.0, 1.0, 1.5]),
            no_repeat_ngram_size=choose([0, 0, 2]),
            suppress_tokens=choose([(), (), (5, 6, 7)]),
            top_logprobs=choose([0, 0, 3]),
        )
        if is_scored:
            parameters = parameters.model_copy(update={"max_new_tokens": 0})
        attention = frozenset[str]()
        if self.rng.random() < 0.3:
            attention = frozenset({"decoder"} if self.is_decoder_only else {"cross", "decoder"})
        return GenerateRequest(
            self.call(),
            source,
            deadline,
            parameters,
            target_prefix=prefix,
            stop=choose([None, None, StopAtSum(150)]),
            attention=attention,
            map_budget=self.budget() if attention and self.rng.random() < 0.5 else None,
            caller=caller,
            stream=num_beams == 1 and self.rng.random() < 0.5,
        )

    def budget(self) -> MapBudget:
        """Return the budget of a call whose client reads its response at some time."""
        per_column = dict.fromkeys(("cross", "decoder"), 4)
        bytes_per_column = dict.fromkeys(("cross", "decoder"), 16)
        return MapBudget(10**9, per_column, bytes_per_column, self.use_memory)

    def use_memory(self, num_bytes: int) -> bool:
        if num_bytes > self.memory:
            return False
        self.memory -= num_bytes
        return True

    def call(self) -> str:
        """Return the request id of the next request."""
        is_large = not self.has_many_calls or self.rng.random() < 0.6
        return "large" if is_large else f"small {len(self.clients)}"

    def abandon_thread(self) -> None:
        active = self.rng.choice(list(self.clients))
        self.engine.cancel(active)
        self.clients[active].has_given_up |= not active.has_ended

    def step(self) -> None:
        before = {active: len(client.events) for active, client in self.clients.items()}
        first_call = len(self.runner.encoded)
        self.runner.stepped = []
        self.engine.step()
        self.now += self.rng.random()
        if self.rng.random() < 0.1:  # slow clients have read their responses
            self.memory = MEMORY
        self.check_books(before)
        if not self.has_many_calls:
            self.check_order(self.runner.encoded[first_call:])

    def check_books(self, before: Mapping[ActiveRequest, int]) -> None:
        open_clients = [client for client in self.clients.values() if not client.has_ended]
        owners = self.engine._rows.owners
        running = [self.clients[owner.active_request] for owner in owners]
        assert not any(client.has_ended for client in running)
        assert self.engine.num_running == len(running)
        assert self.engine.num_waiting == len(open_clients) - len(running)
        rows = [row for owner in owners for row in owner.rows]
        assert sorted(rows) == list(range(self.engine.num_rows_in_use)), "a row has two owners or none"
        assert len(rows) <= self.runner.max_rows
        for owner in owners:
            request = owner.request
            assert len(owner.rows) == (request.parameters.num_beams if isinstance(request, GenerateRequest) else 1)
        if not self.is_decoder_only:  # the runner's own record of its rows
            assert running == sorted(filter(self.runs, open_clients), key=running.index)
        for client in [] if self.is_decoder_only else running:
            assert isinstance(client.request, GenerateRequest)
            checked = [row for row in self.runner.rows if tuple(row.source) == client.request.source_ids]
            assert len(checked) == client.request.parameters.num_beams
        assert all(not client.has_given_up for client in open_clients)
        for active, client in self.clients.items():
            assert active.has_ended == client.has_ended
            if not client.has_given_up and len(client.events) == before[active]:
                continue
            assert len(client.finals) <= 1
            if client.has_given_up:
                assert client.finals == [Cancelled()]
                # Its row was freed before the step: no token came after it.
                assert not any(isinstance(event, TokenEvent) for event in client.events[before[active] :])
        for row in [] if self.is_decoder_only else self.runner.stepped:
            client = self.sources[row.source[0]]
            assert not client.has_given_up, "a cancelled request was run"

    def check_order(self, calls: list[list[list[int]]]) -> None:
        """Check that the oldest request that could be scheduled was scheduled."""
        if not calls:
            return
        arrivals = {client: index for index, client in enumerate(self.clients.values())}
        oldest = min(arrivals[self.sources[source[0]]] for source in calls[0])
        passed = [
            client
            for client, index in arrivals.items()
            if index < oldest and not client.has_ended and not self.runs(client)
        ]
        assert all(isinstance(client.request, GenerateRequest) for client in passed)
        if passed:  # only requests that need no row may pass, and only where rows are full
            taken = [self.sources[source[0]].request for source in calls[0]]
            assert all(isinstance(request, EncodeRequest) for request in taken)

    def runs(self, client: Client) -> bool:
        return list(client.request.source_ids) in [row.source for row in self.runner.rows]

    def check_generated(self, client: Client, final: Generated) -> None:
        request = client.request
        assert isinstance(request, GenerateRequest)
        alone = run_alone(dataclasses.replace(request, map_budget=None), self.runner.manifest)
        for target, expected in zip(final.targets, alone.targets, strict=True):
            assert target.tokens == expected.tokens
            assert (target.finish_reason, target.score) == (expected.finish_reason, expected.score)
            assert set(target.attention) == request.attention
            for kind, array in expected.attention.items():
                np.testing.assert_array_equal(target.attention[kind], array)
        streamed = [event.token for event in client.events if isinstance(event, TokenEvent)]
        generated = final.targets[0].tokens[len(request.target_prefix) :]
        assert streamed == (list(generated) if request.stream else [])

    def ends(self) -> Counter[str]:
        """Return how many requests ended in each way: the type of the result, or the error code."""
        finals = [client.finals[0] for client in self.clients.values()]
        return Counter(one.code if isinstance(one, Failed) else type(one).__name__ for one in finals)

    def check_results(self) -> None:
        for client in self.clients.values():
            (final,) = client.finals
            request, source = client.request, client.request.source_ids
            if isinstance(final, Generated):
                assert client.budget is None or client.budget.error is None
                self.check_generated(client, final)
            elif isinstance(final, Encoded):
                np.testing.assert_array_equal(final.hidden[:, 0], source)
            elif isinstance(final, Failed) and final.code == "internal":
                assert self.calls_fail or {POISON, NAN} & set(source)
            elif isinstance(final, Failed) and final.code == "overloaded":
                assert client.budget is not None and client.budget.error == "overloaded"
            elif isinstance(final, Failed):
                assert final.code == "deadline_exceeded" and request.deadline < 1e6
            assert not isinstance(final, Generated | Encoded) or not {POISON, NAN} & set(source)


def run(seed: int, num_steps: int, **kind: bool) -> Simulation:
    """Run a simulation to its end, and check all results."""
    simulation = Simulation(seed, **kind)
    load = simulation.rng.choice([0.3, 0.6, 0.9])
    for _ in range(num_steps):
        while simulation.rng.random() < load and simulation.engine.num_waiting < 20:
            simulation.arrive()
        if simulation.clients and simulation.rng.random() < 0.15:
            simulation.abandon_thread()
        simulation.step()
    while simulation.engine.has_work:
        simulation.step()
    assert simulation.engine.num_rows_in_use == 0
    simulation.check_results()
    return simulation


# Results, cancellations, failing graphs, deadlines, and responses that slow clients have not read.
ENDS = {"Generated", "Encoded", "Cancelled", "internal", "deadline_exceeded", "overloaded"}
KINDS: list[dict[str, bool]] = [{}, {"has_many_calls": True}, {"is_decoder_only": True}]


@pytest.mark.parametrize("kind", KINDS, ids=["one call", "many calls", "decoder-only"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_every_request_ends_exactly_once_with_the_correct_result(seed: int, kind: dict[str, bool]) -> None:
    simulation = run(seed, 120, **kind)
    kinds = {type(client.finals[0]) for client in simulation.clients.values()}
    assert kinds >= {Generated, Encoded}
    assert simulation.runner.num_moved and simulation.runner.num_branched


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100_000, 1000))
def test_a_hundred_thousand_short_schedules(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # the tracebacks of the faults would be kept in memory
    ends: dict[int, Counter[str]] = {index: Counter() for index in range(len(KINDS))}
    for seed in range(first, first + 1000):
        index = seed // 3 % len(KINDS)  # of each three seeds, one has calls that fail
        ends[index] += run(seed, 8, **KINDS[index]).ends()
    for counts in ends.values():
        assert counts.keys() == ENDS and min(counts.values()) >= 10, ends
