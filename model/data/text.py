"""Reading of lines and parallel text."""

from pathlib import Path

from sightline.model.data.files import read_texts


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, as the lines of a corpus. Raises `ValueError` for others."""
    return [line for _, line in read_texts(path)]


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
