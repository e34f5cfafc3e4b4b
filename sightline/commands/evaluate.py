"""`sightline evaluate`: compute the metrics of a trained model on held-out data."""

from collections.abc import Sequence
from importlib import import_module

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.train import run_training
from sightline.model.evaluation.defaults import EvaluateOptions

ACTIONS = "sightline.model.evaluate_command"  # needs PyTorch, which `--help` and wrong options do not


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, EvaluateOptions)
    return run_training(lambda: import_module(ACTIONS).evaluate(options))
