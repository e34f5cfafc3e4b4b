"""Reading of lines and parallel text."""

from pathlib import Path


def read_lines(path: Path) -> list[str]:
    r"""Read the lines of a UTF-8 file, without line endings and byte order mark.

    A line ends with a line feed, optionally preceded by a carriage return. A lone carriage return
    or another separator is text: the lines of a parallel corpus correspond by number, so all tools
    must count them in the same way. Raises `ValueError` if the file is not UTF-8.
    """
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        ) from None
    lines = text.removeprefix("\ufeff").split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def numbered_sentences(path: Path) -> dict[int, str]:
    """Read a file with one sentence per line, without blank lines; return them by line number.
    Raises `ValueError` if the file has no sentence or is not UTF-8.
    """
    sentences = {number: line for number, line in enumerate(read_lines(path), start=1) if line.strip()}
    if not sentences:
        raise ValueError(f"{path} has no sentences: expected one sentence per line")
    return sentences


def read_parallel(folder: Path, split: str, source: str, target: str) -> tuple[list[str], list[str]]:
    """Read `split.source` and `split.target`. Raises `ValueError` if a file is empty or not UTF-8,
    or the sides have different numbers of lines.
    """
    sides = []
    for language in (source, target):
        path = folder / f"{split}.{language}"
        if not path.is_file():
            raise FileNotFoundError(
                f"missing file {path}: parallel text of the split {split} is two files with one sentence per line, "
                f"{split}.{source} and {split}.{target}; add them, or change the folder, the split or the languages"
            )
        sides.append(read_lines(path))
        if not sides[-1]:
            raise ValueError(f"{path} is empty: expected one sentence per line")
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{folder / split}.{source} has {len(sides[0])} lines, but {split}.{target} has {len(sides[1])}: line N of "
            "one must be the translation of line N of the other"
        )
    return sides[0], sides[1]
