"""Writing of bundles: a new bundle replaces an old one only after verification."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
import torch
from tokenizers import Tokenizer

from export.architecture import Graphs, build_graphs
from export.builder import WeightFile
from export.calibrate import measure_ranges
from export.half import half_graphs, rows_graph
from export.quality import ParallelText, check_loss, compare, encode_sources
from export.quantize import Ranges, Recipe, quantize_graphs
from export.sessions import open_sessions
from export.verify import verify
from model.architectures.causal import CausalModel
from model.architectures.factory import Model
from model.checkpoint import TOKENIZER, load_model
from model.config import architecture_of
from model.data import dialogues
from model.data.dialogues import CHAT
from model.data.tokenizer import prompt_tokenizer, read_tokenizer
from service.bundle import (
    MANIFEST,
    SCHEMA_VERSION,
    BundleError,
    ChatTemplate,
    FileRecord,
    Graph,
    Languages,
    Limits,
    Manifest,
    Quantization,
    Task,
    Tokens,
    Verification,
    read_bundle,
    read_manifest,
    record_files,
    write_manifest,
)

ENCODER, STEP = "encoder.onnx", "step.onnx"
SIMILAR, ROWS, WEIGHTS = "similar.onnx", "rows.onnx", "weights.bin"
PROMPT_TOKENIZER = "prompt_tokenizer.json"


@dataclass(frozen=True)
class BundleMetadata:
    """Descriptive fields of a manifest."""

    name: str  # name of the model in requests
    description: str = ""
    license: str = ""  # license of the weights
    languages: Languages | None = None
    chat: ChatTemplate | None = None  # None for the format of the training dialogues

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.name):
            raise ValueError(
                f"name must be 1 to 128 letters, digits, '.', '_' or '-' and begin with a letter or digit, got "
                f"{self.name!r}"
            )


def export_bundle(
    checkpoint: Path,
    bundle: Path,
    metadata: BundleMetadata,
    sentences: Sequence[str],
    tolerance: float | None = None,
    half_weights: bool = False,
) -> Manifest:
    """Export a checkpoint to a bundle and verify it.

    An existing bundle is replaced. Files in its folder that its manifest does not list are kept.

    Args:
        checkpoint: folder of the checkpoint.
        bundle: folder to write or replace.
        metadata: descriptive fields of the manifest.
        sentences: source sentences for the verification.
        tolerance: largest allowed difference from PyTorch; derived from float32 rounding by
            default.
        half_weights: round matrices to float16, which halves the files. Computation stays float32.

    Raises:
        VerificationError: ONNX Runtime and PyTorch differ; nothing is written.
        BundleError: `bundle` exists and is not a folder without subfolders.
        FileNotFoundError: a file of the checkpoint is missing.
        ValueError: the checkpoint cannot be read (see `load_model`), a sentence is too long (see
            `verify`), or a weight is too large for float16.
    """
    model, tokenizer = _load(checkpoint, half_weights)
    with _replacing(bundle) as folder:
        graphs = _write_graphs(folder, model, half_weights)
        shutil.copyfile(checkpoint / TOKENIZER, folder / TOKENIZER)
        source_tokenizer = _source_tokenizer(model, tokenizer)
        if source_tokenizer is not tokenizer:
            source_tokenizer.save(str(folder / PROMPT_TOKENIZER))
        manifest = _manifest(folder, model, metadata, graphs, half_weights)
        sessions = open_sessions(folder, manifest)
        verification = verify(sessions, model, source_tokenizer, sentences, tolerance)
        manifest = manifest.model_copy(update={"verification": verification})
        write_manifest(folder, manifest)
    return manifest


def quantize_bundle(
    source: Path,
    bundle: Path,
    recipe: Recipe,
    text: ParallelText | None,
    force: bool = False,
    calibration: Sequence[str] = (),
) -> Quantization:
    """Quantize a float32 bundle, see `export.quantize`.

    Args:
        source: the float32 bundle.
        bundle: folder to write or replace; its name becomes the name of the model.
        recipe: the quantization scheme of each group of layers.
        text: parallel text for comparing the BLEU of both bundles; None to skip the comparison.
        force: write the bundle even if it loses too much BLEU.
        calibration: sentences for measuring the activations, needed by static per-tensor
            quantization.

    Returns:
        The record in the manifest.

    Raises:
        VerificationError: the bundle loses too much BLEU; nothing is written.
        BundleError: `source` is damaged or not float32, or `bundle` exists and is not a folder
            without subfolders.
        ValueError: a sentence is too long, the folder name is not a valid model name, or
            calibration sentences are missing.
    """
    is_static = "static" in recipe.schemes.values()
    if is_static and not calibration:
        raise ValueError("the scheme static needs calibration sentences; name a file with --calibration")
    record = Quantization(
        bits=recipe.bits, block_size=recipe.block_size, schemes=recipe.schemes, float32_digest="", quality=None
    )

    def write(original: Manifest, folder: Path) -> Manifest:
        ranges: Ranges = {}
        if is_static:
            sources = encode_sources(original, read_tokenizer(source / original.source_tokenizer), calibration)
            ranges = measure_ranges(source, original, sources)
        rewrite = partial(quantize_graphs, recipe=recipe, ranges=ranges)
        files = _write_rewritten(source, original, folder, rewrite)
        return original.model_copy(update={"dtype": f"int{recipe.bits}", "files": files})

    return _write_converted(source, bundle, text, force, record, write)


def half_bundle(source: Path, bundle: Path, text: ParallelText | None, force: bool = False) -> Quantization:
    """Convert a float32 bundle to float16 with operators for CUDA, see `export.half`.

    Arguments and errors are those of `quantize_bundle`, with these additions.

    Raises:
        BundleError: a state of the model has no axis that grows, or the model is decoder-only.
        ValueError: a weight is too large for float16.
    """
    record = Quantization(bits=16, block_size=None, schemes={}, float32_digest="", quality=None)

    def write(original: Manifest, folder: Path) -> Manifest:
        if not all(any(isinstance(axis, str) for axis in state.shape) for state in original.states):
            raise BundleError(f"{source} has states of fixed size; float16 bundles support only key-value caches")
        if original.is_decoder_only:
            raise BundleError(f"{source} is a decoder-only model; float16 bundles support only encoder-decoder models")
        states = tuple(state.model_copy(update={"dtype": "float16"}) for state in original.states)
        rows = rows_graph()
        onnx.save_model(rows, folder / ROWS)
        files = _write_rewritten(source, original, folder, half_graphs) | record_files(folder, [ROWS])
        return original.model_copy(
            update={"dtype": "float16", "rows": _graph_entry(ROWS, rows), "states": states, "files": files}
        )

    return _write_converted(source, bundle, text, force, record, write)


def _write_converted(
    source: Path,
    bundle: Path,
    text: ParallelText | None,
    force: bool,
    record: Quantization,
    write: Callable[[Manifest, Path], Manifest],
) -> Quantization:
    """Convert a float32 bundle and compare both bundles.

    `write` fills a folder and returns its manifest.
    """
    original = read_bundle(source)
    if original.dtype != "float32":
        raise BundleError(f"{source} must be a float32 bundle, got {original.dtype}")
    if original.half_weights:
        raise BundleError(f"{source} has float16 weights; export the checkpoint again without --half-weights")
    if original.decoder is None:
        raise BundleError(f"{source} does not generate text, so its BLEU cannot be compared; it cannot be converted")
    name = BundleMetadata(bundle.resolve().name).name
    with _replacing(bundle) as folder:
        changes = {"name": name, "created": int(time.time()), "verification": None}
        manifest = write(original, folder).model_copy(update=changes)
        sessions = open_sessions(folder, manifest)
        quality = None
        if text is not None:
            tokenizer = read_tokenizer(folder / manifest.source_tokenizer)
            quality = compare(open_sessions(source, original), sessions, tokenizer, text)
            if not force:
                check_loss(quality)
        quantization = record.model_copy(update={"float32_digest": original.digest, "quality": quality})
        write_manifest(folder, manifest.model_copy(update={"quantization": quantization}))
    return quantization


def verify_bundle(
    bundle: Path, checkpoint: Path, sentences: Sequence[str], tolerance: float | None = None
) -> Verification:
    """Compare a bundle on disk with a checkpoint.

    Arguments are those of `export_bundle`.

    Raises:
        VerificationError: they differ.
        BundleError: the bundle is damaged or quantized, or its tokenizer is not that of the
            checkpoint.
        FileNotFoundError: a file of the checkpoint is missing.
        ValueError: the checkpoint cannot be read (see `load_model`), or a sentence is too long (see
            `verify`).
    """
    manifest = read_bundle(bundle)
    if manifest.quantization is not None:
        raise BundleError(
            f"{bundle} is {manifest.dtype} and intentionally differs from PyTorch; verify its float32 bundle"
        )
    model, tokenizer = _load(checkpoint, manifest.half_weights)
    source_tokenizer = _source_tokenizer(model, tokenizer)
    _check_tokenizer(bundle / manifest.source_tokenizer, source_tokenizer)
    _check_tokenizer(bundle / manifest.target_tokenizer, tokenizer)
    return verify(open_sessions(bundle, manifest), model, source_tokenizer, sentences, tolerance)


def _load(checkpoint: Path, half_weights: bool) -> tuple[Model, Tokenizer]:
    """Load a checkpoint; with `half_weights`, round its matrices to float16 and back."""
    model, tokenizer = load_model(checkpoint)
    if half_weights:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.copy_(parameter.half())
                if not parameter.isfinite().all():
                    raise ValueError(f"{name} has weights beyond ±65504, the largest of float16")
    return model, tokenizer


def _source_tokenizer(model: Model, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer of sources, or of prompts for a causal model."""
    return prompt_tokenizer(tokenizer) if isinstance(model, CausalModel) else tokenizer


def _check_tokenizer(path: Path, expected: Tokenizer) -> None:
    if Tokenizer.from_file(str(path)).to_str() != expected.to_str():
        raise BundleError(f"{path} differs from the tokenizer of the checkpoint; name the checkpoint that was exported")


def _write_graphs(folder: Path, model: Model, half_weights: bool) -> Graphs:
    weights = WeightFile(WEIGHTS, half_weights)
    graphs = build_graphs(model, weights)
    weights.write(folder)
    onnx.save_model(graphs.encoder, folder / ENCODER)
    if graphs.decoder is not None:
        onnx.save_model(graphs.decoder, folder / STEP)
    onnx.save_model(graphs.similar, folder / SIMILAR)
    return graphs


Rewrite = Callable[[Sequence[onnx.ModelProto], Path, WeightFile], list[onnx.ModelProto]]


def _write_rewritten(source: Path, manifest: Manifest, folder: Path, rewrite: Rewrite) -> dict[str, FileRecord]:
    """Write converted graphs, their weights and the tokenizers; return the file records."""
    weights = WeightFile(WEIGHTS)
    graphs = [manifest.encoder.file, manifest.decoder_graph.file]
    if manifest.similar is not None:
        graphs.append(manifest.similar.file)
    originals = [onnx.load_model(source / name, load_external_data=False) for name in graphs]
    for name, proto in zip(graphs, rewrite(originals, source, weights), strict=True):
        onnx.save_model(proto, folder / name)
    weights.write(folder)
    tokenizers = {manifest.source_tokenizer, manifest.target_tokenizer}
    for name in tokenizers:
        shutil.copyfile(source / name, folder / name)
    return record_files(folder, (*graphs, WEIGHTS, *sorted(tokenizers)))


def _graph_entry(name: str, proto: onnx.ModelProto) -> Graph:
    inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
    return Graph(file=name, inputs=tuple(inputs), outputs=tuple(outputs))


def _manifest(folder: Path, model: Model, metadata: BundleMetadata, graphs: Graphs, half_weights: bool) -> Manifest:
    config, step = model.config, graphs.decoder
    source_tokenizer = PROMPT_TOKENIZER if graphs.decoder_start == "source" else TOKENIZER
    steps = () if step is None else (STEP,)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=metadata.name,
        architecture=architecture_of(config),
        description=metadata.description,
        license=metadata.license,
        created=int(time.time()),
        dtype="float32",
        tasks=_tasks(graphs),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        half_weights=half_weights,
        source_tokenizer=source_tokenizer,
        target_tokenizer=TOKENIZER,
        tokens=Tokens(pad_id=config.pad_id, start_id=config.bos_id, end_id=config.eos_id),
        decoder_start=graphs.decoder_start,
        limits=Limits(
            max_source_tokens=config.max_positions,
            max_target_tokens=0 if step is None else config.max_positions,
            vocabulary=config.vocab_size,
        ),
        encoder=_graph_entry(ENCODER, graphs.encoder),
        decoder=None if step is None else _graph_entry(STEP, step),
        similar=_graph_entry(SIMILAR, graphs.similar),
        states=graphs.states,
        attention=graphs.attention,
        labels=graphs.labels,
        languages=metadata.languages,
        chat=metadata.chat or (chat_template(CHAT) if isinstance(model, CausalModel) else None),
        verification=None,
        files=record_files(folder, dict.fromkeys((ENCODER, *steps, SIMILAR, WEIGHTS, TOKENIZER, source_tokenizer))),
    )


def chat_template(trained: dialogues.ChatTemplate) -> ChatTemplate:
    """Convert the text format of training dialogues to its manifest entry."""
    return ChatTemplate(user=trained.user, assistant=trained.bot, reply=trained.reply)


def _tasks(graphs: Graphs) -> tuple[Task, ...]:
    can_do: dict[Task, bool] = {
        "generate": graphs.decoder is not None,
        "encode": True,
        "attention": bool(graphs.attention),
        "classify": bool(graphs.labels),
        "similar": True,
    }
    return tuple(task for task, is_possible in can_do.items() if is_possible)


def _files_to_keep(bundle: Path) -> list[Path]:
    """List files of an existing folder that its manifest does not list, such as a model card."""
    if not bundle.exists():
        return []
    if not bundle.is_dir() or any(path.is_dir() for path in bundle.iterdir()):
        raise BundleError(f"{bundle} exists and is not a bundle: it must be a folder without subfolders")
    try:
        own = {MANIFEST, *read_manifest(bundle).files}
    except BundleError:
        own = {MANIFEST}
    return [path for path in bundle.iterdir() if path.name not in own]


@contextmanager
def _replacing(bundle: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces the bundle on success.

    Files of the old folder that its manifest does not list are copied.
    """
    bundle = bundle.resolve()
    clean_up(bundle)
    kept = _files_to_keep(bundle)
    with _temporary_sibling(bundle) as folder:
        yield folder
        for path in kept:
            if not (folder / path.name).exists():
                shutil.copy2(path, folder)
        _replace(bundle, folder)


def clean_up(bundle: Path) -> None:
    """Remove or restore the folders that an interrupted export left beside a bundle.

    `.NAME.new` is an unfinished bundle and is removed. `.NAME.old` is the previous bundle. It is
    restored if the export ended before the new bundle was in place, and removed otherwise.
    """
    bundle = bundle.resolve()
    shutil.rmtree(_sibling(bundle, "new"), ignore_errors=True)
    old = _sibling(bundle, "old")
    if old.exists() and not bundle.exists():
        old.rename(bundle)
    shutil.rmtree(old, ignore_errors=True)


def _sibling(bundle: Path, suffix: str) -> Path:
    """Return the path of a hidden folder beside the bundle; the service ignores hidden folders."""
    return bundle.with_name(f".{bundle.name}.{suffix}")


@contextmanager
def _temporary_sibling(bundle: Path) -> Iterator[Path]:
    """Yield an empty folder beside the bundle, which is removed at the end unless it was moved."""
    folder = _sibling(bundle, "new")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(bundle: Path, folder: Path) -> None:
    if not bundle.exists():
        folder.rename(bundle)
        return
    old = _sibling(bundle, "old")
    bundle.rename(old)
    try:
        folder.rename(bundle)
    except BaseException:
        old.rename(bundle)
        raise
    shutil.rmtree(old)
