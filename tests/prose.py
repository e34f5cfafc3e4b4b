"""Check the openings of docstrings and descriptions, and the width of Markdown lines.

Run as `python -m tests.prose`, part of `make check`. Ruff (W505) checks the width of docstrings and
comments.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_WIDTH = 100
OPENING = re.compile(r"\s*(What|Who|Whose|Whoever|Whether|Where|Which|How|Of|So many|So much)\b")
DESCRIPTIONS = {"description", "help", "summary", "epilog"}


def find_openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring or description that opens with a refused word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            texts = [node.value]
        elif isinstance(node, ast.Call):
            texts = [keyword.value for keyword in node.keywords if keyword.arg in DESCRIPTIONS]
        else:
            continue
        for text in texts:
            if isinstance(text, ast.JoinedStr) and text.values:
                text = text.values[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and OPENING.match(text.value):
                yield text.lineno, text.value.strip().splitlines()[0]


def find_wide_lines(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each prose line that is too wide.

    Code blocks, tables, and lines that start with a link or an image may be wider.
    """
    in_code = False
    for number, line in enumerate(markdown.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        elif in_code or len(line) <= MAX_WIDTH or line.lstrip().startswith(("|", "<", "![", "[")):
            continue
        else:
            yield number, line


def main() -> int:
    """Print each violation as `file:line: text` and return the exit status."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    found = 0
    for name in files:
        path = Path(name)
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        find = find_openings if path.suffix == ".py" else find_wide_lines
        for line, excerpt in find(text):
            found += 1
            print(f"{name}:{line}: {excerpt[:100]}")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
