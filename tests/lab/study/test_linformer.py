import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from lab.bench.process import JsonWorker
from lab.study.attention_graphs import RESULT
from lab.study.linformer import (
    MAX_SCORES_BYTES,
    Variant,
    crossover,
    is_faster,
    is_smaller,
    modules,
    variants_of,
    write_graph,
)
from sightline.service.runtime.provider import session_options

LONGEST, WIDTH = 64, 256
LENGTHS = (37, 50)  # of the two rows of a batch, 50 tokens wide

VARIANTS = [Variant("operator"), Variant("plain"), Variant("linformer", 32)]


def inputs() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    return np.random.default_rng(1).standard_normal((2, 50, WIDTH), np.float32), np.array(LENGTHS, np.int32)


def run(graph: Path) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(str(graph), session_options(1), ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    x, lengths = inputs()
    return dict(zip(names, session.run(names, {"x": x, "lengths": lengths}), strict=True))


def torch_output(variant: Variant) -> NDArray[Any]:
    module, projections = modules(variant, LONGEST)
    x, lengths = (torch.from_numpy(array) for array in inputs())
    mask = (torch.arange(x.size(1)) < lengths[:, None])[:, None, None]  # (B, 1, 1, S)
    with torch.inference_mode():
        matrices = () if projections is None else projections.for_layer(0)
        return module(x, x, mask, False, *matrices)[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.attention)
def test_the_measured_graphs_compute_the_same_as_pytorch(variant: Variant, tmp_path: Path) -> None:
    given, expected = run(write_graph(variant, LONGEST, tmp_path / "graph"))[RESULT], torch_output(variant)
    for row, length in enumerate(LENGTHS):  # outputs at padding are undefined
        np.testing.assert_allclose(given[row, :length], expected[row, :length], atol=1e-5)


def test_a_graph_without_maps_has_no_map_nodes_and_the_same_result(tmp_path: Path) -> None:
    graphs = [write_graph(Variant("linformer", 32, maps), LONGEST, tmp_path / str(maps)) for maps in (True, False)]
    with_maps, without = (run(graph) for graph in graphs)
    assert set(with_maps) == {RESULT, "encoder_attention.0", "encoder_slots.0"}
    assert set(without) == {RESULT}
    np.testing.assert_array_equal(with_maps[RESULT], without[RESULT])
    kinds = [[node.op_type for node in onnx.load(graph).graph.node] for graph in graphs]
    assert kinds[0].count("MatMul") == kinds[1].count("MatMul") + 1  # the product that maps the weights back to tokens
    (attention,) = (node for node in onnx.load(graphs[1]).graph.node if node.op_type == "Attention")
    assert len(attention.output) == 1


def test_cases_with_too_many_projected_keys_or_too_large_matrices_are_skipped() -> None:
    assert [one.slots for one in variants_of(8, 128)] == [None, 32, 64, None]
    assert {one.slots for one in variants_of(1, 4096) if one.has_maps} == {None, 32, 64, 128, 256}
    assert not any(one.has_maps for one in variants_of(1, 8192))
    assert MAX_SCORES_BYTES == 4 * 8192 * 8192 * 4  # heads, n, n, bytes


def test_memory_is_measured_in_a_separate_process(tmp_path: Path) -> None:
    graph = write_graph(Variant("plain"), 1024, tmp_path / "graph")
    process = JsonWorker(["lab.study.attention_worker", str(graph), "--threads", "1"], os.environ)
    try:
        process.wait_until_ready()
        results = [
            process.request({"rows": 1, "tokens": n, "length": n, "outputs": [RESULT], "at_least_s": 0})
            for n in (16, 1024)
        ]
    finally:
        process.end()
    scores_mib = 4 * 1024 * 1024 * 4 / 2**20
    assert results[1]["peak_mib"] - results[0]["peak_mib"] > scores_mib
    assert results[1]["seconds"] > results[0]["seconds"] > 0


def test_the_crossover_is_the_length_from_which_ours_is_always_less() -> None:
    assert crossover({128: False, 256: False, 512: True, 1024: True}) == "512"
    assert (
        crossover({128: True, 256: False, 512: False, 1024: True}) == "1,024"
    )  # being less at 128 alone does not count
    assert crossover({128: True, 256: False, 512: True, 1024: False}) == "none up to 1,024"
    assert crossover({}) == "not measured"


def test_faster_means_in_all_rounds_but_one() -> None:
    theirs = row(128, "operator", None, [1.0, 1.0, 1.0, 9.0], 16)
    assert is_faster(row(128, "linformer", 32, [0.9, 0.9, 82.0, 8.9], 15), theirs)
    assert not is_faster(row(128, "linformer", 32, [0.9, 1.0, 1.1, 8.9], 15), theirs)  # faster in half of the rounds
    one, other = (row(128, "linformer", 32, [ms], 15) for ms in (0.9, 1.1))
    assert is_faster(one, other) and not is_faster(other, one)


def test_smaller_means_by_at_least_one_mib() -> None:
    theirs = row(128, "operator", None, [1.0], 16.2)
    assert is_smaller(row(128, "linformer", 32, [1.0], 15.2), theirs)
    assert not is_smaller(row(128, "linformer", 32, [1.0], 15.3), theirs)


def row(
    tokens: int, attention: str, slots: int | None, ms: list[float], peak_mib: float, maps: bool = False
) -> dict[str, Any]:
    short = {} if maps or attention == "plain" else {"short_ms": [0.1], "padded_ms": ms}
    kind = {"rows": 1, "tokens": tokens, "attention": attention, "slots": slots, "maps": maps}
    return {**kind, "ms": ms, "peak_mib": peak_mib, **short}
