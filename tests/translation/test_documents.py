"""Texts with marks come back whole: nothing is lost, doubled or moved out of its place."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from sightline.translation.alignment import Translated
from sightline.translation.glossary import Glossary
from sightline.translation.marks import Mark, MarkedText, TranslatedText, as_source, chained
from sightline.translation.protected import protected_spans
from sightline.translation.stand_ins import Edit, Sentence
from sightline.translation.translator import translate_texts
from tests.translation.fakes import FakeEngine, Order, reversed_order, same_order

PAGE = """# Release notes

## Main

Hello {name}, please write to jane.doe@example.com or see https://example.com/a?b=1. It costs $1,234,567.89 😀

- First item with `code`.
  1. Nested item

> A quote. Another one.

| Name | Value |
|------|-------|
| A dog runs. | A cat sleeps. |

```python
def total(x, y):
    return x + y
```

    def total(x, y):
        return x

\tLast line.
"""
KEPT = (
    "jane.doe@example.com", "https://example.com/a_(b)?q=1", "$1,234,567.89", "5 kg", "20 °C", "12:30", "50 %",
    "{name}", "{{ user.name }}", "%s", "%(n)d", "%1$s", "$1", ":smile:", '<x id="1"/>', "#topic", "@jane", "😀",
    "👍🏽", "🇩🇪", "`x = 1`", "/usr/local/bin", "src/main.py", "README.md", "[^1]",
    "{count, plural, one {# item} other {# items}}", "2026-11-30", "v1.2.3", "${HOME}", "__init__", "snake_case",
    "C:\\Temp\\a.txt", "+49 30 1234567", "www.example.org", "&amp;", "#ff8800", "978-3-16-148410-0", "5 km/h", "3×4",
    "DE89 3704 0044 0532 0130 00", "10–12 kg", "(030) 1234567", "$x^2$", "v1.2.0-rc.1", "2001:db8::1", "$t(a.b)",
    "{name:>10,.2f}", "<%= x %>", "3:30pm", "@:common.hello", ":-)", "192.168.0.1", "--verbose=1", "👩‍👩‍👧",
    "%B", "{percent}%", "*|NAME|*", "<jane@example.com>", "<0>", "m²",
)  # fmt: skip
WORDS = ("the", "red", "dog", "runs", "over", "green", "grass", "and", "a", "small", "cat", "sleeps", "near", "houses")
ORDERS = (same_order, reversed_order)


def translate(text: str, marks: Sequence[Mark] = (), order: Order = same_order, **options: int) -> TranslatedText:
    engine = FakeEngine(order, **options)  # type: ignore[arg-type]
    ((result,),) = asyncio.run(translate_texts([MarkedText(text, marks)], engine))
    return result


def test_a_page_comes_back_with_all_that_is_no_sentence() -> None:
    translated = translate(PAGE).text
    kept = ("{name}", "jane.doe@example.com", "https://example.com/a?b=1", "$1,234,567.89", "😀", "`code`")
    code = PAGE[PAGE.index("```python") : PAGE.index("\tLast")]
    expected = PAGE.replace(code, "\0").upper().replace("\0", code)
    for part in kept:
        expected = expected.replace(part.upper(), part)
    assert translated == expected


@pytest.mark.parametrize("kept", KEPT)
def test_what_must_not_change_is_found_whole(kept: str) -> None:
    text = f"We read {kept} today."
    assert [text[span.start : span.end] for span in protected_spans(text)] == [kept]
    for order in ORDERS:
        assert translate(text, order=order).text.count(kept) == 1


@pytest.mark.parametrize(
    "text",
    ["A 12-year-old boy.", "In the 1990s.", "A 1st dog.", "He and/or she, e.g. I.", "I <3 it & you.", "5 A students"],
)
def test_ordinary_words_are_translated(text: str) -> None:
    assert protected_spans(text) == []


def generate(seed: int) -> tuple[str, list[Mark], Counter[str]]:
    """Return a document, its marks, and what must come back as it is."""
    rng, text, marks = random.Random(seed), "", list[Mark]()
    kept: Counter[str] = Counter()

    def sentence(parent: int | None, depth: int) -> None:
        nonlocal text
        for number in range(rng.randint(1, 6)):
            if number:
                text += " "
            choice = rng.random()
            if choice < 0.15:
                kept[part := rng.choice(KEPT)] += 1
                text += part
            elif choice < 0.35 and depth < 3:
                index = len(marks)
                marks.append(Mark(len(text), len(text), parent=parent))
                start = len(text)
                if rng.random() < 0.8:
                    sentence(index, depth + 1)
                    if rng.random() < 0.1:
                        text += ". "
                        sentence(index, depth + 1)
                marks[index] = Mark(start, len(text), rng.choice(("around", "around", "keep")), parent=parent)
            else:
                text += rng.choice(WORDS)

    for _ in range(rng.randint(1, 6)):
        text += rng.choice(("", "\n", "\n\n", "  ", "- ", "\t", "# ", "1. ", "> "))
        sentence(None, 0)
        text += rng.choice((".", "!", "?", "", ":")) + rng.choice(("\n", "\r\n", " ", "\n\n"))
    return text, marks, kept


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_nothing_is_lost_or_doubled_in_generated_documents(first: int) -> None:
    for seed in range(first, first + 250):
        text, marks, kept = generate(seed)
        order, size = ORDERS[seed % 2], (10_000, 25)[seed % 3 == 0]
        result = translate(text, marks, order, max_characters=size)
        note = f"seed {seed}: {text!r} {marks} -> {result}"
        assert Counter(re.findall(r"\r\n|[\n\t#>]", result.text)) == Counter(re.findall(r"\r\n|[\n\t#>]", text)), note
        words = Counter(re.findall(r"[a-z]+", text.lower()))
        assert Counter(re.findall(r"[a-z]+", result.text.lower())) == words, note
        for part, count in kept.items():
            assert result.text.count(part) >= count, note
        assert sorted(mark.index for mark in result.marks) == list(range(len(marks))), note
        check_nesting(marks, result, note)
        for mark in result.marks:
            source = marks[mark.index]
            if source.kind == "keep" and not any(inner.parent == mark.index for inner in marks):
                assert result.text[mark.start : mark.end] == text[source.start : source.end], note


def check_nesting(marks: Sequence[Mark], result: TranslatedText, note: str) -> None:
    """Check that each mark is inside of its parent, and that those beside it do not overlap."""
    places = {mark.index: mark for mark in result.marks}
    ends: dict[int | None, int] = {}
    for mark in result.marks:
        parent = marks[mark.index].parent
        if parent is not None:
            assert places[parent].start <= mark.start <= mark.end <= places[parent].end, note
        assert ends.get(parent, 0) <= mark.start, note
        ends[parent] = mark.end


def test_marks_follow_their_words() -> None:
    text = "The red dog and a cat run fast."
    marks = [Mark(4, 11), Mark(8, 11, parent=0), Mark(18, 21)]
    for order, expected in ((same_order, ["RED DOG", "DOG", "CAT"]), (reversed_order, ["DOG RED", "DOG", "CAT"])):
        result = translate(text, marks, order)
        placed = {mark.index: (result.text[mark.start : mark.end], mark.confidence > 0.9) for mark in result.marks}
        assert [placed[index] for index in range(3)] == [(words, True) for words in expected]


def test_a_mark_without_a_translation_is_empty_and_reported() -> None:
    engine = FakeEngine(lost=["red"])
    ((result,),) = asyncio.run(translate_texts([MarkedText("The red dog runs.", [Mark(4, 7)])], engine))
    assert [(mark.start == mark.end, mark.confidence) for mark in result.marks] == [(True, 0.0)]


def test_a_mark_with_a_scattered_translation_is_around_a_part_of_it() -> None:
    result = translate("x a b y", [Mark(2, 5)], lambda size: [1, 0, 3, 2])
    assert [result.text[mark.start : mark.end] for mark in result.marks] == ["A"]


def test_unknown_words_are_copied_and_unknown_quotes_and_capitals_are_plain() -> None:
    engine, texts = FakeEngine(reversed_order), ["The ħello dog’s “house” here.", "A {x} DOG."]
    ((result,), (upper,)) = asyncio.run(translate_texts(list(map(MarkedText, texts)), engine))
    assert engine.read == ['The Peter dog\'s "house" here.', "A Peter dog."]
    assert "ħello" in result.text and "PETER" not in result.text and upper.text == "DOG {x} A."


@pytest.mark.parametrize(
    ("text", "glossary", "expected"),
    [
        ("A big dog runs.", {"dog": "Hund"}, "A BIG Hund RUNS."),
        ("Dog runs. A Dog", {"dog": "hund"}, "Hund RUNS. A hund"),  # a capital at the start of a sentence follows
        ("It is IT. A bus.", {"IT": "EDV", "BUS": "x"}, "IT IS EDV. A BUS."),  # terms with capitals match only these
        ("A guide  dog, dogs", {"dog": "Hund", "guide dog": "Blinden-Hund"}, "A Blinden-Hund, DOGS"),
        ("A {dog} dog", {"dog": "Hund"}, "A {dog} Hund"),
        ("A ħog’s dog", {"ħog’s": "Igel", "dog": "Hund"}, "A Igel Hund"),  # words that the model does not know
        ("A dog sees a cat", {"dog": "CAT", "cat": "KATZ"}, "A CAT SEES A KATZ"),
        ("A cat sees a dog", {"dog": "DO"}, "A CAT SEES A DOG"),  # the model may add an ending
    ],
)
def test_terms_get_the_translations_of_a_glossary(text: str, glossary: dict[str, str], expected: str) -> None:
    ((result,),) = asyncio.run(translate_texts([Glossary(glossary).mark(MarkedText(text))], FakeEngine()))
    assert (result.text, result.marks) == (expected, [])


def test_forms_and_compounds_of_a_term_stay() -> None:
    forms = (("Hund", "Hundes"), ("Mann", "Männern"), ("Haare", "Haar"), ("Haaren", "Haare"), ("junge", "Jungen"))
    for written, word in (*forms, ("Kleid", "Jeanskleid")):
        assert Edit(0, 1, "x", written, is_term=True).is_in(word), word
    for written, word in (("IT", "Zeit"), ("Ball", "Bank"), ("Hut", "Schutz"), ("Hund", "")):
        assert not Edit(0, 1, "x", written, is_term=True).is_in(word), word


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([[0.9, 0.1], [0.1, 0.9]], "Hund B"),  # a word of the term alone is replaced
        ([[0.4, 0.6], [0.0, 0.0]], "A B"),  # a compound, which stands for another word too, stays
        ([[0.01, 0.9], [0.0, 0.0]], "Hund A B"),  # no word stands for the term
    ],
)
def test_a_term_replaces_only_words_of_its_own(weights: list[list[float]], expected: str) -> None:
    sentence = Sentence("dog x", (), [Mark(0, 3, "term", text="Hund")], ())
    words = [(0, 3), (4, 5)]
    translated = Translated("A B", words, [(0, 1), (2, 3)], np.array(weights, np.float32))
    assert sentence.aligned(translated, ()).text == expected


def test_terms_pass_through_a_language_between() -> None:
    """Their marks follow the words of the first translation, also over a tag that they exceed."""
    text = Glossary({"red dog": "Fuchs", "cat": "Katz"}).mark(MarkedText("The red dog, a cat {x}.", [Mark(4, 7)]))
    ((first,),) = asyncio.run(translate_texts([text], FakeEngine(reversed_order), writes_terms=False))
    assert [first.text[mark.start : mark.end] for mark in first.marks] == ["RED", "DOG RED", "CAT"]
    ((second,),) = asyncio.run(translate_texts([as_source(text, first)], FakeEngine(reversed_order)))
    assert second.text == "THE Fuchs, A Katz {x}."
    assert [mark.index for mark in chained(first, second).marks] == [0]


def test_marks_are_around_terms() -> None:
    marks = [Mark(2, 9), Mark(6, 9, parent=0)]
    text = MarkedText("A red dog runs.", marks)
    text = Glossary({"dog": "Hund"}).mark(text)
    ((result,),) = asyncio.run(translate_texts([text], FakeEngine(reversed_order)))
    placed = {mark.index: result.text[mark.start : mark.end] for mark in result.marks}
    assert (result.text, placed) == ("RUNS Hund RED A.", {0: "Hund RED", 1: "Hund"})


def test_long_sentences_are_divided_at_clauses() -> None:
    engine = FakeEngine(max_characters=30)
    text = "The red dog runs over grass, and a small cat sleeps; children play."
    ((result,),) = asyncio.run(translate_texts([MarkedText(text)], engine))
    assert result.text == text.upper()
    assert engine.read == ["The red dog runs over grass,", "and a small cat sleeps;", "children play."]


def test_symbols_between_two_texts_are_copied() -> None:
    engine = FakeEngine()
    text = "A dog? # Two cats\nFile → Save it | My site · Item # 5 #\nFive #topic here"
    ((result,),) = asyncio.run(translate_texts([MarkedText(text)], engine))
    assert result.text == text.upper().replace("#TOPIC", "#topic").replace("ITEM #", "ITEM#")
    assert engine.read == ["A dog?", "# Two cats", "File", "Save it", "My site", "Item # 5", "Five Peter here"]


def test_a_number_is_copied_if_the_model_writes_another() -> None:
    class Confused(FakeEngine):
        async def translate(self, sentences: Sequence[str], are_aligned: Sequence[bool]) -> Sequence[list[Translated]]:
            changed = [sentence.replace("12", "18").replace(" 03 ", " 15 ") for sentence in sentences]
            return await super().translate(changed, are_aligned)

    engine = Confused()
    text = "We saw 12 dogs and 7 cats. We came at 03 o'clock. No number."
    ((result,),) = asyncio.run(translate_texts([MarkedText(text)], engine))
    assert result.text == "WE SAW 12 DOGS AND 7 CATS. WE CAME AT 15 O'CLOCK. NO NUMBER."  # 15 is three in the afternoon
    assert len(engine.read) == 4


def test_patterns_take_linear_time() -> None:
    """Each of these texts would take minutes with a pattern that tries all lengths."""
    parts = ["a", "a.", "{a,plural,", "{", "a@", "$a·", "<a·", "/a", "1,1", "_a", "`a", "a-", "\\a{", "www.", "1·234"]
    for part in [part.replace("·", " ") for part in parts]:
        assert protected_spans(part * (40_000 // len(part))) is not None
