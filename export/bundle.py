"""Writes a bundle: graphs, weights, tokenizer and manifest, in place only once verified."""

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
from tokenizers import Tokenizer

from export.builder import WeightFile
from export.graphs import attention_maps, encoder_graph, states, step_graph
from export.sessions import open_sessions
from export.verify import TOLERANCE, verify
from model.checkpoint import TOKENIZER, load_checkpoint
from model.transformer import Transformer
from service.bundle import (
    MANIFEST,
    SCHEMA_VERSION,
    BundleError,
    Graph,
    Limits,
    Manifest,
    Tokens,
    Verification,
    read_bundle,
    read_manifest,
    record_files,
    write_manifest,
)

ENCODER, STEP, WEIGHTS = "encoder.onnx", "step.onnx", "weights.bin"


@dataclass(frozen=True)
class Label:
    """What people should know of a bundle."""

    name: str  # what requests call the model
    description: str = ""
    license: str = ""  # of the weights, not of the code

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.name):
            raise ValueError(f"{self.name!r} is not a name: letters, digits, '.', '_' and '-', 128 at most")


def export_bundle(
    checkpoint: Path, bundle: Path, label: Label, sentences: Sequence[str], tolerance: float = TOLERANCE
) -> Manifest:
    """Write the bundle of a checkpoint, verified on sentences.

    An existing bundle is replaced; files in its folder that its manifest does not name are kept.

    Raises:
        VerificationError: ONNX Runtime and PyTorch differ; nothing was written.
        BundleError: there is something at `bundle` that is not a flat folder.
        FileNotFoundError, ValueError: the checkpoint cannot be read, see `load_checkpoint`.
        ValueError: a sentence is too long, see `verify`.
    """
    bundle = bundle.resolve()
    model, tokenizer = load_checkpoint(checkpoint)
    kept = _files_to_keep(bundle)
    with _temporary_sibling(bundle) as folder:
        graphs = _write_graphs(folder, model)
        shutil.copyfile(checkpoint / TOKENIZER, folder / TOKENIZER)
        manifest = _manifest(folder, model, label, *graphs)
        sessions = open_sessions(folder, manifest)
        verification = verify(sessions, model, tokenizer, sentences, tolerance)
        manifest = manifest.model_copy(update={"verification": verification})
        write_manifest(folder, manifest)
        for path in kept:
            if not (folder / path.name).exists():
                shutil.copy2(path, folder)
        _replace(bundle, folder)
    return manifest


def verify_bundle(
    bundle: Path, checkpoint: Path, sentences: Sequence[str], tolerance: float = TOLERANCE
) -> Verification:
    """Compare a bundle on disk with a checkpoint.

    Raises:
        VerificationError: they differ.
        BundleError: the bundle is damaged.
        FileNotFoundError, ValueError: the checkpoint cannot be read, see `load_checkpoint`.
        ValueError: a sentence is too long, see `verify`.
    """
    manifest = read_bundle(bundle)
    model, tokenizer = load_checkpoint(checkpoint)
    _check_tokenizer(bundle / manifest.source_tokenizer, tokenizer)
    return verify(open_sessions(bundle, manifest), model, tokenizer, sentences, tolerance)


def _check_tokenizer(path: Path, expected: Tokenizer) -> None:
    if Tokenizer.from_file(str(path)).to_str() != expected.to_str():
        raise BundleError(f"{path} is not the checkpoint's tokenizer")


def _write_graphs(folder: Path, model: Transformer) -> tuple[Graph, Graph]:
    weights = WeightFile(WEIGHTS)
    protos = {ENCODER: encoder_graph(model, weights), STEP: step_graph(model, weights)}
    weights.write(folder)
    for name, proto in protos.items():
        onnx.save_model(proto, folder / name)
    encoder, step = (_described(name, proto) for name, proto in protos.items())
    return encoder, step


def _described(name: str, proto: onnx.ModelProto) -> Graph:
    inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
    return Graph(file=name, inputs=tuple(inputs), outputs=tuple(outputs))


def _manifest(folder: Path, model: Transformer, label: Label, encoder: Graph, step: Graph) -> Manifest:
    config = model.config
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=label.name,
        architecture="transformer",
        description=label.description,
        license=label.license,
        created=int(time.time()),
        dtype="float32",
        tasks=("generate", "encode", "attention"),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        source_tokenizer=TOKENIZER,
        target_tokenizer=TOKENIZER,
        tokens=Tokens(pad_id=config.pad_id, start_id=config.bos_id, end_id=config.eos_id),
        limits=Limits(
            max_source_tokens=config.max_positions,
            max_target_tokens=config.max_positions,
            vocabulary=config.vocab_size,
        ),
        encoder=encoder,
        step=step,
        states=states(config),
        attention=attention_maps(config),
        verification=None,
        files=record_files(folder, (ENCODER, STEP, WEIGHTS, TOKENIZER)),
    )


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
def _temporary_sibling(bundle: Path) -> Iterator[Path]:
    """An empty folder beside the bundle's, gone at the end unless it was moved."""
    folder = bundle.with_name(f".{bundle.name}.new")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(bundle: Path, folder: Path) -> None:
    if not bundle.exists():
        folder.rename(bundle)
        return
    old = folder.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)  # of an export that was killed
    bundle.rename(old)
    folder.rename(bundle)
    shutil.rmtree(old)
