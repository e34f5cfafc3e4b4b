"""`sightline serve`: serve the bundles of a folder over HTTP."""

from collections.abc import Sequence

from sightline.base.parser import Parser


def run(parser: Parser, words: Sequence[str]) -> int:
    from sightline.service.__main__ import main

    return main(words, parser)
