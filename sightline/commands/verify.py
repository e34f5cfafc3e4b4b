"""`sightline verify`: compare a bundle with its checkpoint."""

from collections.abc import Sequence

from sightline.base.options import parse
from sightline.base.parser import Parser
from sightline.commands.actions import actions, run_action
from sightline.export.options import VerifyOptions


def run(parser: Parser, words: Sequence[str]) -> int:
    options = parse(parser, words, VerifyOptions)
    return run_action(lambda: actions().verify(options))
