"""Writes a bundle: graphs, weights, tokenizer and manifest, in place only once verified."""

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

from export.architecture import Graphs, graphs_of
from export.builder import WeightFile
from export.calibrate import measure_ranges
from export.half import half_graphs, rows_graph
from export.quality import ParallelText, compare, encode_sources, refuse_loss
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
class Label:
    """Descriptive fields of a manifest, and the format of dialogues."""

    name: str  # what requests call the model
    description: str = ""
    license: str = ""  # of the weights, not of the code
    languages: Languages | None = None
    chat: ChatTemplate | None = None  # None for the format that models of dialogues are trained on

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.name):
            raise ValueError(f"{self.name!r} is not a name: letters, digits, '.', '_' and '-', 128 at most")


def export_bundle(
    checkpoint: Path,
    bundle: Path,
    label: Label,
    sentences: Sequence[str],
    tolerance: float | None = None,
    half_weights: bool = False,
) -> Manifest:
    """Write the bundle of a checkpoint, verified on sentences.

    An existing bundle is replaced; files in its folder that its manifest does not name are kept. With `half_weights`
    matrices are rounded to float16, which halves the files; all is still computed in float32.

    Raises:
        VerificationError: ONNX Runtime and PyTorch differ; nothing was written.
        BundleError: there is something at `bundle` that is not a flat folder.
        FileNotFoundError, ValueError: the checkpoint cannot be read, see `load_model`.
        ValueError: a sentence is too long, see `verify`; a weight is too large for float16.
    """
    model, tokenizer = _load(checkpoint, half_weights)
    with _replacing(bundle) as folder:
        graphs = _write_graphs(folder, model, half_weights)
        shutil.copyfile(checkpoint / TOKENIZER, folder / TOKENIZER)
        source_tokenizer = _source_tokenizer(model, tokenizer)
        if source_tokenizer is not tokenizer:
            source_tokenizer.save(str(folder / PROMPT_TOKENIZER))
        manifest = _manifest(folder, model, label, graphs, half_weights)
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
    """Write a float32 bundle again with its products quantised, see `export.quantize`.

    Args:
        source: the float32 bundle.
        bundle: as in `export_bundle`; its name is the model's.
        recipe: which products are quantised, and how.
        text: what both bundles are compared on; None to write without measuring.
        force: write whatever BLEU is lost.
        calibration: sentences; the scales of static products are measured on them.

    Raises:
        VerificationError: too much BLEU was lost; nothing was written.
        BundleError: `source` is damaged or not float32, or there is something at `bundle` that is not a flat folder.
        ValueError: a sentence is too long, the name of the folder is no name, or static products have no sentences.
    """
    is_static = "static" in recipe.forms.values()
    if is_static and not calibration:
        raise ValueError("the scales of static products are measured on sentences, and there are none")
    record = Quantization(
        bits=recipe.bits, block_size=recipe.block_size, forms=recipe.forms, float32_digest="", quality=None
    )

    def write(original: Manifest, folder: Path) -> Manifest:
        ranges: Ranges = {}
        if is_static:
            sources = encode_sources(original, read_tokenizer(source / original.source_tokenizer), calibration)
            ranges = measure_ranges(source, original, sources)
        rewrite = partial(quantize_graphs, recipe=recipe, ranges=ranges)
        files = _write_rewritten(source, original, folder, rewrite)
        return original.model_copy(update={"dtype": f"int{recipe.bits}", "files": files})

    return _write_again(source, bundle, text, force, record, write)


def half_bundle(source: Path, bundle: Path, text: ParallelText | None, force: bool = False) -> Quantization:
    """Write a float32 bundle again in float16 and with operators for CUDA, see `export.half`.

    Arguments and errors are those of `quantize_bundle`; besides:

    Raises:
        BundleError: a state of the model has no axis that grows, or the model goes on with its source.
        ValueError: a weight is too large for float16.
    """
    record = Quantization(bits=16, block_size=None, forms={}, float32_digest="", quality=None)

    def write(original: Manifest, folder: Path) -> Manifest:
        if not all(any(isinstance(axis, str) for axis in state.shape) for state in original.states):
            raise BundleError(f"{source} has states of fixed size, which float16 bundles cannot keep on a device")
        if original.goes_on:
            raise BundleError(f"{source} reads its prompt with attention that float16 bundles do not have")
        states = tuple(state.model_copy(update={"dtype": "float16"}) for state in original.states)
        rows = rows_graph()
        onnx.save_model(rows, folder / ROWS)
        files = _write_rewritten(source, original, folder, half_graphs) | record_files(folder, [ROWS])
        return original.model_copy(
            update={"dtype": "float16", "rows": _described(ROWS, rows), "states": states, "files": files}
        )

    return _write_again(source, bundle, text, force, record, write)


def _write_again(
    source: Path,
    bundle: Path,
    text: ParallelText | None,
    force: bool,
    record: Quantization,
    write: Callable[[Manifest, Path], Manifest],
) -> Quantization:
    """Write a float32 bundle in another form and compare the two; `write` fills a folder and says what it is."""
    original = read_bundle(source)
    if original.dtype != "float32":
        raise BundleError(f"{source} is {original.dtype}: only a float32 bundle can be quantised")
    if original.half_weights:
        raise BundleError(f"{source} has weights in float16; export it again without --half-weights to quantise it")
    if original.step is None:
        raise BundleError(f"{source} generates nothing: what other forms cost is measured on what is generated")
    name = Label(bundle.resolve().name).name
    with _replacing(bundle) as folder:
        changes = {"name": name, "created": int(time.time()), "verification": None}
        manifest = write(original, folder).model_copy(update=changes)
        sessions = open_sessions(folder, manifest)
        quality = None
        if text is not None:
            tokenizer = read_tokenizer(folder / manifest.source_tokenizer)
            quality = compare(open_sessions(source, original), sessions, tokenizer, text)
            if not force:
                refuse_loss(quality)
        quantization = record.model_copy(update={"float32_digest": original.digest, "quality": quality})
        write_manifest(folder, manifest.model_copy(update={"quantization": quantization}))
    return quantization


def verify_bundle(
    bundle: Path, checkpoint: Path, sentences: Sequence[str], tolerance: float | None = None
) -> Verification:
    """Compare a bundle on disk with a checkpoint.

    Raises:
        VerificationError: they differ.
        BundleError: the bundle is damaged, or quantised.
        FileNotFoundError, ValueError: the checkpoint cannot be read, see `load_model`.
        ValueError: a sentence is too long, see `verify`.
    """
    manifest = read_bundle(bundle)
    if manifest.quantization is not None:
        raise BundleError(f"{bundle} is {manifest.dtype}: its graphs are not PyTorch's; verify the float32 bundle")
    model, tokenizer = _load(checkpoint, manifest.half_weights)
    source_tokenizer = _source_tokenizer(model, tokenizer)
    _check_tokenizer(bundle / manifest.source_tokenizer, source_tokenizer)
    _check_tokenizer(bundle / manifest.target_tokenizer, tokenizer)
    return verify(open_sessions(bundle, manifest), model, source_tokenizer, sentences, tolerance)


def _load(checkpoint: Path, half_weights: bool) -> tuple[Model, Tokenizer]:
    """What a bundle is made from and compared with."""
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
    """What the model reads: what is gone on with has a start and no end."""
    return prompt_tokenizer(tokenizer) if isinstance(model, CausalModel) else tokenizer


def _check_tokenizer(path: Path, expected: Tokenizer) -> None:
    if Tokenizer.from_file(str(path)).to_str() != expected.to_str():
        raise BundleError(f"{path} is not the checkpoint's tokenizer")


def _write_graphs(folder: Path, model: Model, half_weights: bool) -> Graphs:
    weights = WeightFile(WEIGHTS, half_weights)
    graphs = graphs_of(model, weights)
    weights.write(folder)
    onnx.save_model(graphs.encoder, folder / ENCODER)
    if graphs.step is not None:
        onnx.save_model(graphs.step, folder / STEP)
    onnx.save_model(graphs.similar, folder / SIMILAR)
    return graphs


Rewrite = Callable[[Sequence[onnx.ModelProto], Path, WeightFile], list[onnx.ModelProto]]


def _write_rewritten(source: Path, manifest: Manifest, folder: Path, rewrite: Rewrite) -> dict[str, FileRecord]:
    """The graphs in their new form, their weights and the tokenizers; what they are to be recorded as."""
    weights = WeightFile(WEIGHTS)
    graphs = [manifest.encoder.file, manifest.decoder.file]
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


def _described(name: str, proto: onnx.ModelProto) -> Graph:
    inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
    return Graph(file=name, inputs=tuple(inputs), outputs=tuple(outputs))


def _manifest(folder: Path, model: Model, label: Label, graphs: Graphs, half_weights: bool) -> Manifest:
    config, step = model.config, graphs.step
    source_tokenizer = PROMPT_TOKENIZER if graphs.begins_with == "source" else TOKENIZER
    steps = () if step is None else (STEP,)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=label.name,
        architecture=architecture_of(config),
        description=label.description,
        license=label.license,
        created=int(time.time()),
        dtype="float32",
        tasks=_tasks(graphs),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        half_weights=half_weights,
        source_tokenizer=source_tokenizer,
        target_tokenizer=TOKENIZER,
        tokens=Tokens(pad_id=config.pad_id, start_id=config.bos_id, end_id=config.eos_id),
        begins_with=graphs.begins_with,
        limits=Limits(
            max_source_tokens=config.max_positions,
            max_target_tokens=0 if step is None else config.max_positions,
            vocabulary=config.vocab_size,
        ),
        encoder=_described(ENCODER, graphs.encoder),
        step=None if step is None else _described(STEP, step),
        similar=_described(SIMILAR, graphs.similar),
        states=graphs.states,
        attention=graphs.attention,
        labels=graphs.labels,
        languages=label.languages,
        chat=label.chat or (chat_template(CHAT) if isinstance(model, CausalModel) else None),
        verification=None,
        files=record_files(folder, dict.fromkeys((ENCODER, *steps, SIMILAR, WEIGHTS, TOKENIZER, source_tokenizer))),
    )


def chat_template(trained: dialogues.ChatTemplate) -> ChatTemplate:
    """Return the format of a training's dialogues as a manifest has it."""
    return ChatTemplate(user=trained.user, assistant=trained.bot, reply=trained.reply)


def _tasks(graphs: Graphs) -> tuple[Task, ...]:
    can_do: dict[Task, bool] = {
        "generate": graphs.step is not None,
        "encode": True,
        "attention": bool(graphs.attention),
        "classify": bool(graphs.labels),
        "similar": True,
    }
    return tuple(task for task, is_possible in can_do.items() if is_possible)


def _files_to_keep(bundle: Path) -> list[Path]:
    """Files of an existing folder that are not the bundle's own, such as a model card."""
    if not bundle.exists():
        return []
    if not bundle.is_dir() or any(path.is_dir() for path in bundle.iterdir()):
        raise BundleError(f"{bundle} is not a bundle: one is a folder without folders in it")
    try:
        own = {MANIFEST, *read_manifest(bundle).files}
    except BundleError:
        own = {MANIFEST}
    return [path for path in bundle.iterdir() if path.name not in own]


@contextmanager
def _replacing(bundle: Path) -> Iterator[Path]:
    """An empty folder that takes the bundle's place if all goes well, with the files that are not the old one's own."""
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
    """Undo what an interrupted export left beside a bundle.

    `.NAME.new` is not finished. `.NAME.old` is the bundle itself if the export ended before the new one had its place,
    and otherwise the one that was replaced.
    """
    bundle = bundle.resolve()
    shutil.rmtree(_sibling(bundle, "new"), ignore_errors=True)
    old = _sibling(bundle, "old")
    if old.exists() and not bundle.exists():
        old.rename(bundle)
    shutil.rmtree(old, ignore_errors=True)


def _sibling(bundle: Path, suffix: str) -> Path:
    """A hidden folder beside the bundle, which the service does not take for a bundle."""
    return bundle.with_name(f".{bundle.name}.{suffix}")


@contextmanager
def _temporary_sibling(bundle: Path) -> Iterator[Path]:
    """An empty folder beside the bundle's, gone at the end unless it was moved."""
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
