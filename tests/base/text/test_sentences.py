"""Sentences of texts; joined with their gaps they are the text."""

import re
import time

import pytest
import sentencex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sightline.base.text.sentences import WINDOW_CHARACTERS, SplitText, split_sentences

MANY = 10**9
EXACT = "zh"  # a language for which `join` adds no space
PIECES = [
    *("Dr. Smith", "z. B.", "e.g.", "U.S.", "3.5", "1. ", "www.a.de", "...", "…", "?!", "。", "！", "؟", "۔", "।"),
    *("\n", "\r\n", "\r", "\n\n\n", "\t", " ", "  ", "\u3000", "\u00a0", "\u2028", "\x0b", "\x1c", "\u200b"),
    *(
        "„Ja.“",
        '"No."',
        "‘",
        "’",
        "»",
        "«",
        "(a.)",
        "[",
        "你好",
        "世界",
        "مرحبا",
        "नमस्ते",
        "한국어",
        "e\u0301",
        "👩‍👩‍👧",
        "word",
        "\x00",
    ),
]
LANGUAGES = st.sampled_from(["en", "de", "fr", "zh", "ja", "ar", "hi", "th", "hy", "xx", ""])


def split(text: str, language: str = "en") -> SplitText:
    found = split_sentences(text, language, MANY)
    assert found is not None
    return found


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)), LANGUAGES)
@example(':1. 2Ж\xa0http://x.y/z?a=b \x1f”你Ж303İa।"\x000I. Z\u3000.', "zh")  # sentencex 1.0.32 fails for it
def test_sentences_and_gaps_are_exactly_the_text(text: str, language: str) -> None:
    found = split(text, language)
    assert len(found.gaps) == len(found.sentences) + 1
    assert found.join(found.sentences, EXACT) == text
    marker = re.compile(r"\s*(\(?\w[\w.]*[.)]+\s+)?")
    assert all(map(marker.fullmatch, found.gaps))
    for sentence in found.sentences:
        assert sentence == sentence.strip() != ""
        assert len(sentence.splitlines()) == 1


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    [
        ("en", "A dog runs. A man sleeps!  Why?", ["A dog runs.", "A man sleeps!", "Why?"]),
        (
            "en",
            "Dr. Smith paid $3.50 in the U.S. today. He left.",
            ["Dr. Smith paid $3.50 in the U.S. today.", "He left."],
        ),
        ("en", "A title\n\nA dog runs\nin the park.", ["A title", "A dog runs", "in the park."]),
        ("en", "\r\n\tA dog.\r\nA man.\r", ["A dog.", "A man."]),
        ("de", "Das ist z. B. gut. Am 3. Mai kam er.", ["Das ist z. B. gut.", "Am 3. Mai kam er."]),
        ("en", "1. Open the door.\n2. Close it. Wait!", ["Open the door.", "Close it.", "Wait!"]),
        ("en", "1.\tOpen. 2. Close.", ["Open.", "Close."]),
        ("en", "a) Open.\n(iv) Close.\n2.3. Wait.\n", ["Open.", "Close.", "Wait."]),
        ("en", "- Open.\n* Close. Wait.\n• Go.", ["- Open.", "* Close.", "Wait.", "• Go."]),
        ("en", "1.\nOpen.\n 2. \n", ["1.", "Open.", "2."]),
        ("en", "There are 3. We saw 1990. It was late.", ["There are 3.", "We saw 1990.", "It was late."]),
        ("de", "1. Tür öffnen.\n2. Fenster schließen.", ["Tür öffnen.", "Fenster schließen."]),
        ("fr", "1. Ouvrez la porte. 2. Fermez-la.", ["Ouvrez la porte.", "Fermez-la."]),
        ("zh", "你好。世界。", ["你好。", "世界。"]),
        ("ar", "كيف حالك؟ أنا بخير.", ["كيف حالك؟", "أنا بخير."]),
        ("en", " \n ", []),
        ("en", "", []),
    ],
)
def test_texts_are_split_at_sentences_and_line_breaks(language: str, text: str, sentences: list[str]) -> None:
    assert split(text, language).sentences == sentences


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
    long = "word " * WINDOW_CHARACTERS + "end."
    assert split(f"A dog. {long} A man.").sentences == ["A dog.", long, "A man."]


@pytest.mark.parametrize("unit", ["„", "'", "你好。", "\n", "a\n", "a. "])
def test_the_time_does_not_grow_with_the_square_of_the_length(unit: str) -> None:
    text = unit * (300_000 // len(unit))
    started = time.process_time()
    found = split(text)
    assert time.process_time() - started < 10  # sentencex alone takes 45 s for the first
    assert found.join(found.sentences, EXACT) == text


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
