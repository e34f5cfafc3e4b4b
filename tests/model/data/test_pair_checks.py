"""Pairs that are no translations are found, and others are not."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from sightline.model.data.corpus import open_corpus
from sightline.model.data.formats import Reading
from sightline.model.data.pair_checks import pair_warnings
from sightline.model.data.samples import write_sample

COUNT = 600


def words(pair: int, side: int) -> str:
    """Return a sentence whose length is about that of its translation, in words of its side."""
    draw = random.Random(pair)
    return " ".join(
        f"{'ab'[side]}{'xyz'[draw.randrange(3)]}{'klmn'[draw.randrange(4)]}" for _ in range(draw.randint(3, 20))
    )


PAIRS = [(words(pair, 0), words(pair, 1)) for pair in range(COUNT)]


def warnings(folder: Path, pairs: Sequence[tuple[str, str]], source: str = "en", target: str = "de") -> list[str]:
    for side, language in enumerate((source, target)):
        (folder / f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return list(pair_warnings(open_corpus(folder, Reading("translation", source, target))))


def test_translations_have_no_warning(tmp_path: Path) -> None:
    assert warnings(tmp_path, PAIRS) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda pair: pair[::-1], "seem to have source and target exchanged"),
        (lambda pair: (pair[0], pair[0]), "seem to have both sides in the same language"),
        (lambda pair: (pair[0], words(COUNT, 0)), "seem to have both sides in the same language"),
        (lambda pair: (pair[0], 30 * f"{pair[1]} "), "have sides whose lengths do not fit"),
    ],
)
def test_unusual_pairs_are_named_with_their_lines(tmp_path: Path, change, problem: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    pairs = [change(pair) if index % 20 == 7 else pair for index, pair in enumerate(PAIRS)]
    (warning,) = warnings(tmp_path, pairs)
    lines = ", ".join(str(line) for line in range(8, 208, 20))
    assert warning.startswith(f"30 of 600 pairs {problem}: train.en and train.de, lines {lines} and 20 more; ")


@pytest.mark.parametrize("offset", [1, -1, 4])
def test_lines_that_are_misaligned_from_a_line_on_are_found(tmp_path: Path, offset: int) -> None:
    sources, targets = ([pair[side] for pair in PAIRS] for side in (0, 1))
    moved = targets[: COUNT // 2] + (
        offset * ["bxk bxk"] + targets[COUNT // 2 : -offset] if offset > 0 else [*targets[COUNT // 2 - offset :], "b"]
    )
    (first, *_) = warnings(tmp_path, list(zip(sources, moved, strict=True)))
    start = int(first.removeprefix("from train.en and train.de, line ").split()[0])
    assert abs(start - COUNT // 2) < 10
    lines = f"{abs(offset)} {'line' if abs(offset) == 1 else 'lines'} {'later' if offset > 0 else 'earlier'}"
    assert f"would if each target were that of {lines}; find where a line is missing" in first


def test_files_in_different_orders_are_found(tmp_path: Path) -> None:
    targets = [pair[1] for pair in PAIRS]
    random.Random(1).shuffle(targets)
    sources = [pair[0] for pair in PAIRS]
    assert "the lengths of the sides are unrelated" in warnings(tmp_path, list(zip(sources, targets, strict=True)))[0]


def test_the_sample_data_have_no_warning(tmp_path: Path) -> None:
    write_sample("translation", tmp_path, 500)
    assert list(pair_warnings(open_corpus(tmp_path, Reading("translation", "en", "de")))) == []
