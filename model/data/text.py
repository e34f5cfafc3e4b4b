"""Reading text: lines, parallel text and labelled sentences."""

from pathlib import Path


def read_lines(path: Path) -> list[str]:
    r"""Read the lines of a UTF-8 file, without their ends and without a byte order mark; an empty file has none.

    A line ends with a line feed, or with a carriage return and a line feed. All else, a lone carriage return too, is
    text: the lines of a parallel corpus correspond by their numbers, so no tool may count them differently.

    Raises:
        ValueError: the file is not UTF-8; the message names the line.
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


def read_parallel(folder: Path, split: str, source: str, target: str) -> tuple[list[str], list[str]]:
    """Read `split.source` and `split.target`.

    Raises:
        FileNotFoundError: one of the files is missing.
        ValueError: a file is empty or not UTF-8, or the sides have different numbers of lines.
    """
    sides = []
    for language in (source, target):
        path = folder / f"{split}.{language}"
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: expected one sentence a line, the same number on both sides")
        sides.append(read_lines(path))
        if not sides[-1]:
            raise ValueError(f"{path} is empty: expected one sentence a line")
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{folder / split}.{source} has {len(sides[0])} lines, {split}.{target} has {len(sides[1])}: line N of one "
            "must translate line N of the other"
        )
    return sides[0], sides[1]


def read_labelled(folder: Path, split: str, num_labels: int | None = None) -> tuple[list[str], list[int]]:
    """Read the sentences of `split.tsv` and the numbers of their labels; a line is `label TAB text`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or not UTF-8, a line is not of that form, or its label is not one of `num_labels`.
    """
    path = folder / f"{split}.tsv"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: expected one sentence a line, the label's number and a tab before it")
    texts, labels = [], []
    for number, line in enumerate(read_lines(path), start=1):
        label, tab, text = line.partition("\t")
        if not (tab and text.strip() and label.isascii() and label.isdigit()):
            raise ValueError(f"line {number} of {path} is not a label's number, a tab and a text")
        if num_labels is not None and int(label) >= num_labels:
            raise ValueError(
                f"line {number} of {path}: there is a label {label}; those of the model are 0 to {num_labels - 1}"
            )
        texts.append(text)
        labels.append(int(label))
    if not texts:
        raise ValueError(f"{path} is empty: expected one sentence a line, the label's number and a tab before it")
    return texts, labels
