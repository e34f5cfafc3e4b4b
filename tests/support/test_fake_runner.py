"""Results of the fake model depend on every input, and values that are not in use are garbage."""

import numpy as np

from sightline.base.bundle import Manifest
from sightline.service.runtime.runner import Runner
from tests.support.fake_runner import FakeRunner, Faults, fake_manifest

SOURCES = [(5, 6, 7), (8, 9, 10, 11, 12), (13,)]


def encode(runner: FakeRunner, *sources: tuple[int, ...]) -> dict[str, np.ndarray]:
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.zeros((len(sources), lengths.max()), np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    return dict(runner.run_encoder(ids, lengths, runner.manifest.encoder_graph.outputs))


def step(runner: FakeRunner, tokens: list[int], length: int, sources: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    source_lengths = np.array([len(source) for source in sources], np.int32)
    lengths = np.full(len(tokens), length, np.int32)
    names = [name for name in runner.manifest.decoder_graph.outputs if not name.endswith("_next")]
    return dict(runner.step(np.array(tokens, np.int64), lengths, source_lengths, names))


def filled_runner(faults: Faults | None = None) -> FakeRunner:
    runner = FakeRunner(fake_manifest(), max_rows=3, faults=faults)
    runner.init_rows(0, encode(runner, *SOURCES), [0, 1, 2])
    return runner


def test_it_is_a_runner_and_its_manifest_is_valid() -> None:
    runner: Runner = FakeRunner(fake_manifest(), max_rows=3)
    assert Manifest.model_validate_json(runner.manifest.model_dump_json()) == runner.manifest


def test_a_row_moved_with_too_few_positions_differs() -> None:
    for short in ({"target_tokens": 1, "source_tokens": 5}, {"target_tokens": 2, "source_tokens": 4}):
        stayed, moved = filled_runner(), filled_runner()
        for runner in (stayed, moved):
            step(runner, [1, 1, 1], 0, SOURCES)
            step(runner, [5, 6, 7], 1, SOURCES)
        moved.move(1, 0, **short)
        after = step(moved, [4], 2, [SOURCES[1]])["logits"]
        assert (after != step(stayed, [3, 4, 9], 2, SOURCES)["logits"][1]).any()


def test_the_output_of_a_row_depends_on_all_tokens_that_it_has_read() -> None:
    one, other = filled_runner(), filled_runner()
    step(one, [1, 1, 1], 0, SOURCES)
    step(other, [7, 1, 1], 0, SOURCES)
    differs = step(one, [3, 3, 3], 1, SOURCES)["logits"] != step(other, [3, 3, 3], 1, SOURCES)["logits"]
    assert differs.any(axis=1).tolist() == [True, False, False]


def test_a_steps_outputs_are_overwritten_by_the_next() -> None:
    runner = filled_runner()
    first = step(runner, [1, 1, 1], 0, SOURCES)
    kept = first["logits"].copy()
    step(runner, [3, 3, 3], 1, SOURCES)
    assert (first["logits"] != kept).all()
