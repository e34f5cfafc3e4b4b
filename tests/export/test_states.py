"""Decoder states of 8 bits: the attention that reads them, their ranges, and the bundle."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import encode, initial_states, open_sessions, run_step
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.convert.states import LEVELS, MARGIN, measure_states, round_states
from sightline.export.families.description import Attention
from sightline.export.graphs import operators
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.options import QuantizationRecipe, StateType

Array = NDArray[np.float32]
HEADS, SIZE, POSITIONS = 4, 16, 12
LARGEST = 2.5
GENERATOR = np.random.default_rng(3)


def random(*shape: int) -> Array:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def codes_of(values: Array) -> NDArray[np.int8]:
    codes: NDArray[np.int8] = np.clip(np.rint(values * (LEVELS / LARGEST)), -LEVELS - 1, LEVELS).astype(np.int8)
    return codes


def attention(query: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """Attend with one query of each head, (H, D), to all positions (H, K, D)."""
    scores = np.einsum("hd,hkd->hk", query.astype(np.float64), keys) / SIZE**0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hk,hkd->hd", weights, values), weights


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_attention_to_codes_is_attention_to_their_values(tmp_path: Path, kind: str) -> None:
    with WeightFile(tmp_path / "weights.bin") as weights:
        graph = GraphBuilder("step", weights)
        query = graph.input("query", onnx.TensorProto.FLOAT, ("batch", 1, HEADS * SIZE * (3 if kind == "self" else 1)))
        last = graph.input("last", onnx.TensorProto.INT32, ("batch",))
        longest = graph.input("longest", onnx.TensorProto.INT32, ())
        shape = ("batch", HEADS, "positions", SIZE)
        names = [f"{kind}_{part}.0" for part in ("key", "value")]
        past = [graph.input(name, onnx.TensorProto.FLOAT, shape) for name in names]
        options = Attention(HEADS, HEADS, SIZE, scale=SIZE**-0.5)
        cache = operators.Cache(past[0], past[1], last, longest, SIZE)
        if kind == "self":
            present = [graph.output(name.replace(".", "_out."), onnx.TensorProto.FLOAT, shape) for name in names]
            outputs = operators.self_attention(graph, options, [query], cache, present)
        else:
            outputs = operators.cross_attention(graph, options, query, cache)
        for name, value, size in zip(("attended", "map"), outputs, (3, 4), strict=True):
            graph.add("Identity", value, output=graph.output(name, onnx.TensorProto.FLOAT, ("batch",) * size))
        model = graph.build()
    round_states([model], dict.fromkeys(names, np.full((HEADS, SIZE), LARGEST, np.float32)))
    onnx.save_model(model, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])

    lengths = np.array([POSITIONS, 1, 5], np.int32)  # the new token included
    states = {name: codes_of(random(3, HEADS, POSITIONS, SIZE)) for name in names}
    given = random(3, 1, HEADS * SIZE * (3 if kind == "self" else 1))
    given[0, 0, -1] = 100.0  # beyond the range of a value
    binding = session.io_binding()
    memory = {name: onnxruntime.OrtValue.ortvalue_from_numpy(codes.copy()) for name, codes in states.items()}
    feed = {"query": given, "last": lengths - 1, "longest": lengths.max()}
    for name, array in feed.items():
        binding.bind_cpu_input(name, np.asarray(array))
    for name, value in memory.items():
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(name.replace(".", "_out."), value)
    binding.bind_output("attended", "cpu")
    binding.bind_output("map", "cpu")
    session.run_with_iobinding(binding)
    attended, maps = (value.numpy() for value in binding.get_outputs()[-2:])

    parts = given.reshape(3, -1, HEADS, SIZE)
    for row, length in enumerate(lengths):
        expected = {name: codes[row].copy() for name, codes in states.items()}
        if kind == "self":
            for name, new in zip(names, parts[row, 1:], strict=True):
                expected[name][:, length - 1] = codes_of(new)
        for name in names:
            np.testing.assert_array_equal(memory[name].numpy()[row], expected[name])
        keys, values = (expected[name][:, :length] * np.float32(LARGEST / LEVELS) for name in names)
        result, weights_of_row = attention(parts[row, 0], keys, values)
        np.testing.assert_allclose(attended[row].reshape(HEADS, SIZE), result, atol=1e-5)
        np.testing.assert_allclose(maps[row, :, 0, :length], weights_of_row, atol=1e-6)


def test_ranges_have_a_margin_over_the_read_sentences(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    ranges = measure_states(bundle, manifest)
    assert ranges.keys() == {state.input for state in manifest.states}
    sessions = open_sessions(bundle, manifest)
    states = initial_states(manifest, encode(sessions, [[5, 6, 7]]), 1)
    run_step(sessions, states, [manifest.tokens.start_ids[0]], [0], [3], ["top_ids"])
    for name, largest in ranges.items():
        assert largest.shape == (states[name].shape[1], states[name].shape[3])
        assert np.abs(states[name][0]).max() < MARGIN * largest.max()
        assert np.abs(states[name][0]).max() > 0.1 * largest.max()


def test_a_model_whose_start_token_is_an_end_token_is_measured(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    start = manifest.tokens.start_ids[-1]
    changed = manifest.model_copy(update={"tokens": manifest.tokens.model_copy(update={"end_ids": (start,)})})
    for name, largest in measure_states(bundle, changed).items():
        assert largest.max() > 0, name


@pytest.mark.parametrize("states", ["int8", "float32"])
def test_a_bundle_has_the_chosen_type_of_states(bundle: Path, tmp_path: Path, states: StateType) -> None:
    quantize_bundle(bundle, tmp_path / "small", QuantizationRecipe(8, states=states), None)
    manifest, original = read_bundle(tmp_path / "small"), read_bundle(bundle)
    assert {state.dtype for state in manifest.states} == {states}
    changes = {"dtype", "output"} if states == "int8" else set[str]()
    for state, before in zip(manifest.states, original.states, strict=True):
        assert state.model_dump(exclude=changes) == before.model_dump(exclude=changes)
        assert state.is_changed == before.is_changed
    encoded = encode(open_sessions(tmp_path / "small", manifest), [[5, 6, 7]])
    assert encoded["cross_key.0"].dtype == states


def test_values_of_the_source_beyond_the_range_are_cut(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path, dirs_exist_ok=True)
    manifest = read_bundle(bundle)
    model = onnx.load_model(tmp_path / "encoder.onnx", load_external_data=False)
    exact = encode(open_sessions(bundle, manifest), [[5, 6, 7]])
    names = [state.input for state in manifest.states if state.encoder_output]
    ranges = {name: 0.5 * np.abs(exact[name][0]).max(axis=1) for name in names}
    round_states([model], ranges)
    onnx.save_model(model, tmp_path / "encoder.onnx")
    encoded = encode(open_sessions(tmp_path, manifest), [[5, 6, 7]])
    for name in names:
        scale = ranges[name][:, None] / LEVELS
        np.testing.assert_allclose(encoded[name][0], np.clip(exact[name][0] / scale, -LEVELS - 1, LEVELS), atol=0.501)
        assert np.abs(encoded[name].astype(int)).max() >= LEVELS
