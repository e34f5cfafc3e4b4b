import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from sightline.base.bundle import BundleError
from sightline.base.text.stream import TextStream
from sightline.base.text.tokenizer import TextTokenizer, read_tokenizer
from tests.service.conftest import byte_level_tokenizer

TEXT = TextTokenizer(byte_level_tokenizer())
AWKWARD = [
    "a dog",
    "  x  y",
    "naïve 🙂 ok",
    "e\u0301a",
    "a\u0308\u0323b",
    "</s> x",
    "\u1100\u1161\u11a8 z",
    "a\x00b",
    "ﬁ Å",
]


def spans(text: str) -> list[tuple[str, int, int]]:
    return [(TEXT.name(one.id), one.start, one.end) for one in TEXT.encode_spans(text)]


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], str]:
    stream = TextStream(TEXT, stop)
    return [stream.push(id_) for id_ in TEXT.encode(text)], stream.finish()


def test_tokens_have_the_range_of_their_characters() -> None:
    assert spans("a dog") == [(" a", 0, 1), (" dog", 1, 5), ("</s>", 5, 5)]


def test_an_inserted_leading_space_does_not_shift_offsets() -> None:
    assert spans("xd") == [(" ", 0, 0), ("x", 0, 1), ("d", 1, 2), ("</s>", 2, 2)]


def test_composed_characters_keep_the_offsets_of_the_original() -> None:
    """Normalization merges `e` and its accent; later offsets must not change."""
    assert spans("e\u0301a") == [(" ", 0, 0), ("\ufffd", 0, 2), ("\ufffd", 0, 2), ("a", 2, 3), ("</s>", 3, 3)]


def test_the_bytes_of_one_character_share_its_offsets() -> None:
    assert [one[1:] for one in spans("x🙂y")] == [(0, 0), (0, 1), *[(1, 2)] * 4, (2, 3), (3, 3)]


@settings(deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=20).filter(lambda text: text.strip() and "\ud800" not in text))
def test_every_character_of_any_text_belongs_to_a_token(text: str) -> None:
    covered: set[int] = set()
    for one in TEXT.encode_spans(text):
        assert 0 <= one.start <= one.end <= len(text)
        covered.update(range(one.start, one.end))
    assert covered == set(range(len(text)))


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_decoding_gives_back_any_text_in_its_normal_form(text: str) -> None:
    normal = unicodedata.normalize("NFC", text)
    assert TEXT.decode(TEXT.encode(text)) == (normal[1:] if normal.startswith(" ") else normal)


def test_the_name_of_a_special_token_in_a_text_is_text() -> None:
    assert TEXT.decode(TEXT.encode("a </s> b")) == "a </s> b"
    assert [TEXT.name(id_) for id_ in TEXT.encode("</s>")].count("</s>") == 1


def test_special_tokens_are_left_out_of_the_text_or_named() -> None:
    ids = TEXT.encode("a dog")
    assert TEXT.decode(ids) == "a dog"
    assert TEXT.decode(ids, skip_special_tokens=False) == "a dog</s>"


def test_an_id_without_a_token_has_no_text() -> None:
    assert (TEXT.name(len(TEXT)), TEXT.bytes_of(len(TEXT))) == ("", b"")


@pytest.mark.parametrize("text", AWKWARD)
def test_streamed_pieces_join_to_the_whole_text(text: str) -> None:
    stream, rest = pieces(text)
    assert "".join(stream) + rest == TEXT.decode(TEXT.encode(text))


def test_no_piece_has_half_a_character() -> None:
    stream, rest = pieces("naïve 🙂")
    assert "\ufffd" not in "".join(stream)
    assert rest == ""


def test_incomplete_characters_are_returned_at_the_end() -> None:
    stream = TextStream(TEXT)
    first_byte_of_two = next(id_ for id_ in TEXT.encode("é") if TEXT.bytes_of(id_) == b"\xc3")
    assert (stream.push(first_byte_of_two), stream.finish()) == ("", "\ufffd")


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(TEXT) - 1), max_size=30), st.lists(st.text("ado gn", min_size=1, max_size=4)))
def test_any_tokens_stream_to_their_text_up_to_the_first_stop_string(ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TEXT, stop)
    streamed = "".join([stream.push(id_) for id_ in ids]) + stream.finish()
    whole = TEXT.decode(ids)
    if stream.has_stopped:
        assert any(whole.startswith(streamed + string) for string in stop)
    else:
        assert streamed == whole
    assert not any(string in streamed for string in stop)


def test_a_stop_string_of_several_tokens_is_found_and_never_sent() -> None:
    assert pieces("a xyz b", stop=("xyz",)) == (["a", " ", "", "", "", "", "", ""], "")


def test_the_start_of_an_incomplete_stop_string_is_sent_later() -> None:
    stream, rest = pieces("xyxyq", stop=("xyz",))
    assert ("".join(stream), rest) == ("xyxyq", "")
    assert pieces("xy", stop=("xyz",)) == (["", "", "", ""], "xy")


def test_the_stop_condition_is_true_from_the_token_that_completes_a_string() -> None:
    condition = TextStream(TEXT, ["xyz"])
    assert [condition.update(id_) for id_ in TEXT.encode("a xyz b")] == [False] * 4 + [True] * 4


def test_a_copy_of_a_stop_condition_is_independent() -> None:
    condition = TextStream(TEXT, ["é!"])
    first, second, end = TEXT.encode("é!", add_special_tokens=False)[1:]
    assert not condition.update(first)
    other = condition.copy()
    assert (condition.update(second), condition.update(end)) == (False, True)
    assert not other.update(end)  # half a character and another
    assert (other.update(first), other.update(second), other.update(end)) == (False, False, True)


def test_the_first_piece_includes_the_text_of_the_prefix() -> None:
    stream = TextStream(TEXT, prefix=TEXT.encode("a dog", add_special_tokens=False))
    dog = TEXT.encode("dog", add_special_tokens=False)
    assert [stream.push(id_) for id_ in (*dog, *dog)] == ["a dog dog", " dog"]
    only = TextStream(TEXT, prefix=TEXT.encode("a dog"))
    assert (only.finish(), only.finish()) == ("a dog", "")


def test_stop_strings_are_searched_after_the_prefix() -> None:
    prefix = TEXT.encode("a xy", add_special_tokens=False)
    generated = TEXT.encode("z xyz", add_special_tokens=False)
    stream = TextStream(TEXT, ["xyz"], prefix)
    assert "".join(stream.push(id_) for id_ in generated[1:]) + stream.finish() == "a xyz "
    # Only the complete text loses its leading space, not generated text after a prefix.
    assert TextStream(TEXT, [" z"], prefix).update(generated[0]) is False
    condition = TextStream(TEXT, [" z"], prefix)
    assert [condition.update(id_) for id_ in generated[:2]] == [False, True]


def test_a_stop_string_in_the_first_piece_leaves_the_prefix() -> None:
    stream = TextStream(TEXT, ["dog"], TEXT.encode("a", add_special_tokens=False))
    assert (stream.push(TEXT.encode("dog")[0]), stream.finish()) == ("a ", "")


def test_the_minimum_number_of_tokens_of_a_long_text_needs_no_tokenisation() -> None:
    text = "a dog " * 1000
    assert 0 < TEXT.min_num_tokens(text, 64) <= len(TEXT.encode(text))
    assert TEXT.min_num_tokens("a dog", 64) == 0


@pytest.mark.parametrize("text", ["a dog " * 20_000, "x" * 100_000, "\u03b9\u0308\u0301" * 30_000, "🙂" * 30_000])
def test_the_beginning_of_a_text_has_its_first_tokens(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Regression: truncation tokenized the whole text; 1 MB took 300 MB of memory."""
    encode = TEXT.encode
    *beginning, end = encode(text)
    tokenised: list[str] = []

    def note(text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenised.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TEXT, "encode", note)
    assert TEXT.encode_truncated(text, 64) == [*beginning[:63], end]
    assert sum(map(len, tokenised)) < 64 * 100


def test_the_beginning_of_a_text_that_fits_is_all_of_it() -> None:
    ids = TEXT.encode("a dog")
    for max_tokens in (len(ids), 64):
        assert TEXT.encode_truncated("a dog", max_tokens) == ids


def test_combining_marks_in_any_order_take_linear_time() -> None:
    """Regression: `unicodedata.normalize` takes quadratic time for combining marks.

    A body of 1 MiB blocked the process for minutes; this text took 40 seconds.
    """
    text = "a" + "\u0301\u0323" * 100_000
    started = time.process_time()
    assert TEXT.min_num_tokens(text, 64) > 64
    assert time.process_time() - started < 5


def test_a_tokenizer_of_another_kind_is_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.CTC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BundleError, match="its decoder has the step CTC, which is not supported here; supported are"):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_that_is_no_tokenizer_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_saved_tokenizer_reads_special_tokens_in_text_as_text(tmp_path: Path) -> None:
    """The option `encode_special_tokens` is not stored in the file."""
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path / "tokenizer.json").encode("</s>") == TEXT.encode("</s>")
