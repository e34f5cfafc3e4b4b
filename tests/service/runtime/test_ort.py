"""The ONNX Runtime runner with hand-made graphs; `test_ort_growth` tests memory."""

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle_files import read_bundle
from sightline.service.runtime import base
from sightline.service.runtime.ort import OnnxRunner
from tests.service.runtime.running_total import OUTPUTS, SHOWN, admit, running_total, step, write_graphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("running-total")
    write_graphs(path)
    return path


@pytest.fixture
def runner(folder: Path) -> OnnxRunner:
    return running_total(folder, max_source_tokens=6, max_target_tokens=5)


def test_a_state_of_fixed_size_is_passed_from_step_to_step(runner: OnnxRunner) -> None:
    admit(runner, 0, [3, 4])
    assert step(runner, [10])["logits"] == [[17, 10]]
    assert step(runner, [100])["logits"] == [[117, 110]]


def test_a_state_that_grows_with_the_target_is_updated_in_place(runner: OnnxRunner) -> None:
    admit(runner, 0, [3], [4])
    step(runner, [10, 20])
    step(runner, [11, 21], position=1)
    assert step(runner, [12, 22], SHOWN, position=2)["read_shown"] == [[10, 11, 12, 0, 0], [20, 21, 22, 0, 0]]


def test_rows_keep_their_states_and_a_moved_row_continues(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    admit(runner, 1, [2])
    assert step(runner, [10, 20])["logits"] == [[11, 10], [22, 20]]
    runner.move(1, 0, target_tokens=1, source_tokens=1)
    assert step(runner, [5])["logits"] == [[27, 25]]


def test_a_move_copies_all_states_up_to_the_used_positions(runner: OnnxRunner) -> None:
    admit(runner, 0, [1, 1, 1, 1, 1, 1])
    admit(runner, 1, [7, 8, 9])
    for position in range(3):
        step(runner, [10 + position, 20 + position], position=position)
    runner.move(1, 0, target_tokens=2, source_tokens=3)
    given = step(runner, [5], (*OUTPUTS, *SHOWN), position=4)
    assert given["logits"] == [[24 + 63 + 5, 63 + 5]]
    assert given["source_shown"] == [[7, 8, 9, 1, 1, 1]]
    assert given["read_shown"] == [[20, 21, 12, 0, 5]]


def test_several_rows_start_from_one_example(runner: OnnxRunner) -> None:
    admit(runner, 0, [5])
    admit(runner, 1, [1], [2, 3], examples=[1, 1, 0])
    assert step(runner, [10, 20, 30, 40])["logits"] == [[15, 10], [25, 20], [35, 30], [41, 40]]
    shown = step(runner, [0] * 4, SHOWN)["source_shown"]
    assert shown == [[5, 0, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_a_fork_copies_only_states_that_steps_change(runner: OnnxRunner) -> None:
    admit(runner, 0, [1], [2], [3], [4])
    for position in range(3):
        step(runner, [10 + position, 20 + position, 30 + position, 40 + position], position=position)
    runner.fork([2, 2], [0, 3], [slice(2)] * 2)
    given = step(runner, [5, 6, 7, 8], (*OUTPUTS, *SHOWN), position=4)
    assert given["logits"] == [[101, 98], [71, 69], [103, 100], [104, 101]]  # 3 + 30 + 31 + 32 + 5, and so on
    first_slots = [row[0] for row in given["source_shown"]]
    assert first_slots == [1, 2, 3, 4]  # forked rows have the same source, so it is not copied
    assert given["read_shown"] == [[30, 31, 12, 0, 5], [20, 21, 22, 0, 6], [30, 31, 32, 0, 7], [30, 31, 42, 0, 8]]


def test_forked_rows_are_independent(runner: OnnxRunner) -> None:
    admit(runner, 0, [1], examples=[0, 0])
    step(runner, [10, 99])
    runner.fork([0], [1], [slice(1)])
    step(runner, [2, 3], position=1)
    assert step(runner, [0, 0], SHOWN, position=2)["read_shown"] == [[10, 2, 0, 0, 0], [10, 3, 0, 0, 0]]


def test_a_reused_row_keeps_no_state(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    step(runner, [10])
    admit(runner, 0, [7])
    assert step(runner, [1])["logits"] == [[8, 1]]


def test_only_requested_outputs_are_returned(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    given = step(runner, [4], ("top_ids", "top_logprobs"))
    assert set(given) == {"top_ids", "top_logprobs"}
    assert given["top_ids"] == [[0]]
    assert given["top_logprobs"] == [[pytest.approx(-0.31326, abs=1e-5)]]  # 5 beside 4
    assert set(step(runner, [4], ("logprobs",))) == {"logprobs"}


def test_outputs_of_free_and_of_fixed_size_are_returned_together(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    for token in (4, 5):
        given = step(runner, [token], ("read_shown", "top_ids"))
        assert given == {"read_shown": [[token, 0, 0, 0, 0]], "top_ids": [[0]]}


def test_a_state_that_grows_with_the_source_is_at_the_start_of_its_row(runner: OnnxRunner) -> None:
    admit(runner, 2, [5, 6, 7])
    shown = step(runner, [0] * 4, SHOWN)["source_shown"]
    assert shown == [[0] * 6, [0] * 6, [5, 6, 7, 0, 0, 0], [0] * 6]


def test_warming_up_leaves_no_state(runner: OnnxRunner) -> None:
    runner.warm_up(max_batch_tokens=24)
    admit(runner, 0, [3])
    assert step(runner, [1])["logits"] == [[4, 1]]


def test_only_the_most_recent_kinds_of_steps_stay_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: weakref.WeakSet[base.StepBinding] = weakref.WeakSet()

    class NotedBinding(base.StepBinding):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            bound.add(self)

    monkeypatch.setattr(base, "StepBinding", NotedBinding)
    monkeypatch.setattr(base, "MAX_BINDINGS", 3)
    runner = running_total(folder, max_source_tokens=6, max_target_tokens=5, max_rows=8)
    admit(runner, 0, [1], [2], [3], [4], [5], [6], [7], [8])
    totals = [*range(1, 9)]
    for position in range(4):
        for rows in range(1, 9):
            given = step(runner, [10] * rows, position=position)["logits"]
            totals[:rows] = [total + 10 for total in totals[:rows]]
            assert [total for total, _ in given] == totals[:rows]
    assert len(bound) == 3
    runner.release_memory()  # a binding takes as long to create as a step
    assert len(bound) == 3


@pytest.mark.parametrize(
    "module",
    [
        "sightline.service.runtime.ort",
        "sightline.service.server",
        "sightline.export.check.sessions",
        "sightline.export.commands",
    ],
)
def test_onnx_runtime_is_always_loaded_without_telemetry(module: str, tmp_path: Path) -> None:
    """ONNX Runtime writes no files to the home folder."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}  # no variable that disables it
    program = f"import sys, {module}; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []


def test_maps_of_the_source_are_as_wide_as_the_longest_source(bundle: Path) -> None:
    """All steps of the same rows write their maps to one array."""
    runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=1, max_rows=3)
    lengths = np.array([3, 6, 2], np.int32)
    needed = [name for name in runner.manifest.encoder_graph.outputs if "attention" not in name]
    runner.init_rows(0, runner.run_encoder(np.full((3, 6), 7, np.int64), lengths, needed), range(3))

    def maps_of(rows: slice) -> NDArray[np.float32]:
        ids, ages = np.full(len(lengths[rows]), 7, np.int64), np.zeros(len(lengths[rows]), np.int32)
        outputs = runner.step(ids, ages, lengths[rows], ("cross_attention", "top_ids"), first=rows.start)
        addresses.setdefault(rows.stop - rows.start, set()).add(outputs["cross_attention"].ctypes.data)
        return outputs["cross_attention"].copy()

    addresses: dict[int, set[int]] = {}
    for _ in range(2):
        together = maps_of(slice(0, 3))
        alone = [maps_of(slice(row, row + 1)) for row in range(3)]
        assert [array.shape[-1] for array in (together, *alone)] == [max(lengths), *lengths]
        for row, array in enumerate(alone):
            np.testing.assert_allclose(together[row, ..., : lengths[row]], array[0], atol=1e-6)
            np.testing.assert_allclose(array.sum(axis=-1), 1, atol=1e-5)
        lengths[:] = [3, 5, 2]  # the longest one hides a token
    assert len(addresses[3]) == 1
