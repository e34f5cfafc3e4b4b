"""Opening of a source by its kind."""

from collections.abc import Iterable
from pathlib import Path

from sightline.export.options import Kind
from sightline.export.sources.opened_checkpoint import FolderFiles, open_folder
from sightline.export.sources.training_run import TrainingRun


def open_source(path: Path, kind: Kind, allowed: Iterable[Path] = (), half_weights: bool = False) -> FolderFiles:
    """Open a checkpoint of a kind, see `sightline.export.sources.opened_checkpoint.detect_kind`.

    Symbolic links of a Hugging Face or Firefox folder may lead into folders of `allowed`.
    `half_weights` rounds the matrices of a training run to float16. Raises `FileNotFoundError` if a
    file of a run is missing, and `ValueError` for other errors.
    """
    if kind == "training":
        return TrainingRun(path, half_weights)
    return FolderFiles(path, allowed) if kind == "firefox" else open_folder(path, allowed)
