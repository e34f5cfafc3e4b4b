"""Decoder states use memory only for tokens in use, and release it."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_bundle
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.state_memory import trim_heap
from tests.service.runtime.running_total import SHOWN, admit, running_total, step, write_graphs

MAX_SOURCE, MAX_TARGET = 100, 150  # no powers of two
MB = 1_000_000


@pytest.fixture(scope="module")
def totals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("running-total")
    write_graphs(path)
    return path


@pytest.fixture
def runner(totals: Path) -> OnnxRunner:
    return running_total(totals, MAX_SOURCE, MAX_TARGET)


def resident_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def run_in_process_of_its_own(check: str) -> None:
    """Call a function of this module where no threads of other tests use memory."""
    subprocess.run([sys.executable, "-c", f"import {__name__} as test; test.{check}"], check=True)


def check_growth(totals: str) -> None:
    """States of 64 rows of a million tokens have 256 MB; each initialized row uses 4 MB."""
    before = resident_bytes()
    runner = running_total(Path(totals), 1_000_000, 1, max_rows=64)
    assert resident_bytes() - before < 10 * MB
    encoded = {"hidden": np.ones((1, 1_000_000), np.float32), "source_sum": np.ones((1, 1), np.float32)}
    before = resident_bytes()
    runner.init_rows(0, encoded, [0] * 16)
    assert 60 * MB < resident_bytes() - before < 70 * MB
    runner.release_memory()
    assert resident_bytes() - before < 4 * MB


def test_rows_allocate_memory_when_filled_and_release_it_when_idle(totals: Path) -> None:
    run_in_process_of_its_own(f"check_growth({str(totals)!r})")


def test_a_released_row_can_be_filled_and_stepped_as_before(runner: OnnxRunner) -> None:
    admit(runner, 0, *[[3] * 70] * 4)
    before = step(runner, [1, 2, 3, 4])["logits"]
    runner.release_memory()
    admit(runner, 0, *[[3] * 70] * 4)
    assert step(runner, [1, 2, 3, 4])["logits"] == before


def check_sessions(folder: str) -> None:
    bundle = Path(folder)
    manifest = read_bundle(bundle)
    outputs = [name for name in manifest.encoder_graph.outputs if "attention" not in name]
    shape = (16, manifest.limits.max_source_tokens)
    runners = [OnnxRunner(bundle, manifest, num_threads=1, max_rows=4) for _ in range(4)]
    before = resident_bytes()
    growth = []
    for runner in runners:
        runner.run_encoder(np.full(shape, 5, np.int64), np.full(shape[0], shape[1], np.int32), outputs)
        growth.append(resident_bytes() - before)
    assert growth[-1] < 2 * growth[0]
    runners[0].release_memory()
    trim_heap()
    assert resident_bytes() - before < growth[0] / 2


def test_no_session_keeps_the_memory_of_its_largest_run(bundle: Path) -> None:
    """Regression: an arena for each session kept the memory of each run, about 60 MB."""
    run_in_process_of_its_own(f"check_sessions({str(bundle)!r})")


def test_rows_of_different_ages_survive_every_growth(runner: OnnxRunner) -> None:
    """Compare four rows that start at different times with a Python model of their content."""
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


def test_a_row_is_moved_and_forked_after_a_growth_as_before(runner: OnnxRunner) -> None:
    admit(runner, 0, [1] * 70, [2] * 70, [3] * 70, [4] * 70)
    for position in range(70):
        step(runner, [100 + position, 200 + position, 300 + position, 400 + position], position=position)
    runner.move(3, 0, target_tokens=70, source_tokens=70)
    runner.fork([2], [1], [slice(70)])
    given = step(runner, [5, 6, 7], SHOWN, position=70)
    targets = [row[:71] for row in given["read_shown"]]
    assert targets == [[*range(400, 470), 5], [*range(300, 370), 6], [*range(300, 370), 7]]
    assert [row[:70] for row in given["source_shown"]] == [[4] * 70, [2] * 70, [3] * 70]


def test_growth_beyond_32_rows_keeps_the_states_of_earlier_rows(totals: Path) -> None:
    runner = running_total(totals, MAX_SOURCE, MAX_TARGET, max_rows=70)
    for row in range(70):
        admit(runner, row, [row + 1])
        given = step(runner, [7] * (row + 1), SHOWN, position=row)
        assert [shown[0] for shown in given["source_shown"]] == list(range(1, row + 2))
    # A row has read one token at each position since it was admitted.
    read = step(runner, [7] * 70, SHOWN, position=69)["read_shown"]
    assert [[position for position, value in enumerate(row) if value] for row in read] == [
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
def runners(bundle: Path, manifest: Manifest) -> tuple[OnnxRunner, OnnxRunner]:
    """Return a runner with unwritten rows, and a runner with completely written rows."""
    new, used = (OnnxRunner(bundle, manifest, num_threads=1, max_rows=4) for _ in range(2))
    used.warm_up(max_batch_tokens=400)
    longest = [45] * 100
    for row in range(4):
        begin(used, row, longest)
    for age in range(150):
        read(used, [45] * 4, [age] * 4, [100] * 4)
    return new, used


def begin(runner: OnnxRunner, row: int, source: Sequence[int]) -> None:
    names = [state.encoder_output for state in runner.manifest.states if state.encoder_output is not None]
    ids, lengths = np.array([source], np.int64), np.array([len(source)], np.int32)
    runner.init_rows(row, runner.run_encoder(ids, lengths, names), [0])


def read(runner: OnnxRunner, tokens: Sequence[int], ages: Sequence[int], source_lengths: Sequence[int]) -> Arrays:
    lengths = np.array(ages, np.int32), np.array(source_lengths, np.int32)
    given = runner.step(np.array(tokens, np.int64), *lengths, OUTPUTS)
    return {name: array.copy() for name, array in given.items()}


def play(runner: OnnxRunner, ticks: int) -> list[Arrays]:
    """Return the outputs of each step by row, for sequences that start one after another.

    At tick 90 the second row is forked into the third. At tick 100 the second ends, and the last
    row is moved into its row.
    """
    found: list[Arrays] = []
    sources, ages, tokens = list(RUNNING), [0] * 4, [1] * 4
    count = 0
    for tick in range(ticks):
        if tick in BEGINS:
            begin(runner, count, sources[count])
            count += 1
        if tick == 90:
            runner.fork([1], [2], [slice(ages[1])])
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


def test_rows_have_the_same_bits_with_any_earlier_content_of_their_memory(
    runners: tuple[OnnxRunner, OnnxRunner],
) -> None:
    given, expected = (play(runner, 150) for runner in runners)
    assert len(given) == len(expected) > 400
    for one, other in zip(given, expected, strict=True):
        for name in OUTPUTS:
            np.testing.assert_array_equal(one[name], other[name])
