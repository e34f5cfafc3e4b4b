"""Measure how context changes the encoder's vectors, by distance and for words with two senses."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import interval, percent, resamples
from lab.study.maps import Weights, array_of
from lab.study.runs import SOURCE, system_of
from lab.study.served import INPUTS_PER_CALL, Served, served_models
from sightline.base.text.words import Word, words_of
from sightline.model.data.text import read_lines
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.evaluation.result import Share

NAME = "context"
SENTENCES = 50
REPLACEMENT = "something"
DISTANCES = (0, 1, 2, 3, 4, 7, 10, 10**6)  # first distance in words of each group, and the end of the last
# Sentences with a word in two senses, four of each; the word comes first.
SENSES = Path(__file__).with_name("senses.txt")

Vectors = list[tuple[Word, Weights]]  # words of a text in order, with their vectors (D,)


@dataclass(frozen=True)
class Use:
    """A sentence with a word of two senses."""

    word: str
    sense: int
    sentence: str


def uses() -> list[Use]:
    all_uses = []
    for block in SENSES.read_text(encoding="utf-8").strip().split("\n\n"):
        word, rest = block.split("\n", 1)
        for sense, lines in enumerate(rest.split("|")):
            all_uses += [Use(word, sense, line) for line in lines.strip().splitlines()]
    return all_uses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundles", type=Path, nargs="+", help="folders of bundles; models without an encoder are skipped"
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"), help="folder with the test set")


def measure(arguments: argparse.Namespace) -> Result:
    """Encode the sentences with one model after another."""
    sentences = read_lines(arguments.data / f"{TEST_SPLIT}.{SOURCE}")[:SENTENCES]
    rows: list[Row] = []
    for served, manifest in served_models(*arguments.bundles):
        if "encode" in manifest.tasks and not manifest.is_decoder_only:
            rows += [
                {"model": manifest.name, **influence(served, manifest.name, sentences)},
                {"model": manifest.name, **senses(served, manifest.name)},
            ]
    return Result(rows=rows)


def word_vectors(served: Served, model: str, texts: Sequence[str]) -> list[Vectors]:
    """Return the words of each text with the means of the encoder's vectors of their tokens."""
    body = {"model": model, "pooling": "none", "encoding": "base64", "normalize": False}
    of_texts = []
    for start in range(0, len(texts), INPUTS_PER_CALL):
        part = list(texts[start : start + INPUTS_PER_CALL])
        (encoded,) = served.post("/v1/encode", {**body, "inputs": part})
        (tokenized,) = served.post("/v1/tokenize", {"model": model, "inputs": part})
        for text, data, shape, tokens in zip(
            part, encoded["embeddings"], encoded["shapes"], tokenized["outputs"], strict=True
        ):
            vectors = array_of({"data": data, "shape": shape})
            words = words_of(text, [None if token["special"] else (token["start"], token["end"]) for token in tokens])
            of_texts.append([(word, vectors[list(word.tokens)].mean(axis=0)) for word in words])
    return of_texts


def influence(served: Served, model: str, sentences: Sequence[str]) -> Row:
    """Replace each word of each sentence and return how much the vectors of all words change, by
    their distance from it in words, as a share of the change of its own vector. A change is the
    length of the difference, divided by the length of the vector before.
    """
    counts, sums = (np.zeros((len(sentences), len(DISTANCES) - 1)) for _ in range(2))
    for number, (sentence, before) in enumerate(zip(sentences, word_vectors(served, model, sentences), strict=True)):
        places = [place for place, (word, _) in enumerate(before) if word.text.isalpha()]
        replaced = [before[place][0] for place in places]
        changed = [f"{sentence[: word.start]}{REPLACEMENT}{sentence[word.end :]}" for word in replaced]
        for place, after in zip(places, word_vectors(served, model, changed), strict=True):
            if len(after) != len(before):  # the replacement has joined the word before or after it
                continue
            for other, ((_, old), (_, new)) in enumerate(zip(before, after, strict=True)):
                group = int(np.searchsorted(DISTANCES, abs(other - place), side="right")) - 1
                counts[number, group] += 1
                sums[number, group] += np.linalg.norm(new - old) / np.linalg.norm(old)
    samples = resamples(len(sentences))
    drawn = (samples @ sums) / np.maximum(samples @ counts, 1)
    means = sums.sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    shares = drawn / drawn[:, :1]
    return {
        "quantity": "influence",
        "sentences": len(sentences),
        "value": [round(float(mean / means[0]), 4) for mean in means],
        "interval": [[round(end, 4) for end in interval(column)] for column in shares.T],
    }


def senses(served: Served, model: str) -> Row:
    """Return how often the nearest other vector of a word with two senses has the same sense."""
    every = uses()
    vectors: list[Weights] = []
    for use, words in zip(every, word_vectors(served, model, [use.sentence for use in every]), strict=True):
        vector = next(vector for word, vector in words if word.text == use.word)
        vectors.append(vector / np.linalg.norm(vector))
    correct = 0
    for number, use in enumerate(every):
        others = [other for other, candidate in enumerate(every) if candidate.word == use.word and other != number]
        nearest = max(others, key=lambda other: float(vectors[number] @ vectors[other]))
        correct += every[nearest].sense == use.sense
    share = Share(correct, len(every))
    return {"quantity": "senses", "correct": share.count, "total": share.total, "interval": list(share.interval)}


def tables(result: Result) -> Mapping[str, str]:
    groups = [
        str(first) if last == first + 1 else f"{first} or more" if last == DISTANCES[-1] else f"{first} to {last - 1}"
        for first, last in pairwise(DISTANCES)
    ][1:]
    by_model = {row["model"]: row for row in result.rows if row["quantity"] == "senses"}
    body = []
    for row in result.rows:
        if row["quantity"] == "influence":
            cells = [percent(*pair, digits=1) for pair in zip(row["value"][1:], row["interval"][1:], strict=True)]
            of_senses = by_model[row["model"]]
            sense = percent(of_senses["correct"] / of_senses["total"], of_senses["interval"])
            body.append([f"`{system_of(row['model'])}`", *cells, sense])
    return {NAME: table(["system", *(f"distance {group}" for group in groups), "senses correct"], body)}
