from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.batches import bucket, make_batch, read_lines, read_parallel

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 200), st.integers(0, 5))
def test_buckets_hold_every_example_once_within_the_budget_and_come_again_from_the_seed(
    lengths: list[tuple[int, int]], batch_tokens: int, seed: int
) -> None:
    batches = bucket(lengths, batch_tokens, seed)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert max(max(lengths[i]) for i in batch) * len(batch) <= batch_tokens
    assert batches == bucket(lengths, batch_tokens, seed)


def test_another_seed_gives_another_order() -> None:
    lengths = [(3, 1 + i % 4) for i in range(40)]
    assert bucket(lengths, 24, seed=1) != bucket(lengths, 24, seed=2)


def test_another_seed_gives_other_batches_where_lengths_are_equal() -> None:
    first, second = ({frozenset(batch) for batch in bucket([(3, 4)] * 40, 24, seed)} for seed in (1, 2))
    assert first != second


def test_batches_come_in_an_order_that_is_not_by_length() -> None:
    first_of_each = [batch[0] for batch in bucket([(length,) for length in range(1, 31)], 30, seed=1)]
    assert first_of_each != sorted(first_of_each)


def test_examples_of_like_length_share_a_batch() -> None:
    lengths = [(length, length) for length in [2, 20, 2, 20, 2, 20]]
    assert sorted(sorted(batch) for batch in bucket(lengths, 60, seed=0)) == [[0, 2, 4], [1, 3, 5]]


def test_a_batch_is_padded_on_the_right_and_its_target_shifted() -> None:
    batch = make_batch([([5, 6, 2], [7, 2]), ([5, 2], [8, 9, 2])], pad_id=0, bos_id=1)
    assert batch.source.tolist() == [[5, 6, 2], [5, 2, 0]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target_input.tolist() == [[1, 7, 0], [1, 8, 9]]
    assert batch.target_output.tolist() == [[7, 2, 0], [8, 9, 2]]
    assert batch.to(torch.device("cpu")).source.dtype == torch.int64


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one\u2028still one\x0cstill\ntwo\n", encoding="utf-8")
    assert read_lines(tmp_path / "text") == ["one\u2028still one\x0cstill", "two"]


def test_a_missing_side_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"train\.de"):
        read_parallel(tmp_path, "train", "en", "de")


def test_sides_of_different_lengths_are_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "train.de").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"2 lines.* 1"):
        read_parallel(tmp_path, "train", "en", "de")


def test_a_lone_carriage_return_ends_no_line_so_that_pairs_stay_aligned(tmp_path: Path) -> None:
    """It ended one: with one on each side the numbers of lines were equal and the pairs were not."""
    (tmp_path / "train.en").write_bytes(b"one\rmore\ntwo\nthree\n")
    (tmp_path / "train.de").write_bytes(b"eins\nzwei\ndrei\rmehr\n")
    source, target = read_parallel(tmp_path, "train", "en", "de")
    assert list(zip(source, target, strict=True)) == [
        ("one\rmore", "eins"),
        ("two", "zwei"),
        ("three", "drei\rmehr"),
    ]


@pytest.mark.parametrize(
    "content",
    [b"one\ntwo\n", b"one\r\ntwo\r\n", b"one\ntwo", b"\xef\xbb\xbfone\ntwo\n"],
    ids=["LF", "CRLF", "no end", "byte order mark"],
)
def test_lines_are_the_same_whatever_program_wrote_them(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    assert read_lines(tmp_path / "text") == ["one", "two"]


def test_an_empty_file_has_no_lines_and_is_no_side(tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / f"val.{language}").touch()
    assert read_lines(tmp_path / "val.en") == []
    with pytest.raises(ValueError, match=r"val\.en is empty"):
        read_parallel(tmp_path, "val", "en", "de")


def test_a_byte_that_is_not_utf_8_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_bytes("ein\nzwei\nfünf\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.de, line 3: byte 0xfc is not UTF-8; convert"):
        read_lines(tmp_path / "train.de")
