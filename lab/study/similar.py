"""Nearest tokens and analogies in the shipped model's embeddings, also in 8 bits."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.served import INPUTS_PER_CALL, Served, serve
from sightline.base.bundle import Manifest
from sightline.service.discovery import find_bundles

NAME = "similar"
MODEL = "multi30k-en-de"
SHOWN_NEIGHBOURS, SHOWN_RESULTS = 4, 3
FIRST = 5  # number of top results of an analogy that are checked
NEAR = 100  # number of neighbours, the service's maximum
COMPARED = 10  # number of neighbours to compare between two bundles
ALIKE = 0.99  # only tokens whose embeddings almost equal many others have ten neighbours above this cosine

# `wom` is an intermediate piece of longer tokens.
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
# Pairs with the same relation on each line. All words are tokens of the model.
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

Query = str | Sequence[str]  # a token, or the words a, b, c of an analogy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {MODEL}")
    parser.add_argument("--float32", type=Path, help=f"folder with {MODEL} in float32, to compare neighbours with")


def measure(arguments: argparse.Namespace) -> Result:
    """Query the model. Raises `ValueError` if it is missing, or not in float32 where it must be, or
    a word is not one of its tokens.
    """
    with serve(arguments.bundles) as served:
        manifest = _manifest(arguments.bundles)
        rows: list[Row] = [
            *({"kind": "token", "token": token, **_neighbours(served, token, SHOWN_NEIGHBOURS)} for token in TOKENS),
            *(
                {"kind": "analogy", "analogy": words, **_neighbours(served, words, SHOWN_RESULTS)}
                for words in ANALOGIES
            ),
            *({"kind": "relation", **count(served, pairs_of(relation))} for relation in RELATIONS),
        ]
        if arguments.float32 is not None:
            with serve(arguments.float32) as exact:
                dtype = _manifest(arguments.float32).dtype
                if dtype != "float32":
                    raise ValueError(f"{MODEL} in {arguments.float32} must be float32, got {dtype}")
                tokens = queryable_tokens(served, manifest.limits.vocabulary)
                rows.append({"kind": "agreement", "dtype": manifest.dtype, **compare(served, exact, tokens)})
    return Result(rows=rows)


def _manifest(bundles: Path) -> Manifest:
    for manifest in find_bundles(bundles).values():
        if manifest.name == MODEL:
            return manifest
    raise ValueError(f"{bundles} has no {MODEL}")


def pairs_of(relation: str) -> list[tuple[str, str]]:
    return [(first, second) for first, second in (pair.split() for pair in relation.split(", "))]


def neighbours(served: Served, query: Query, top_k: int) -> list[dict[str, Any]]:
    """Return the tokens nearest to a token, or to the completion of an analogy."""
    question = {"token": query} if isinstance(query, str) else {"analogy": list(query)}
    (response,) = served.post("/v1/similar", {"model": MODEL, "top_k": top_k, **question})
    nearest: list[dict[str, Any]] = response["neighbours"]
    return nearest


def _neighbours(served: Served, query: Query, top_k: int) -> Row:
    nearest = neighbours(served, query, top_k)
    return {"neighbours": [{"text": neighbour["text"], "score": round(neighbour["score"], 4)} for neighbour in nearest]}


def count(served: Served, pairs: Sequence[tuple[str, str]]) -> Row:
    """Count how often the analogies between two pairs, in their order, rank the expected word
    first, and among the first five. Also count the pairs whose second word is near the first one.
    """
    ranks = [_rank(served, (*pair, word), expected, FIRST) for pair, (word, expected) in permutations(pairs, 2)]
    return {
        "relation": pairs[0],
        "pairs": len(pairs),
        "near": sum(_rank(served, first, second, NEAR) < NEAR for first, second in pairs),
        "analogies": len(ranks),
        "first": ranks.count(0),
        "first_five": sum(rank < FIRST for rank in ranks),
    }


def _rank(served: Served, query: Query, expected: str, top_k: int) -> int:
    """Return the rank of a word among the neighbours, from 0; `top_k` if it is not among them."""
    texts = [neighbour["text"] for neighbour in neighbours(served, query, top_k)]
    word = f" {expected}"  # without the space it would be a piece inside a word
    return texts.index(word) if word in texts else top_k


def queryable_tokens(served: Served, vocabulary: int) -> list[str]:
    """Return all tokens that can be queried, which are those that a text can begin with."""
    texts: list[str] = []
    for start in range(0, vocabulary, INPUTS_PER_CALL):
        ids = [[id_] for id_ in range(start, min(start + INPUTS_PER_CALL, vocabulary))]
        (response,) = served.post("/v1/detokenize", {"model": MODEL, "ids": ids, "side": "source"})
        texts += response["texts"]
    words = [(id_, text) for id_, text in enumerate(texts) if text.strip()]
    body = {"model": MODEL, "add_special_tokens": False}
    split = served.outputs("/v1/tokenize", body, [text for _, text in words])
    return [text for (id_, text), tokens in zip(words, split, strict=True) if [part["id"] for part in tokens] == [id_]]


def compare(served: Served, exact: Served, tokens: Sequence[str]) -> Row:
    """Count how many of a token's nearest neighbours are the same in two bundles of one model.
    Tokens with many near-equal embeddings in the exact bundle are counted in `alike`, included in
    `mean`, and excluded from `fewest`.
    """
    common, is_alike = [], []
    for token in tokens:
        actual, expected = (neighbours(bundle, token, COMPARED) for bundle in (served, exact))
        common.append(len({neighbour["id"] for neighbour in actual} & {neighbour["id"] for neighbour in expected}))
        is_alike.append(expected[-1]["score"] > ALIKE)
    others = [number for number, alike in zip(common, is_alike, strict=True) if not alike]
    return {
        "tokens": len(common),
        "mean": round(sum(common) / len(common), 2),
        "alike": sum(is_alike),
        "fewest": min(others, default=0),
    }


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of neighbours and analogies, and a sentence on 8-bit embeddings, if any."""
    tokens, analogies, relations, compared = (
        [row for row in result.rows if row["kind"] == kind] for kind in ("token", "analogy", "relation", "agreement")
    )
    return {
        "similar-tokens": table(["token", "neighbours"], [[f"`{row['token']}`", _list(row)] for row in tokens]),
        "similar-analogies": table(["analogy", "results"], [[_question(row), _list(row)] for row in analogies]),
        "similar-relations": _relations(relations),
        **({"similar-agreement": _agreement(compared[0])} if compared else {}),
    }


def _question(row: Row) -> str:
    a, b, c = row["analogy"]
    return f"{a} : {b} :: {c} : ?"


def _list(row: Row) -> str:
    return ", ".join(f"{_name(neighbour['text'])} {neighbour['score']:.2f}" for neighbour in row["neighbours"])


def _name(text: str) -> str:
    return text.strip() if text.startswith(" ") else f"`{text}` (a piece)"


def _relations(rows: Sequence[Row]) -> str:
    head = ["relation", "pairs", f"among the {NEAR} nearest", "analogies", "first", "first five"]
    columns = ("pairs", "near", "analogies", "first", "first_five")
    return table(head, [[" : ".join(row["relation"]), *(str(row[column]) for column in columns)] for row in rows])


def _agreement(row: Row) -> str:
    return (
        f"Of the {COMPARED} tokens nearest to a token of the shipped model ({row['dtype']}), {row['mean']:.1f} are the "
        f"same as in float32, on average over all {row['tokens']:,} tokens that can be queried. Each token has at "
        f"least {row['fewest']} in common, except {row['alike']} whose {COMPARED} nearest all have a cosine above "
        f"{ALIKE:g}."
    )
