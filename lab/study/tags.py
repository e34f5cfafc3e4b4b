"""Measure which words are under tags after a translation, beside other ways to translate markup."""

import argparse
import html
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.chrf import CHRF

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bergamot import bergamot
from lab.study.bleu import interval, resamples
from lab.study.runs import SOURCE
from lab.study.served import Served, served_translators
from lab.study.step import add_keep, keep_last_rows
from lab.study.word_aligner import align
from lab.study.word_links import Links, words_in
from lab.zoo.systems import MULTI30K
from sightline.base.text.sentences import has_letter
from sightline.base.text.words import Span, word_spans
from sightline.model.data.text import read_lines
from sightline.model.evaluation.defaults import TEST_SPLIT

NAME = "tags"
TRANSLATED = 8000  # sentences of the training set that a model translates if there are no references
# Words between which there are phrases.
FUNCTION_WORDS = re.compile(
    "an?|the|th[ei]se?|this|that|those|some|two|three|four|and|or|but|while|as|with|without|of|in|on|at|by|for|from|to|"
    "into|onto|over|under|near|next|up|down|out|off|through|across|along|around|behind|between|front|is|are|was|were|"
    "be|being|has|have|had|his|her|their|its?|he|she|they|who|which|there|what|where",
    re.IGNORECASE,
)
Translate = Callable[[Sequence[str]], list[str]]
Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Tagged:
    """A text, and the ranges in it that tags are around."""

    text: str
    ranges: Sequence[Span] = ()

    @property
    def pieces(self) -> tuple[str, str, str]:
        """The text before, inside and after the first tag."""
        start, end = self.ranges[0]
        return self.text[:start], self.text[start:end], self.text[end:]

    @property
    def html(self) -> str:
        return "{}<b>{}</b>{}".format(*map(html.escape, self.pieces))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, nargs="+", help="folders of bundles; each has a translator")
    add_keep(parser, "models")
    parser.add_argument("--data", type=Path, required=True, help=f"the folder {MULTI30K.folder}")
    parser.add_argument("--sentences", type=int, help="number of test sentences, from the first one (default: all)")
    parser.add_argument("--firefox", type=Path, help="files of the Firefox model in one of the folders, for Bergamot")


def measure(arguments: argparse.Namespace) -> Result:
    """Translate captions with a tag around a phrase in several ways, and compare the words under it
    with those that an aligner links to the phrase. Without references, the training set and the
    test set have translations by the model itself.
    """
    rows, lines = list[Row](), read_lines(arguments.data / f"{TEST_SPLIT}.{SOURCE}")[: arguments.sentences]
    captions = with_phrases(lines)
    tagged, marked = list(captions.values()), [caption.html for caption in captions.values()]
    for served, manifest in served_translators(*arguments.bundles):
        plain = partial(_translate, served, model=manifest.name)
        outputs = {
            "Sightline": _translate(served, marked, model=manifest.name, markup="html"),
            "cut at tags": cut(plain, tagged),
            "without tags": plain([each.text for each in tagged]),
        }
        if arguments.firefox is not None and manifest.architecture == "firefox":
            with bergamot(arguments.firefox) as translate:
                outputs["Bergamot"] = translate(marked, html=True)["texts"]
        assert manifest.languages is not None, "it translates"
        references, targets = (
            arguments.data / f"{split}.{manifest.languages.target}" for split in (TEST_SPLIT, "train")
        )
        sources = read_lines(arguments.data / f"train.{SOURCE}")[: None if targets.exists() else TRANSLATED]
        training = zip(sources, read_lines(targets) if targets.exists() else plain(sources), strict=True)
        expected = (
            [read_lines(references)[number] for number in captions] if references.exists() else outputs["without tags"]
        )
        read = {name: list(map(without_tags, texts)) for name, texts in outputs.items()}
        pairs = [(one.text, other.text) for texts in read.values() for one, other in zip(tagged, texts, strict=True)]
        links = iter(align([(words_in(one), words_in(other)) for one, other in [*pairs, *training]]))
        for name, texts in read.items():
            counts = np.array([under_tag(*each, next(links)) for each in zip(tagged, texts, strict=True)], np.float64)
            low, high = interval(f1(resamples(len(counts)) @ counts))
            rows.append(
                {
                    "model": manifest.name,
                    "method": name,
                    "sentences": len(counts),
                    "has_references": references.exists(),
                    "chrf": round(CHRF().corpus_score([each.text for each in texts], [expected]).score, 2),
                    "words": int(counts[:, [0, 2]].sum()),
                    "f1": round(float(f1(counts.sum(axis=0))), 4),
                    "interval": [round(low, 4), round(high, 4)],
                    "once": sum(len(each.ranges) == 1 for each in texts),
                }
            )
    return Result(rows=keep_last_rows(arguments.results, NAME, rows, itemgetter("model")) if arguments.keep else rows)


def _translate(served: Served, texts: Sequence[str], **body: str) -> list[str]:
    return [output["text"] for output in served.outputs("/v1/translate", body, texts)]


def with_phrases(lines: Sequence[str]) -> dict[int, Tagged]:
    """Return the lines that have a phrase by their number, with a tag around it."""
    return {number: Tagged(line, [span]) for number, line in enumerate(lines) if (span := _phrase(line, number))}


def _phrase(text: str, seed: int) -> Span | None:
    """Return a run of words between function words and marks; None if there is none."""
    runs, last = list[Span](), -2
    for index, (start, end) in enumerate(word_spans(text)):
        if text[start].isalnum() and not FUNCTION_WORDS.fullmatch(text, start, end):
            runs[-1:] = [(runs[-1][0], end)] if last == index - 1 else [*runs[-1:], (start, end)]
            last = index
    return random.Random(seed).choice(runs) if runs else None


def without_tags(text: str) -> Tagged:
    """Read a text with tags of one kind."""
    plain, ranges = "", list[Span]()
    for piece in re.split("(</?b>)", text):
        if piece == "<b>":
            ranges.append((len(plain), len(plain)))
        elif piece == "</b>":
            ranges[-1] = ranges[-1][0], len(plain)
        else:
            plain += html.unescape(piece)
    return Tagged(plain, ranges)


def cut(translate: Translate, captions: Sequence[Tagged]) -> list[str]:
    """Translate what is before, inside and after each tag alone, as LibreTranslate does."""
    pieces = [piece for caption in captions for piece in caption.pieces]
    wanted = [piece.strip() for piece in pieces if has_letter(piece)]
    found = iter(translate(wanted))
    texts = [piece.replace(piece.strip(), next(found)) if has_letter(piece) else piece for piece in pieces]
    return ["{}<b>{}</b>{}".format(*map(html.escape, texts[start : start + 3])) for start in range(0, len(texts), 3)]


def under_tag(source: Tagged, target: Tagged, links: Links) -> tuple[int, int, int]:
    """Return how many target words are under a tag with a link to the phrase, without one, and how
    many with one are under none. Words without a link do not count.
    """
    inside, under = (
        [any(start < last and first < end for start, end in each.ranges) for first, last in word_spans(each.text)]
        for each in (source, target)
    )
    linked: dict[int, bool] = {}
    for one, other in links:
        linked[other] = linked.get(other, False) or inside[one]
    right, wrong, missed = ((True, True), (False, True), (True, False))
    found = [(is_expected, under[word]) for word, is_expected in linked.items()]
    return found.count(right), found.count(wrong), found.count(missed)


def f1(counts: Counts) -> Counts:
    right, wrong, missed = np.moveaxis(counts, -1, 0)
    scores: Counts = 2 * right / np.maximum(2 * right + wrong + missed, 1)
    return scores


def tables(result: Result) -> Mapping[str, str]:
    head = ["model", "method", "F1 of words under the tag", "one tag", "chrF"]
    body = []
    for row in result.rows:
        low, high = row["interval"]
        is_plain = row["method"] == "without tags"
        own = (
            ["", ""]
            if is_plain
            else [f"{row['f1']:.3f} [{low:.3f}, {high:.3f}]", f"{row['once']} of {row['sentences']}"]
        )
        chrf = f"{row['chrf']:.1f}" + ("" if row["has_references"] else " to the text without tags")
        body.append([f"`{row['model']}`", row["method"], *own, chrf])
    return {NAME: table(head, body)}
