"""Command line for training and evaluation, `python -m model COMMAND`.

The options need no PyTorch, so that every installation has `--help`.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from model.errors import EXIT_FAILED, EXIT_USAGE, exit_status
from model.evaluation.defaults import NUM_DIALOGUES, SEED, TEST_SPLIT, TURNS
from model.systems import PLAN, SYSTEMS
from model.training.config import PRECISIONS, TrainConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, action: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.set_defaults(action=action)  # name of a function of `model.commands`
    return parser


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json, weights.safetensors and tokenizer.json")


def add_train(commands: Commands) -> None:
    text = "train a model; run the same command again to resume"
    parser = add_command(commands, "train", "train", text)
    parser.description = "Train a model from a folder of data; run the same command again to resume."
    parser.epilog = "example: %(prog)s data/multi30k --run runs/multi30k-en-de"
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        help="folder with train.SOURCE, train.TARGET, val.SOURCE and val.TARGET, or with train.tsv and dev.tsv for "
        "classification; not accepted by chat systems, which generate their data",
    )
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and log, created if missing")
    parser.add_argument("--system", choices=SYSTEMS, default="transformer", help="name of the system to train")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        type=_field,
        metavar="FIELD=VALUE",
        help="fields of the model configuration (model/config.py) to change, for example cell=lstm",
    )
    for field in dataclasses.fields(TrainConfig):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(field.default), default=argparse.SUPPRESS, help="default: depends on the system"
        )


def _field(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must have the form FIELD=VALUE, got {text}")
    return name, value


def add_evaluate(commands: Commands) -> None:
    parser = add_command(
        commands, "evaluate", "evaluate", "translate a test set by reference beam search and compute BLEU and chrF"
    )
    add_checkpoint(parser)
    parser.add_argument(
        "data", type=Path, help="folder with SPLIT.SOURCE, SPLIT.TARGET and, optionally, SPLIT.lc.norm.tok.TARGET"
    )
    parser.add_argument(
        "--split",
        default=argparse.SUPPRESS,
        help=f"first part of the file names (default: {TEST_SPLIT} if DATA has its files, otherwise val)",
    )
    parser.add_argument("--source", default="en", help="file extension of the source language")
    parser.add_argument("--target", default="de", help="file extension of the target language")
    parser.add_argument("--num-beams", type=int, default=5, help="number of beams")
    parser.add_argument("--length-penalty", type=float, default=1.0, help="exponent of the length that divides a score")
    parser.add_argument("--limit", type=int, help="evaluate only the first LIMIT sentences")
    parser.add_argument("--json", type=Path, help="also write the scores and the translations to this file")


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
        help="number of dialogues of each kind of instruction and each length",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the dialogues")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")


def add_zoo(commands: Commands) -> None:
    text = "train and evaluate all systems, one after another; run the same command again to resume"
    parser = add_command(commands, "zoo", "train_zoo", text)
    folders = " and ".join(sorted({system.corpus.folder for system in SYSTEMS.values()} - {""}))
    parser.add_argument("data", type=Path, help=f"folder with the subfolders {folders}")
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="parent folder of the runs")
    parser.add_argument(
        "--systems", nargs="*", choices=PLAN, default=list(PLAN), metavar="NAME", help="train only these"
    )
    parser.add_argument("--seeds", type=int, help="number of runs of each system (default: depends on the system)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="precision of new runs; a resumed run keeps its own"
    )


def run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Add the commands to a parser, run a command and return the exit code.

    Args:
        parser: parser of the program.
        arguments: words of the command line; by default those of the process.

    Raises:
        ModuleNotFoundError: a library of the extra `train` is not installed.
    """
    parser.description = "Train and evaluate attention models."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_evaluate(commands)
    add_accuracy(commands)
    add_recall(commands)
    add_zoo(commands)
    parsed = parser.parse_args(arguments)
    from model import commands as actions  # needs PyTorch, which `--help` and wrong options do not

    try:
        getattr(actions, parsed.action)(parsed)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_status(error)
    except RuntimeError as error:
        if not actions.is_out_of_memory(error):
            raise
        message = str(error).splitlines()[0]
        print(f"error: out of memory; use a smaller model or a smaller --batch-tokens: {message}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("error: interrupted; finished epochs are kept, run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `python -m model` and return the exit code."""
    try:
        return run(argparse.ArgumentParser(prog="python -m model"), arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "model":
            raise
        print(
            f"error: python -m model needs the library {error.name}: run `make .venv/ready` and use .venv/bin/python, "
            "or run pip install '.[train]'",
            file=sys.stderr,
        )
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
