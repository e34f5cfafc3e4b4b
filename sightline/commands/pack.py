"""`sightline pack`: store the matrices of a bundle in 8 bits."""

from collections.abc import Sequence

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.actions import actions, run_action
from sightline.export.options import PackOptions


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, PackOptions)
    return run_action(lambda: actions().pack(options))
