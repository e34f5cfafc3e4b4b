"""Sentences of texts; joined with their gaps they are the text."""

import re
import time

import pytest
import sentencex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sightline.base.text.sentences import (
    ABBREVIATIONS,
    LANGUAGES_WITHOUT_SPACES,
    ONE_SENTENCE,
    WINDOW_CHARACTERS,
    SplitText,
    split_sentences,
)
from tests.support.tables import read_table

MANY = 10**9
# What shows nothing, alone or between sentences.
BLANK = (
    "[\\s\\x00-\\x1f\\x7f-\\xa0\\xad\u034f\u061c\u115f\u1160\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0]*"
)
PAIRED = '"“”„«»‹›()[]「」『』*_`'  # half of a pair is copied, too
PIECES = [
    *("Dr. Smith", "z. B.", "e.g.", "U.S.", "3.5", "1. ", "www.a.de", "...", "…", "?!", "。", "！", "؟", "۔", "।"),
    *("\n", "\r\n", "\r", "\n\n\n", "\t", " ", "  ", "\u3000", "\u00a0", "\u2028", "\x0b", "\x1c"),
    *("\u200b", "\ufeff", "\u200f", "\xad", "\ufe0f", "ASP.NET", "README.MD", "max. ", "20 lbs. "),
    *("„Ja.“", '"No."', "‘", "’", "»", "«", "(a.)", "["),
    *("你好", "世界", "مرحبا", "नमस्ते", "한국어", "e\u0301", "👩‍👩‍👧", "word", "\x00"),
]
# The languages that `sentencex` has rules for, those of `ABBREVIATIONS`, others, and none.
LANGUAGES = [
    *("am", "ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "fi", "fr", "gu", "he", "hi", "hy", "it"),
    *("ja", "ka", "kk", "km", "kn", "ko", "lo", "ml", "mr", "my", "nl", "pa", "pl", "pt-BR", "ru", "sk", "sv", "ta"),
    *("te", "th", "tr", "uk", "ur", "vi", "xx", "zh", "zh-Hant", *ABBREVIATIONS),
]
SPACED = sorted(language for language in {*LANGUAGES} if language.partition("-")[0] not in LANGUAGES_WITHOUT_SPACES)


def split(text: str, language: str = "en") -> SplitText:
    found = split_sentences(text, language, MANY)
    assert found is not None
    return found


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)), st.sampled_from(LANGUAGES))
@example("0\u2028\ufe00]", "am")  # a mark that shows nothing, beside a bracket without its partner
@example(':1. 2Ж\xa0http://x.y/z?a=b \x1f”你Ж303İa।"\x000I. Z\u3000.', "zh")  # sentencex 1.0.32 fails for it
def test_sentences_and_gaps_are_exactly_the_text(text: str, language: str) -> None:
    found = split(text, language)
    assert len(found.gaps) == len(found.sentences) + 1
    parts = zip(found.gaps, [*found.sentences, ""], strict=True)
    assert "".join(gap + sentence for gap, sentence in parts) == text
    assert found.join(found.sentences, language) == text
    assert not ONE_SENTENCE.fullmatch(text) or found == SplitText([text], ["", ""])
    marks = f"(?:{BLANK}[{re.escape(PAIRED)}])*{BLANK}"
    marker = re.compile(rf"{marks}(\(?\w[\w.]*[.)]+\s+{marks})?")
    assert all(map(marker.fullmatch, found.gaps))
    for sentence in found.sentences:
        assert sentence == sentence.strip() != ""
        assert not re.fullmatch(BLANK, sentence)
        assert len(sentence.splitlines()) == 1


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    read_table(__file__),
)
def test_texts_are_split_at_sentences_and_line_breaks(language: str, text: str, sentences: list[str]) -> None:
    assert split(text, language).sentences == sentences


@pytest.mark.parametrize("language", SPACED)
@pytest.mark.parametrize(
    "text",
    [
        "We use ASP.NET at work.",
        "See https://example.org/a?B=c now.",
        "Node.JS, System.IO.File and README.MD.",
        "foo!Bar\u200bBaz!\u200bNo?Yes…No.”Yes",
        "A dog.\u200b",
        "हाँ।नहीं نعم؟لا ነው።እንዴት Ես։Դու",
    ],
)
def test_in_scripts_with_spaces_a_sentence_ends_only_before_whitespace(language: str, text: str) -> None:
    assert len(split(text, language).sentences) == 1


def test_a_space_is_added_between_sentences_without_a_gap_unless_the_language_has_none() -> None:
    found = split("\t你好。世界。\n再见。", "zh")
    assert found.join(["Hallo.", "Welt.", "Ade."], "de") == "\tHallo. Welt.\nAde."
    assert found.join(["A。", "B。", "C。"], "ja") == "\tA。B。\nC。"


@pytest.mark.parametrize("language", ["en", "de", "fr", "es", "ru", "zh", "hi", "xx"])
def test_the_number_of_a_list_item_is_copied(language: str) -> None:
    lines = [f"{number}. Item {number} of the list." for number in range(1, 120)]
    items = [f"Item {number} of the list." for number in range(1, 120)]
    found = split("\n".join(lines), language)
    assert (found.sentences, found.join(items, language)) == (items, "\n".join(lines))
    assert split(" ".join(["word"] * WINDOW_CHARACTERS + ["end.\n"] + lines[:1]), language).sentences[-1] == items[0]


def test_an_initial_is_not_the_letter_of_a_list_item() -> None:
    assert split("J. Smith sleeps. A. Smith runs.").sentences == ["J. Smith sleeps.", "A. Smith runs."]


def test_a_text_with_too_many_sentences_is_not_split() -> None:
    assert split_sentences("A dog. A man.\n", "en", 2) is not None
    assert split_sentences("A dog. A man.\nA cat.", "en", 2) is None


def test_long_lines_are_split_as_short_ones_are() -> None:
    sentences = [f"Dog number {number} runs{' on' * (number % 50)}." for number in range(500)]
    assert split(" ".join(sentences)).sentences == sentences
    long = "Word " * WINDOW_CHARACTERS + "end."
    assert split(f"A dog. {long} A man.").sentences == ["A dog.", long, "A man."]


@pytest.mark.parametrize("unit", ["„", "'", "你好。", "\n", "a\n", "a. ", "a.B", "A b. c d. "])
def test_the_time_does_not_grow_with_the_square_of_the_length(unit: str) -> None:
    text = unit * (150_000 // len(unit))
    started = time.process_time()
    found = split(text)
    assert time.process_time() - started < 5  # sentencex alone takes 11 s for the first
    assert found.join(found.sentences, "de") == text


@pytest.mark.parametrize("error", ["PanicException", "KeyboardInterrupt"])
def test_a_text_for_which_the_library_panics_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    def segment(language: str, text: str) -> list[str]:
        raise type(error, (BaseException,), {})

    monkeypatch.setattr(sentencex, "segment", segment)
    if error == "PanicException":
        assert split("A dog. A man.\nA cat.").sentences == ["A dog. A man.", "A cat."]
    else:
        with pytest.raises(BaseException, match=r"^$"):
            split("A dog.")


def test_a_text_of_which_the_library_loses_characters_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencex, "segment", lambda language, text: ["A dog."])
    assert split("A dog. A man.").sentences == ["A dog. A man."]
