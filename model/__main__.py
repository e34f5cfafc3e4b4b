"""Command line for training and evaluation, `python -m sightline.model COMMAND`.

The options need no PyTorch, so that every installation has `--help`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from sightline.base.errors import EXIT_FAILED, EXIT_USAGE, Interrupted, exit_status, is_out_of_memory
from sightline.model.data.formats import PAIR_TASKS
from sightline.model.data.records import TaskName
from sightline.model.data.samples import DEFAULT_EXAMPLES, write_sample
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.training.options import add_options, given_options, options_to_toml

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, action: str, text: str, module: str) -> argparse.ArgumentParser:
    """Add a command whose action is a function of a module that needs PyTorch."""
    parser = commands.add_parser(name, help=text)
    parser.set_defaults(action=action, module=module, parser=parser)
    return parser


# For each task, what the data are and an example.
TASKS: Mapping[TaskName, tuple[str, str]] = {
    "translation": ("pairs of source and target", "data/pairs --source en --target de --run runs/en-de"),
    "classification": ("texts with labels", "data/messages.csv --run runs/messages"),
    "language-model": ("texts, or dialogues as chat APIs have them", "data/dialogues.jsonl --run runs/chat"),
    "encoder": ("pairs of similar texts, for an embedding model", "data/pairs.tsv --run runs/search"),
}


def add_train(commands: Commands) -> None:
    text = "train a model on your own data"
    parser = commands.add_parser("train", help=text)
    parser.description = "Train a model; run the same command again to resume."
    parser.epilog = f"example: %(prog)s classification {TASKS['classification'][1]}"
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    for task, (data, example) in TASKS.items():
        add_task(tasks, task, data, example)
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


def add_evaluate(commands: Commands) -> None:
    text = "compute the metrics of a trained model on data that it was not trained on"
    parser = add_command(commands, "evaluate", "evaluate", text, "sightline.model.evaluate_command")
    parser.description = (
        "Compute the metrics of a trained model: BLEU and chrF of translations, accuracy and F1 of labels, perplexity "
        "of texts, recall of similar texts."
    )
    parser.epilog = "example: %(prog)s runs/messages"
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
    parsed, unknown = parser.parse_known_args(arguments)
    parsed.check_files = check_files
    if unknown:
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if parsed.action == "train" and not parsed.print_config:
        missing = [name for name, value in (("DATA", parsed.data), ("--run", parsed.run)) if value is None]
        if missing:
            parsed.parser.error(f"the following arguments are required: {', '.join(missing)}")

    def action() -> None:
        if parsed.action == "print_sample":
            print_sample(parsed)
        elif parsed.action == "train" and parsed.print_config:
            print_config(parsed)
        else:  # the module needs PyTorch, which `--help` and wrong options do not
            getattr(import_module(parsed.module), parsed.action)(parsed)

    return run_command(action)


def run_command(action: Callable[[], None]) -> int:
    """Run an action, print its error if there is one, and return the exit code."""
    try:
        action()
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
