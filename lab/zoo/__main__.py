"""Train, plan, export and measure the systems of the attention study, `python -m lab.zoo`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from lab.zoo import training
from lab.zoo.export import export
from lab.zoo.recall import NUM_DIALOGUES, SEED, TURNS, recall_report
from lab.zoo.systems import GROUPS, PLAN, SYSTEMS
from sightline.base.errors import UsageError
from sightline.commands.actions import run_action
from sightline.commands.train import run_training
from sightline.export.options import DEFAULT_SENTENCES
from sightline.model.evaluate_command import write_json

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.zoo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = _add_selection(commands, "train", "train and score systems; run the same command again to resume")
    command.set_defaults(action=training.train)
    command.add_argument(
        "--processes", type=int, default=1, help="number of runs at the same time, each in a process with one thread"
    )
    command.add_argument(
        "--precision",
        choices=training.PRECISIONS,
        default="float32",
        help="precision of new runs; a resumed run keeps its own",
    )
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file of `sightline train` with other settings"
    )
    command.add_argument(
        "--model",
        nargs="*",
        default=[],
        type=_field,
        metavar="FIELD=VALUE",
        help="fields of the model configuration (model/config.py) to change, for example cell=lstm",
    )
    command = _add_selection(commands, "plan", "measure some updates of each system and print the hours of training")
    command.set_defaults(action=training.print_plan)
    command = _add(commands, "export", "export the first run of each system that is finished")
    command.set_defaults(action=export)
    command.add_argument("runs", type=Path, help="parent folder of the runs")
    command.add_argument("--out", type=Path, required=True, metavar="BUNDLES", help="parent folder of the bundles")
    command.add_argument(
        "--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="export only these"
    )
    command.add_argument("--lazy", action="store_true", help="let the service load these models on their first use")
    command.add_argument("--half-weights", action="store_true", help="store matrices as float16, as sightline export")
    command.add_argument(
        "--sentences", type=Path, default=DEFAULT_SENTENCES, help="sentences for the verification, one a line"
    )
    command.add_argument(
        "--tolerance", type=float, help="largest allowed difference from PyTorch (default: derived from rounding)"
    )
    command = _add(commands, "recall", "measure how long a chat model follows an instruction")
    command.set_defaults(action=_measure_recall)
    command.add_argument("checkpoint", type=Path, help="checkpoint of a chat system")
    command.add_argument("--turns", type=int, nargs="+", default=list(TURNS), help="lengths of the dialogues, in turns")
    command.add_argument(
        "--dialogues", type=int, default=NUM_DIALOGUES, help="dialogues of each condition, kind and length"
    )
    command.add_argument("--seed", type=int, default=SEED, help="seed of the dialogues")
    command.add_argument("--json", type=Path, help="also write the counts to this file")
    return parser.parse_args(arguments)


def _add(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text)


def _add_selection(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command with the options that select runs."""
    command = _add(commands, name, text)
    folders = " and ".join(sorted({system.corpus.folder for system in SYSTEMS.values()} - {""}))
    command.add_argument(
        "data",
        type=Path,
        help=f"folder with the subfolders {folders}; corpora that are derived from them are written to RUNS/data",
    )
    command.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="parent folder of the runs")
    command.add_argument(
        "--systems", nargs="*", choices=PLAN, metavar="NAME", help="only these (default: all of the groups)"
    )
    command.add_argument(
        "--groups",
        nargs="*",
        choices=GROUPS,
        metavar="GROUP",
        help=f"only systems of these groups, in this order; of {', '.join(GROUPS)} (default: {GROUPS[0]})",
    )
    command.add_argument("--seeds", type=int, help="number of runs of each system (default: depends on the system)")
    command.add_argument("--only-seed", type=int, help="only the runs of this seed")
    return command


def _field(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must have the form FIELD=VALUE, got {text}")
    return name, value


def _measure_recall(arguments: argparse.Namespace) -> None:
    if min(*arguments.turns, arguments.dialogues) < 1:
        raise UsageError(
            f"turns and dialogues must be at least 1, got {min(arguments.turns)} and {arguments.dialogues}"
        )
    report = recall_report(arguments.checkpoint, arguments.turns, arguments.dialogues, arguments.seed)
    for condition, turns in report["turns"].items():
        for turn, kinds in turns.items():
            counts = ", ".join(f"{name} {count['kept']} of {count['total']}" for name, count in kinds.items())
            print(f"{condition}, turn {turn}: {counts}")
    if arguments.json is not None:
        write_json(arguments.json, report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    parsed = parse_arguments(arguments)
    if parsed.action is export:
        return run_action(lambda: export(parsed))
    return run_training(lambda: parsed.action(parsed))


if __name__ == "__main__":
    sys.exit(main())
