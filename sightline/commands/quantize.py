"""`sightline quantize`: quantize a bundle to 8-bit or 4-bit weights."""

from collections.abc import Sequence

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.actions import actions, run_action
from sightline.export.options import QuantizeOptions


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, QuantizeOptions)
    return run_action(lambda: actions().quantize(options))
