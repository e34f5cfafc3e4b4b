"""The largest values of activations equal those of hooks on PyTorch modules in greedy decoding."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_bundle
from sightline.export.convert.calibrate import MAX_NEW_TOKENS, measure_ranges
from sightline.export.convert.products import product_inputs
from sightline.model.architectures.transformer import Transformer
from tests.support.reference_decoding import greedy, pytorch_steps

# Fused products of several layers have names of their own; these layers have the same input.
FIRST_OF_SEVERAL = {
    "self_attention.query_key_value": "self_attention.query",
    "decoder.cross_attention.keys_values": "decoder.0.cross_attention.key",
}
Ranges = dict[str, dict[str, NDArray[np.float32]]]


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_bundle(bundle)


@contextmanager
def watching(model: Transformer) -> Iterator[dict[str, float]]:
    """Return the largest input magnitude of each linear layer and of the output projection."""
    largest: dict[str, float] = {}

    def keep(name: str, x: Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), float(x.abs().max()))

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_pre_hook(lambda _, inputs: keep(name, inputs[0]))

    handles = [watch(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    decoded = model.decoder[-1].feed_forward_norm.register_forward_hook(  # type: ignore[union-attr]
        lambda module, inputs, output: keep("embedding", output)
    )
    yield largest
    for handle in (*handles, decoded):
        handle.remove()


def watched(
    model: Transformer, manifest: Manifest, sources: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    tokens = manifest.tokens
    with watching(model) as largest:
        for source in sources:
            greedy(pytorch_steps(model, source), tokens.start_ids[0], tokens.end_id, new_tokens)
    return largest


def layer_of(weight: str) -> str:
    """Return the name of a module with the given constant matrix."""
    name = weight.removesuffix(".weight")
    for joined, first in FIRST_OF_SEVERAL.items():
        name = name.replace(joined, first)
    return name


def by_layer(bundle: Path, manifest: Manifest, ranges: Ranges) -> dict[str, float]:
    """Return the measured input range of each product, by module name."""
    found = {}
    for graph, name in ((manifest.encoder_graph, "encoder"), (manifest.decoder_graph, "step")):
        proto = onnx.load_model(bundle / graph.file, load_external_data=False).graph
        assert ranges[name].keys() == set(product_inputs(proto))
        matrices = {tensor.name for tensor in proto.initializer if len(tensor.dims) == 2}
        for node in proto.node:
            if node.op_type in ("MatMul", "Gemm") and node.input[1] in matrices:
                found[layer_of(node.input[1])] = float(ranges[name][node.input[0]].max())
    return found


def test_the_range_of_every_product_is_the_largest_magnitude_that_it_reads(
    bundle: Path, manifest: Manifest, model: Transformer, sources: list[list[int]]
) -> None:
    given = by_layer(bundle, manifest, measure_ranges(bundle, manifest, sources))
    expected = watched(model, manifest, sources, MAX_NEW_TOKENS)
    assert len(given) == 9 + 13
    assert given == pytest.approx({name: expected[name] for name in given}, rel=1e-4)


def test_decoding_ends_at_the_limit_of_the_model(
    bundle: Path, manifest: Manifest, model: Transformer, sources: list[list[int]]
) -> None:
    limits = manifest.limits.model_copy(update={"max_target_tokens": 3})
    ranges = measure_ranges(bundle, manifest.model_copy(update={"limits": limits}), sources)
    few, many = (watched(model, manifest, sources, new_tokens) for new_tokens in (3, MAX_NEW_TOKENS))
    given = by_layer(bundle, manifest, ranges)
    assert given == pytest.approx({name: few[name] for name in given}, rel=1e-4)
    assert sum(many[name] > 1.01 * few[name] for name in given) > 5, "ranges that do not grow prove little"


def test_the_largest_of_all_sources_counts(bundle: Path, manifest: Manifest, sources: list[list[int]]) -> None:
    alone = [measure_ranges(bundle, manifest, [source]) for source in sources]
    for graph, ranges in measure_ranges(bundle, manifest, sources).items():
        for name, largest in ranges.items():
            np.testing.assert_array_equal(largest, np.max([one[graph][name] for one in alone], axis=0))


def test_values_of_one_name_in_both_graphs_are_kept_apart(
    bundle: Path, manifest: Manifest, sources: list[list[int]], tmp_path: Path
) -> None:
    """Both graphs number their values, so that products can have inputs of the same name."""
    ranges = measure_ranges(bundle, manifest, sources)
    folder = Path(shutil.copytree(bundle, tmp_path / "renamed"))
    first = {}
    for graph, name in ((manifest.encoder_graph, "encoder"), (manifest.decoder_graph, "step")):
        proto = onnx.load_model(folder / graph.file, load_external_data=False)
        first[name] = product_inputs(proto.graph)[0]
        rename(proto.graph, first[name], "shared")
        onnx.save_model(proto, folder / graph.file)
    given = measure_ranges(folder, manifest, sources)
    for name in ("encoder", "step"):
        np.testing.assert_array_equal(given[name]["shared"], ranges[name][first[name]])
    assert given["encoder"]["shared"].max() != given["step"]["shared"].max()


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


def test_the_bundle_is_unchanged(bundle: Path, manifest: Manifest, sources: list[list[int]]) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in bundle.iterdir()}
    measure_ranges(bundle, manifest, sources[:1])
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in bundle.iterdir()} == before
    assert read_bundle(bundle) == manifest


def test_nothing_is_measured_without_sources(bundle: Path, manifest: Manifest) -> None:
    assert measure_ranges(bundle, manifest, []) == {"encoder": {}, "step": {}}
