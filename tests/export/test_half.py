"""Float16 graphs: close to float32, with operators of CUDA, and with in-place caches."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import BundleError, Manifest, Quantization
from sightline.base.bundle_files import read_bundle, write_manifest
from sightline.export.check.sessions import Sessions, encode, initial_states, onnx_steps, open_sessions, run_step
from sightline.export.convert.conversions import half_bundle
from sightline.export.convert.half import OPSET, half_graphs
from sightline.export.graphs.builder import WeightFile

SOURCES = [[11, 52, 90, 33, 2], [7, 2], [45, 67, 12, 80, 81, 82, 2]]
TARGETS = [[1, 45, 67, 12, 13, 14], [1, 9, 8, 7, 6, 5], [1, 21, 22, 23, 24, 25]]
CLOSE = 2e-2
# Float16 operators of the CUDA provider for this opset, from the kernel list of ONNX Runtime.
CUDA_OPERATORS = {
    *(
        "Add",
        "Cast",
        "Concat",
        "Div",
        "Expand",
        "Gather",
        "Gemm",
        "Identity",
        "LayerNormalization",
        "Less",
        "LessOrEqual",
    ),
    *("LogSoftmax", "MatMul", "Mul", "Pad", "Range", "Relu", "Reshape", "ScatterElements", "ScatterND", "Shape"),
    *("Slice", "Softmax", "Split", "Squeeze", "Sub", "TopK", "Transpose", "Unsqueeze", "Where"),
}

Array = NDArray[Any]
Change = Callable[[onnx.NodeProto], None]


@pytest.fixture(scope="module")
def half(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "half"
    half_bundle(bundle, folder, None)
    return folder


def load(folder: Path) -> Sessions:
    return open_sessions(folder, read_bundle(folder))


def read(sessions: Sessions, slots: int) -> list[dict[str, Array]]:
    """Run steps over rows that started at different times; return all outputs except states."""
    manifest = sessions.manifest
    kept = {state.output for state in manifest.states}
    outputs = [name for name in manifest.decoder_graph.outputs if name not in kept]
    lengths = [len(source) for source in SOURCES]
    states = initial_states(manifest, encode(sessions, SOURCES), slots)
    steps = []
    for tick in range(6):
        ages = [max(tick - row, 0) for row in range(len(SOURCES))]
        tokens = [target[age] for target, age in zip(TARGETS, ages, strict=True)]
        steps.append(run_step(sessions, states, tokens, ages, lengths, outputs))
    return steps


def far(given: Array, expected: Array) -> float:
    return float(np.abs(given.astype(np.float32) - expected).max())


def test_encodings_are_close_to_float32(bundle: Path, half: Path) -> None:
    expected, given = encode(load(bundle), SOURCES), encode(load(half), SOURCES)
    for row, source in enumerate(SOURCES):
        assert far(given["hidden"][row, : len(source)], expected["hidden"][row, : len(source)]) < CLOSE
        for name in load(half).manifest.attention_of("encoder").outputs:
            own = given[name][row, :, : len(source)]  # (H, S, columns)
            assert far(own, expected[name][row, :, : len(source)]) < CLOSE
            assert not own[..., len(source) :].any()


def test_steps_of_rows_of_all_ages_are_close_to_float32(bundle: Path, half: Path) -> None:
    differences = []
    for given, expected in zip(read(load(half), 9), read(load(bundle), 9), strict=True):
        differences += [far(given[name], expected[name]) for name in ("logits", "logprobs", "top_logprobs")]
        for row, source in enumerate(SOURCES):
            own = np.s_[row, ..., : len(source)]
            assert far(given["cross_attention"][own], expected["cross_attention"][own]) < CLOSE
    assert 0 < max(differences) < CLOSE


def test_scores_are_float32_and_consistent(half: Path) -> None:
    for given in read(load(half), 6):
        assert {given[name].dtype for name in ("logits", "logprobs", "top_logprobs")} == {np.dtype(np.float32)}
        assert np.exp(given["logprobs"]).sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
        assert (np.take_along_axis(given["logprobs"], given["top_ids"], axis=1) == given["top_logprobs"]).all()


def test_the_size_of_the_buffers_changes_nothing(half: Path) -> None:
    for short, long in zip(read(load(half), 6), read(load(half), 20), strict=True):
        assert far(short["logprobs"], long["logprobs"]) < 1e-3


def test_a_step_writes_only_its_position(half: Path) -> None:
    sessions = load(half)
    states = initial_states(sessions.manifest, encode(sessions, SOURCES), 8)
    before = {name: array.copy() for name, array in states.items()}
    run_step(sessions, states, [5, 6, 7], [0, 3, 7], [len(source) for source in SOURCES], ["top_ids"])
    for name, array in states.items():
        changed = {tuple(index) for index in np.argwhere((array != before[name]).any(axis=(1, 3)))}
        assert changed == ({(0, 0), (1, 3), (2, 7)} if name.startswith("self_") else set())


def test_cuda_supports_all_operators(half: Path) -> None:
    manifest = read_bundle(half)
    assert manifest.rows is not None
    for graph in (manifest.encoder_graph, manifest.decoder_graph, manifest.rows):
        model = onnx.load_model(half / graph.file, load_external_data=False)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", OPSET)]
        assert {node.op_type for node in model.graph.node} <= CUDA_OPERATORS
        names = [node.name for node in model.graph.node if node.name]
        assert len(names) == len(set(names))
        assert tuple(value.name for value in model.graph.input) == graph.inputs
        assert tuple(value.name for value in model.graph.output) == graph.outputs


def test_a_float16_bundle_is_half_as_large_and_declares_its_type(bundle: Path, half: Path) -> None:
    manifest, original = read_bundle(half), read_bundle(bundle)
    assert (manifest.name, manifest.dtype, manifest.verification) == ("half", "float16", None)
    assert manifest.quantization == Quantization(
        bits=16, block_size=None, schemes={}, float32_digest=original.digest, quality=None
    )
    assert {state.dtype for state in manifest.states} == {"float16"}
    assert set(manifest.files) == {*("encoder.onnx", "step.onnx", "rows.onnx", "tokenizer.json", "weights.bin")}
    assert (half / "weights.bin").stat().st_size < 0.55 * (bundle / "weights.bin").stat().st_size


def test_prefixes_have_similar_scores_with_a_growing_cache(bundle: Path, half: Path) -> None:
    scores = [onnx_steps(load(folder), SOURCES[0])([[1, 45, 67, 12]])[0] for folder in (bundle, half)]
    assert far(scores[1], scores[0]) < CLOSE


def rewritten(bundle: Path, folder: Path, change: dict[str, Any]) -> Path:
    manifest = read_bundle(bundle)
    for name in manifest.files:
        (folder / name).write_bytes((bundle / name).read_bytes())
    write_manifest(folder, Manifest.model_validate(manifest.model_copy(update=change).model_dump()))
    return folder


def test_only_float32_with_states_that_grow_becomes_float16(bundle: Path, half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BundleError, match="half must be a float32 bundle, got float16"):
        half_bundle(half, out, None)
    (tmp_path / "fixed").mkdir()
    state = read_bundle(bundle).states[0].model_copy(update={"shape": (8,)})
    fixed = rewritten(bundle, tmp_path / "fixed", {"states": (state,)})
    with pytest.raises(BundleError, match="states of fixed size"):
        half_bundle(fixed, out, None)
    assert not out.exists()


@pytest.mark.parametrize("values", [[7e4], [1.0, -7e4]])
def test_a_weight_that_float16_cannot_hold_is_rejected_by_name(values: Sequence[float], tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.array(values, np.float32), "large")
    graph = onnx.helper.make_graph([], "graph", [], [], [weight])
    weights = WeightFile(tmp_path / "weights.bin")
    with weights, pytest.raises(ValueError, match="large has weights beyond"):
        half_graphs([onnx.helper.make_model(graph)], tmp_path, weights)


def with_attributes(**attributes: int) -> Change:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(*pair) for pair in attributes.items())])

    return change


def with_bias(index: int) -> Change:
    def change(node: onnx.NodeProto) -> None:
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = "bias"

    return change


@pytest.mark.parametrize(
    ("graph", "change"),
    [
        ("encoder", with_attributes(kv_num_heads=2)),
        ("encoder", with_bias(3)),
        ("step", with_attributes(num_heads=8)),
        ("step", with_attributes(do_rotary=1)),
        ("step", with_attributes(local_window_size=4)),
        ("step", with_bias(10)),
    ],
)
def test_attention_with_options_that_the_conversion_would_ignore_is_rejected(
    bundle: Path, tmp_path: Path, graph: str, change: Change
) -> None:
    model = onnx.load_model(bundle / f"{graph}.onnx", load_external_data=False)
    change(next(node for node in model.graph.node if "Attention" in node.op_type))
    with WeightFile(tmp_path / "weights.bin") as weights, pytest.raises(ValueError, match="do not support relative"):
        half_graphs([model], bundle, weights)
