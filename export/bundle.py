"""Writing of bundles: a new bundle replaces an old one only after verification."""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from export.check.alignment import choose_alignment
from export.check.sessions import open_sessions
from export.check.verify import verify
from export.convert.bundles import half_bundle as half_bundle
from export.convert.bundles import quantize_bundle as quantize_bundle
from export.families import trained
from export.graphs import recurrent
from export.graphs.builder import WeightFile
from export.graphs.model import Graphs
from export.options import BundleMetadata as BundleMetadata
from export.writing import PROMPT_TOKENIZER, WEIGHTS, replacing, write_graphs
from export.writing import clean_up as clean_up
from model.architectures.causal import CausalModel
from model.architectures.factory import Model
from model.architectures.recurrent import RecurrentModel
from model.checkpoint import TOKENIZER, load_model
from model.config import architecture_of
from model.data import dialogues
from model.data.dialogues import CHAT
from model.data.tokenizer import prompt_tokenizer
from service.bundle import (
    SCHEMA_VERSION,
    BundleError,
    ChatTemplate,
    Graph,
    Limits,
    Manifest,
    Ops,
    Tokens,
    Verification,
    read_bundle,
    record_files,
    write_manifest,
)


def export_bundle(
    checkpoint: Path,
    bundle: Path,
    metadata: BundleMetadata,
    sentences: Sequence[str],
    tolerance: float | None = None,
    half_weights: bool = False,
    ops: Ops = "contrib",
    check: bool = True,
) -> Manifest:
    """Export a checkpoint to a bundle, verify it, and choose the heads that align words.

    An existing bundle is replaced. Files in its folder that its manifest does not list are kept.

    Args:
        checkpoint: folder of the checkpoint.
        bundle: folder to write or replace.
        metadata: descriptive fields of the manifest.
        sentences: source sentences for the verification and for the choice of heads.
        tolerance: largest allowed difference from PyTorch; derived from float32 rounding by
            default.
        half_weights: round matrices to float16, which halves the files. Computation stays float32.
        ops: operators of the graphs.
        check: compare the graphs with PyTorch. Tests that compare them in other ways omit it.

    Raises:
        VerificationError: ONNX Runtime and PyTorch differ; nothing is written.
        BundleError: `bundle` exists and is not a folder without subfolders.
        FileNotFoundError: a file of the checkpoint is missing.
        ValueError: the checkpoint cannot be read (see `load_model`), a sentence is too long (see
            `verify`), a weight is too large for float16, or a recurrent model shall have standard
            operators.
    """
    model, tokenizer = _load(checkpoint, half_weights)
    if isinstance(model, RecurrentModel) and ops != "contrib":
        raise ValueError(
            f"{checkpoint} is a recurrent model, whose graphs need operators of ONNX Runtime; omit --ops standard"
        )
    with replacing(bundle) as folder:
        with WeightFile(folder / WEIGHTS, half_weights) as weights:
            if isinstance(model, RecurrentModel):
                graphs = recurrent.build(model, weights)
            else:
                graphs = trained.build(model, weights, ops)
        entries = write_graphs(folder, graphs)
        shutil.copyfile(checkpoint / TOKENIZER, folder / TOKENIZER)
        source_tokenizer = _source_tokenizer(model, tokenizer)
        if source_tokenizer is not tokenizer:
            source_tokenizer.save(str(folder / PROMPT_TOKENIZER))
        manifest = _manifest(folder, model, metadata, ops, graphs, entries, half_weights)
        sessions = open_sessions(folder, manifest)
        verification = verify(sessions, model, source_tokenizer, sentences, tolerance) if check else None
        alignment = choose_alignment(sessions, folder, sentences)
        manifest = manifest.model_copy(update={"verification": verification, "alignment": alignment})
        write_manifest(folder, manifest)
    return manifest


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


def _manifest(
    folder: Path,
    model: Model,
    metadata: BundleMetadata,
    ops: Ops,
    graphs: Graphs,
    entries: Mapping[str, Graph],
    half_weights: bool,
) -> Manifest:
    config = model.config
    source_tokenizer = PROMPT_TOKENIZER if graphs.decoder_start == "source" else TOKENIZER
    files = [entry.file for entry in entries.values()]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=metadata.name,
        architecture=architecture_of(config),
        description=metadata.description,
        license=metadata.license,
        created=int(time.time()),
        dtype="float32",
        ops=ops,
        tasks=graphs.tasks,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        half_weights=half_weights,
        source_tokenizer=source_tokenizer,
        target_tokenizer=TOKENIZER,
        tokens=Tokens(pad_id=config.pad_id, start_ids=(config.bos_id,), end_ids=(config.eos_id,)),
        decoder_start=graphs.decoder_start,
        limits=Limits(
            max_source_tokens=config.max_positions,
            max_target_tokens=0 if graphs.decoder is None else config.max_positions,
            vocabulary=config.vocab_size,
        ),
        encoder=entries.get("encoder"),
        decoder=entries.get("decoder"),
        similar=entries.get("similar"),
        states=graphs.states,
        attention=graphs.attention,
        labels=graphs.labels,
        languages=metadata.languages,
        chat=metadata.chat or (chat_template(CHAT) if isinstance(model, CausalModel) else None),
        verification=None,
        files=record_files(folder, dict.fromkeys((*files, WEIGHTS, TOKENIZER, source_tokenizer))),
    )


def chat_template(trained: dialogues.ChatTemplate) -> ChatTemplate:
    """Convert the text format of training dialogues to its manifest entry."""
    return ChatTemplate(user=trained.user, assistant=trained.bot, reply=trained.reply, single_line=True)
