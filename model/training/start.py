"""Initial weights of a run: those of another run, or of a checkpoint that others trained."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn

from sightline.base.errors import UsageError
from sightline.model.architectures.bert import BertClassifier
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import build_model
from sightline.model.checkpoint import load_tensors, one_line, read_safetensors
from sightline.model.config import (
    ArchitectureConfig,
    ClassifierConfig,
    PretrainedConfig,
    RecurrentConfig,
    architecture_of,
)
from sightline.model.data.chat_template import end_token, read_chat_template
from sightline.model.data.pretrained import (
    CHAT_TEMPLATE,
    FAMILIES,
    WEIGHTS,
    is_pretrained,
    read_pretrained,
    with_end_token,
)
from sightline.model.parts import CONFIG, checkpoint_of, load_parts, weights_file

PICKLE = "pytorch_model.bin"
# Architectures of our own models by task. Another architecture may be trained for the same task.
TASK_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "translation": ("transformer", "recurrent"),
    "classification": ("classifier",),
    "language-model": ("causal",),
    "encoder": ("encoder",),
}
# Tensors that no model needs: positions that older versions stored.
_STORED_POSITIONS = ("embeddings.position_ids", "embeddings.token_type_ids", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class Start:
    """Model and tokenizer with which a run starts."""

    config: ArchitectureConfig
    tokenizer: Tokenizer
    # Sets the weights of a new model of this configuration. Layers that the checkpoint does not
    # have, such as the output layer for new labels, keep their random weights.
    initialise: Callable[[nn.Module], None]
    notes: tuple[str, ...]  # sentences for the user


def start_from(
    path: Path,
    task: str,
    labels: Sequence[str] = (),
    *,
    multi_label: bool = False,
    chat_template: str | None = None,
) -> Start:
    """Prepare a run that starts from a checkpoint.

    Args:
        path: a run folder, one of its checkpoints, or a folder in the layout of Hugging Face.
        labels: labels of the new run, if it is a classification.
        multi_label: a text has any number of labels.
        chat_template: Jinja template for dialogues, for a third-party checkpoint that has none;
            None if the data has no dialogues.

    Raises:
        UsageError: the folder has no checkpoint, or one that cannot be trained for the task.
        FileNotFoundError, ValueError: a file of a run is missing or damaged.
    """
    folder = checkpoint_folder(path)
    if is_pretrained(folder):
        return _start_from_pretrained(folder, task, labels, multi_label, chat_template)
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder} has no {CONFIG}; --from needs a run folder, or the folder of a checkpoint in the layout of "
            f"Hugging Face with {CONFIG}, {WEIGHTS} and tokenizer.json"
        )
    config, tokenizer = load_parts(folder)
    if architecture_of(config) not in TASK_ARCHITECTURES.get(task, ()):
        raise UsageError(
            f"{folder} is a model of architecture {architecture_of(config)}, which cannot be trained for the task "
            f"{task}; use a run of that task"
        )
    if isinstance(config, RecurrentConfig) and config.selection != "soft":
        raise UsageError(f"{folder} has hard attention, which cannot be trained for the task {task}; use another run")
    old = config
    if isinstance(old, ClassifierConfig):
        config = dataclasses.replace(old, labels=tuple(labels))
    note = f"starts from the weights of {folder}"
    before = old.labels if isinstance(old, ClassifierConfig) else ()
    notes = (note, *_label_note(before, labels))

    def initialise(model: nn.Module) -> None:
        weights = load_tensors(weights_file(folder), only_shapes=_is_meta(model))
        if isinstance(model, Classifier):
            weights = _with_labels(weights, "output", before, labels)
        _load(model, weights, folder, new=("output.",) if isinstance(model, Classifier) else ())

    return _checked(folder, Start(config, tokenizer, initialise, notes))


def checkpoint_folder(path: Path) -> Path:
    """Return the averaged or else the best checkpoint of a run, or the folder itself."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; --from needs a run folder, or the folder of a checkpoint")
    return checkpoint_of(path)


def _start_from_pretrained(
    folder: Path, task: str, labels: Sequence[str], multi_label: bool, chat_template: str | None
) -> Start:
    if task not in ("classification", "encoder", "language-model"):
        raise UsageError(
            f"{folder} is a third-party checkpoint, which cannot be trained for the task {task}; supported are "
            "classification, encoder and language-model"
        )
    config, tokenizer = read_pretrained(
        folder,
        task,  # type: ignore[arg-type]
        labels if task == "classification" else None,
        multi_label=multi_label,
    )
    _find_weights(folder)
    before: tuple[str, ...] = ()
    if config.task == "classification" and _is_classifier(config):
        before = read_pretrained(folder, "classification")[0].labels
    notes = [f"starts from the weights of {folder} ({config.family})", *_label_note(before, labels)]
    if chat_template is not None:
        if read_chat_template(config) is None:
            config = dataclasses.replace(config, files={**config.files, CHAT_TEMPLATE: chat_template})
            notes.append(f"{folder} has no chat template, so that of Sightline is used")
        config = with_end_token(config, tokenizer, end_token(config, tokenizer))

    def initialise(model: nn.Module) -> None:
        weights = adapted(read_weights(folder, only_shapes=_is_meta(model)), config, keeps_head=bool(before))
        new: tuple[str, ...] = ("pooler.",)
        if isinstance(model, BertClassifier):
            weights = _with_labels(weights, model.output_name, before, labels)
            new = (f"{FAMILIES[config.family].prefix}pooler.", "classifier.", "pre_classifier.")
        _load(model, weights, folder, new)

    return _checked(folder, Start(config, tokenizer, initialise, tuple(notes)))


def _checked(folder: Path, start: Start) -> Start:
    """Compare the shapes of the weights with those of the model before it gets any memory. Raises
    `UsageError` if they differ, or the configuration describes no model.
    """
    try:
        with torch.device("meta"):
            model = build_model(start.config)
    except Exception as error:  # third-party values that no model can have raise several classes
        raise UsageError(f"{folder / CONFIG} describes no model: {one_line(error)}; download it again") from None
    start.initialise(model)
    return start


def _is_meta(model: nn.Module) -> bool:
    """Return True for a model that has only shapes."""
    return all(parameter.is_meta for parameter in model.parameters())


def _is_classifier(config: PretrainedConfig) -> bool:
    """Return True if the checkpoint was a classifier before."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.value("architectures", []))


def _label_note(before: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """Return a note if the labels are new."""
    if not labels or set(labels) <= set(before):
        return ()
    return (f"the output layer is new, for the labels {', '.join(labels)}",)


def _with_labels(
    weights: dict[str, Tensor], layer: str, before: Sequence[str], labels: Sequence[str]
) -> dict[str, Tensor]:
    """Choose the rows of the output layer for the labels, or leave it out if one of them is new."""
    names = [f"{layer}.weight", f"{layer}.bias"]
    if not set(labels) <= set(before):
        return {name: tensor for name, tensor in weights.items() if name not in names}
    rows = [before.index(label) for label in labels]
    return {name: tensor[rows] if name in names else tensor for name, tensor in weights.items()}


def _load(model: nn.Module, weights: Mapping[str, Tensor], folder: Path, new: tuple[str, ...]) -> None:
    """Set the weights of a model, by the names of its state dictionary. Only tensors whose names
    start with one of `new` may be missing; none may be unknown or have another shape.
    """
    expected = model.state_dict()
    missing = [name for name in expected if name not in weights and not name.startswith(new)]
    unknown = [name for name in weights if name not in expected]
    for problem, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UsageError(
                f"{folder} {problem} tensors: {', '.join(sorted(names)[:3])}{more}; its configuration may belong to "
                "another checkpoint, or it is a variant that cannot be trained"
            )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise UsageError(
                f"{folder}: {name} has the shape {list(tensor.shape)}, but config.json gives "
                f"{list(expected[name].shape)}; the files belong to different checkpoints"
            )
    model.load_state_dict(weights, strict=False)


def _find_weights(folder: Path) -> list[Path]:
    """Return the files with the weights of a third-party checkpoint."""
    for name in (WEIGHTS, PICKLE):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if not index.is_file():
            continue
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            paths = [folder / Path(str(file_name)).name for file_name in names]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{index} has no valid weight_map ({error}); download it again") from None
        for path in paths:
            if not path.is_file():
                raise UsageError(f"{path} is missing, but {index.name} names it; download it")
        return paths
    raise UsageError(f"{folder} has no weights: it needs {WEIGHTS}, or {PICKLE}; download them")


def read_weights(folder: Path, *, only_shapes: bool = False) -> dict[str, Tensor]:
    """Read the weights of a third-party checkpoint as float32. No code in a pickle is run. With
    `only_shapes`, they are on the device "meta", without values.
    """
    weights: dict[str, Tensor] = {}
    for path in _find_weights(folder):
        try:
            if path.suffix == ".safetensors":
                weights |= read_safetensors(path, only_shapes=only_shapes)
            else:
                weights |= torch.load(path, map_location="meta" if only_shapes else "cpu", weights_only=True)
        except SafetensorError as error:
            raise UsageError(f"{path} is damaged or truncated: {error}; download it again") from None
        except Exception as error:  # of `torch.load`: several classes
            raise UsageError(f"{path} cannot be read: {one_line(error)}; use a checkpoint with {WEIGHTS}") from None
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def adapted(weights: Mapping[str, Tensor], config: PretrainedConfig, *, keeps_head: bool) -> dict[str, Tensor]:
    """Return the weights by the names of the model to train, without those that it does not need.
    `keeps_head` keeps the head, because the checkpoint is a classifier.
    """
    family = FAMILIES[config.family]
    has_prefix = any(name.startswith(family.prefix) for name in weights)
    keeps_pooler = config.has_pooler or (config.family == "bert" and config.task == "classification")
    kept: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        inner = name.removeprefix(family.prefix)
        is_base = name.startswith(family.prefix) or not has_prefix
        if inner.endswith(_STORED_POSITIONS):
            continue
        if not is_base and not keeps_head and not (name == "lm_head.weight" and config.task == "language-model"):
            continue  # the head of another task
        if is_base and inner.startswith("pooler.") and not keeps_pooler:
            continue
        if is_base:
            # Old checkpoints have the names of TensorFlow for normalizations.
            inner = inner.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            name = inner if config.task == "encoder" else family.prefix + inner
        kept[name] = tensor
    return _with_output(kept, config) if config.task == "language-model" else kept


def _with_output(weights: dict[str, Tensor], config: PretrainedConfig) -> dict[str, Tensor]:
    """Leave out an output layer that is the embedding; use the embedding if there is no other.
    Raises `UsageError` if both differ although config.json states that they are the same.
    """
    output, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if config.value("tie_word_embeddings", config.family == "smollm3"):
        if output is not None and embedding is not None and not (output.is_meta or torch.equal(output, embedding)):
            raise UsageError(
                "the checkpoint has an lm_head.weight that differs from the embedding, although tie_word_embeddings in "
                "config.json is true; set it to false"
            )
        return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    return weights
