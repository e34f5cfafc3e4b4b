"""`python -m model train | evaluate`: the command line of this package."""

import argparse
import dataclasses
import sys
from pathlib import Path

from model.config import TrainConfig, TransformerConfig
from model.train import Trainer

SIZES = {"tiny": TransformerConfig.tiny, "base": TransformerConfig}


def add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train from a folder of parallel text; run again with the same arguments to resume",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="folder with train.SOURCE, train.TARGET, val.SOURCE, val.TARGET")
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and the log")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="sizes of the Transformer")
    for field in dataclasses.fields(TrainConfig):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.set_defaults(action=train)


def train(arguments: argparse.Namespace) -> None:
    config = TrainConfig(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(TrainConfig)})
    Trainer(arguments.run, config, arguments.data, SIZES[arguments.size]).fit()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model", description="Train and evaluate attention models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    arguments = parser.parse_args()
    try:
        arguments.action(arguments)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
