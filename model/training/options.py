"""Settings and options of `sightline train TASK`, on the command line and in files. They need no
PyTorch.

A setting of a run is declared once, in `TrainConfig`: its type and limits, its default and its
documentation, from which follow its option and its check in the file of a run. `auto` means that
the data decide (see `sightline.model.training.recipe`), and an empty text that the option is not
used.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, create_model, model_validator

from sightline.base.errors import UsageError
from sightline.base.options import (
    STATES_DEFAULT,
    Given,
    Options,
    Shown,
    check,
    flag_name,
    given_keys,
    read_toml,
    to_toml,
)
from sightline.model.config import Count, Decoder, LearningRate, Limit, Minutes, Norm, Probability, Seed, read_fields
from sightline.model.data.files import known_encoding
from sightline.model.data.records import TASK_NAMES, TaskName

AUTO = "auto"  # value of an option that the data decide
MAX_LENGTH_TOKENS = 512  # of an example, if the user gives no other limit
LABEL_SMOOTHING: Mapping[TaskName, float] = {"translation": 0.1}  # other tasks: 0

TASK_KEY = "task"  # key of a configuration file that names its task

Auto = Literal["auto"]
Column = Annotated[str, Shown("COLUMN")]
Size = Literal["tiny", "small", "base"]
Precision = Literal["float32", "bfloat16"]
Metric = Literal["loss", "accuracy", "macro_f1"]


@dataclass(frozen=True)
class Setting:
    """Properties of a setting besides its type and its default."""

    is_chosen: bool = False  # the data decide it if the user does not
    may_change: bool = False  # when a run is resumed, because it does not change what an update does
    tasks: tuple[TaskName, ...] = TASK_NAMES  # that have the option


_CHOSEN = Setting(is_chosen=True)
_LENGTH = Setting(is_chosen=True, may_change=True)
_CHANGEABLE = Setting(may_change=True)


class TrainConfig(Options):
    """Settings of a training run, by default the Multi30k recipe of Wu et al. 2021 with half its
    batch size and more clipping.
    """

    max_length_tokens: Annotated[Count, _CHOSEN] = Field(
        default=128,
        description="length of the longest example; longer texts of classification and encoder are truncated, and "
        "longer pairs and exchanges dropped (default: "
        f"{MAX_LENGTH_TOKENS}, or the positions of the model of --from if it has fewer)",
    )
    epochs: Annotated[Count, _LENGTH] = 150
    """most passes over the training data"""
    minutes: Annotated[Minutes, _CHANGEABLE] = 0.0
    """end the training after this time; 0: no limit; only updates and the validations between them
    count, not the check of the data, the tokenizer, the encoding and the last validation"""
    patience_epochs: Annotated[Count, _LENGTH] = 15
    """epochs without a lower dev loss, or a better value of another --metric, after which the
    training ends"""
    evaluate_epochs: Annotated[Count, _LENGTH] = 1
    """epochs from one validation on dev to the next"""
    average_last: Annotated[Count, _LENGTH] = 10
    """number of last epochs whose weights are averaged"""
    batch_tokens: Annotated[Count, _CHOSEN] = 4096
    """most tokens of a batch, padding included"""
    accumulate: Annotated[Count, Setting()] = 1
    """batches whose gradients are added for an update; the task encoder compares texts only within
    a batch, so that only a larger batch_tokens gives it more wrong texts to compare with"""
    # 5e-3 of the recipe, divided by sqrt(2) for half the batch size.
    learning_rate: Annotated[LearningRate, _CHOSEN] = 3.5e-3
    """largest learning rate"""
    warmup_steps: Annotated[Count, _CHOSEN] = 2000
    """updates until the largest learning rate is reached"""
    label_smoothing: Annotated[Probability, _CHOSEN] = Field(
        default=0.1,
        description="share of probability that the loss gives to other tokens or labels (default: "
        + "".join(f"{share:g} for {task}, " for task, share in LABEL_SMOOTHING.items())
        + "otherwise 0)",
    )
    clip_norm: Annotated[Norm, Setting()] = 1.0
    """largest norm of the gradients of an update"""
    seed: Annotated[Seed, Setting()] = 1
    """seed of the initial weights, the order of batches, dropout, and the sample of texts for a
    tokenizer"""
    precision: Annotated[Precision, _CHOSEN] = "float32"
    """number format of matrix products (default: bfloat16 on a GPU, otherwise float32)"""
    threads: Annotated[Limit, _CHANGEABLE] = 0
    """threads on the CPU; 0: as many as PyTorch chooses"""
    checkpoint_minutes: Annotated[Minutes, _CHANGEABLE] = 4.0
    """minutes between checkpoints within an epoch; 0: none"""
    checkpoint_steps: Annotated[Limit, _CHANGEABLE] = 0
    """updates between checkpoints within an epoch; 0: none"""
    lora: Annotated[Limit, Shown("RANK"), Setting(tasks=("translation", "language-model"))] = 0
    """rank of low-rank updates (LoRA) that are trained instead of all weights of a third-party
    checkpoint, which needs less memory, such as 16; 0: train all weights"""
    metric: Annotated[Metric, Setting(tasks=("classification",))] = "loss"
    """value of dev that determines the best epoch, up to which weights are averaged, and the end of
    the training; accuracy with --multi-label is that of all labels of a text"""

    @model_validator(mode="after")
    def _check_longest(self) -> Self:
        if self.max_length_tokens > self.batch_tokens:
            raise ValueError(
                f"max_length_tokens: must be at most --batch-tokens ({self.batch_tokens}), got "
                f"{self.max_length_tokens}: the longest example must fit into a batch; increase --batch-tokens, or "
                "decrease --max-length-tokens"
            )
        return self


SETTINGS: Mapping[str, Setting] = {
    name: next(part for part in field.metadata if isinstance(part, Setting))
    for name, field in TrainConfig.model_fields.items()
}
CHANGEABLE = frozenset({"license", *(name for name, setting in SETTINGS.items() if setting.may_change)})
# Settings that depend on the number of epochs and that no update depends on, so that they can be
# chosen again when a run gets another number. The warm-up depends on it too, but is part of the
# schedule of the updates that the run has made.
SETTINGS_OF_LENGTH = frozenset(name for name, setting in SETTINGS.items() if setting == _LENGTH)
# Names that earlier versions wrote.
_EARLIER = {"max_epochs": "epochs", "max_minutes": "minutes", "peak_learning_rate": "learning_rate"}
_LEFT_OUT = ("source", "target", "vocab_size", "tensorboard")


def make_config(options: Mapping[str, Any]) -> TrainConfig:
    """Return the settings among options by their names; those that are missing or "auto" have their
    defaults. Raises `UsageError` if they contradict each other.
    """
    given = {name: value for name, value in options.items() if name in SETTINGS and value != AUTO}
    return check(TrainConfig, {name: (flag_name(name), value) for name, value in given.items()})


def goal_of(metric: str) -> str:
    """Return the name of the value of dev that determines the best epoch."""
    return "dev loss" if metric == "loss" else f"{metric.replace('_f1', ' F1')} of dev"


def changed_options(earlier: Options, later: Options) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, by name, with both values."""
    after = later.model_dump()
    return {name: (value, after[name]) for name, value in earlier if after[name] != value}


def read_train_config(path: Path) -> TrainConfig:
    """Read the settings in the JSON file of a run; missing ones get their defaults. A `ValueError`
    names the file and the field.
    """
    fields = {_EARLIER.get(name, name): value for name, value in read_fields(path).items() if name not in _LEFT_OUT}
    try:
        return check(TrainConfig, given_keys(TrainConfig, fields, path))
    except UsageError as error:  # the file is damaged, and no option is wrong
        raise ValueError(error) from None


class TrainOptions(Options):
    """Options of all tasks, besides those of `TrainConfig`."""

    has_file = True
    task: ClassVar[TaskName]

    split_seed: Seed = 1
    """seed of the division into train and dev of data that have no dev"""
    encoding: Annotated[str, AfterValidator(known_encoding), Shown("NAME")] = ""
    """encoding of the files of DATA, such as cp1252 (default: UTF-8, or UTF-16 with a byte order
    mark)"""
    license: Annotated[str, Shown("TEXT")] = ""
    """license of the data, as the exported model will state it"""
    size: Auto | Size = "auto"
    """size of the model (default: chosen from the data)"""
    from_: Annotated[str, Shown("CHECKPOINT")] = ""
    """start from the weights of a run, or of a third-party checkpoint: a folder, a GGUF file,
    OWNER/NAME of a hub, or a name of the catalogue"""
    tokenizer: Annotated[str, Shown("FILE")] = ""
    """use this tokenizer.json instead of training one"""
    vocab_size: Annotated[int, Ge(1), Le(2**20)] | Auto = "auto"
    """number of tokens of the tokenizer that is trained (default: chosen from the data)"""
    dropout: Probability | Auto = "auto"
    """probability of dropout in the model (default: chosen from the data)"""


class _SideOptions(Options):
    source: Annotated[str, Shown("NAME")] = ""
    """language of the sources as BCP 47 tag, such as en or de-CH, which the exported model states;
    it is in the name of their files if there are two for each split, selects the texts of TMX and
    XLIFF, or is their column or field; a column, or an ending for encoder, may have another name,
    such as question"""
    target: Annotated[str, Shown("NAME")] = ""
    """language of the targets, likewise"""


class TranslationOptions(TrainOptions, _SideOptions):
    """Train a model on pairs of source and target."""

    task = "translation"
    example = "data/pairs --source en --target de --run runs/en-de"

    decoder: Decoder = "transformer"
    """kind of the decoder; ssru has recurrent units in place of self-attention and at most two
    layers, and translates faster"""
    guided_alignment: Annotated[str, Shown("FILE")] = ""
    """train one head to align words, to the links of a file with a line such as 0-0 1-2 for each
    pair of train; auto: train.align beside the files of train, or else links that the model finds
    itself after a part of the training"""
    teacher: Annotated[str, Shown("BUNDLE")] = ""
    """train on translations of the sources by this bundle, with beam search, in place of the
    targets of train"""


class _TextOptions(Options):
    text: Column = ""
    """column or field of the texts; a number if the file does not name its columns (default:
    text)"""


class ClassificationOptions(TrainOptions, _TextOptions):
    """Train a model on texts with labels."""

    task = "classification"
    example = "data/messages.csv --run runs/messages"

    label: Column = ""
    """column or field of the labels, likewise (default: label)"""
    multi_label: bool = False
    """a text has any number of labels instead of one"""
    class_weights: bool = False
    """let all labels count equally in the loss, also rare ones"""


class LanguageModelOptions(TrainOptions, _TextOptions):
    """Train a model on texts, or dialogues as chat APIs have them."""

    task = "language-model"
    example = "data/dialogues.jsonl --run runs/chat"


class EncoderOptions(TrainOptions, _SideOptions):
    """Train a model on texts that belong together, for an embedding model.

    They are pairs, triplets with negatives, or pairs with scores.
    """

    task = "encoder"
    example = "data/pairs.tsv --run runs/search"


class RerankingOptions(TrainOptions, _SideOptions):
    """Train a reranker on the files of an embedding model, starting from a third-party encoder."""

    task = "reranking"
    example = "data/triplets.jsonl --run runs/reranker --from minilm"


class TaggingOptions(TrainOptions):
    """Train a model on texts with entities, such as names."""

    task = "tagging"
    example = "data/names.conll --run runs/names"


def _with_settings(kind: type[TrainOptions]) -> type[TrainOptions]:
    """Add the settings of a task to its options; "auto" stands for those that the data decide."""
    added = dict[str, Any]()
    for name, field in TrainConfig.model_fields.items():
        hint: Any = Annotated[field.annotation, *field.metadata]
        default, text, setting = field.default, field.description or "", SETTINGS[name]
        if setting.is_chosen:
            hint, default = hint | Auto, AUTO
            text += "" if STATES_DEFAULT.search(text) else " (default: chosen from the data)"
        if kind.task in setting.tasks:
            added[name] = hint, Field(default=default, description=text)
    return create_model(kind.__name__, __base__=kind, __doc__=kind.__doc__, **added)


OPTIONS: Mapping[TaskName, type[TrainOptions]] = {
    kind.task: _with_settings(kind)
    for kind in (
        TranslationOptions,
        ClassificationOptions,
        LanguageModelOptions,
        EncoderOptions,
        RerankingOptions,
        TaggingOptions,
    )
}


def read_keys(path: Path, task: TaskName) -> Given:
    """Return the options in a configuration file, which are not checked yet. A `UsageError` names
    the file and the key.
    """
    if not path.exists():
        raise UsageError(f"missing file {path}; write one with --print-config")
    values = read_toml(path)
    values.pop("tensorboard", None)  # of the runs of earlier versions
    file_task = values.pop(TASK_KEY, task)
    if file_task != task:
        shown = json.dumps(file_task, default=str)
        raise UsageError(
            f"{path} is for the task {shown}, not {task}; use a file of this task, or the folder of another run"
        )
    return given_keys(OPTIONS[task], values, path)


def read_options(path: Path, task: TaskName) -> TrainOptions:
    """Read the options in a configuration file. A `UsageError` names the file and the key."""
    return check(OPTIONS[task], read_keys(path, task))


def options_to_toml(options: TrainOptions) -> str:
    """Return a configuration file for `read_options` with all options."""
    return (
        f"# Configuration of `sightline train {options.task}`. Options of the command line override it.\n"
        f'# "{AUTO}" lets the data decide. An empty text means none.\n\n{TASK_KEY} = {json.dumps(options.task)}\n'
        f"{to_toml(type(options), options.model_dump())}"
    )
