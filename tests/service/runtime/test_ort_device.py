"""States in device memory: the calls for CUDA, with the CPU as the device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_bundle
from sightline.export.convert.conversions import half_bundle
from sightline.service.runtime.device import DeviceRunner
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.runner import Runner

SOURCES = [[11, 52, 90, 33, 2], [7, 2], [45, 67, 12, 80, 81, 82, 2]]
TARGETS = [[1, 45, 67, 12, 13, 14], [1, 9, 8, 7, 6, 5], [1, 21, 22, 23, 24, 25]]
CLOSE = 2e-2  # of log-probabilities in float16
OUTPUTS = ("logits", "logprobs", "top_logprobs", "top_ids", "cross_attention", "decoder_attention")


@pytest.fixture(scope="module")
def folder(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "half"
    half_bundle(bundle, path, None)
    return path


@pytest.fixture
def runner(folder: Path) -> DeviceRunner:
    return DeviceRunner(folder, read_bundle(folder), provider="cpu", num_threads=1, max_rows=6)


@pytest.fixture
def expected(bundle: Path) -> OnnxRunner:
    return OnnxRunner(bundle, read_bundle(bundle), num_threads=1, max_rows=6)


def needed_outputs(manifest: Manifest) -> list[str]:
    return [name for name in manifest.encoder_graph.outputs if not name.startswith("encoder_attention")]


def admit(
    runner: Runner,
    first: int,
    sources: Sequence[Sequence[int]],
    examples: Sequence[int],
    visible: Mapping[int, Sequence[int]] | None = None,
) -> None:
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.zeros((len(sources), lengths.max()), np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    runner.init_rows(first, runner.run_encoder(ids, lengths, needed_outputs(runner.manifest)), examples, visible)


def read(runner: Runner, rows: Sequence[tuple[Sequence[int], int]], age: int) -> Mapping[str, NDArray[np.float32]]:
    """Run one step for rows of (decoder inputs, source length)."""
    tokens = np.array([target[age] for target, _ in rows], np.int64)
    ages = np.full(len(rows), age, np.int32)
    given = runner.step(tokens, ages, np.array([length for _, length in rows], np.int32), OUTPUTS)
    return {name: array.copy() for name, array in given.items()}


def rows_of(*indices: int) -> list[tuple[list[int], int]]:
    return [(TARGETS[index], len(SOURCES[index])) for index in indices]


def largest_difference(given: Mapping[str, NDArray[np.float32]], other: Mapping[str, NDArray[np.float32]]) -> float:
    return float(np.abs(given["logprobs"] - other["logprobs"]).max())


def test_rows_of_several_sources_equal_float32(runner: DeviceRunner, expected: OnnxRunner) -> None:
    for one in (runner, expected):
        admit(one, 0, SOURCES, [0, 1, 2])
    for age in range(5):
        given, right = (read(one, rows_of(0, 1, 2), age) for one in (runner, expected))
        assert largest_difference(given, right) < CLOSE
        assert given["top_logprobs"].dtype == given["logits"].dtype == np.float32
        decoder = [one["decoder_attention"][..., : age + 1].astype(np.float32) for one in (given, right)]
        assert np.abs(decoder[0] - decoder[1]).max() < CLOSE
        for row, source in enumerate(SOURCES):
            cross = [one["cross_attention"][row, ..., : len(source)].astype(np.float32) for one in (given, right)]
            assert np.abs(cross[0] - cross[1]).max() < CLOSE


def test_rows_keep_only_the_visible_source_tokens(runner: DeviceRunner, expected: OnnxRunner) -> None:
    visible = {0: [0, 2, 4], 2: [3]}
    rows = [(TARGETS[row], len(visible.get(row, SOURCES[row]))) for row in (0, 1, 2)]
    for one in (runner, expected):
        admit(one, 0, SOURCES, [0, 1, 2], visible)
    for age in range(3):
        given, right = (read(one, rows, age) for one in (runner, expected))
        assert largest_difference(given, right) < CLOSE
        np.testing.assert_allclose(given["cross_attention"][2, ..., 0].astype(np.float32), 1)
    admit(runner, 0, SOURCES, [0, 1, 2])
    complete = [read(runner, rows_of(0, 1, 2), age) for age in range(3)][-1]
    assert largest_difference({"logprobs": given["logprobs"][1]}, {"logprobs": complete["logprobs"][1]}) < 1e-3
    assert (
        largest_difference({"logprobs": given["logprobs"][[0, 2]]}, {"logprobs": complete["logprobs"][[0, 2]]}) > CLOSE
    )


def test_a_moved_row_continues(runner: DeviceRunner) -> None:
    admit(runner, 0, SOURCES, [0, 1, 2])
    for age in range(3):
        read(runner, rows_of(0, 1, 2), age)
    runner.move(2, 0, target_tokens=3, source_tokens=len(SOURCES[2]))
    moved = read(runner, rows_of(2, 1), 3)
    admit(runner, 0, SOURCES, [0, 1, 2])
    stayed = [read(runner, rows_of(0, 1, 2), age) for age in range(4)][-1]
    assert np.abs(moved["logprobs"][0] - stayed["logprobs"][2]).max() < 1e-3
    assert np.abs(moved["logprobs"][1] - stayed["logprobs"][1]).max() < 1e-3


def test_forked_rows_start_with_the_state_of_their_source_and_are_independent(runner: DeviceRunner) -> None:
    admit(runner, 0, SOURCES, [0, 0, 0, 1])
    length = len(SOURCES[0])
    others = [(TARGETS[2], length), (TARGETS[1], length), (TARGETS[1], len(SOURCES[1]))]
    for age in range(3):
        read(runner, [(TARGETS[0], length), *others], age)
    runner.fork([0, 0], [1, 2], [slice(3)] * 2)
    branched = read(runner, [(TARGETS[0], length), (TARGETS[0], length), (TARGETS[2], length), others[2]], 3)
    assert np.abs(branched["logprobs"][0] - branched["logprobs"][1]).max() < 1e-3
    assert np.abs(branched["logprobs"][0] - branched["logprobs"][2]).max() > CLOSE  # it has read another token
    admit(runner, 0, SOURCES, [0, 0, 0, 1])
    spectator = [read(runner, [(TARGETS[0], length), *others], age) for age in range(4)][-1]
    assert np.abs(branched["logprobs"][3] - spectator["logprobs"][3]).max() < 1e-3


def test_several_rows_start_from_one_example_in_any_row(runner: DeviceRunner) -> None:
    admit(runner, 0, SOURCES[:1], [0])
    admit(runner, 1, SOURCES[1:], [1, 1, 0])
    given = read(runner, rows_of(0, 2, 2, 1), 0)
    admit(runner, 0, SOURCES, [0, 1, 2])
    alone = read(runner, rows_of(0, 1, 2), 0)
    assert np.abs(given["logprobs"] - alone["logprobs"][[0, 2, 2, 1]]).max() < 1e-3


def test_a_row_keeps_no_state_of_its_predecessor(runner: DeviceRunner) -> None:
    """Regression: an attention weight of zero times a NaN in a masked position is NaN."""
    admit(runner, 0, SOURCES[2:], [0])
    clean = [read(runner, rows_of(2), age) for age in range(2)][-1]
    spoilt = runner.run_encoder(np.array([SOURCES[2]]), np.array([7], np.int32), needed_outputs(runner.manifest))
    for name, value in spoilt.items():
        if name.startswith("cross_"):
            on_device: Any = value
            on_device.update_inplace(np.full(on_device.shape(), np.nan, np.float16))
    runner.init_rows(0, spoilt, [0])
    for age in range(5):
        assert np.isnan(read(runner, rows_of(2), age)["logprobs"]).all()
    admit(runner, 0, SOURCES[2:], [0])
    again = [read(runner, rows_of(2), age) for age in range(2)][-1]
    assert largest_difference(clean, again) == 0


def test_only_requested_outputs_are_returned_and_encodings_stay_on_the_device(runner: DeviceRunner) -> None:
    runner.warm_up(max_batch_tokens=512)
    encoded = runner.run_encoder(np.array([SOURCES[1]]), np.array([2], np.int32), ("hidden", "cross_key.0"))
    assert isinstance(encoded["hidden"], np.ndarray) and encoded["hidden"].shape[:2] == (1, 2)
    assert not isinstance(encoded["cross_key.0"], np.ndarray)
    admit(runner, 0, SOURCES[1:2], [0])
    few = runner.step(np.array([1]), np.zeros(1, np.int32), np.full(1, 2, np.int32), ("top_ids", "top_logprobs"))
    assert set(few) == {"top_ids", "top_logprobs"}
