"""`sightline align`: choose the heads of a bundle that align words."""

from collections.abc import Sequence

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.actions import actions, run_action
from sightline.export.options import AlignOptions


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, AlignOptions)
    return run_action(lambda: actions().align(options))
