"""`sightline export`: export a training run, or import a model of others, as a bundle."""

from collections.abc import Sequence

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.actions import actions, run_action
from sightline.export.options import CheckpointOptions


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, CheckpointOptions)
    return run_action(lambda: actions().export(options))
