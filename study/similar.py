"""Tokens that the shipped model's embeddings hold for similar, analogies that they complete, and what 8 bits change."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from bench.record import Result, Row
from bench.report import table
from service.bundle import Manifest
from service.fields import MAX_INPUTS
from service.loading import find_bundles
from study.served import Served, serve
from study.step import no_pictures

NAME = "similar"
MODEL = "multi30k-en-de"
SHOWN_NEIGHBOURS, SHOWN_ANSWERS = 4, 3
FIRST = 5  # answers to an analogy that are counted
NEAR = 100  # neighbours, as many as the service tells
COMPARED = 10  # neighbours that two bundles should have in common
ALIKE = 0.99  # ten cosines above this has only a token whose row is nearly that of many others

# `wom` is a piece that was only a step to longer ones.
TOKENS = (
    "woman",
    "playing",
    "bicycle",
    "red",
    "beach",
    "snow",
    "guitar",
    "the",
    "Hund",
    "rot",
    "spielt",
    "Strand",
    "wom",
)
ANALOGIES = (
    ("boy", "boys", "girl"),
    ("plays", "playing", "runs"),
    ("red", "rot", "blue"),
    ("walking", "geht", "running"),
    ("dog", "dogs", "child"),
    ("man", "woman", "boy"),
    ("man", "Mann", "woman"),
)
# Pairs of one relation each. All words are tokens of the model.
RELATIONS = (
    "riding rides, playing plays, running runs, walking walks, sitting sits, standing stands, jumping jumps, "
    "holding holds",
    "two zwei, three drei, four vier, five fünf",
    "man men, woman women, boy boys, girl girls, dog dogs, child children, car cars, tree trees, bike bikes, "
    "horse horses",
    "Mann Männer, Frau Frauen, Junge Jungen, Hund Hunde, Kind Kinder, Pferd Pferde, Baum Bäume",
    "red rot, blue blau, green grün, white weiß, yellow gelb, black schwarz",
    "two Two, three Three, a A, man Man, woman Woman, people People, girl Girl, boy Boy",
    "man woman, boy girl, men women, boys girls, Mann Frau, Männer Frauen, guy lady",
    "dog Hund, man Mann, woman Frau, girl Mädchen, boy Junge, child Kind, car Auto, beach Strand, street Straße, "
    "water Wasser, horse Pferd",
)

Asked = str | Sequence[str]  # a token, or a, b, c of an analogy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {MODEL}")
    parser.add_argument("--float32", type=Path, help=f"folder with {MODEL} in float32, to compare neighbours with")


def measure(arguments: argparse.Namespace) -> Result:
    """Ask the model over the service's HTTP API.

    Raises:
        ValueError: the model is not there or not in float32 where it should be, or a word is not one of its tokens.
    """
    with serve(arguments.bundles) as served:
        manifest = _manifest(arguments.bundles)
        rows: list[Row] = [
            *({"kind": "token", "token": token, **_shown(served, token, SHOWN_NEIGHBOURS)} for token in TOKENS),
            *({"kind": "analogy", "analogy": words, **_shown(served, words, SHOWN_ANSWERS)} for words in ANALOGIES),
            *({"kind": "relation", **count(served, pairs_of(relation))} for relation in RELATIONS),
        ]
        if arguments.float32 is not None:
            with serve(arguments.float32) as exact:
                dtype = _manifest(arguments.float32).dtype
                if dtype != "float32":
                    raise ValueError(f"{MODEL} in {arguments.float32} is {dtype}, not float32")
                tokens = askable(served, manifest.limits.vocabulary)
                rows.append({"kind": "agreement", "dtype": manifest.dtype, **compare(served, exact, tokens)})
    return Result(rows=rows)


def _manifest(bundles: Path) -> Manifest:
    for manifest in find_bundles(bundles, default_model=None).values():
        if manifest.name == MODEL:
            return manifest
    raise ValueError(f"{bundles} has no {MODEL}")


def pairs_of(relation: str) -> list[tuple[str, str]]:
    return [(first, second) for first, second in (pair.split() for pair in relation.split(", "))]


def neighbours(served: Served, asked: Asked, top_k: int) -> list[dict[str, Any]]:
    """The tokens nearest to a token, or to what completes an analogy."""
    question = {"token": asked} if isinstance(asked, str) else {"analogy": list(asked)}
    (answer,) = served.post("/v1/similar", {"model": MODEL, "top_k": top_k, **question})
    found: list[dict[str, Any]] = answer["neighbours"]
    return found


def _shown(served: Served, asked: Asked, top_k: int) -> Row:
    found = neighbours(served, asked, top_k)
    return {"neighbours": [{"text": one["text"], "score": round(one["score"], 4)} for one in found]}


def count(served: Served, pairs: Sequence[tuple[str, str]]) -> Row:
    """How often an analogy between two pairs, in this order, finds its word first and among the first five.

    Also of how many pairs the second word is near the first.
    """
    places = [_place(served, (*pair, asked), wanted, FIRST) for pair, (asked, wanted) in permutations(pairs, 2)]
    return {
        "relation": pairs[0],
        "pairs": len(pairs),
        "near": sum(_place(served, first, second, NEAR) < NEAR for first, second in pairs),
        "analogies": len(places),
        "first": places.count(0),
        "first_five": sum(place < FIRST for place in places),
    }


def _place(served: Served, asked: Asked, wanted: str, top_k: int) -> int:
    """How many neighbours come before a word; top_k where it is not among them."""
    texts = [one["text"] for one in neighbours(served, asked, top_k)]
    word = f" {wanted}"  # without the blank it is a piece from inside a word
    return texts.index(word) if word in texts else top_k


def askable(served: Served, vocabulary: int) -> list[str]:
    """All tokens of a vocabulary that can be asked for: a text can begin with them."""
    texts: list[str] = []
    for start in range(0, vocabulary, MAX_INPUTS):
        ids = [[id_] for id_ in range(start, min(start + MAX_INPUTS, vocabulary))]
        (answer,) = served.post("/v1/detokenize", {"model": MODEL, "ids": ids, "side": "source"})
        texts += answer["texts"]
    words = [(id_, text) for id_, text in enumerate(texts) if text.strip()]
    body = {"model": MODEL, "add_special_tokens": False}
    split = served.outputs("/v1/tokenize", body, [text for _, text in words])
    return [text for (id_, text), tokens in zip(words, split, strict=True) if [one["id"] for one in tokens] == [id_]]


def compare(served: Served, exact: Served, tokens: Sequence[str]) -> Row:
    """How many of a token's nearest are the same in two bundles of one model.

    Tokens of which the exact one finds many alike are counted; they are part of `mean`, and not of `fewest`.
    """
    common, is_alike = [], []
    for token in tokens:
        found, wanted = (neighbours(bundle, token, COMPARED) for bundle in (served, exact))
        common.append(len({one["id"] for one in found} & {one["id"] for one in wanted}))
        is_alike.append(wanted[-1]["score"] > ALIKE)
    others = [number for number, alike in zip(common, is_alike, strict=True) if not alike]
    return {
        "tokens": len(common),
        "mean": round(sum(common) / len(common), 2),
        "alike": sum(is_alike),
        "fewest": min(others, default=0),
    }


def tables(result: Result) -> Mapping[str, str]:
    """Neighbours, analogies and counts; a sentence on 8 bits where they were compared."""
    tokens, analogies, relations, compared = (
        [row for row in result.rows if row["kind"] == kind] for kind in ("token", "analogy", "relation", "agreement")
    )
    return {
        "similar-tokens": table(["token", "neighbours"], [[f"`{row['token']}`", _list(row)] for row in tokens]),
        "similar-analogies": table(["analogy", "answers"], [[_question(row), _list(row)] for row in analogies]),
        "similar-relations": _relations(relations),
        **({"similar-agreement": _agreement(compared[0])} if compared else {}),
    }


def _question(row: Row) -> str:
    a, b, c = row["analogy"]
    return f"{a} : {b} :: {c} : ?"


def _list(row: Row) -> str:
    return ", ".join(f"{_name(one['text'])} {one['score']:.2f}" for one in row["neighbours"])


def _name(text: str) -> str:
    return text.strip() if text.startswith(" ") else f"`{text}` (a piece)"


def _relations(rows: Sequence[Row]) -> str:
    head = ["relation", "pairs", f"among the {NEAR} nearest", "analogies", "first", "first five"]
    columns = ("pairs", "near", "analogies", "first", "first_five")
    return table(head, [[" : ".join(row["relation"]), *(str(row[column]) for column in columns)] for row in rows])


def _agreement(row: Row) -> str:
    return (
        f"Of the {COMPARED} tokens nearest to a token of the shipped model ({row['dtype']}), {row['mean']:.1f} are "
        f"those of float32, in the mean over all {row['tokens']:,} that can be asked for. Each has at least "
        f"{row['fewest']}, leaving out {row['alike']} whose {COMPARED} nearest all have a cosine above {ALIKE:g}."
    )


draw = no_pictures
