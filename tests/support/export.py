"""Commands of `sightline` that write and check bundles."""

from collections.abc import Sequence

from sightline.__main__ import LIMITED
from sightline.__main__ import main as sightline


def main(words: Sequence[str]) -> int:
    """Run `sightline export`, or the other command that the words begin with."""
    return sightline([*([] if words[0] in LIMITED else ["export"]), *words])
