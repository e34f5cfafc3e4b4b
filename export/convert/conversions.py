"""Conversion of float32 bundles to 8 bits, 4 bits or float16. It does not need PyTorch.

A converted bundle replaces an old one only after the loss was measured and is small enough.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from sightline.base.bundle import BundleError, Manifest, Quality, Quantization, TextQuality
from sightline.base.bundle_files import read_bundle, read_manifest, record_files, write_manifest
from sightline.base.errors import UsageError
from sightline.export.check.sessions import Sessions, open_sessions
from sightline.export.convert.calibrate import measure_ranges
from sightline.export.convert.half import half_graphs, rows_graph
from sightline.export.convert.pack import pack_graph
from sightline.export.convert.quality import ParallelText, check_loss, compare
from sightline.export.convert.quantize import Ranges, quantize_graphs
from sightline.export.convert.states import calibration_sources, measure_states, round_states, rounded_states
from sightline.export.convert.text_quality import PlainText, check_text_loss, compare_on_texts
from sightline.export.graphs.builder import WeightFile
from sightline.export.import_errors import VerificationError
from sightline.export.options import BundleMetadata, QuantizationRecipe
from sightline.export.writing import GRAPH_FILES, ROWS, WEIGHTS, clear_disk_errors, graph_entry, replacing, write_graphs
from sightline.model.data.tokenizer_training import encode_lines, read_tokenizer

Text = ParallelText | PlainText
Rewrite = Callable[[Sequence[onnx.ModelProto], Path, WeightFile], list[onnx.ModelProto]]


def quantize_bundle(
    source: Path,
    bundle: Path,
    recipe: QuantizationRecipe,
    text: Text | None,
    force: bool = False,
    calibration: Sequence[str] = (),
    name: str | None = None,
) -> Quantization:
    """Quantize a float32 bundle, see `sightline.export.convert.quantize`.

    If the recipe has no scheme for the layers of a decoder-only model with 8 bits, it is
    `per-token`, or `group-wise` if `per-token` loses too much.

    Args:
        text: parallel text for measuring BLEU, or plain text for the measures of
            `sightline.export.convert.text_quality`; None to skip the comparison.
        force: write the bundle even if it loses too much.
        calibration: sentences for the ranges of activations in static per-tensor quantization.
        name: name of the model; None for the name of the folder.

    Raises:
        VerificationError: the bundle loses too much; nothing is written.
        BundleError: `source` is damaged or not float32, or `bundle` exists and is not a folder
            without subfolders.
        ValueError: a name is not valid, or calibration is missing.
    """
    if recipe.layers is None and recipe.bits == 8 and read_manifest(source).is_decoder_only:
        per_token = replace(recipe, layers="per-token")
        with suppress(VerificationError):
            return quantize_bundle(source, bundle, per_token, text, calibration=calibration, name=name)
    is_static = "per-tensor" in recipe.schemes.values()
    if is_static and not calibration:
        raise UsageError("the scheme per-tensor needs calibration sentences; name a file with --calibration")
    record = Quantization(
        bits=recipe.bits, block_size=recipe.block_size, schemes=recipe.schemes, float32_digest="", quality=None
    )

    def write(original: Manifest, folder: Path) -> Manifest:
        ranges: Ranges = {}
        if is_static:
            sources = encode_lines(read_tokenizer(source / original.source_tokenizer), calibration)
            ranges = measure_ranges(source, original, sources)
        elif original.is_decoder_only and recipe.layers == "per-token":  # to smooth channels
            ranges = measure_ranges(source, original, calibration_sources(source, original), max_new_tokens=0)
        state_ranges = measure_states(source, original) if recipe.states == "int8" else {}

        def rewrite(models: Sequence[onnx.ModelProto], folder: Path, weights: WeightFile) -> list[onnx.ModelProto]:
            quantized = quantize_graphs(models, folder, weights, recipe, ranges)
            if state_ranges:
                round_states(quantized, state_ranges)
            return quantized

        changes = write_rewritten(source, original, folder, rewrite)
        states = rounded_states(original, state_ranges)
        return original.model_copy(update={"dtype": f"int{recipe.bits}", "states": states, **changes})

    return _write_converted(source, bundle, text, force, record, write, name)


def half_bundle(
    source: Path, bundle: Path, text: Text | None, force: bool = False, name: str | None = None
) -> Quantization:
    """Convert a float32 bundle to float16 for CUDA, see `sightline.export.convert.half`.

    Arguments and errors are those of `quantize_bundle`; also a `BundleError` if the model is not an
    encoder-decoder or a state has no axis that grows, a `ValueError` if a weight is too large.
    """
    record = Quantization(bits=16, block_size=None, schemes={}, float32_digest="", quality=None)

    def write(original: Manifest, folder: Path) -> Manifest:
        if any(state.has_fixed_size for state in original.states):
            raise BundleError(f"{source} has states of fixed size; float16 is only for key-value caches: use --bits 8")
        kind = "an encoder" if original.decoder is None else "a decoder-only model" if original.is_decoder_only else ""
        if kind:
            raise BundleError(f"{source} is {kind}; float16 is only for encoder-decoder models: use --bits 8 or 32")
        states = tuple(state.model_copy(update={"dtype": "float16"}) for state in original.states)
        rows = rows_graph()
        onnx.save_model(rows, folder / ROWS)
        changes = write_rewritten(source, original, folder, half_graphs)
        changes["files"] |= record_files(folder, [ROWS])
        return original.model_copy(
            update={"dtype": "float16", "rows": graph_entry(ROWS, rows), "states": states, **changes}
        )

    return _write_converted(source, bundle, text, force, record, write, name)


def pack_bundle(source: Path, bundle: Path, text: Text | None, force: bool = False) -> Quantization:
    """Store the matrices of a float32 bundle in 8 bits, see `sightline.export.convert.pack`.

    Arguments and errors are those of `quantize_bundle`; `source` may have float16 weights.
    """
    record = Quantization(bits=8, block_size=None, schemes={}, float32_digest="", quality=None)

    def pack(models: Sequence[onnx.ModelProto], folder: Path, weights: WeightFile) -> list[onnx.ModelProto]:
        return [pack_graph(model, folder, weights) for model in models]

    def write(original: Manifest, folder: Path) -> Manifest:
        changes = write_rewritten(source, original, folder, pack)
        return original.model_copy(update={"half_weights": False, **changes})

    return _write_converted(source, bundle, text, force, record, write, takes_half=True)


def _write_converted(
    source: Path,
    bundle: Path,
    text: Text | None,
    force: bool,
    record: Quantization,
    write: Callable[[Manifest, Path], Manifest],
    name: str | None = None,
    *,
    takes_half: bool = False,
) -> Quantization:
    """Convert a float32 bundle and compare both bundles.

    `write` fills a folder and returns its manifest. `takes_half` allows float16 weights.
    """
    original = read_bundle(source)
    if original.dtype != "float32":
        raise BundleError(f"{source} must be a float32 bundle, got {original.dtype}")
    if original.shortlist is not None:
        raise BundleError(f"{source} has a shortlist; convert the bundle that it was made from, or import without it")
    if original.quantization is not None:
        raise BundleError(f"{source} has weights of 8 bits already; convert the bundle that it was made from")
    if original.half_weights and not takes_half:
        raise BundleError(f"{source} has float16 weights; export the checkpoint again without --half-weights")
    if original.decoder is None and isinstance(text, ParallelText):
        raise UsageError(f"{source} does not generate text, so that BLEU cannot be measured; use --texts, not --data")
    name = BundleMetadata(name or bundle.resolve().name).name
    with clear_disk_errors(bundle), replacing(bundle) as folder:
        changes = {"name": name, "created": int(time.time()), "verification": None}
        manifest = write(original, folder).model_copy(update=changes)
        sessions = open_sessions(folder, manifest)
        quality = None if text is None else measure(source, original, sessions, text, force)
        has_group = {"encoder": original.encoder is not None, "layers": original.decoder is not None}
        schemes = {group: scheme for group, scheme in record.schemes.items() if has_group.get(group, True)}
        changes = {"float32_digest": original.digest, "quality": quality, "schemes": schemes}
        quantization = record.model_copy(update=changes)
        write_manifest(folder, manifest.model_copy(update={"quantization": quantization}))
    return quantization


def measure(source: Path, original: Manifest, converted: Sessions, text: Text, force: bool) -> Quality | TextQuality:
    """Measure the loss of a converted bundle; check it unless `force` is true."""
    tokenizer, float32 = read_tokenizer(source / original.source_tokenizer), open_sessions(source, original)
    if isinstance(text, ParallelText):
        quality = compare(float32, converted, tokenizer, text)
        if not force:
            check_loss(quality)
        return quality
    target_tokenizer = read_tokenizer(source / original.target_tokenizer)
    text_quality = compare_on_texts(float32, converted, tokenizer, target_tokenizer, text)
    if not force:
        check_text_loss(text_quality)
    return text_quality


def write_rewritten(source: Path, manifest: Manifest, folder: Path, rewrite: Rewrite) -> dict[str, Any]:
    """Write converted graphs, weights and other files; return changed fields of the manifest."""
    manifest = manifest.model_copy(update={"contributions": None})  # they would be those of other products
    files = {field: graph.file for field in GRAPH_FILES if (graph := getattr(manifest, field)) is not None}
    originals = [onnx.load_model(source / name, load_external_data=False) for name in files.values()]
    with WeightFile(folder / WEIGHTS) as weights:
        rewritten = rewrite(originals, source, weights)
    entries = {"contributions": None, **write_graphs(folder, dict(zip(files, rewritten, strict=True)))}
    others = {manifest.source_tokenizer, manifest.target_tokenizer}
    others |= {layer.file for layer in (manifest.embedding.dense if manifest.embedding else ())}
    for name in others:
        shutil.copyfile(source / name, folder / name)
    return {**entries, "files": record_files(folder, (*files.values(), WEIGHTS, *sorted(others)))}
