"""Writing of the files of a model, and its manifest."""

import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sightline.base.bundle import SCHEMA_VERSION, Manifest, Origin
from sightline.base.bundle_files import record_files
from sightline.export.describe import Described
from sightline.export.graphs.model import Graphs
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.writing import WEIGHTS, write_graphs


def write_model(
    folder: Path,
    described: Described,
    graphs: Graphs,
    metadata: BundleMetadata,
    options: ExportOptions,
    origin: Origin | None,
) -> Manifest:
    """Write all files of a model except its weights and the manifest, which is returned.

    The manifest lacks the results of the check. Fields of `described` with the name of a field of
    the manifest are copied. The metadata of the user precedes that of the checkpoint; `origin` is
    None for a model of this project.
    """
    entries = write_graphs(folder, vars(graphs))
    files = [WEIGHTS, *(entry.file for entry in entries.values()), *_write_others(folder, described)]
    of_model = {name: value for name, value in vars(described).items() if name in Manifest.model_fields}
    of_graphs = ("decoder_start", "states", "attention", "labels", "label_kind")
    fields: dict[str, Any] = {
        "license": "",
        "encoder": None,
        "decoder": None,
        **of_model,
        **{name: getattr(graphs, name) for name in of_graphs},
        "tasks": tuple(task for task in graphs.tasks if task != "fill-mask" or described.tokens.mask_id is not None),
        **entries,
        **{name: value for name, value in vars(metadata).items() if value},
    }
    return Manifest(
        schema_version=SCHEMA_VERSION,
        created=int(time.time()),
        dtype="float32",
        half_weights=options.half_weights,
        origin=origin,
        verification=None,
        files=record_files(folder, files),
        **fields,
    )


def _write_others(folder: Path, described: Described) -> list[str]:
    """Write the layers after pooling and the tokenizers; return the names of the files."""
    names, limits = [], described.limits
    for layer, values in zip(described.embedding.dense if described.embedding else (), described.dense, strict=True):
        values.astype("<f4").tofile(folder / layer.file)
        names.append(layer.file)
    for name, tokenizer in described.tokenizers.items():
        is_target = name == described.target_tokenizer
        _write_tokenizer(
            folder / name, tokenizer, limits.vocabulary if is_target else limits.source_vocabulary or limits.vocabulary
        )
        names.append(name)
    return names


def _write_tokenizer(path: Path, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Write a tokenizer without padding and truncation, of at most `vocabulary` tokens."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > vocabulary:
        raise ImportFailedError(
            f"the tokenizer has token ids up to {size - 1}, but the model has only {vocabulary} tokens; the tokenizer "
            "files belong to another checkpoint"
        )
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    path.write_text(tokenizer.to_str(), encoding="utf-8")  # `save` raises bare exceptions
