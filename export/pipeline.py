"""Import of checkpoints that others trained: from a folder to a verified bundle.

An import needs neither PyTorch nor transformers. It reads one tensor at a time and writes it to the
bundle. The written bundle is verified in a child process, so that the memory of both steps does not
add up.
"""

import errno
import math
import multiprocessing
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from tokenizers import Tokenizer

from export import describe
from export.built import Built
from export.graphs.builder import WeightFile
from export.options import BundleMetadata, ImportOptions
from export.progress import ByteProgress
from export.sources.chat_template import ChatTemplateError, read_chat_template
from export.sources.checkpoint import Folder, FolderFiles, ImportFailedError, Provenance, open_folder
from export.writing import WEIGHTS, replacing, write_graphs
from service.bundle import (
    SCHEMA_VERSION,
    Alignment,
    GenerationDefaults,
    Graph,
    Manifest,
    Ops,
    Origin,
    Verification,
    record_files,
    write_manifest,
)

TOKENIZER, TARGET_TOKENIZER = "tokenizer.json", "target_tokenizer.json"
NO_OPTIONS = ImportOptions()
UNKNOWN = Provenance()
FLOAT32_BYTES = 4
# Memory of the verification beside the weights: Python, NumPy, ONNX Runtime, and the intermediate
# results of a long text.
BASE_BYTES = 400 << 20
LARGE_STATE_BYTES = 256 << 20  # a note suggests `--max-tokens` for states above this size


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    manifest: Manifest
    notes: tuple[str, ...]  # facts that the user should read
    import_peak_bytes: int  # largest memory of this process so far
    verification_peak_bytes: int  # largest memory of the child process


def import_checkpoint(
    path: Path,
    bundle: Path,
    metadata: BundleMetadata,
    options: ImportOptions = NO_OPTIONS,
    *,
    kind: Literal["huggingface", "firefox"] = "huggingface",
    provenance: Provenance = UNKNOWN,
    allowed: Iterable[Path] = (),
    stream: TextIO = sys.stderr,
) -> Imported:
    """Import a checkpoint to a bundle and verify it. An existing bundle is replaced.

    Args:
        path: folder of the checkpoint.
        bundle: folder to write or replace.
        metadata: descriptive fields of the manifest.
        options: options that change the graphs or the limits.
        kind: kind of the folder, see `export.sources.checkpoint.detect_kind`.
        provenance: location from which the folder was downloaded.
        allowed: folders that symbolic links may lead into, such as the cache of a hub.
        stream: shows the progress if it is a terminal.

    Raises:
        ImportFailedError: the checkpoint is not supported or damaged, or there is too little memory
            or disk space; nothing is written.
        VerificationError: the bundle differs from the checkpoint; nothing is written.
        BundleError: `bundle` exists and is not a folder without subfolders.
    """
    if options.shortlist and kind != "firefox":
        raise ImportFailedError(
            f"{path} is not a Firefox translation model, and only those have a shortlist; leave out --shortlist"
        )
    with _clear_disk_errors(bundle), _open(path, kind, tuple(allowed)) as checkpoint, replacing(bundle) as folder:
        num_bytes = _num_bytes(checkpoint)
        _check_resources(num_bytes, folder)
        with WeightFile(folder / WEIGHTS) as weights:
            built = _build(checkpoint, weights, options, ByteProgress("importing", num_bytes, stream))
        built, notes = _with_chat(built, checkpoint)
        if provenance.quantized is not None:
            notes.append(
                f"the weights were quantized before ({provenance.quantized}), so the results only approximate those of "
                "the original model; the manifest records it"
            )
        entries = write_graphs(folder, built.graphs)
        files = _write_files(folder, built, entries.values())
        origin = Origin(
            kind=kind,
            family=built.family,
            repository=provenance.repository,
            revision=provenance.revision,
            package=provenance.package,
            quantized=provenance.quantized,
            pickle=isinstance(checkpoint, Folder) and checkpoint.is_pickle,
            files=dict(sorted({**checkpoint.files, **provenance.files}.items())),
        )
        manifest = _manifest(folder, built, metadata, options.ops, origin, entries, files)
        if options.task is not None and options.task not in manifest.tasks:
            raise ImportFailedError(
                f"the checkpoint cannot do the task {options.task}; it can do {', '.join(manifest.tasks)}; use a "
                "checkpoint that was trained for it"
            )
        verification, peak = _verify_in_child(checkpoint, folder, manifest, options)
        alignment = _align_in_child(folder, manifest, built.guided_alignment)
        manifest = manifest.model_copy(update={"verification": verification, "alignment": alignment})
        write_manifest(folder, manifest)
    return Imported(manifest, (*notes, *_memory_note(manifest)), _peak_bytes(), peak)


@contextmanager
def _clear_disk_errors(bundle: Path) -> Iterator[None]:
    """Convert the errors of a full disk, which do not name the file, to one with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ImportFailedError(
            f"{bundle} cannot be written: {error.strerror}; remove files, or choose another --out; no incomplete "
            "bundle is left"
        ) from None


def _open(path: Path, kind: str, allowed: Iterable[Path]) -> FolderFiles:
    return FolderFiles(path, allowed) if kind == "firefox" else open_folder(path, allowed)


def _build(checkpoint: FolderFiles, weights: WeightFile, options: ImportOptions, progress: ByteProgress) -> Built:
    """Build the graphs, and check that everything in the checkpoint is known."""
    if not isinstance(checkpoint, Folder):
        return describe.build_firefox(checkpoint, weights, options)
    checkpoint.tensors.on_read = progress.add
    try:
        built = describe.build(checkpoint, weights, options)
    finally:
        progress.close()
    checkpoint.config.check_all_read()
    checkpoint.tensors.check_all_read()
    return built


def _num_bytes(checkpoint: FolderFiles) -> int:
    """Return the size of all weights as float32, or an upper bound of it."""
    if not isinstance(checkpoint, Folder):  # int8
        return sum((checkpoint.path / name).stat().st_size for name in checkpoint.names()) * FLOAT32_BYTES
    tensors = checkpoint.tensors
    return sum(math.prod(tensors.shape(name)) for name in tensors.names) * FLOAT32_BYTES


def _check_resources(num_bytes: int, folder: Path) -> None:
    """Check the memory and the disk space for weights of this size.

    The verification needs more memory than the import: ONNX Runtime holds all weights. With 538 MB
    of weights it was measured at 896 MB, and the import at 341 MB.

    Raises:
        ImportFailedError: there is too little.
    """
    needed, available = BASE_BYTES + num_bytes, available_memory()
    if available is not None and needed > available:
        raise ImportFailedError(
            f"the import needs about {_giga(needed)} of memory, but {_giga(available)} are available; end other "
            "programs, or import on a machine with more memory and copy the bundle"
        )
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ImportFailedError(
            f"the bundle needs about {_giga(num_bytes)} in {folder.parent}, but {_giga(free)} are free; remove files, "
            "or choose another --out"
        )


def _giga(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def available_memory() -> int | None:
    """Return the memory that this process can still use, or None if it is unknown.

    It is the smaller one of the available memory of the machine and the rest of the limit of the
    control group, such as that of a container.
    """
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass  # another system than Linux, or no control group
    return max(0, min(found)) if found else None


def _with_chat(built: Built, checkpoint: FolderFiles) -> tuple[Built, list[str]]:
    """Add the chat template of a decoder-only model, or a note with the reason that it has none."""
    notes: list[str] = []
    if built.graphs.decoder_start != "source" or built.chat is not None:
        return built, notes
    added = built.source_tokenizer.get_added_tokens_decoder().values()
    special_tokens = [token.content for token in added if token.special]
    try:
        return replace(built, chat=read_chat_template(checkpoint, special_tokens)), notes
    except ChatTemplateError as error:
        notes.append(f"chat is not available for this model, because its chat template is not supported: {error}")
        return built, notes


def _write_files(folder: Path, built: Built, graphs: Iterable[Graph]) -> list[str]:
    """Write the layers after pooling and the tokenizers; return the names of all files."""
    files, limits = [WEIGHTS, *(graph.file for graph in graphs)], built.limits
    for layer, values in zip(built.embedding.dense if built.embedding else (), built.dense, strict=True):
        values.astype("<f4").tofile(folder / layer.file)
        files.append(layer.file)
    for name, tokenizer, vocabulary in (
        (TOKENIZER, built.source_tokenizer, limits.source_vocabulary or limits.vocabulary),
        (TARGET_TOKENIZER, built.target_tokenizer, limits.vocabulary),
    ):
        if tokenizer is not None:
            _write_tokenizer(folder / name, tokenizer, vocabulary)
            files.append(name)
    return files


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


def _manifest(
    folder: Path,
    built: Built,
    metadata: BundleMetadata,
    ops: Ops,
    origin: Origin,
    entries: Mapping[str, Graph],
    files: list[str],
) -> Manifest:
    graphs = built.graphs
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=metadata.name,
        architecture=built.architecture,
        description=metadata.description or built.description,
        license=metadata.license,
        created=int(time.time()),
        dtype="float32",
        ops=ops,
        tasks=graphs.tasks,
        parameters=built.parameters,
        source_tokenizer=TOKENIZER,
        target_tokenizer=TOKENIZER if built.target_tokenizer is None else TARGET_TOKENIZER,
        tokens=built.tokens,
        decoder_start=graphs.decoder_start,
        limits=built.limits,
        encoder=entries.get("encoder"),
        decoder=entries.get("decoder"),
        similar=entries.get("similar"),
        states=graphs.states,
        attention=graphs.attention,
        labels=graphs.labels,
        label_kind=graphs.label_kind,
        languages=metadata.languages or built.languages,
        chat=metadata.chat or built.chat,
        generation=built.generation or GenerationDefaults(),
        embedding=built.embedding,
        origin=origin,
        verification=None,
        files=record_files(folder, files),
    )


def _verify_in_child(
    checkpoint: FolderFiles, folder: Path, manifest: Manifest, options: ImportOptions
) -> tuple[Verification, int]:
    """Verify a bundle in a child process; return the record and the child's largest memory."""
    kind = manifest.origin.kind if manifest.origin else "huggingface"
    source = (checkpoint.path, kind, checkpoint.allowed)
    # "spawn" starts a new interpreter, which does not inherit the memory of this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(_verify, source, folder, manifest.model_dump_json(), options)
        try:
            record, peak = future.result()
        except BrokenProcessPool:
            raise ImportFailedError(
                "the process that verifies the bundle was ended, probably because there is too little memory; end "
                "other programs, or import on a machine with more memory and copy the bundle"
            ) from None
    return Verification.model_validate_json(record), peak


def _verify(
    source: tuple[Path, str, tuple[Path, ...]],
    folder: Path,
    manifest: str,
    options: ImportOptions,
) -> tuple[str, int]:
    with _open(*source) as checkpoint:
        record = compare(checkpoint, folder, Manifest.model_validate_json(manifest), options)
    return record.model_dump_json(), _peak_bytes()


def compare(checkpoint: FolderFiles, bundle: Path, manifest: Manifest, options: ImportOptions) -> Verification:
    """Compare a written bundle with the NumPy reference of its checkpoint.

    Raises:
        VerificationError: a difference is larger than rounding explains.
        ImportFailedError: the checkpoint is not supported.
    """
    from export.check.verify_imported import verify

    with describe.described(checkpoint, options) as (model, weights):
        return verify(bundle, manifest, model, weights)


def _align_in_child(folder: Path, manifest: Manifest, guided: tuple[int, int] | None) -> Alignment | None:
    """Choose the heads that align words in a child process, whose memory is released at its end."""
    if all(one.kind != "cross" for one in manifest.attention):
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            record = pool.submit(_align, folder, manifest.model_dump_json(), guided).result()
        except BrokenProcessPool:
            raise ImportFailedError(
                "the process that chooses the alignment heads was ended, probably because there is too little memory; "
                "end other programs, or import on a machine with more memory and copy the bundle"
            ) from None
    return None if record is None else Alignment.model_validate_json(record)


def _align(folder: Path, manifest: str, guided: tuple[int, int] | None) -> str | None:
    from export.check.alignment import choose_alignment
    from export.check.sessions import open_sessions

    sessions = open_sessions(folder, Manifest.model_validate_json(manifest))
    alignment = choose_alignment(sessions, folder, guided=guided)
    return None if alignment is None else alignment.model_dump_json()


def _peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1 << 10  # kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _memory_note(manifest: Manifest) -> list[str]:
    """Return a note about the memory of the longest sequence, if it is large."""
    sizes = {"source": manifest.limits.max_source_tokens, "target": manifest.limits.max_target_tokens}
    num_bytes = sum(
        math.prod(sizes[axis] if isinstance(axis, str) else axis for axis in state.shape) * FLOAT32_BYTES
        for state in manifest.states
    )
    if num_bytes < LARGE_STATE_BYTES:
        return []
    return [
        f"a sequence of {manifest.limits.max_target_tokens} tokens needs {_giga(num_bytes)} of memory when it is "
        "served; --max-tokens imports the model with a lower limit"
    ]
