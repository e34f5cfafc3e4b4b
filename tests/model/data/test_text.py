from pathlib import Path

import pytest

from sightline.model.data.text import read_lines, read_parallel


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one\u2028still one\x0cstill\ntwo\n", encoding="utf-8")
    assert read_lines(tmp_path / "text") == ["one\u2028still one\x0cstill", "two"]


def test_a_missing_side_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"train\.de"):
        read_parallel(tmp_path, "train", "en", "de")


def test_sides_of_different_lengths_are_rejected_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "train.de").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"2 lines.* 1"):
        read_parallel(tmp_path, "train", "en", "de")


def test_a_lone_carriage_return_ends_no_line_so_that_pairs_stay_aligned(tmp_path: Path) -> None:
    """A lone carriage return must not end a line, because the pairs would be misaligned."""
    (tmp_path / "train.en").write_bytes(b"one\rmore\ntwo\nthree\n")
    (tmp_path / "train.de").write_bytes(b"eins\nzwei\ndrei\rmehr\n")
    source, target = read_parallel(tmp_path, "train", "en", "de")
    assert list(zip(source, target, strict=True)) == [("one\rmore", "eins"), ("two", "zwei"), ("three", "drei\rmehr")]


@pytest.mark.parametrize(
    "content",
    [b"one\ntwo\n", b"one\r\ntwo\r\n", b"one\ntwo", b"\xef\xbb\xbfone\ntwo\n"],
    ids=["LF", "CRLF", "no end", "byte order mark"],
)
def test_line_endings_and_a_byte_order_mark_do_not_change_the_lines(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    assert read_lines(tmp_path / "text") == ["one", "two"]


def test_an_empty_file_has_no_lines_and_is_rejected_as_a_side(tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / f"val.{language}").touch()
    assert read_lines(tmp_path / "val.en") == []
    with pytest.raises(ValueError, match=r"val\.en is empty"):
        read_parallel(tmp_path, "val", "en", "de")


def test_a_byte_that_is_not_utf_8_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_bytes("ein\nzwei\nfünf\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.de, line 3, column 2 \(in bytes\): byte 0xfc is not UTF-8; save"):
        read_lines(tmp_path / "train.de")
