"""Initial weights of a run: those of another run, or of a checkpoint that others trained."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from sightline.base.errors import UsageError
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import build_model
from sightline.model.architectures.pretrained import LABELLED, PretrainedModel, check_names
from sightline.model.checkpoint import load_tensors, one_line
from sightline.model.config import (
    OWN_TASKS,
    RELEVANCE,
    ArchitectureConfig,
    ClassifierConfig,
    PretrainedConfig,
    RecurrentConfig,
    architecture_of,
    read_model_config,
    task_of,
)
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.parts import CONFIG, TOKENIZER, load_parts, weights_file


@dataclass(frozen=True)
class Start:
    """Model and tokenizer with which a run starts."""

    config: ArchitectureConfig
    tokenizer: Tokenizer
    initialise: Callable[[nn.Module], None]  # sets the weights of a new model of this configuration
    note: str  # for the user, if the labels are new


def start_from(
    folder: Path, task: str, labels: Sequence[str] = (), parts: Path | None = None, *, multi_label: bool = False
) -> Start:
    """Prepare a run that starts from a checkpoint.

    Args:
        folder: the checkpoint, such as `averaged` of a run.
        labels: labels of the new run, if its task has any.
        parts: folder with the configuration and the tokenizer of a third-party checkpoint
            (`sightline.model.parts`); None for a checkpoint of this project.

    Raises:
        UsageError: the folder has no checkpoint, or one that cannot be trained for the task.
        FileNotFoundError, ValueError: a file of a run is missing or damaged.
    """
    if parts is None:
        config, tokenizer = _own_parts(folder, task)
    else:
        config, tokenizer = read_model_config(parts / CONFIG), read_tokenizer(parts / TOKENIZER)
    before: Sequence[str] = getattr(config, "labels", ())
    if isinstance(config, ClassifierConfig):
        config = dataclasses.replace(config, labels=tuple(labels))
    elif isinstance(config, PretrainedConfig) and task in LABELLED:
        labels = (RELEVANCE,) if task == "reranking" else labels
        config = dataclasses.replace(config, labels=tuple(labels), multi_label=multi_label)
    # Compare the shapes of the weights with those of the model before it gets any memory.
    try:
        with torch.device("meta"):
            model = build_model(config)
    except Exception as error:  # third-party values that no model can have raise several classes
        raise UsageError(f"{folder / CONFIG} describes no model: {one_line(error)}; download it again") from None
    _load(folder, before, model)
    note = "" if set(labels) <= set(before) else f"; the output layer is new, for the labels {', '.join(labels)}"
    return Start(config, tokenizer, partial(_load, folder, before), note)


def _own_parts(folder: Path, task: str) -> tuple[ArchitectureConfig, Tokenizer]:
    """Return configuration and tokenizer of a checkpoint of this project for a task."""
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder} has no {CONFIG}; --from needs a run folder, or the folder of a checkpoint in the layout of "
            f"Hugging Face with {CONFIG}, model.safetensors and the files of its tokenizer"
        )
    config, tokenizer = load_parts(folder)
    if task_of(config) != task:
        way_out = "use a run of that task" if task in OWN_TASKS else "use a third-party encoder"
        raise UsageError(
            f"{folder} is a model of architecture {architecture_of(config)}, which cannot be trained for the task "
            f"{task}; {way_out}"
        )
    if isinstance(config, RecurrentConfig) and config.selection != "soft":
        raise UsageError(f"{folder} has hard attention, which cannot be trained for the task {task}; use another run")
    return config, tokenizer


def _load(folder: Path, before: Sequence[str], model: nn.Module) -> None:
    """Set the weights of a model to those of a checkpoint with the labels `before`. If one of the
    labels of the model is new, the output layer keeps its random weights.
    """
    if isinstance(model, PretrainedModel):
        model.load(folder, before)
        return
    is_meta = all(parameter.is_meta for parameter in model.parameters())  # it has only shapes
    weights, output = load_tensors(weights_file(folder), only_shapes=is_meta), set[str]()
    if isinstance(model, Classifier):
        labels, output = model.config.labels, {"output.weight", "output.bias"}
        rows = [before.index(label) for label in labels] if set(labels) <= set(before) else None
        for name in output & weights.keys():
            tensor = weights.pop(name)
            weights |= {} if rows is None else {name: tensor[rows]}
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of shapes
        raise UsageError(f"{folder}: {one_line(error)}; its files belong to different checkpoints") from None
    check_names(folder, [name for name in found.missing_keys if name not in output], found.unexpected_keys)
