"""Texts that belong together, for embeddings and rerankers: the names of their fields, and their
examples.

A record has two texts and either texts that are worse than the second one (negatives) or a score.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from random import Random
from typing import Any

from tokenizers import Tokenizer

from sightline.model.data.examples import Example
from sightline.model.data.records import PairRecord, texts_of
from sightline.model.data.tokenizer_training import encode_lines

# Names of fields in lower case, without spaces and signs.
SOURCES = ("source", "anchor", "query", "question", "sentence1", "text1", "question1", "sentencea", "texta", "premise")
TARGETS = (
    *("target", "positive", "pos", "document", "doc", "passage", "answer", "response", "sentence2", "text2"),
    *("question2", "sentenceb", "textb", "hypothesis"),
)  # fmt: skip
SCORES = ("score", "label", "labels", "similarity", "similarityscore", "relevance", "relevancescore",
          "relatednessscore", "isduplicate")  # fmt: skip
_NEGATIVE = re.compile(r"(hard)?neg(ative)?s?\d*")
_NAMES = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}  # of scores
_EXPECTED = (
    "the fields are two texts, such as anchor and positive, query and document, or sentence1 and sentence2, and "
    "optionally texts that are worse than the second one (negative, or negative_1, negative_2, ...) or a score"
)

# The second list of an example has the token ids of the target, those of each negative after a
# mark, and a larger mark for the score. No vocabulary is so large.
MARK = 2**24
SCORE_UNIT = 1_000_000  # marks between the scores 0 and 1
LAST_MARK = MARK + 1 + SCORE_UNIT

# Negatives of pairs that have none: targets of other pairs of a part of the file.
NUM_DOCUMENTS = 5  # of a query, the right one included
PART = 100


@dataclass(frozen=True)
class Names:
    """Names of the fields of a record."""

    source: str
    target: str
    negatives: tuple[str, ...] = ()
    score: str | None = None


@lru_cache
def find_names(fields: tuple[str, ...]) -> Names:
    """Return the names of the fields of a record; others are ignored. Raises `ValueError` if they
    are missing or not clear.
    """
    by_key: dict[str, list[str]] = {}
    for name in fields:
        by_key.setdefault(re.sub(r"[^a-z0-9]", "", name.casefold()), []).append(name)
    source, target = _one_of(SOURCES, by_key, "source"), _one_of(TARGETS, by_key, "target")
    negatives = tuple(name for key, names in by_key.items() if _NEGATIVE.fullmatch(key) for name in names)
    score = next((by_key[key][0] for key in SCORES if key in by_key), None)
    if score is not None and not negatives and "premise" in by_key:
        raise ValueError(
            f"{score[:40]!r} names a relation of premise and hypothesis, which is no score; write triplets with the "
            "premise as anchor, an entailment as positive and a contradiction as negative"
        )
    return Names(source, target, negatives, None if negatives else score)


def _one_of(known: Sequence[str], by_key: Mapping[str, Sequence[str]], side: str) -> str:
    """Return the name of a side: its own one, or else the only one that is known."""
    found = [name for key in known for name in by_key.get(key, ())]
    if found and (len(found) == 1 or found[0].casefold() == side):
        return found[0]
    names = [name[:40] for names in by_key.values() for name in names]
    there_are = f"there are {', '.join(map(repr, names[:12]))}{f' and {len(names) - 12} more' if names[12:] else ''}"
    if found:
        raise ValueError(f"{' and '.join(map(repr, found))} may be the {side}; remove or rename one; {there_are}")
    raise ValueError(f"no field for the {side}; {_EXPECTED}, but {there_are}; rename one to {side}")


def negatives_of(fields: Mapping[str, Any], names: Names) -> list[tuple[Any, str]]:
    """Return the negatives of a record, each a text or several, with the names of their fields."""
    values = ((fields[name], name) for name in names.negatives)
    return [
        (text, name)
        for value, name in values
        for text in (value if isinstance(value, list) else [] if value is None else [value])
    ]


def one_target_each(
    rows: Iterable[tuple[int, dict[str, Any] | str]], is_similar: bool
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield rows of similar texts, one for each target of a row with a list of them."""
    for number, fields in rows:
        if isinstance(fields, str):
            yield number, fields
            continue
        lists = {name: value for name, value in fields.items() if isinstance(value, list)} if is_similar else {}
        try:
            target = find_names(tuple(fields)).target if lists else ""
        except ValueError:  # an error of the record
            target = ""
        for text in lists.get(target, [None]) or [""]:
            yield number, fields | {target: text} if target in lists else fields


def read_score(value: Any, name: str) -> float:
    """Read a score. Raises `ValueError` for another value."""
    number = value
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            number = _NAMES[text] if text in _NAMES else float(text.replace(",", "."))
        except ValueError:
            number = None
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(
            f"{name} must be a number that is larger for texts that fit better, such as 0 and 1, or 0 to 5, got "
            f"{str(value)[:40]!r}"
        )
    return float(number)


def limits_of(scores: Sequence[float]) -> tuple[float, float]:
    """Return the scores that become 0 and 1: these, if all are between them, or the least and the
    greatest.
    """
    low, high = min(scores), max(scores)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def scaled(score: float, limits: tuple[float, float]) -> float:
    """Return a score between 0 and 1, given the least and the greatest one."""
    low, high = limits
    return min(1.0, max(0.0, (score - low) / ((high - low) or 1.0)))


def encode_similar(
    tokenizer: Tokenizer, records: Sequence[PairRecord], limits: tuple[float, float] | None = None
) -> list[Example]:
    """Return the examples of an encoder: the token ids of the source; and those of the target, with
    negatives and score after marks. `limits` are those of the scores, see `scaled`.
    """
    ids = iter(encode_lines(tokenizer, [text for record in records for text in texts_of(record)]))
    examples = list[Example]()
    for record in records:
        source, target, *negatives = islice(ids, 2 + len(record.negatives))
        for negative in negatives:
            target = [*target, MARK, *negative]
        if record.score is not None:
            assert limits is not None, "limits of scores are known"
            target = [*target, MARK + 1 + round(SCORE_UNIT * scaled(record.score, limits))]
        examples.append((source, target))
    return examples


def decode_similar(example: Example) -> tuple[list[list[int]], float | None]:
    """Return the token ids of source, target and negatives of an example, and its score."""
    source, marked = example
    texts, score = [list(source), []], None
    for id_ in marked:
        if id_ < MARK:
            texts[-1].append(id_)
        elif id_ == MARK:
            texts.append([])
        else:
            score = (id_ - MARK - 1) / SCORE_UNIT
    return texts, score


def truncated(example: Example, truncate: Callable[[Sequence[int]], list[int]]) -> Example:
    """Return an example with its texts truncated."""
    source, marked = example
    starts = [0, *(index for index, id_ in enumerate(marked) if id_ >= MARK), len(marked)]
    parts = (marked[start:end] for start, end in pairwise(starts))
    texts = ((list(part[:1]), part[1:]) if part[:1] and part[0] >= MARK else ([], part) for part in parts)
    return truncate(source), [id_ for mark, ids in texts for id_ in mark + (truncate(ids) if ids else [])]


def longest_text(example: Example) -> int:
    """Return the length of the longest text of an example."""
    return max(map(len, decode_similar(example)[0]))


def documents_of(records: Sequence[PairRecord], index: int, num_documents: int) -> list[tuple[str, float]]:
    """Return the documents of the query of a record, which has no score, with 1 for the right one
    and 0 for others: its negatives, and if there are fewer than `num_documents` in all, random
    targets of other records near to it.
    """
    record, part = records[index], records[index // PART * PART :][:PART]
    negatives = [text for text in dict.fromkeys(record.negatives) if text != record.target]
    right = {other.target for other in part if other.source == record.source}
    others = sorted({other.target for other in part} - right - {record.source, *negatives})
    draw = Random(f"{index % PART} {record.source}")  # noqa: S311 - texts, not secrets
    negatives += draw.sample(others, min(len(others), max(0, num_documents - 1 - len(negatives))))
    return [(record.target, 1.0), *((text, 0.0) for text in negatives)]


def encode_pairs_of_texts(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[list[int]]:
    """Return the token ids of pairs, in the form that the tokenizer has for them. The longer text
    of a pair that is too long is truncated first, as the service does.
    """
    tokenizer.enable_truncation(max_tokens)
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(pairs))]
    finally:
        tokenizer.no_truncation()


def encode_reranking(
    tokenizer: Tokenizer, records: Sequence[PairRecord], limits: tuple[float, float] | None, max_tokens: int
) -> list[Example]:
    """Return the examples of a reranker, one for each pair of a query and a document: the token
    ids, and the score in units of `SCORE_UNIT`.
    """
    pairs, scores = list[tuple[str, str]](), list[int]()
    for index, record in enumerate(records):
        documents = [(record.target, scaled(record.score, limits))] if limits and record.score is not None else []
        for text, score in documents or documents_of(records, index, 0 if record.negatives else NUM_DOCUMENTS):
            pairs.append((record.source, text))
            scores.append(round(SCORE_UNIT * score))
    ids = encode_pairs_of_texts(tokenizer, pairs, max_tokens)
    return [(one, [score]) for one, score in zip(ids, scores, strict=True)]
