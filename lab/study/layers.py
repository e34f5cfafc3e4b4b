"""Measure the loss of translations if attention or a whole layer gives zeros or is shuffled."""

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.external_data_helper import ExternalDataInfo

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import SEED, estimate, format_ends, resamples, statistics_of
from lab.study.runs import TARGET, sources_and_references, system_of
from lab.study.served import serve
from lab.zoo.systems import MULTI30K, bundle_name
from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_manifest, record_files, write_manifest
from sightline.model.evaluation.bleu import MAX_NEW_TOKENS, moses_lines

NAME = "layers"
# Four layers, two, one, and one without residual connections; layers normalize after the sum.
MODELS = (
    MULTI30K.name,
    *map(bundle_name, ("small-positions-sinusoidal", "small-depth-1", "small-depth-1-no-residual")),
)
# Last linear maps of the sublayers of each part, as the weights of bundles are named.
PARTS = {
    "encoder self-attention": ("encoder", ("self_attention.output",)),
    "decoder self-attention": ("decoder", ("self_attention.output",)),
    "cross-attention": ("decoder", ("cross_attention.output",)),
    "encoder layer": ("encoder", ("self_attention.output", "feed_forward.outer")),
    "decoder layer": ("decoder", ("self_attention.output", "cross_attention.output", "feed_forward.outer")),
}
FAULTS = ("zero", "shuffled")
Array = NDArray[Any]


@dataclass(frozen=True)
class Damage:
    """A fault in one part of some layers."""

    part: str
    layers: Sequence[int]
    fault: str

    def changes(self, weight: str) -> bool:
        """Return True for tensors of the last linear maps of the part."""
        stack, maps = PARTS[self.part]
        names = "|".join(re.escape(f"{stack}.{layer}.{name}") for layer in self.layers for name in maps)
        return re.match(rf"({names})\.(weight|bias)\b", weight) is not None

    def of(self, tensor: Array) -> Array:
        """Return a tensor of a linear map, in which the last axis is that of the output."""
        if self.fault == "zero":  # codes of quantized weights stay, and their scales become zero
            return np.zeros_like(tensor) if tensor.dtype.kind == "f" else tensor
        return tensor[..., np.random.default_rng(SEED).permutation(tensor.shape[-1])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {', '.join(MODELS)}")
    parser.add_argument("data", type=Path, help=f"folder that contains {MULTI30K.folder}")
    parser.add_argument("--sentences", type=int, help="number of test sentences, from the first one (default: all)")


def measure(arguments: argparse.Namespace) -> Result:
    """Translate the test set greedily with each model, whole and with one damage after another."""
    sources, references = sources_and_references(arguments.data / MULTI30K.folder, arguments.sentences)
    samples, rows = resamples(len(sources)), list[Row]()
    for model in MODELS:
        bundle, whole = arguments.bundles / model, None
        for damage in (None, *damages(read_manifest(bundle))):
            print(model, damage or "whole", flush=True)
            outputs = translations(bundle, damage, sources)
            bleu = estimate([statistics_of(moses_lines(outputs, TARGET), references).rows], samples)
            whole = whole or bleu
            row = {"model": model, **(vars(damage) if damage else {}), "sentences": len(sources)}
            rows.append({**row, "bleu": bleu.ends, "difference": (bleu - whole).ends})
    return Result(rows=rows)


def damages(manifest: Manifest) -> list[Damage]:
    """Return the faults of parts in one and in all layers; only attention of one is shuffled."""
    faults = []
    for part, (stack, maps) in PARTS.items():
        single = [[layer] for layer in range(manifest.attention_of(stack).layers)]
        every = [[layer for (layer,) in single]] if len(single) > 1 else []
        faults += [Damage(part, layers, FAULTS[0]) for layers in (*single, *every)]
        faults += [Damage(part, layers, FAULTS[1]) for layers in single if len(maps) == 1]
    return faults


def translations(bundle: Path, damage: Damage | None, sources: Sequence[str]) -> list[str]:
    """Translate greedily with a damaged copy of a bundle, over the HTTP API of the service."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, bundle.name)
        shutil.copytree(bundle, copy)
        manifest = read_manifest(copy)
        changed = damage_weights(copy, manifest, damage) if damage else []
        files = {**manifest.files, **record_files(copy, changed)}
        write_manifest(copy, manifest.model_copy(update={"files": files, "lazy": False}))
        body = {"model": manifest.name, "parameters": {"max_new_tokens": MAX_NEW_TOKENS, "split_sentences": False}}
        with serve(copy.parent) as served:
            return [output["text"] for output in served.outputs("/v1/generate", body, sources)]


def damage_weights(bundle: Path, manifest: Manifest, damage: Damage) -> set[str]:
    """Change the weights of a bundle, and return the names of the changed files. Raises
    `ValueError` if the bundle has no such weights.
    """
    changed = set()
    for graph in (manifest.encoder_graph, manifest.decoder_graph):
        for tensor in onnx.load(bundle / graph.file, load_external_data=False).graph.initializer:
            if damage.changes(tensor.name):
                info = ExternalDataInfo(tensor)
                dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
                stored = np.memmap(bundle / info.location, dtype, "r+", int(info.offset or 0), shape)
                stored[:] = damage.of(np.array(stored))
                changed.add(info.location)
    if not changed:
        raise ValueError(f"{bundle} has no weights of {damage.part} {damage.layers}")
    return changed


def tables(result: Result) -> Mapping[str, str]:
    """Return a table of the model with most layers and one of the others."""
    first, *others = dict.fromkeys(row["model"] for row in result.rows)
    parts = {NAME: [first], f"{NAME}-small": others}
    return {part: _table(result, models) for part, models in parts.items() if models}


def _table(result: Result, models: Sequence[str]) -> str:
    """Return the scores of the whole models, and of each part and fault by model and layer."""
    rows = [row for row in result.rows if row["model"] in models]
    cells = {
        (row["part"], row["fault"], _column(row, models)): format_ends(row["difference"])
        for row in rows
        if "part" in row
    }
    columns = list(dict.fromkeys(column for _, _, column in cells))
    body = [
        [f"{part}: {fault}", *(cells.get((part, fault, column), "") for column in columns)]
        for part, fault in dict.fromkeys((part, fault) for part, fault, _ in cells)
    ]
    whole = ", ".join(f"`{system_of(row['model'])}` {format_ends(row['bleu'])}" for row in rows if "part" not in row)
    return f"{table(['output of', *columns], body)}\n\nBLEU of the whole: {whole}."


def _column(row: Row, models: Sequence[str]) -> str:
    layer = f"layer {row['layers'][0]}" if len(row["layers"]) == 1 else "all layers"
    return layer if len(models) == 1 else f"`{system_of(row['model'])}`, {layer}"
