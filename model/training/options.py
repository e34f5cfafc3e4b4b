"""Options of `sightline train`: one table for the command line, the configuration file and the
documentation. It needs no PyTorch.

A configuration file is TOML with the names of this table as keys. `AUTO` means that the data decide
(see `sightline.model.training.recipe`), and an empty text that the option is not used.
"""

import argparse
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from sightline.base.errors import UsageError
from sightline.model.data.corpus import LANGUAGE_TAG
from sightline.model.data.records import TASK_NAMES, TaskName
from sightline.model.fields import Limits
from sightline.model.training.config import PRECISIONS, TrainConfig
from sightline.model.training.recipe import LABEL_SMOOTHING, MAX_LENGTH_TOKENS, SIZES

AUTO = "auto"
TASK_KEY = "task"  # key of a configuration file that names its task
WIDTH = 100  # of comments in a configuration file

Value: TypeAlias = int | float | bool | str


@dataclass(frozen=True)
class Option:
    """An option of a training."""

    name: str  # key in a configuration file; the flag has hyphens
    text: str
    kind: type[Value]
    default: Value  # AUTO if the data decide
    limits: Limits | None = None
    choices: tuple[str, ...] = ()
    tasks: tuple[TaskName, ...] = TASK_NAMES
    field: str = ""  # name of the field of TrainConfig, if there is one
    metavar: str = ""
    is_language: bool = False  # a BCP 47 tag, or empty
    chosen: str = "chosen from the data"  # default AUTO in words

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """Default in words, for the help and the documentation."""
        if self.default == AUTO:
            return self.chosen
        if self.default == "":
            return "none"
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def shown_values(self) -> str:
        """Stands for the value in the help."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return self.metavar or self.name.rpartition("_")[2].upper()

    @property
    def allowed(self) -> str:
        """Allowed values in words, for errors and the documentation."""
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        number = {int: "a whole number", float: "a number", str: "a text"}[self.kind]
        limit = "" if self.limits is None else f", {str(self.limits).removeprefix('be ')}"
        return f"{number}{limit}{f', or {AUTO}' if self.default == AUTO else ''}"

    def check(self, value: object) -> Value:
        """Return a value of a configuration file.

        Raises:
            ValueError: the type is wrong, or the value is not allowed; the message says what is
                allowed.
        """
        if value == AUTO and self.default == AUTO:
            return AUTO
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ValueError(f"must be {self.allowed}, got {_shown(value)}")
        if self.is_language and value and not LANGUAGE_TAG.fullmatch(str(value)):
            raise ValueError(f"must be a BCP 47 tag such as en, de-CH, zh-Hans or x-mine, got {_shown(value)}")
        is_allowed = not self.choices or value in self.choices
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_allowed = math.isfinite(value) and (self.limits is None or self.limits.allows(value))
        if not is_allowed:
            raise ValueError(f"must be {self.allowed}, got {_shown(value)}")
        return value

    def parse(self, text: str) -> Value:
        """Return a value of the command line.

        Raises:
            ValueError: the value is not allowed.
        """
        if text == AUTO and self.default == AUTO:
            return AUTO
        try:
            value: Value = text if self.kind is str else self.kind(text)
        except ValueError:
            raise ValueError(f"must be {self.allowed}, got {text}") from None
        return self.check(value)


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80] if not isinstance(value, str) else f'"{value[:80]}"'


def _training_option(
    name: str, text: str, *, field: str = "", is_auto: bool = False, default: Value | None = None, **others: Any
) -> Option:
    """Return an option for a field of TrainConfig, which has its type, limits and default."""
    field = field or name
    hint = get_type_hints(TrainConfig, include_extras=True)[field]
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    limits = next((one for one in metadata if isinstance(one, Limits)), None)
    if default is None:
        default = AUTO if is_auto else getattr(TrainConfig, field)
    return Option(name, text, kind, default, limits, field=field, **others)


OPTIONS: tuple[Option, ...] = (
    # Data
    Option(
        "source",
        "language of the sources as BCP 47 tag, such as en or de-CH; it is the ending of their files if DATA has two "
        "files for each split",
        str,
        "",
        tasks=("translation",),
        metavar="TAG",
        is_language=True,
    ),
    Option(
        "target",
        "language of the targets, likewise",
        str,
        "",
        tasks=("translation",),
        metavar="TAG",
        is_language=True,
    ),
    Option(
        "source",
        "ending of the files of sources, such as en or question, if DATA has two files for each split",
        str,
        "",
        tasks=("encoder",),
        metavar="ENDING",
    ),
    Option("target", "ending of the files of targets, likewise", str, "", tasks=("encoder",), metavar="ENDING"),
    Option("multi_label", "a text has any number of labels instead of one", bool, False, tasks=("classification",)),
    Option(
        "split_seed", "seed of the division into train and dev of data that have no dev", int, 1, Limits(0, 2**32 - 1)
    ),
    Option("license", "license of the data, as the exported model will state it", str, "", metavar="TEXT"),
    # Model
    Option("size", "size of the model", str, AUTO, choices=(AUTO, *SIZES)),
    Option("from", "start from the weights of a run", str, "", tasks=("translation",), metavar="FOLDER"),
    Option(
        "from",
        "start from the weights of a run, or of a checkpoint of others in a folder",
        str,
        "",
        tasks=("classification", "language-model", "encoder"),
        metavar="FOLDER",
    ),
    Option("tokenizer", "use this tokenizer.json instead of training one", str, "", metavar="FILE"),
    Option("vocab_size", "number of tokens of the tokenizer that is trained", int, AUTO, Limits(1, 2**20)),
    Option("dropout", "probability of dropout in the model", float, AUTO, Limits(0.0, 0.9)),
    _training_option(
        "max_length_tokens",
        "length of the longest example; longer ones are dropped",
        is_auto=True,
        chosen=f"{MAX_LENGTH_TOKENS}, or the positions of the model of --from if it has fewer",
    ),
    # Length of the training
    _training_option("epochs", "most passes over the training data", field="max_epochs", is_auto=True),
    _training_option(
        "minutes",
        "end the training after this time; 0: no limit; only updates and the validations between them count, not the "
        "check of the data, the tokenizer, the encoding and the last validation",
        field="max_minutes",
    ),
    _training_option("patience_epochs", "epochs without a lower dev loss after which the training ends", is_auto=True),
    _training_option("evaluate_epochs", "epochs from one validation on dev to the next", is_auto=True),
    _training_option("average_last", "number of last epochs whose weights are averaged", is_auto=True),
    # Updates
    _training_option("batch_tokens", "most tokens of a batch, padding included", is_auto=True),
    _training_option(
        "accumulate",
        "batches whose gradients are added for an update; the task encoder compares texts only within a batch, so that "
        "only a larger batch_tokens gives it more wrong texts to compare with",
    ),
    _training_option("learning_rate", "largest learning rate", field="peak_learning_rate", is_auto=True),
    _training_option("warmup_steps", "updates until the largest learning rate is reached", is_auto=True),
    _training_option(
        "label_smoothing",
        "share of probability that the loss gives to other tokens or labels",
        is_auto=True,
        chosen="".join(f"{share:g} for {task}, " for task, share in LABEL_SMOOTHING.items()) + "otherwise 0",
    ),
    _training_option("clip_norm", "largest norm of the gradients of an update", default=1.0),
    _training_option(
        "seed", "seed of the initial weights, the order of batches, dropout, and the sample of texts for a tokenizer"
    ),
    Option(
        "precision",
        "number format of matrix products",
        str,
        AUTO,
        choices=(AUTO, *PRECISIONS),
        field="precision",
        chosen="bfloat16 on a GPU, otherwise float32",
    ),
    _training_option("threads", "threads on the CPU; 0: as many as PyTorch chooses"),
    # Files
    _training_option("checkpoint_minutes", "minutes between checkpoints within an epoch; 0: none"),
    _training_option("checkpoint_steps", "updates between checkpoints within an epoch; 0: none"),
    _training_option("tensorboard", "also write events for TensorBoard into the folder of the run"),
)

# Flags by the names of settings, for messages.
FLAGS: Mapping[str, str] = {option.field or option.name: option.flag for option in OPTIONS}


def with_flags(message: str) -> str:
    """Return a message of `sightline.model.training.config` with flags instead of names of
    settings.
    """
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda name: FLAGS.get(name[0], name[0]), message)


def add_options(parser: argparse.ArgumentParser, task: TaskName) -> None:
    """Add the options of a task to a parser, without defaults, so that given ones are known."""
    for option in options_of(task).values():
        text = f"{option.text} (default: {option.shown_default})".replace("%", "%%")
        if option.kind is bool:
            parser.add_argument(
                option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        parser.add_argument(
            option.flag,
            dest=option.name,
            type=_argument(option),
            default=argparse.SUPPRESS,
            metavar=option.shown_values,
            help=text,
        )


def _argument(option: Option) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def given_options(arguments: argparse.Namespace, task: TaskName) -> dict[str, Value]:
    """Return the options in the configuration file and on the command line, which has precedence.

    Raises:
        UsageError: see `read_options`.
    """
    values = read_options(arguments.config, task) if arguments.config is not None else {}
    return values | {name: value for name, value in vars(arguments).items() if name in options_of(task)}


def training_fields(values: Mapping[str, Value]) -> dict[str, Any]:
    """Return the fields of TrainConfig that options set, without those that the data decide."""
    options = {option.name: option for option in OPTIONS}
    return {options[name].field: value for name, value in values.items() if options[name].field and value != AUTO}


def options_of(task: TaskName) -> dict[str, Option]:
    """Return the options of a task by name."""
    return {option.name: option for option in OPTIONS if task in option.tasks}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(f"missing file {path}; write one with --print-config") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also of the encoding
        raise UsageError(f"{path} is not a TOML file: {error}") from None


def read_task(path: Path) -> object:
    """Return the task that a configuration file names, None if it names none.

    Raises:
        UsageError: see `read_options`.
    """
    return _read_toml(path).get(TASK_KEY)


def read_options(path: Path, task: TaskName) -> dict[str, Value]:
    """Read the options in a configuration file.

    Raises:
        UsageError: the file is missing or is not TOML, it is for another task, a key is unknown, or
            a value is not allowed; the message names the file and the key.
    """
    values = _read_toml(path)
    found = values.pop(TASK_KEY, task)
    if found != task:
        raise UsageError(f"{path} is for the task {_shown(found)}, not {task}; use a file of this task")
    options, read = options_of(task), dict[str, Value]()
    for name, value in values.items():
        if name not in options:
            raise UsageError(f"{path}: unknown key {name}; the keys of {task} are {', '.join([TASK_KEY, *options])}")
        try:
            read[name] = options[name].check(value)
        except ValueError as error:
            raise UsageError(f"{path}: {name} {error}") from None
    return read


def options_to_toml(task: TaskName, values: Mapping[str, Value]) -> str:
    """Return a configuration file with every option of a task, which `read_options` reads.

    Args:
        task: task of the file.
        values: values of options; the others have their defaults.
    """
    lines = [f"# Configuration of `sightline train {task}`. Options of the command line override it."]
    lines += [f'# "{AUTO}" lets the data decide. An empty text means none.', "", f"{TASK_KEY} = {json.dumps(task)}"]
    for option in options_of(task).values():
        value = values.get(option.name, option.default)
        lines += ["", *textwrap.wrap(f"{_sentence(option)}", WIDTH, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"{option.name} = {_to_toml(value)}")
    return "\n".join(lines) + "\n"


def _sentence(option: Option) -> str:
    allowed = f" ({option.allowed})" if option.kind is not str or option.choices else ""
    return f"{option.text[0].upper()}{option.text[1:]}{allowed}. Default: {option.shown_default}."


def _to_toml(value: Value) -> str:
    # A JSON string is a basic string of TOML, unless it has DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
