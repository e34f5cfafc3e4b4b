"""The picture of the README shows the attention of the shipped model."""

import re
from pathlib import Path

import pytest

from sightline.__main__ import main

SENTENCE = "Two girls are playing with a small brown dog on the beach."
COMMITTED = Path("docs/images/attention.svg").read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<]+)</text>", svg)


def test_the_command_prints_the_translation_and_writes_the_committed_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "attention.svg"
    assert main(["draw", SENTENCE, "--bundle", "bundles/multi30k-en-de", "--out", str(out)]) == 0
    assert capsys.readouterr().out == "Zwei Mädchen spielen am Strand mit einem kleinen braunen Hund.\n"
    drawn, committed = texts(out.read_text(encoding="utf-8")), texts(COMMITTED)
    assert [text for text in drawn if not text.isdigit()] == [text for text in committed if not text.isdigit()]
    assert [text.isdigit() for text in drawn] == [text.isdigit() for text in committed]
    for new, old in zip(drawn, committed, strict=True):
        assert not old.isdigit() or abs(int(new) - int(old)) <= 1  # another processor may round otherwise
