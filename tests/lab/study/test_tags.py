"""Words under tags are counted as an aligner links them."""

import pytest

from lab.study.documents import compare, document
from lab.study.tags import Tagged, cut, under_tag, with_phrases, without_tags
from lab.study.word_aligner import align


def test_an_aligner_learns_which_words_stand_for_each_other() -> None:
    texts = [("a red dog runs", "ein roter Hund rennt"), ("a dog", "ein Hund"), ("red cats", "rote Katzen")]
    texts += [("a red house", "ein rotes Haus"), ("a cat runs", "eine Katze rennt"), ("houses", "Häuser")]
    pairs = [(source.split(), target.split()) for source, target in 5 * texts]
    assert align(pairs)[0] >= {(0, 0), (2, 2), (3, 3)}


def test_words_under_a_tag_are_right_wrong_or_missed() -> None:
    source, target = Tagged("a red dog", [(2, 9)]), without_tags("<b>ein</b> <b>roter</b> &amp; Hund gut")
    assert target == Tagged("ein roter & Hund gut", [(0, 3), (4, 9)])
    assert under_tag(source, target, frozenset({(0, 0), (1, 1), (2, 3)})) == (1, 1, 1)


def test_text_is_cut_at_tags() -> None:
    (caption,) = with_phrases(["A big dog runs in a <park>."]).values()
    assert caption.html.replace("<b>", "").replace("</b>", "") == "A big dog runs in a &lt;park&gt;."
    (text,) = cut(lambda pieces: [piece.upper() for piece in pieces], [Tagged("A dog & a cat.", [(2, 5)])])
    assert text == "A <b>DOG</b> &amp; A CAT."


@pytest.mark.parametrize("is_html", [False, True])
def test_all_that_changes_in_a_document_is_counted(is_html: bool) -> None:
    source, spans = next(made for seed in range(99) if len((made := document(seed, is_html))[1]) > 3)
    whole = compare(source, source, spans)
    assert [whole[f"{name}_kept"] for name in ("spans", "lines", "tags")] == [
        whole[name] for name in ("spans", "lines", "tags")
    ]
    changed = compare(source, source.replace(spans[0], "", 1).replace("\n", " ", 1) + "<i>", spans)
    assert changed["spans_kept"] < whole["spans"] and changed["lines_kept"] == 0 and not changed["well_formed"]
