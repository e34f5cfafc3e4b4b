"""Options of `sightline train TASK`, on the command line and in a configuration file. They need no
PyTorch.

`auto` means that the data decide (see `sightline.model.training.recipe`), and an empty text that
the option is not used.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field

from sightline.base.errors import UsageError
from sightline.base.options import Given, Options, Shown, check, flag_name, given_keys, key_of, read_toml, to_toml
from sightline.model.config import Decoder
from sightline.model.data.files import known_encoding
from sightline.model.data.records import TaskName
from sightline.model.training.recipe import LABEL_SMOOTHING, MAX_LENGTH_TOKENS, Size
from sightline.model.training.train_config import Metric, Precision, TrainConfig

AUTO = "auto"
TASK_KEY = "task"  # key of a configuration file that names its task
# Options whose field of TrainConfig has another name.
FIELDS = {"epochs": "max_epochs", "minutes": "max_minutes", "learning_rate": "peak_learning_rate"}

Value: TypeAlias = int | float | bool | str
Auto = Literal["auto"]
Count = Annotated[int, Ge(1)]
Limit = Annotated[int, Ge(0)]
Minutes = Annotated[float, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Dropout = Annotated[float, Ge(0), Le(0.9)]


Column = Annotated[str, Shown("COLUMN")]


class TrainOptions(Options):
    """Options of all tasks."""

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
    dropout: Dropout | Auto = "auto"
    """probability of dropout in the model (default: chosen from the data)"""
    max_length_tokens: Count | Auto = Field(
        default="auto",
        description="length of the longest example; longer texts of classification and encoder are truncated, and "
        "longer pairs and exchanges dropped (default: "
        f"{MAX_LENGTH_TOKENS}, or the positions of the model of --from if it has fewer)",
    )
    epochs: Count | Auto = "auto"
    """most passes over the training data (default: chosen from the data)"""
    minutes: Minutes = TrainConfig.max_minutes
    """end the training after this time; 0: no limit; only updates and the validations between them
    count, not the check of the data, the tokenizer, the encoding and the last validation"""
    patience_epochs: Count | Auto = "auto"
    """epochs without a lower dev loss, or a better value of another --metric, after which the
    training ends (default: chosen from the data)"""
    evaluate_epochs: Count | Auto = "auto"
    """epochs from one validation on dev to the next (default: chosen from the data)"""
    average_last: Count | Auto = "auto"
    """number of last epochs whose weights are averaged (default: chosen from the data)"""
    batch_tokens: Count | Auto = "auto"
    """most tokens of a batch, padding included (default: chosen from the data)"""
    accumulate: Count = TrainConfig.accumulate
    """batches whose gradients are added for an update; the task encoder compares texts only within
    a batch, so that only a larger batch_tokens gives it more wrong texts to compare with"""
    learning_rate: Annotated[float, Gt(0), Le(1)] | Auto = "auto"
    """largest learning rate (default: chosen from the data)"""
    warmup_steps: Count | Auto = "auto"
    """updates until the largest learning rate is reached (default: chosen from the data)"""
    label_smoothing: Dropout | Auto = Field(
        default="auto",
        description="share of probability that the loss gives to other tokens or labels (default: "
        + "".join(f"{share:g} for {task}, " for task, share in LABEL_SMOOTHING.items())
        + "otherwise 0)",
    )
    clip_norm: Annotated[float, Gt(0)] = 1.0
    """largest norm of the gradients of an update"""
    seed: Seed = TrainConfig.seed
    """seed of the initial weights, the order of batches, dropout, and the sample of texts for a
    tokenizer"""
    precision: Auto | Precision = "auto"
    """number format of matrix products (default: bfloat16 on a GPU, otherwise float32)"""
    threads: Limit = TrainConfig.threads
    """threads on the CPU; 0: as many as PyTorch chooses"""
    checkpoint_minutes: Minutes = TrainConfig.checkpoint_minutes
    """minutes between checkpoints within an epoch; 0: none"""
    checkpoint_steps: Limit = TrainConfig.checkpoint_steps
    """updates between checkpoints within an epoch; 0: none"""


class _SideOptions(Options):
    source: Annotated[str, Shown("NAME")] = ""
    """language of the sources as BCP 47 tag, such as en or de-CH, which the exported model states;
    it is in the name of their files if there are two for each split, selects the texts of TMX and
    XLIFF, or is their column or field; a column, or an ending for encoder, may have another name,
    such as question"""
    target: Annotated[str, Shown("NAME")] = ""
    """language of the targets, likewise"""


class _TranslatorOptions(Options):
    decoder: Decoder = "transformer"
    """kind of the decoder; ssru has recurrent units in place of self-attention and at most two
    layers, and translates faster"""
    guided_alignment: Annotated[str, Shown("FILE", alone=AUTO)] = ""
    """train one head to align words, to the links of a file with a line such as 0-0 1-2 for each
    pair of train; without FILE, to train.align beside the files of train, or else to links that the
    model finds itself after a part of the training"""
    teacher: Annotated[str, Shown("BUNDLE")] = ""
    """train on translations of the sources by this bundle, with beam search, in place of the
    targets of train"""


class _LoraOptions(Options):
    lora: Annotated[Limit, Shown("RANK")] = TrainConfig.lora
    """rank of low-rank updates (LoRA) that are trained instead of all weights of a third-party
    checkpoint, which needs less memory, such as 16; 0: train all weights"""


class TranslationOptions(TrainOptions, _SideOptions, _TranslatorOptions, _LoraOptions):
    """Train a model on pairs of source and target; run the same command again to resume."""

    task = "translation"
    example = "data/pairs --source en --target de --run runs/en-de"


class _TextOptions(Options):
    text: Column = ""
    """column or field of the texts; a number if the file does not name its columns (default:
    text)"""


class _LabelOptions(Options):
    label: Column = ""
    """column or field of the labels, likewise (default: label)"""
    multi_label: bool = False
    """a text has any number of labels instead of one"""
    class_weights: bool = False
    """let all labels count equally in the loss, also rare ones"""
    metric: Metric = TrainConfig.metric
    """value of dev that determines the best epoch, up to which weights are averaged, and the end of
    the training; accuracy with --multi-label is that of all labels of a text"""


class ClassificationOptions(TrainOptions, _LabelOptions, _TextOptions):
    """Train a model on texts with labels; run the same command again to resume."""

    task = "classification"
    example = "data/messages.csv --run runs/messages"


class LanguageModelOptions(TrainOptions, _TextOptions, _LoraOptions):
    """Train a model on texts, or dialogues as chat APIs have them.

    Run the same command again to resume.
    """

    task = "language-model"
    example = "data/dialogues.jsonl --run runs/chat"


class EncoderOptions(TrainOptions, _SideOptions):
    """Train a model on texts that belong together, for an embedding model.

    They are pairs, triplets with negatives, or pairs with scores.

    Run the same command again to resume.
    """

    task = "encoder"
    example = "data/pairs.tsv --run runs/search"


class RerankingOptions(TrainOptions, _SideOptions):
    """Train a reranker on the files of an embedding model, starting from a third-party encoder.

    Run the same command again to resume.
    """

    task = "reranking"
    example = "data/triplets.jsonl --run runs/reranker --from minilm"


class TaggingOptions(TrainOptions):
    """Train a model on texts with entities, such as names; run the same command again to resume."""

    task = "tagging"
    example = "data/names.conll --run runs/names"


OPTIONS: Mapping[TaskName, type[TrainOptions]] = {
    kind.task: kind
    for kind in (
        TranslationOptions,
        ClassificationOptions,
        LanguageModelOptions,
        EncoderOptions,
        RerankingOptions,
        TaggingOptions,
    )
}
# Flags by the names of settings, for messages.
FLAGS: Mapping[str, str] = {
    FIELDS.get(name, name): flag_name(name) for kind in OPTIONS.values() for name in kind.model_fields
}


def with_flags(message: str) -> str:
    """Replace names of settings by flags in a message of `train_config`."""
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda name: FLAGS.get(name[0], name[0]), message)


def training_fields(values: Mapping[str, Value]) -> dict[str, Any]:
    """Return the fields of TrainConfig that options set, without those that the data decide."""
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    named = {FIELDS.get(name, name): value for name, value in values.items() if value != AUTO}
    return {name: value for name, value in named.items() if name in fields}


def values_of(options: TrainOptions) -> dict[str, Value]:
    """Return the options that are given, by their keys in a configuration file."""
    return {key_of(name): getattr(options, name) for name in options.model_fields_set}


def defaults_of(task: TaskName) -> dict[str, Value]:
    """Return the defaults of the options of a task, by their keys in a configuration file."""
    return {key_of(name): field.default for name, field in OPTIONS[task].model_fields.items()}


def read_task(path: Path) -> object:
    """Return the task that a configuration file names, None if it names none."""
    return read_toml(path).get(TASK_KEY)


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
        raise UsageError(f"{path} is for the task {shown}, not {task}; use a file of this task")
    return given_keys(OPTIONS[task], values, path)


def read_options(path: Path, task: TaskName) -> dict[str, Value]:
    """Read the options in a configuration file. A `UsageError` names the file and the key."""
    return values_of(check(OPTIONS[task], read_keys(path, task)))


def options_to_toml(task: TaskName, values: Mapping[str, Value]) -> str:
    """Return a configuration file for `read_options` with every option of a task; those that
    `values` lacks have their defaults.
    """
    names = {key_of(name): name for name in OPTIONS[task].model_fields}
    text = to_toml(OPTIONS[task], {names[key]: value for key, value in values.items()})
    return (
        f"# Configuration of `sightline train {task}`. Options of the command line override it.\n"
        f'# "{AUTO}" lets the data decide. An empty text means none.\n\n{TASK_KEY} = {json.dumps(task)}\n{text}'
    )
