"""Writing of the files of a model that are no graphs, and of its manifest."""

import time
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from export.describe import Described
from export.errors import ImportFailedError
from export.graphs.model import Graphs
from export.options import BundleMetadata, ExportOptions
from export.writing import WEIGHTS
from service.bundle import SCHEMA_VERSION, Graph, Manifest, Origin, record_files


def write_others(folder: Path, described: Described) -> list[str]:
    """Write the layers after pooling and the tokenizers; return the names of the files."""
    names, limits = [], described.limits
    for layer, values in zip(described.embedding.dense if described.embedding else (), described.dense, strict=True):
        values.astype("<f4").tofile(folder / layer.file)
        names.append(layer.file)
    for name, tokenizer in described.tokenizers.items():
        is_target = name == described.target_file
        _write_tokenizer(
            folder / name, tokenizer, limits.vocabulary if is_target else limits.source_vocabulary or limits.vocabulary
        )
        names.append(name)
    return names


def _write_tokenizer(path: Path, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Write a tokenizer without its settings of padding and truncation.

    Raises:
        ImportFailedError: it has more tokens than the model.
    """
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > vocabulary:
        raise ImportFailedError(
            f"the tokenizer has token ids up to {size - 1}, but the model has only {vocabulary} tokens; the tokenizer "
            "files belong to another checkpoint"
        )
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # `save` raises bare exceptions


def manifest_of(
    folder: Path,
    described: Described,
    graphs: Graphs,
    entries: Mapping[str, Graph],
    others: list[str],
    metadata: BundleMetadata,
    options: ExportOptions,
    origin: Origin | None,
) -> Manifest:
    """Return the manifest of written files, without the results of the check.

    Args:
        folder: the bundle.
        described: the model.
        graphs: its graphs.
        entries: the entries of the graphs, by field of the manifest.
        others: names of the other files besides the weights.
        metadata: what the user says about the model, which precedes what the checkpoint says.
        options: options of the export.
        origin: origin of a model that others trained.
    """
    files = [WEIGHTS, *(entry.file for entry in entries.values()), *others]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=metadata.name,
        architecture=described.architecture,
        description=metadata.description or described.description,
        license=metadata.license,
        created=int(time.time()),
        dtype="float32",
        ops=options.ops,
        tasks=graphs.tasks,
        parameters=described.parameters,
        half_weights=options.half_weights,
        source_tokenizer=described.source_file,
        target_tokenizer=described.target_file,
        tokens=described.tokens,
        decoder_start=graphs.decoder_start,
        limits=described.limits,
        encoder=entries.get("encoder"),
        decoder=entries.get("decoder"),
        similar=entries.get("similar"),
        states=graphs.states,
        attention=graphs.attention,
        labels=graphs.labels,
        label_kind=graphs.label_kind,
        languages=metadata.languages or described.languages,
        chat=metadata.chat or described.chat,
        generation=described.generation,
        embedding=described.embedding,
        origin=origin,
        verification=None,
        files=record_files(folder, files),
    )
