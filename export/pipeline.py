"""The export of a checkpoint: from a source to a checked bundle.

One way leads from each kind of source to a bundle, with one module for each step:

1. `sources/` opens a training run, a folder of Hugging Face, or a Firefox model. GGUF files are
   converted to a folder first.
2. `describe.py` describes it, with `families/` and `tokenizers/`.
3. `graphs/` builds the graphs.
4. `writing.py` and `manifest.py` write the files.
5. `check/` compares the written bundle with the source.

No step needs transformers, and only recurrent models need PyTorch. One tensor at a time is read and
written.
"""

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from sightline.base.bundle import BundleError, Manifest, Origin, Verification
from sightline.base.bundle_files import write_manifest
from sightline.base.errors import UsageError
from sightline.base.machine import available_memory
from sightline.export.check.alignment import choose_alignment
from sightline.export.check.coverage import choose_coverage
from sightline.export.check.serving import check_serving
from sightline.export.check.sessions import open_sessions
from sightline.export.check.verify import verify
from sightline.export.describe import Described, build, describe_source
from sightline.export.families.description import Guided
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.contributions import contributions_graph
from sightline.export.import_errors import ImportFailedError
from sightline.export.limits import CHECK_SPEED, begin_step, end_step, folder_bytes
from sightline.export.manifest import write_model
from sightline.export.options import BundleMetadata, ExportOptions, Kind
from sightline.export.sources.opened_checkpoint import Folder, FolderFiles, Provenance, hub_cache
from sightline.export.sources.training_run import TrainingRun
from sightline.export.writing import WEIGHTS, replacing

NO_OPTIONS = ExportOptions()
UNKNOWN = Provenance()
FLOAT32_BYTES = 4
# Memory of the check beside the weights: Python, NumPy, ONNX Runtime, and the intermediate results
# of a long text.
BASE_BYTES = 500 << 20
LARGE_STATE_BYTES = 256 << 20  # a note suggests `--max-tokens` for states above this size


@dataclass(frozen=True)
class Export:
    """A checkpoint, and the bundle to export it to."""

    checkpoint: Path  # its folder
    bundle: Path  # folder to write or replace
    metadata: BundleMetadata  # descriptive fields of the manifest
    options: ExportOptions = NO_OPTIONS
    kind: Kind = "huggingface"  # of the folder, see `sightline.export.sources.opened_checkpoint.detect_kind`
    provenance: Provenance = UNKNOWN  # location from which the folder was downloaded

    def open(self) -> FolderFiles:
        return open_source(self.checkpoint, self.kind, self.options.half_weights)


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    manifest: Manifest
    notes: tuple[str, ...]  # facts that the user should read
    peak_bytes: int  # largest memory of this process so far


def export_checkpoint(export: Export) -> Exported:
    """Export a checkpoint to a bundle and check it. An existing bundle is replaced.

    Files in the folder of an existing bundle that its manifest does not list are kept.

    Raises:
        ImportFailedError: the checkpoint is not supported or damaged, or there is too little memory
            or disk space; nothing is written.
        VerificationError: the bundle differs from the checkpoint; nothing is written.
        BundleError: the bundle exists and is not a folder without subfolders.
        FileNotFoundError: a file of a training run is missing.
        ValueError: a training run is unreadable, or an option does not fit.
    """
    path, metadata, options = export.checkpoint, export.metadata, export.options
    if options.ignored_keys and export.kind == "firefox":
        raise UsageError(f"{path} is a Firefox model, which has no config.json; leave out --ignore-key")
    begin_step(f"reading {path}", folder_bytes(path, [hub_cache()]))
    checkpoint = export.open()
    with replacing(export.bundle) as folder:
        model = describe_source(checkpoint, options)
        num_bytes = model.parameters * FLOAT32_BYTES
        _check_memory(num_bytes)
        begin_step(f"building and checking the graphs of {path}", 4 * num_bytes, CHECK_SPEED, is_first=False)
        with (
            WeightFile(folder / WEIGHTS, options.half_weights) as weights,
            tqdm(desc="exporting", total=num_bytes, unit="B", unit_scale=True, disable=None) as bar,
        ):
            if model.weights is not None:
                # A tensor may be read twice.
                model.weights.tensors.on_read = lambda count: bar.update(min(count, num_bytes - bar.n))
            graphs = build(model, weights)
            if options.contributions:
                graphs = replace(graphs, contributions=contributions_graph(model.model, model.weights, weights))
        if metadata.training_unit == "sentence" and (graphs.encoder is None or graphs.decoder is None):
            raise UsageError(
                "--unit sentence is only for encoder-decoder models, whose texts can be split into sentences; leave it "
                "out"
            )
        origin = _origin(export, model, checkpoint)
        manifest = write_model(folder, model, graphs, metadata, options, origin)
        if options.task is not None and options.task not in manifest.tasks:
            raise UsageError(
                f"the checkpoint cannot do the task {options.task}; it can do {', '.join(manifest.tasks)}; use a "
                "checkpoint that was trained for it"
            )
        guided = None if model.model is None else model.model.guided_alignment
        with tqdm(desc="verifying", bar_format="{desc}: {elapsed}", disable=None):
            manifest = check(export, folder, manifest, guided)
        write_manifest(folder, manifest)
    end_step()
    notes = (*model.notes, *export.provenance.notes, *_notes(export.provenance, manifest))
    return Exported(manifest, notes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)  # KiB on Linux


def open_source(path: Path, kind: Kind, half_weights: bool = False) -> FolderFiles:
    """Open a checkpoint of a kind, see `sightline.export.sources.opened_checkpoint.detect_kind`.

    `half_weights` rounds the matrices of a training run to float16. Raises `FileNotFoundError` if a
    file of a run is missing, and `ValueError` for other errors.
    """
    if kind == "training":
        return TrainingRun(path, half_weights)
    return (FolderFiles if kind == "firefox" else Folder)(path)


def verify_bundle(
    bundle: Path, manifest: Manifest, path: Path, options: ExportOptions = NO_OPTIONS, *, kind: Kind
) -> Verification:
    """Compare a bundle on disk, whose files were checked, with its checkpoint.

    The manifest records how the bundle was exported. `options` has the sentences and the tolerance
    of the check. A `FileNotFoundError` names a missing file of a training run; other errors are
    those of `compare`, and `BundleError` for a quantized bundle.
    """
    if manifest.quantization is not None:
        raise BundleError(
            f"{bundle} is {manifest.dtype} and intentionally differs from its checkpoint; verify its float32 bundle"
        )
    options = replace(
        options,
        max_tokens=manifest.limits.max_source_tokens,
        task="rerank" if manifest.pair_template is not None else None,
        half_weights=manifest.half_weights,
        ignored_keys=() if manifest.origin is None else manifest.origin.ignored_keys,
    )
    num_bytes = folder_bytes(path, [hub_cache()]) + 4 * manifest.parameters * FLOAT32_BYTES
    begin_step(f"comparing {bundle} with {path}", num_bytes, CHECK_SPEED)
    checkpoint = open_source(path, kind, options.half_weights)
    return compare(checkpoint, bundle, manifest, options)


def _notes(provenance: Provenance, manifest: Manifest) -> Iterator[str]:
    """Yield notes about weights that were quantized before, and about the memory of a sequence."""
    if provenance.quantized is not None:
        yield (
            f"the weights were quantized before ({provenance.quantized}), so the results only approximate those of the "
            "original model; the manifest records it"
        )
    sizes = {"source": manifest.limits.max_source_tokens, "target": manifest.limits.max_target_tokens}
    num_bytes = sum(math.prod(state.row_shape(sizes)) * FLOAT32_BYTES for state in manifest.states)
    if num_bytes >= LARGE_STATE_BYTES:
        yield (
            f"a sequence of {manifest.limits.max_target_tokens} tokens needs {_giga(num_bytes)} of memory when it is "
            "served; --max-tokens imports the model with a lower limit"
        )


def _origin(export: Export, model: Described, checkpoint: FolderFiles) -> Origin | None:
    """Return the origin of a model that others trained, None for a training run."""
    if export.kind == "training":
        return None
    provenance = export.provenance
    return Origin(
        kind="firefox" if export.kind == "firefox" else "huggingface",
        family=model.family,
        repository=provenance.repository,
        revision=provenance.revision,
        package=provenance.package,
        quantized=provenance.quantized,
        pickle=isinstance(checkpoint, Folder) and checkpoint.is_pickle,
        ignored_keys=export.options.ignored_keys,
        files=dict(sorted({**checkpoint.files, **provenance.files}.items())),
    )


def _check_memory(num_bytes: int) -> None:
    """Check the memory for weights of this size, which ONNX Runtime holds in the verification.

    The whole export of a model with 538 MB of weights was measured at 1,006 MB.
    """
    needed, available = BASE_BYTES + num_bytes, available_memory()
    if available is not None and needed > available:
        raise ImportFailedError(
            f"the import needs about {_giga(needed)} of memory, but {_giga(available)} are available; end other "
            "programs, or import on a machine with more memory and copy the bundle"
        )


def _giga(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def check(export: Export, folder: Path, manifest: Manifest, guided: Guided | None) -> Manifest:
    """Check a written bundle; return its manifest with the verification and the chosen heads.

    `guided` is the step, layer and head of the cross-attention that was trained to align words.
    """
    check_serving(folder, manifest)
    changes: dict[str, Any] = {"verification": compare(export.open(), folder, manifest, export.options)}
    if manifest.cross_attention is not None:
        sessions, sentences = open_sessions(folder, manifest), export.options.sentences
        changes["alignment"] = choose_alignment(sessions, folder, sentences, guided)
        changes["coverage"] = choose_coverage(sessions, folder, sentences)
    return manifest.model_copy(update=changes)


def compare(checkpoint: FolderFiles, bundle: Path, manifest: Manifest, options: ExportOptions) -> Verification:
    """Compare a written bundle with its checkpoint.

    The reference of recurrent models is PyTorch, that of all others NumPy.

    Raises:
        VerificationError: a difference is larger than rounding explains.
        BundleError: the tokenizer of the bundle is not that of the checkpoint.
        ImportFailedError: the checkpoint is not supported.
    """
    model = describe_source(checkpoint, options)
    for file, tokenizer in model.tokenizers.items() if isinstance(checkpoint, TrainingRun) else ():
        if Tokenizer.from_file(str(bundle / file)).to_str() != tokenizer.to_str():
            raise BundleError(
                f"{bundle / file} differs from the tokenizer of the checkpoint; name the checkpoint that was exported"
            )
    if not isinstance(checkpoint, TrainingRun) and model.chat != manifest.chat:
        raise BundleError(
            f"{bundle} formats dialogues in another way than the chat template of the checkpoint; export it again"
        )
    tokenizer = model.tokenizers[model.source_tokenizer]
    if model.recurrent is not None:
        from sightline.export.check import recurrent_check

        sessions = open_sessions(bundle, manifest)
        return recurrent_check.verify(sessions, model.recurrent, tokenizer, options.sentences, options.tolerance)
    assert model.model is not None and model.weights is not None, "only recurrent models have no description"
    sentences = [encoding.ids for encoding in tokenizer.encode_batch(list(options.sentences))]
    return verify(bundle, manifest, model.model, model.weights, sentences, options.tolerance)
