"""`python -m model train | evaluate`: the command line of this package."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from model.checkpoint import WEIGHTS, load_checkpoint, load_facts
from model.config import TrainConfig, TransformerConfig
from model.evaluate import read_test_set, score, tokenised_path, translate
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


def add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "evaluate",
        help="translate a test set by reference beam search and score it",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder with config.json, weights.safetensors, tokenizer.json")
    parser.add_argument("data", type=Path, help="folder with SPLIT.SOURCE, SPLIT.TARGET, SPLIT.lc.norm.tok.TARGET")
    parser.add_argument("--split", default="test_2016_flickr", help="what the test set's files begin with")
    parser.add_argument("--source", default="en", help="file ending of the source side")
    parser.add_argument("--target", default="de", help="file ending of the target side")
    parser.add_argument("--num-beams", type=int, default=5, help="open hypotheses")
    parser.add_argument("--length-penalty", type=float, default=1.0, help="exponent of the length that divides a score")
    parser.add_argument("--limit", type=int, help="only the first so many sentences")
    parser.add_argument("--json", type=Path, help="also write the scores and outputs to this file")
    parser.set_defaults(action=evaluate)


def evaluate(arguments: argparse.Namespace) -> None:
    model, tokenizer = load_checkpoint(arguments.checkpoint)
    split, source, target = arguments.split, arguments.source, arguments.target
    test_set = read_test_set(arguments.data, split, source, target, arguments.limit)
    outputs = translate(model, tokenizer, test_set.sources, arguments.num_beams, arguments.length_penalty)
    scores = score(outputs, test_set, target)
    tokenised = f"BLEU {scores.tokenised_bleu}"
    if scores.tokenised_bleu is None:
        tokenised = f"left out: there is no {tokenised_path(arguments.data, split, target)}"
    print(f"tok-lc: {tokenised}")
    print(f"detok, cased: BLEU {scores.bleu}; chrF {scores.chrf}")
    if arguments.json is not None:
        report = {
            "split": split,
            "sentences": len(outputs),
            "num_beams": arguments.num_beams,
            "length_penalty": arguments.length_penalty,
            "checkpoint": load_facts(arguments.checkpoint / WEIGHTS),
            **dataclasses.asdict(scores),
            "outputs": outputs,
        }
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model", description="Train and evaluate attention models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_evaluate(commands)
    arguments = parser.parse_args()
    try:
        arguments.action(arguments)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
