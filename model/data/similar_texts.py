"""Texts that belong together, for embeddings and rerankers: their records and their examples.

A record has two texts and either texts that are worse than the second one (negatives) or a score.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from random import Random
from typing import Any

from tokenizers import Tokenizer

from sightline.model.data.columns import key_of
from sightline.model.data.examples import Example
from sightline.model.data.files import check_text
from sightline.model.data.records import PairRecord, texts_of
from sightline.model.data.tokenizer_training import encode_lines

_NUMBERS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}  # of scores

# The second list of an example has the token ids of the target, those of each negative after a
# mark, and a larger mark for the score. No vocabulary is so large.
MARK = 2**24
SCORE_UNIT = 1_000_000  # marks between the scores 0 and 1

# Negatives of pairs that have none: targets of other pairs of a part of the file.
NUM_DOCUMENTS = 5  # of a query, the right one included
PART = 100


def read_similar(fields: Mapping[str, Any], names: Mapping[str, str]) -> list[PairRecord]:
    """Return the records of a row, one for each target of a list. Names other than source, target
    and score are those of negatives. Raises `ValueError` for values of another type.
    """
    source, target, score = names["source"], names["target"], names.get("score")
    if score is not None and key_of(source) == "premise":
        raise ValueError(
            f"{score[:40]!r} names a relation of premise and hypothesis, which is no score; write triplets with the "
            "premise as anchor, an entailment as positive and a contradiction as negative"
        )
    negatives = [
        check_text(text, name)
        for field, name in names.items()
        if field not in ("source", "target", "score")
        for text in _listed(fields[name])
    ]
    texts = check_text(fields[source], source), tuple(text for text in negatives if text.strip())
    number = None if score is None else read_score(fields[score], score)
    targets = _listed(fields[target]) or [""]
    return [PairRecord(texts[0], check_text(text, target), texts[1], number) for text in targets]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def read_score(value: Any, name: str) -> float:
    """Read a score. Raises `ValueError` for another value."""
    number = value
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            number = _NUMBERS[text] if text in _NUMBERS else float(text.replace(",", "."))
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
