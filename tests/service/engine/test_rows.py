import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.service.engine.beam import BeamGeneration
from sightline.service.engine.generation import ActiveRequest, BeamCopies, Generation
from sightline.service.engine.request import GenerateRequest
from sightline.service.engine.rows import Rows
from sightline.service.engine.single import SingleGeneration
from sightline.service.parameters import GenerateParameters
from tests.service.engine.conftest import FAR, SOURCES, CheckedRunner, Harness, ids_of, run_alone


class Filled:
    """Rows with a CheckedRunner, and the generations that the test admits and releases."""

    def __init__(self, max_rows: int) -> None:
        self.runner = CheckedRunner(max_rows)
        self.rows = Rows(self.runner)
        self.alive: list[Generation] = []

    def admit(self, nums_beams: list[int]) -> None:
        """Admit generations together, each with its own source."""
        newcomers: list[tuple[Generation, int]] = []
        first, lengths = len(self.runner.encoded) * 10 + 3, np.arange(1, len(nums_beams) + 1, dtype=np.int32)
        ids = np.tril(np.arange(first, first + len(lengths))[:, None] * np.ones_like(lengths))  # padded by 0
        encoded = self.runner.run_encoder(ids.astype(np.int64), lengths, self.runner.manifest.encoder_graph.outputs)
        for index, num_beams in enumerate(nums_beams):
            source = tuple(ids[index, : index + 1].tolist())
            request = GenerateRequest("r", source, FAR, GenerateParameters(num_beams=num_beams))
            kind = BeamGeneration if num_beams > 1 else SingleGeneration
            active = ActiveRequest(0, request, lambda _: None, 0.0)
            newcomers.append((kind(active, request, self.runner.manifest, {}), index))
        self.rows.admit(newcomers, encoded)
        self.alive += [generation for generation, _ in newcomers]
        self.check()

    def step(self) -> None:
        if len(self.rows):
            self.advance([])

    def branch_last_from_first(self) -> None:
        """Run a step after which the first beam of each search is copied over its last."""
        searches = [one for one in self.alive if len(one.rows) > 1]
        ages = [len(self.runner.rows[one.rows[0]].read) + 1 for one in searches]
        self.advance([(one.rows[0], one.rows[-1], slice(age)) for one, age in zip(searches, ages, strict=True)])

    def advance(self, beam_copies: BeamCopies) -> None:
        rows = range(len(self.rows))
        self.rows.advance(rows, self.rows.step(rows)["top_ids"][:, 0], beam_copies)
        self.check()

    def release(self, index: int) -> None:
        self.rows.release(self.alive.pop(index % len(self.alive)))
        self.check()

    def check(self) -> None:
        """Check that rows have no gaps, one owner each, and the state of their own source."""
        assert list(self.rows) == self.alive
        assert self.rows.num_owners == len(self.alive)
        owned = [row for generation in self.alive for row in generation.rows]
        assert sorted(owned) == list(range(self.rows.first_free))
        assert self.rows.num_free == self.runner.max_rows - len(owned)
        for generation in self.alive:
            assert len(generation.rows) == generation.request.parameters.num_beams
            for row in generation.rows:
                assert tuple(self.runner.rows[row].source) == generation.request.source_ids
                assert self.rows.find(generation.active_request) is generation


@given(
    groups=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    releases=st.lists(st.integers(0, 50), max_size=9),
    num_steps=st.integers(0, 3),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_rows_stay_contiguous_in_any_order_of_release(
    groups: list[list[int]], releases: list[int], num_steps: int
) -> None:
    """`CheckedRunner` checks the lengths in each move."""
    filled = Filled(max_rows=36)
    for group in groups:  # of different ages, then
        filled.admit(group)
        for _ in range(num_steps):
            filled.step()
    filled.branch_last_from_first()
    for index in releases[: len(filled.alive)]:
        filled.release(index)
        filled.step()
    if len(filled.rows) <= 34:
        filled.admit([2])
        filled.step()


def test_rows_of_a_generation_keep_their_order_when_they_move() -> None:
    filled = Filled(max_rows=6)
    filled.admit([2, 1, 3])
    filled.step()
    searching = filled.alive[2]
    before = [filled.runner.rows[row] for row in searching.rows]
    filled.release(0)
    filled.release(0)
    assert sorted(searching.rows) == [0, 1, 2]
    assert [filled.runner.rows[row] for row in searching.rows] == before


def test_releasing_the_last_row_moves_nothing() -> None:
    filled = Filled(max_rows=5)
    filled.admit([2])  # rows of searches that are admitted together alternate
    filled.admit([3])
    filled.release(1)
    filled.release(0)
    assert len(filled.rows) == 0
    assert filled.runner.num_moved == 0


def test_a_search_waits_for_all_its_rows_and_no_later_request_takes_them() -> None:
    harness = Harness(max_rows=4)
    long = GenerateParameters(min_new_tokens=20)
    running = [harness.generate(source, parameters=long) for source in SOURCES[:2]]
    harness.engine.step()
    search, later = harness.search(SOURCES[2], num_beams=3), harness.generate(SOURCES[3])
    encode = harness.encode(SOURCES[4])
    harness.engine.step()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (2, 2)
    assert harness.final(encode)  # it needs no row
    harness.engine.cancel(running[0])
    harness.engine.step()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (2, 1)
    assert harness.events[later] == []
    harness.run()
    assert ids_of(harness.generated(later).targets[0]) == harness.expected(SOURCES[3])
    assert isinstance(search.request, GenerateRequest)
    assert harness.generated(search) == run_alone(search.request, harness.runner.manifest)


def test_searches_are_admitted_in_the_order_of_their_arrival() -> None:
    harness = Harness(max_rows=5)
    order: list[int] = []
    for index, num_beams in enumerate([4, 2, 5, 1, 3, 1]):
        request = GenerateRequest("r", SOURCES[index], FAR, GenerateParameters(num_beams=num_beams))
        harness.submit(request)
    waiting = 6
    while harness.engine.has_work:
        harness.engine.step()
        order.append(waiting - harness.engine.num_waiting)
        waiting = harness.engine.num_waiting
    # 4 alone; 2 alone, for 5 needs all; 5 alone; 1, 3 and 1 together.
    assert [num for num in order if num] == [1, 1, 1, 3]


def test_a_batch_fills_rows_of_several_requests_from_their_own_examples() -> None:
    harness = Harness(runner=CheckedRunner(max_rows=6))
    handles = [harness.search(SOURCES[3], num_beams=2), harness.encode(SOURCES[4]), harness.generate(SOURCES[2])]
    handles.append(harness.search(SOURCES[5], num_beams=3))
    harness.engine.step()
    runner = harness.runner
    assert isinstance(runner, CheckedRunner)
    assert len(runner.encoded) == 1
    assert sorted(len(row.source) for row in runner.stepped) == [4, 5, 7]  # one row each for the first token
    runner.stepped.clear()
    harness.engine.step()
    assert sorted(len(row.source) for row in runner.stepped) == [4, 5, 5, 7, 7, 7]
    harness.run()
    for active in handles:
        if isinstance(active.request, GenerateRequest):
            assert harness.generated(active) == run_alone(active.request, runner.manifest)
