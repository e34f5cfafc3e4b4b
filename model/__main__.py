"""Command line for training and evaluation, `python -m sightline.model COMMAND`.

The options need no PyTorch, so that every installation has `--help`.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from sightline.base.errors import EXIT_FAILED, EXIT_USAGE, Interrupted, exit_status, is_out_of_memory
from sightline.model.data.formats import PAIR_TASKS
from sightline.model.data.records import TaskName
from sightline.model.data.samples import DEFAULT_EXAMPLES, write_sample
from sightline.model.evaluation.defaults import NUM_DIALOGUES, SEED, TEST_SPLIT, TURNS
from sightline.model.systems import GROUPS, PLAN, SYSTEMS
from sightline.model.training.config import PRECISIONS, SystemConfig
from sightline.model.training.options import add_options, given_options, options_to_toml

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that adds the default of each option that has one and does not state it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_stated = action.default is None or "(default" in (action.help or "")
        return action.help if is_stated else super()._get_help_string(action)


def add_command(
    commands: Commands, name: str, action: str, text: str, module: str = "sightline.model.commands"
) -> argparse.ArgumentParser:
    """Add a command whose action is a function of a module that needs PyTorch."""
    parser = commands.add_parser(name, help=text, formatter_class=DefaultsFormatter)
    parser.set_defaults(action=action, module=module, parser=parser)
    return parser


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json, weights.safetensors and tokenizer.json")


# For each task, what the data are and an example.
TASKS: Mapping[TaskName, tuple[str, str]] = {
    "translation": ("pairs of source and target", "data/pairs --source en --target de --run runs/en-de"),
    "classification": ("texts with labels", "data/messages.csv --run runs/messages"),
    "language-model": ("texts, or dialogues as chat APIs have them", "data/dialogues.jsonl --run runs/chat"),
    "encoder": ("pairs of similar texts, for an embedding model", "data/pairs.tsv --run runs/search"),
}


def add_train(commands: Commands) -> None:
    text = "train a model on your own data, or the systems of the attention study"
    parser = commands.add_parser("train", help=text)
    parser.description = "Train a model; run the same command again to resume."
    parser.epilog = f"example: %(prog)s classification {TASKS['classification'][1]}"
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    for task, (data, example) in TASKS.items():
        add_task(tasks, task, data, example)
    add_zoo(tasks)
    add_sample(tasks)


def add_task(tasks: Commands, task: TaskName, data: str, example: str) -> None:
    """Add the command that trains a model for a task."""
    text = f"train on {data}"
    parser = add_command(tasks, task, "train", text, "sightline.model.train_command")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(task=task)
    parser.usage = "%(prog)s DATA --run RUN [OPTION ...]"
    parser.description = f"Train a model on {data}; run the same command again to resume."
    parser.epilog = f"example: %(prog)s {example}"
    parser.add_argument(
        "data",
        metavar="DATA",
        type=Path,
        nargs="?",
        help=f"folder with train and, optionally, dev and test ({formats_of(task)}), or one file that is divided",
    )
    parser.add_argument("--run", type=Path, help="folder for checkpoints and log, created if missing (required)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with options, which flags override")
    parser.add_argument(
        "--print-config", action="store_true", help="print all options with their defaults as TOML, and train nothing"
    )
    add_options(parser, task)


def formats_of(task: TaskName) -> str:
    """Return the endings of the files of a task, for the help."""
    tables = ".jsonl, .csv, .tsv"
    if task in PAIR_TASKS:
        return f"{tables}, or two files such as train.en and train.de"
    return f"{tables}, .txt" if task == "language-model" else tables


def add_sample(commands: Commands) -> None:
    text = "write sample data for a task, to try it or to see the format"
    parser = commands.add_parser("sample", help=text)
    parser.description = f"{text[0].upper()}{text[1:]}. The texts are made by rules."
    parser.epilog = "example: %(prog)s classification data/messages"
    parser.set_defaults(action="print_sample", parser=parser)
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder for train, dev and test, created if missing"
    )
    defaults = ", ".join(f"{number:,} for {task}" for task, number in DEFAULT_EXAMPLES.items())
    parser.add_argument("--examples", type=int, help=f"number of examples in train (default: {defaults})")
    parser.add_argument("--seed", type=int, default=1, help="seed of the texts (default: 1)")


def print_sample(arguments: argparse.Namespace) -> None:
    """Write sample data and print what was written."""
    written = write_sample(arguments.task, arguments.folder, arguments.examples, arguments.seed)
    numbers = ", ".join(f"{number:,} in {name}.jsonl" for name, number in written.items())
    sys.stdout.write(f"wrote {numbers} of {arguments.folder}\n")


def print_config(arguments: argparse.Namespace) -> None:
    """Print the configuration file of a task, with the options that are given."""
    sys.stdout.write(options_to_toml(arguments.task, given_options(arguments, arguments.task)))


def add_system(commands: Commands) -> None:
    text = "train a system of the attention study with settings of your own"
    parser = add_command(commands, "system", "train_system", text)
    parser.description = "Train a system of the attention study; run the same command again to resume."
    parser.epilog = "example: %(prog)s transformer data/multi30k --run runs/multi30k-en-de"
    parser.add_argument("system", choices=SYSTEMS, metavar="NAME", help=f"one of {', '.join(SYSTEMS)}")
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        help="folder with train.SOURCE, train.TARGET, val.SOURCE and val.TARGET, or with train.tsv and dev.tsv for "
        "classification; not accepted by chat systems, which generate their data",
    )
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and log, created if missing")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        type=_field,
        metavar="FIELD=VALUE",
        help="fields of the model configuration (model/config.py) to change, for example cell=lstm",
    )
    for field in dataclasses.fields(SystemConfig):
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true", default=argparse.SUPPRESS, help="default: no")
            continue
        parser.add_argument(
            option, type=type(field.default), default=argparse.SUPPRESS, help="default: depends on the system"
        )


def _field(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must have the form FIELD=VALUE, got {text}")
    return name, value


def add_evaluate(commands: Commands) -> None:
    text = "compute the metrics of a trained model on data that it was not trained on"
    parser = add_command(commands, "evaluate", "evaluate", text, "sightline.model.train_command")
    parser.description = (
        "Compute the metrics of a trained model: BLEU and chrF of translations, accuracy and F1 of labels, perplexity "
        "of texts, recall of similar texts."
    )
    parser.epilog = "example: %(prog)s runs/messages"
    parser.formatter_class = argparse.HelpFormatter  # each help has its default
    parser.add_argument(
        "checkpoint", metavar="RUN", type=Path, help="folder of a run, or of one of its checkpoints such as RUN/best"
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        type=Path,
        nargs="?",
        help="file, or folder of which the part test, or else dev, is used (default: the data of the training)",
    )
    parser.add_argument(
        "--split",
        default=argparse.SUPPRESS,
        help="only for translation: first part of the names of two files in DATA, such as val for val.en and val.de "
        f"(default: {TEST_SPLIT} if DATA has its files)",
    )
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}",
            metavar="TAG",
            default=argparse.SUPPRESS,
            help=f"language of the {side}s, which is the ending of their file (default: that of the training)",
        )
    parser.add_argument(
        "--num-beams", type=int, default=5, help="number of beams of translation (default: %(default)s)"
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=1.0,
        help="exponent of the length that divides a score (default: %(default)s)",
    )
    parser.add_argument(
        "--limit", type=int, default=argparse.SUPPRESS, help="evaluate only the first LIMIT examples (default: all)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="also write the metrics and outputs here"
    )


def add_accuracy(commands: Commands) -> None:
    parser = add_command(
        commands, "accuracy", "print_accuracy", "compute the accuracy of a classifier and print it as JSON"
    )
    add_checkpoint(parser)
    parser.add_argument("data", type=Path, help="folder with SPLIT.tsv")
    parser.add_argument("--split", default="dev", help="name of the file without .tsv")


def add_recall(commands: Commands) -> None:
    parser = add_command(commands, "recall", "measure_recall", "measure how long a chat model follows an instruction")
    add_checkpoint(parser)
    parser.add_argument("--turns", type=int, nargs="+", default=list(TURNS), help="lengths of the dialogues, in turns")
    parser.add_argument(
        "--dialogues",
        type=int,
        default=NUM_DIALOGUES,
        help="number of dialogues of each condition, kind of instruction and length",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the dialogues")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")


def add_zoo(commands: Commands) -> None:
    text = "train and evaluate systems of the study, one after another; run the same command again to resume"
    parser = add_command(commands, "zoo", "train_zoo", text)
    folders = " and ".join(sorted({system.corpus.folder for system in SYSTEMS.values()} - {""}))
    parser.add_argument(
        "data",
        type=Path,
        help=f"folder with the subfolders {folders}; corpora that are derived from them are written to RUNS/data",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="parent folder of the runs")
    parser.add_argument(
        "--systems", nargs="*", choices=PLAN, metavar="NAME", help="train only these (default: all of the groups)"
    )
    parser.add_argument(
        "--groups",
        nargs="*",
        choices=GROUPS,
        metavar="GROUP",
        help=f"train only systems of these groups, in this order; of {', '.join(GROUPS)} (default: {GROUPS[0]})",
    )
    parser.add_argument("--only-seed", type=int, help="train only the runs of this seed")
    parser.add_argument(
        "--processes", type=int, default=1, help="number of runs at the same time, each in a process with one thread"
    )
    parser.add_argument(
        "--plan", action="store_true", help="train nothing; measure some updates of each system and print the hours"
    )
    parser.add_argument("--seeds", type=int, help="number of runs of each system (default: depends on the system)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="precision of new runs; a resumed run keeps its own"
    )


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    check_files: Callable[[Path, TaskName, bool], None] = lambda *_: None,
) -> int:
    """Add the commands to a parser, run a command and return the exit code.

    Args:
        parser: parser of the program.
        arguments: words of the command line; by default those of the process.
        check_files: checks files of others that a training reads, see
            `sightline.model.train_command`.

    Raises:
        ModuleNotFoundError: a library of the extra `train` is not installed.
    """
    parser.description = "Train and evaluate attention models."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_evaluate(commands)
    add_system(commands)
    add_accuracy(commands)
    add_recall(commands)
    add_zoo(commands)
    parsed, unknown = parser.parse_known_args(arguments)
    parsed.check_files = check_files
    if unknown:
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if parsed.action == "train" and not parsed.print_config:
        missing = [name for name, value in (("DATA", parsed.data), ("--run", parsed.run)) if value is None]
        if missing:
            parsed.parser.error(f"the following arguments are required: {', '.join(missing)}")
    try:
        if parsed.action == "print_sample":
            print_sample(parsed)
        elif parsed.action == "train" and parsed.print_config:
            print_config(parsed)
        else:  # the module needs PyTorch, which `--help` and wrong options do not
            getattr(import_module(parsed.module), parsed.action)(parsed)
    except (OSError, ValueError, Interrupted) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_status(error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).splitlines()[0]
        print(f"error: out of memory; use a smaller model or a smaller --batch-tokens: {message}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("error: interrupted; checkpoints are kept, run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `python -m sightline.model` and return the exit code."""
    try:
        return run(argparse.ArgumentParser(prog="python -m sightline.model"), arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sightline":
            raise
        print(
            f"error: python -m sightline.model needs the library {error.name}: run `make .venv/ready` and use "
            ".venv/bin/python, or run pip install '.[train]'",
            file=sys.stderr,
        )
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
