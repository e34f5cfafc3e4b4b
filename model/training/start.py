"""Initial weights of a run: those of another run, or of a checkpoint that others trained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from sightline.base.errors import UsageError, list_of
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import build_model
from sightline.model.architectures.pretrained import LABELLED, PretrainedModel
from sightline.model.checkpoint import load_tensors, one_line
from sightline.model.config import (
    RELEVANCE,
    ArchitectureConfig,
    ClassifierConfig,
    PretrainedConfig,
    RecurrentConfig,
    architecture_of,
    read_model_config,
)
from sightline.model.data.records import TASK_NAMES
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.parts import CONFIG, TOKENIZER, load_parts, weights_file

# Architectures of our own models by task. Another architecture may be trained for the same task.
TASK_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "translation": ("transformer", "recurrent"),
    "classification": ("classifier",),
    "tagging": ("tagger",),
    "language-model": ("causal",),
    "encoder": ("encoder",),
    "reranking": (),  # only third-party checkpoints
}

OWN_TASKS = tuple(task for task in TASK_NAMES if TASK_ARCHITECTURES[task])  # that can start from random weights


@dataclass(frozen=True)
class Start:
    """Model and tokenizer with which a run starts."""

    config: ArchitectureConfig
    tokenizer: Tokenizer
    # Sets the weights of a new model of this configuration. Layers that the checkpoint does not
    # have, such as the output layer for new labels, keep their random weights.
    initialise: Callable[[nn.Module], None]
    note: str  # for the user, if the labels are new


def start_from(folder: Path, task: str, labels: Sequence[str] = ()) -> Start:
    """Prepare a run that starts from a checkpoint of this project.

    Args:
        folder: a checkpoint of a run, such as `averaged`.
        labels: labels of the new run, if it is a classification.

    Raises:
        UsageError: the folder has no checkpoint, or one that cannot be trained for the task.
        FileNotFoundError, ValueError: a file of a run is missing or damaged.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder} has no {CONFIG}; --from needs a run folder, or the folder of a checkpoint in the layout of "
            f"Hugging Face with {CONFIG}, model.safetensors and the files of its tokenizer"
        )
    config, tokenizer = load_parts(folder)
    if architecture_of(config) not in TASK_ARCHITECTURES.get(task, ()):
        way_out = "use a run of that task" if task in OWN_TASKS else "use a third-party encoder"
        raise UsageError(
            f"{folder} is a model of architecture {architecture_of(config)}, which cannot be trained for the task "
            f"{task}; {way_out}"
        )
    if isinstance(config, RecurrentConfig) and config.selection != "soft":
        raise UsageError(f"{folder} has hard attention, which cannot be trained for the task {task}; use another run")
    before: Sequence[str] = ()
    if isinstance(config, ClassifierConfig):
        before, config = config.labels, dataclasses.replace(config, labels=tuple(labels))

    def initialise(model: nn.Module) -> None:
        is_meta = all(parameter.is_meta for parameter in model.parameters())  # it has only shapes
        weights = load_tensors(weights_file(folder), only_shapes=is_meta)
        if isinstance(model, Classifier):
            weights = _with_labels(weights, before, labels)
        _load(model, weights, folder, new=("output.",) if isinstance(model, Classifier) else ())

    # Compare the shapes of the weights with those of the model before it gets any memory.
    try:
        with torch.device("meta"):
            model = build_model(config)
    except Exception as error:  # third-party values that no model can have raise several classes
        raise UsageError(f"{folder / CONFIG} describes no model: {one_line(error)}; download it again") from None
    initialise(model)
    return Start(config, tokenizer, initialise, _label_note(before, labels))


def start_from_pretrained(folder: Path, parts: Path, labels: Sequence[str] = (), *, multi_label: bool = False) -> Start:
    """Prepare a run that starts from a checkpoint of others in `folder`.

    `parts` is a folder with its configuration and tokenizer (`sightline.model.data.pretrained`).
    """
    config, tokenizer = cast(PretrainedConfig, read_model_config(parts / CONFIG)), read_tokenizer(parts / TOKENIZER)
    before = config.labels
    if config.task == "reranking":
        labels = (RELEVANCE,)
    if config.task in LABELLED:
        config = dataclasses.replace(config, labels=tuple(labels), multi_label=multi_label)

    def initialise(model: nn.Module) -> None:
        cast(PretrainedModel, model).load(folder, before)

    return Start(config, tokenizer, initialise, _label_note(before, labels))


def _label_note(before: Sequence[str], labels: Sequence[str]) -> str:
    return "" if set(labels) <= set(before) else f"; the output layer is new, for the labels {', '.join(labels)}"


def _with_labels(weights: dict[str, Tensor], before: Sequence[str], labels: Sequence[str]) -> dict[str, Tensor]:
    """Choose the rows of the output layer for the labels, or leave it out if one of them is new."""
    names = ("output.weight", "output.bias")
    if not set(labels) <= set(before):
        return {name: tensor for name, tensor in weights.items() if name not in names}
    rows = [before.index(label) for label in labels]
    return {name: tensor[rows] if name in names else tensor for name, tensor in weights.items()}


def _load(model: nn.Module, weights: Mapping[str, Tensor], folder: Path, new: tuple[str, ...]) -> None:
    """Set the weights of a model, by the names of its state dictionary. Only tensors whose names
    start with one of `new` may be missing; none may be unknown or have another shape.
    """
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of shapes
        raise UsageError(f"{folder}: {one_line(error)}; its files belong to different checkpoints") from None
    missing = [name for name in found.missing_keys if not name.startswith(new)]
    for problem, names in (("lacks", missing), ("has unknown", found.unexpected_keys)):
        if names:
            raise UsageError(
                f"{folder} {problem} tensors: {list_of(sorted(names), 3)}; its configuration may belong to another "
                "checkpoint, or it is a variant that cannot be trained"
            )
