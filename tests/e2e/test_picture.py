"""The picture of the README shows what the shipped model attends to."""

import re
from pathlib import Path
from urllib.error import URLError

import pytest

from bench.server import RunningServer, free_port
from docs.picture import draw, main, read_map

SENTENCE = "Two girls are playing with a small brown dog on the beach."
COMMITTED = Path("docs/images/attention.svg").read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<]+)</text>", svg)


def test_the_committed_picture_is_that_of_the_shipped_model(shipped: RunningServer) -> None:
    drawn, committed = texts(draw(read_map(shipped.url, SENTENCE))), texts(COMMITTED)
    is_number = [text.isdigit() for text in committed]
    assert [text for text in drawn if not text.isdigit()] == [text for text in committed if not text.isdigit()]
    assert [text.isdigit() for text in drawn] == is_number
    for new, old in zip(drawn, committed, strict=True):
        assert not old.isdigit() or abs(int(new) - int(old)) <= 1  # another processor may round otherwise


def test_the_command_prints_the_translation_and_writes_the_picture(
    shipped: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "attention.svg"
    assert main([SENTENCE, "--url", shipped.url, "--out", str(out)]) == 0
    assert capsys.readouterr().out == "Zwei Mädchen spielen am Strand mit einem kleinen braunen Hund.\n"
    assert texts(out.read_text(encoding="utf-8"))[0] == "Zwei"


def test_errors_are_one_line(shipped: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path / "attention.svg")]
    assert main([SENTENCE, "--url", shipped.url, "--model", "nope", *options]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert main([SENTENCE, "--url", f"http://127.0.0.1:{free_port()}", *options]) == 1
    assert "make serve" in capsys.readouterr().err


def test_a_model_without_cross_attention_is_an_error(shipped: RunningServer) -> None:
    with pytest.raises(URLError):
        read_map(shipped.url, SENTENCE, "sst2-sentiment")
