"""Check that no package has more lines of Python than `[tool.sightline.lines]` allows.

Run as `python -m tests.lines`, part of `make check`. Lines are counted as `wc -l` counts them. An
entry may only fall, except by a number that the change with a new feature states and explains.
"""

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

SLACK = 0.02  # of an entry; with more, it may be lowered


def count_lines(root: Path = Path()) -> Counter[str]:
    """Return the lines of Python by top folder, of all files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    files = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    lines: Counter[str] = Counter()
    for name in files:
        if (root / name).is_file():
            lines[name.partition("/")[0]] += (root / name).read_bytes().count(b"\n")
    return lines


def excess(lines: Mapping[str, int], allowed: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each package that has more lines than its entry."""
    for package, number in sorted(lines.items()):
        if number > allowed.get(package, 0):
            yield (
                f"{package} has {number} lines of Python, but its entry in [tool.sightline.lines] of pyproject.toml "
                f"allows {allowed.get(package, 0)}; make the package smaller"
            )


def slack(lines: Mapping[str, int], allowed: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each entry that may be lowered."""
    for package, limit in sorted(allowed.items()):
        if lines.get(package, 0) <= limit * (1 - SLACK):
            yield f"the entry {package} in [tool.sightline.lines] may be lowered from {limit} to {lines[package]}"


def main() -> int:
    """Print what exceeds its entry and what may be lowered; return the exit status."""
    allowed = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["sightline"]["lines"]
    lines = count_lines()
    exceeding = list(excess(lines, allowed))
    for sentence in [*exceeding, *slack(lines, allowed)]:
        print(sentence)
    return min(len(exceeding), 1)


if __name__ == "__main__":
    sys.exit(main())
