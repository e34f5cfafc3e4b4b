"""`sightline train`: train a model on files of a user, or write sample data."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Ge
from pydantic import Field, model_validator

from sightline.base.errors import EXIT_INTERRUPTED, Interrupted, UsageError, fail
from sightline.base.options import Options, Shown, add_options, check, given_flags, parse
from sightline.base.parser import Parser
from sightline.export.training_check import check_tokenizer, read_checkpoint
from sightline.model.data.formats import PAIR_TASKS
from sightline.model.data.records import TaskName
from sightline.model.data.samples import EXAMPLES, write_sample
from sightline.model.data.tagged_files import TAGGED
from sightline.model.training.options import OPTIONS, options_to_toml, read_keys

ACTIONS = "sightline.model.train_command"  # needs PyTorch, which `--help` and wrong options do not
RESUME = "Run the same command again to resume."
# Endings of the files of tasks, for the help; those of all others are `TABLES`.
TABLES = ".jsonl, .json, .csv, .tsv, .xlsx, .ods"
PAIRS = f"{TABLES}, .txt, .tmx, .xlf, .xliff, or two files such as corpus.en and corpus.de"
FORMATS = {"tagging": ", ".join(TAGGED), "language-model": f"{TABLES}, .txt", **dict.fromkeys(PAIR_TASKS, PAIRS)}


class FolderOptions(Options):
    """Options of all tasks that a configuration file does not have."""

    data: Annotated[Path | None, Shown(is_positional=True)] = None
    """folder with train and, optionally, dev and test, or one file, or one of two files of pairs,
    that is divided"""
    run: Path | None = None
    """folder for checkpoints and log, created if missing (required)"""
    config: Annotated[Path | None, Shown("FILE")] = None
    """TOML file with options, which flags override"""
    print_config: bool = False
    """print all options with their defaults as TOML, and train nothing"""

    @model_validator(mode="after")
    def _check_required(self) -> Self:
        missing = [name for name, value in (("DATA", self.data), ("--run", self.run)) if value is None]
        if missing and not self.print_config:
            raise ValueError(f"the following arguments are required: {', '.join(missing)}")
        return self


class SampleOptions(Options):
    """Write sample data for a task, to try it or to see the format. The texts are made by rules."""

    example = "classification data/messages"

    task: Annotated[TaskName, Shown(is_positional=True)]
    """task of the data"""
    folder: Annotated[Path, Shown(is_positional=True)]
    """folder for train, dev and test, created if missing"""
    examples: Annotated[int | None, Ge(1)] = Field(
        default=None,
        description="number of examples in train (default, and most: "
        + ", ".join(f"{number:,} for {task}" for task, number in EXAMPLES.items())
        + ")",
    )


KINDS: Mapping[Any, type[Options]] = {**OPTIONS, "sample": SampleOptions}


def run(parser: Parser, words: Sequence[str]) -> int:
    """Run `sightline train TASK` or `sightline train sample`, and return the exit code."""
    name = words[0] if words else ""
    if name in KINDS:
        parser.prog += f" {name}"
        return sample(parser, words[1:]) if name == "sample" else train(parser, words[1:], name)
    parser.description = f"Train a model. {RESUME}"
    parser.epilog = "example: sightline train classification data/messages.csv --run runs/messages"
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    for task, kind in KINDS.items():
        tasks.add_parser(task, help=(kind.__doc__ or "").splitlines()[0])
    parser.parse_args(words)  # prints the help or an error
    raise AssertionError("the first word is no task")


def train(parser: Parser, words: Sequence[str], name: str) -> int:
    """Train a model for a task, or print its options, and return the exit code."""
    task, kind = next((task, kind) for task, kind in OPTIONS.items() if task == name)
    add_options(parser, FolderOptions, FolderOptions.model_fields)
    add_options(parser, kind)
    parser.description = f"{parser.description}\n\n{RESUME}"
    parser.usage = "%(prog)s DATA --run RUN [OPTION ...]"
    parser.epilog = f"formats of the files of DATA: {FORMATS.get(task, TABLES)}\n\n{parser.epilog}"
    values = vars(parser.parse_args(words))
    try:
        folders = check(FolderOptions, given_flags(FolderOptions, values))
        flags = given_flags(kind, values)
        check(kind, flags)
        keys = {} if folders.config is None else read_keys(folders.config, task)
        check(kind, keys)  # also values that flags override
        options = check(kind, keys, flags)
    except UsageError as error:
        parser.error(str(error))
    if folders.print_config:
        sys.stdout.write(options_to_toml(options))
        return 0

    # The translation by a teacher needs the service.
    parts = check_tokenizer, read_checkpoint, lambda *given: import_module("sightline.commands.translate").teach(*given)
    return run_training(lambda: import_module(ACTIONS).train(options, folders.data, folders.run, *parts))


def sample(parser: Parser, words: Sequence[str]) -> int:
    """Write sample data, print what was written, and return the exit code."""
    options = parse(parser, words, SampleOptions)

    def action() -> None:
        written = write_sample(options.task, options.folder, options.examples)
        numbers = ", ".join(f"{number:,} in {name}.jsonl" for name, number in written.items())
        sys.stdout.write(f"wrote {numbers} of {options.folder}\n")

    return run_training(action)


def run_training(action: Callable[[], None]) -> int:
    """Run an action, print its error, and return the exit code."""
    try:
        action()
    except (OSError, ValueError, Interrupted) as error:
        return fail(error)
    except RuntimeError as error:
        # PyTorch has no exception class for a failed allocation on a CPU.
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        message = str(error).splitlines()[0]
        return fail(f"out of memory; use a smaller model or a smaller --batch-tokens: {message}")
    except KeyboardInterrupt:
        return fail("interrupted; checkpoints are kept, run the same command again to resume", EXIT_INTERRUPTED)
    return 0
