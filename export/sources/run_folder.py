"""Folder of a training run: its checkpoints, and the record of the training.

The trainer writes `record.json` and its settings, `train.json`, into the folder of the run. Runs of
early versions have no record; those of later ones had the settings in both files.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sightline.base.errors import UsageError
from sightline.model.config import read_fields, read_model_config
from sightline.model.parts import AVERAGED, BEST, CONFIG, TOKENIZER, WEIGHTS

RECORD, SETTINGS, EPOCHS = "record.json", "train.json", "epochs"
# Files that a trainer writes into the folder of a run, and no checkpoint has.
_OF_RUNS = (SETTINGS, "state.safetensors", "log.jsonl")
# Settings with another meaning in the files of earlier versions, unless the data have them.
_OF_DATA = ("source", "target", "vocab_size")
# Weights of a checkpoint of this project, and of a Hugging Face folder.
_WEIGHTS = (WEIGHTS, "model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class TaskWords:
    """Words for the models of a task."""

    model: str  # kind of their architecture
    description: str
    tag: str  # `pipeline_tag` of Hugging Face


TASKS = {
    "translation": TaskWords("an encoder-decoder", "Translation", "translation"),
    "classification": TaskWords("an encoder", "Classification of texts", "text-classification"),
    "language-model": TaskWords("a decoder", "Language model", "text-generation"),
    "encoder": TaskWords("an encoder", "Embeddings of texts", "sentence-similarity"),
    "reranking": TaskWords("an encoder", "Relevance of documents to a query", "text-ranking"),
    "tagging": TaskWords("an encoder", "Entities of texts", "token-classification"),
}


class Metric(BaseModel):
    """Value of a metric, and how it was computed."""

    model_config = ConfigDict(frozen=True)

    value: float
    examples: int | None = None  # number of texts, pairs or dialogues
    search: str | None = None  # such as "greedy"
    weights: str | None = None  # such as "averaged"
    signature: str | None = None  # of sacreBLEU
    interval: tuple[float, float] | None = None  # of 95 %


class Errors(BaseModel):
    """Errors of a model on a split."""

    model_config = ConfigDict(frozen=True)

    confusion: dict[str, dict[str, int]] = {}  # number of texts by expected and predicted label
    worst: list[dict[str, Any]] = []  # examples with the output of the model


class RunRecord(BaseModel):
    """Facts of a training run that its bundle and its model card repeat; each may be missing."""

    model_config = ConfigDict(frozen=True)

    task: str | None = None  # one of `TASKS`
    command: str | None = None
    license: str | None = None  # license of the weights, as given by the user
    source: str | None = None  # BCP 47 tags of a translation model
    target: str | None = None
    examples: dict[str, int | None] = {}  # number by split
    metrics: dict[str, dict[str, Metric | float | None] | None] = {}  # by split and name
    errors: dict[str, Errors] = {}  # by split, if the model was evaluated
    data: dict[str, str] = {}  # SHA-256 of each file by name
    config: dict[str, Any] = {}  # settings of the training, by the file of the settings if there is one
    starts: list[dict[str, Any]] = []  # facts of each start or resume, with the versions of libraries
    has_dialogues: bool | None = None  # a language model was trained on messages of a chat

    @property
    def description(self) -> str:
        """Description of the model in one line, empty if the task is not known."""
        if self.task == "language-model" and self.has_dialogues:
            return "Chat"
        words = "" if self.task not in TASKS else TASKS[self.task].description
        is_pair = self.task == "translation" and self.source and self.target
        return f"{words} from {self.source} to {self.target}" if is_pair else words


def read_record(checkpoint: Path) -> RunRecord | None:
    """Return the record of the run that a checkpoint belongs to, None if there is none.

    The checkpoint is a folder such as `averaged` in that of the run; one of this project can have a
    record of its own. Raises `ValueError` if a file is not JSON, or a field has another type.
    """
    folders = [checkpoint] if (checkpoint / WEIGHTS).is_file() else []
    checkpoint = checkpoint.absolute()  # "." has no name
    if checkpoint.name in (AVERAGED, BEST):
        folders.append(checkpoint.parent)
    path = next((folder / RECORD for folder in folders if (folder / RECORD).is_file()), None)
    if path is None:
        return None
    try:
        record = RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise ValueError(f"{path} is not the record of a training run: {problem}; correct or remove the file") from None
    settings = path.with_name(SETTINGS)
    fields = read_fields(settings) if settings.is_file() else record.config
    return record.model_copy(update={"config": {k: v for k, v in fields.items() if k not in _OF_DATA}})


def is_run(path: Path) -> bool:
    """Return True for the folder of a training run, which contains checkpoints but is none."""
    if not path.is_dir() or _has_weights(path):
        return False
    if any((path / name).is_file() for name in (*_OF_RUNS, RECORD)):
        return True
    return any(_has_weights(path / name) for name in (AVERAGED, BEST)) or bool(_epochs(path))


@contextmanager
def run_checkpoint(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the checkpoint to export: of a run folder one of its own, otherwise the path itself.

    A run folder has `averaged` when its training has finished. Otherwise the weights of its last
    epochs are averaged in a temporary folder, or `best` is used, and the second value is a note
    that states it. Otherwise it is empty. A run without a checkpoint is a `UsageError`, damaged
    weights of an epoch are a `ValueError`.
    """
    if not is_run(path):
        yield path, ""
        return
    if _has_weights(path / AVERAGED):
        yield path / AVERAGED, ""
        return
    epochs, parts = _epochs(path), next(filter(_has_parts, (path, path / BEST)), None)
    if epochs and parts is not None:
        names = epochs[0].stem if len(epochs) == 1 else f"{epochs[0].stem} to {epochs[-1].stem}"
        with TemporaryDirectory(prefix="sightline-") as temporary:
            note = f"{path} has no {AVERAGED}/; used is the mean of the {len(epochs)} epochs in {EPOCHS}/, {names}"
            yield _averaged(path, parts, epochs, Path(temporary)), note
        return
    if not _has_weights(path / BEST):
        raise UsageError(
            f"{path} is a training run without a checkpoint: it has no weights in {AVERAGED}/, {EPOCHS}/ or {BEST}/; "
            "train it for at least one epoch"
        )
    yield path / BEST, f"{path} has no {AVERAGED}/, and no epochs that can be averaged; used is {BEST}/"


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _WEIGHTS)


def _epochs(run: Path) -> list[Path]:
    return sorted((run / EPOCHS).glob("*.safetensors"), key=lambda path: (len(path.stem), path.stem))


def _has_parts(folder: Path) -> bool:
    """Return True if a folder has a configuration and a tokenizer of this project."""
    try:
        read_model_config(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return (folder / TOKENIZER).is_file()


def _averaged(run: Path, parts: Path, epochs: list[Path], out: Path) -> Path:
    """Write the checkpoint with the mean weights of several epochs to an empty folder.

    `run` may have a record. `parts` has the configuration and the tokenizer.
    """
    from sightline.model.checkpoint import average, save_tensors  # with PyTorch

    for source in (parts / CONFIG, parts / TOKENIZER, run / RECORD, run / SETTINGS):
        if source.is_file():
            shutil.copy2(source, out / source.name)
    save_tensors(out / WEIGHTS, average(epochs))
    return out
