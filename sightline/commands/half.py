"""`sightline half`: convert a bundle to float16 for CUDA."""

from collections.abc import Sequence

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.actions import actions, run_action
from sightline.export.options import HalfOptions


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, HalfOptions)
    return run_action(lambda: actions().half(options))
