"""Run the parts of a step of `python -m lab.study`, or of another program with results and
pictures.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


def parse(add_arguments: Callable[[argparse.ArgumentParser], None], *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def drawn_texts(draw: Callable[[Any, Path], None], drawn: Any, picture: Path) -> set[str]:
    """Draw a picture twice, check that both have the same bytes, and return the texts in it."""
    written = []
    for _ in range(2):
        draw(drawn, picture.parent)
        written.append(picture.read_bytes())
    assert written[0] == written[1]
    return {(element.text or "").strip() for element in ElementTree.fromstring(written[0]).iter()}
