"""The ONNX Runtime runner's states grow with what they hold, and nobody notices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.bundle import Manifest, read_bundle
from service.runtime.ort import OnnxRunner
from tests.service.runtime.running_total import SHOWN, admit, running_total, step, write_graphs

MAX_SOURCE, MAX_TARGET = 100, 150  # no powers of two


@pytest.fixture(scope="module")
def totals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("running-total")
    write_graphs(path)
    return path


@pytest.fixture
def runner(totals: Path) -> OnnxRunner:
    return running_total(totals, MAX_SOURCE, MAX_TARGET, room_bytes=0)


def slots(runner: OnnxRunner, place: int = 0) -> tuple[int, int]:
    """How many slots of source and target a row has, after a step at a place."""
    given = step(runner, [1], SHOWN, place)
    source, target = (given[name][0] for name in ("source_shown", "read_shown"))
    return len(source), len(target)


def test_targets_have_64_slots_at_first_and_then_powers_of_two_up_to_the_limit(runner: OnnxRunner) -> None:
    places = {0: 64, 63: 64, 64: 128, 127: 128, 128: MAX_TARGET, MAX_TARGET - 1: MAX_TARGET}
    assert {place: slots(runner, place) for place in places} == {place: (64, most) for place, most in places.items()}


def test_the_oldest_row_decides_wherever_it_is(runner: OnnxRunner) -> None:
    for places, expected in (([0, 63, 2], 64), ([0, 64, 2], 128), ([0, 1, 128], MAX_TARGET)):
        shown = step(runner, [1, 2, 3], SHOWN, places)["read_shown"]
        assert [len(row) for row in shown] == [expected] * 3
        assert [row[place] for row, place in zip(shown, places, strict=True)] == [1, 2, 3]


def test_sources_have_64_slots_at_first_and_then_powers_of_two_up_to_the_limit(runner: OnnxRunner) -> None:
    for length, expected in ((64, 64), (65, MAX_SOURCE), (MAX_SOURCE, MAX_SOURCE)):
        admit(runner, 0, [1] * length)
        assert slots(runner) == (expected, 64)


def test_room_that_was_taken_stays(runner: OnnxRunner) -> None:
    admit(runner, 0, [1] * 70)
    step(runner, [1], place=70)
    admit(runner, 0, [1])
    assert slots(runner) == (MAX_SOURCE, 128)


def test_a_power_of_two_that_is_needed_whole_is_enough(totals: Path) -> None:
    runner = running_total(totals, 1000, 1000, room_bytes=0)
    admit(runner, 0, [1] * 128)
    assert slots(runner, place=127) == (128, 128)
    assert slots(runner, place=300) == (128, 512)


@pytest.mark.parametrize("limits", [(6, 5), (64, 64), (6, 150), (100, 63)])
def test_a_model_with_small_limits_has_no_more_slots_than_they_allow(totals: Path, limits: tuple[int, int]) -> None:
    runner = running_total(totals, *limits, room_bytes=0)
    assert slots(runner) == (min(limits[0], 64), min(limits[1], 64))
    admit(runner, 0, [1] * limits[0])
    assert slots(runner, limits[1] - 1) == limits


def test_rows_of_different_ages_survive_every_growth(runner: OnnxRunner) -> None:
    """Four rows that began at different times; a twin in Python knows what each holds."""
    sources = [[3, 4], [5], [6] * 10, [7] * 80]  # the last makes room for sources while the others run
    begins = [0, 20, 60, 75]
    totals = [[0, 0] for _ in sources]
    written: list[list[int]] = [[] for _ in sources]
    for tick in range(MAX_TARGET):
        for row, source in enumerate(sources):
            if begins[row] == tick:
                admit(runner, row, source)
                totals[row] = [sum(source), 0]
        running = [row for row in range(4) if begins[row] <= tick]
        tokens = [1000 * (row + 1) + tick for row in running]
        for row, token in zip(running, tokens, strict=True):
            written[row].append(token)
            totals[row] = [total + token for total in totals[row]]
        given = step(runner, tokens, ("logits", *SHOWN), [len(written[row]) - 1 for row in running])
        assert given["logits"] == [totals[row] for row in running]
        for name, holds in (("read_shown", written), ("source_shown", sources)):
            for row, shown in zip(running, given[name], strict=True):
                assert shown == [*holds[row], *[0] * (len(shown) - len(holds[row]))]


def test_a_row_is_moved_and_branches_after_a_growth_as_before(runner: OnnxRunner) -> None:
    admit(runner, 0, [1] * 70, [2] * 70, [3] * 70, [4] * 70)
    for place in range(70):
        step(runner, [100 + place, 200 + place, 300 + place, 400 + place], place=place)
    runner.move(3, 0, target_tokens=70, source_tokens=70)
    runner.branch([2], [1], target_tokens=70)
    given = step(runner, [5, 6, 7], SHOWN, place=70)
    targets = [row[:71] for row in given["read_shown"]]
    assert targets == [
        [*range(400, 470), 5],
        [*range(300, 370), 6],
        [*range(300, 370), 7],
    ]
    assert [row[:70] for row in given["source_shown"]] == [[4] * 70, [2] * 70, [3] * 70]


@pytest.mark.parametrize("needs", ["source", "target"])
def test_a_growth_between_steps_of_one_kind_binds_them_anew(runner: OnnxRunner, needs: str) -> None:
    """What is bound to memory that was given up would read and write there."""
    admit(runner, 0, [3], [4])
    step(runner, [10, 20], SHOWN)
    if needs == "source":
        admit(runner, 1, [9] * 65)
    step(runner, [11, 21], SHOWN, place=64 if needs == "target" else 1)
    given = step(runner, [12, 22], SHOWN, place=65 if needs == "target" else 2)
    kept = [[value for value in row if value] for row in given["read_shown"]]
    assert kept == [[10, 11, 12], [20, 21, 22]]
    assert slots(runner) == ((MAX_SOURCE, 64) if needs == "source" else (64, 128))


def test_states_that_are_small_together_have_all_their_room_at_once(totals: Path) -> None:
    num_bytes = 4 * 4 * (1 + 1 + MAX_SOURCE + MAX_TARGET)  # of four rows of float32
    assert slots(running_total(totals, MAX_SOURCE, MAX_TARGET, room_bytes=num_bytes)) == (MAX_SOURCE, MAX_TARGET)
    assert slots(running_total(totals, MAX_SOURCE, MAX_TARGET, room_bytes=num_bytes - 1)) == (64, 64)


def test_warming_up_takes_no_more_room_than_the_first_slots(runner: OnnxRunner) -> None:
    runner.warm_up(max_batch_tokens=2 * MAX_SOURCE)
    assert slots(runner) == (64, 64)


def test_rows_beyond_the_first_32_keep_what_those_before_have_read(totals: Path) -> None:
    runner = running_total(totals, MAX_SOURCE, MAX_TARGET, max_rows=70, room_bytes=0)
    for row in range(70):
        admit(runner, row, [row + 1])
        given = step(runner, [7] * (row + 1), SHOWN, place=row)
        assert [shown[0] for shown in given["source_shown"]] == list(range(1, row + 2))
    # A row has read one token at each place since it was admitted.
    read = step(runner, [7] * 70, SHOWN, place=69)["read_shown"]
    assert [[place for place, value in enumerate(row) if value] for row in read] == [
        list(range(row, 70)) for row in range(70)
    ]


# A real model

OUTPUTS = ("logits", "logprobs", "top_logprobs", "top_ids", "cross_attention", "decoder_attention")
RUNNING = [[11, 52, 90, 33, 2], [45] * 90, [45] * 90, [21, 22, 23, 2]]
BEGINS = [0, 30, 50, 68]

Arrays = Mapping[str, NDArray[Any]]


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    manifest = read_bundle(bundle)
    limits = manifest.limits.model_copy(update={"max_source_tokens": 100, "max_target_tokens": 150})
    return manifest.model_copy(update={"limits": limits})


@pytest.fixture
def growing(bundle: Path, manifest: Manifest) -> OnnxRunner:
    return OnnxRunner(bundle, manifest, num_threads=1, max_rows=4, room_bytes=0)


@pytest.fixture
def roomy(bundle: Path, manifest: Manifest) -> OnnxRunner:
    """Its buffers have their full size from the beginning."""
    return OnnxRunner(bundle, manifest, num_threads=1, max_rows=4)


def begin(runner: OnnxRunner, row: int, source: Sequence[int]) -> None:
    names = [state.encoder_output for state in runner.manifest.states if state.encoder_output is not None]
    ids, lengths = np.array([source], np.int64), np.array([len(source)], np.int32)
    runner.fill(row, runner.encode(ids, lengths, names), [0])


def read(runner: OnnxRunner, tokens: Sequence[int], ages: Sequence[int], source_lengths: Sequence[int]) -> Arrays:
    lengths = np.array(ages, np.int32), np.array(source_lengths, np.int32)
    given = runner.step(np.array(tokens, np.int64), *lengths, OUTPUTS)
    return {name: array.copy() for name, array in given.items()}


def play(runner: OnnxRunner, ticks: int) -> list[Arrays]:
    """What every step gives, row by row, of sequences that begin one after another.

    At tick 90 the third becomes a branch of the second, at tick 100 the second ends and the last takes its place.
    """
    found: list[Arrays] = []
    sources, ages, tokens = list(RUNNING), [0] * 4, [1] * 4
    count = 0
    for tick in range(ticks):
        if tick in BEGINS:
            begin(runner, count, sources[count])
            count += 1
        if tick == 90:
            runner.branch([1], [2], ages[1])
            ages[2] = ages[1]
        if tick == 100:
            runner.move(3, 1, ages[3], len(sources[3]))
            sources[1], ages[1], tokens[1], count = sources[3], ages[3], tokens[3], 3
        lengths = [len(source) for source in sources[:count]]
        given = read(runner, tokens[:count], ages[:count], lengths)
        for row in range(count):
            own = {name: given[name][row] for name in OUTPUTS[:4]}
            own["cross_attention"] = given["cross_attention"][row, ..., : lengths[row]]
            own["decoder_attention"] = given["decoder_attention"][row, ..., : ages[row] + 1]
            found.append(own)
            ages[row] += 1
            tokens[row] = int(own["top_ids"][(tick + row) % 3])  # the likeliest might be one for ever
    return found


def test_a_runner_that_grows_gives_what_one_that_had_the_room_gives_bit_for_bit(
    growing: OnnxRunner, roomy: OnnxRunner
) -> None:
    """Rows of four ages: targets outgrow 64 and 128 slots while others run, a source of 90 tokens comes in between."""
    given, expected = play(growing, 150), play(roomy, 150)
    assert len(given) == len(expected) > 400
    for one, other in zip(given, expected, strict=True):
        for name in OUTPUTS:
            np.testing.assert_array_equal(one[name], other[name])
