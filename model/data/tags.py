"""Tags of tokens: O outside of entities, and B- and I- with a label for the first and the further
tokens of an entity.

All tokens of a word have a tag, as with `--label_all_tokens` of Hugging Face's `run_ner.py`, so
that a service that merges tokens finds whole entities. Special tokens have none.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from sightline.model.data.examples import Example
from sightline.model.data.records import Entity, TaggedRecord
from sightline.model.data.tagged_files import entities_of_tags, without_whitespace
from sightline.model.data.tokenizer_training import batches

NO_TAG = 0  # tags in examples are indices from 1 on
_SENTENCE_END = re.compile(r".*([.!?…]\s|[。！？\n]\s?)", re.DOTALL)


def tags_of(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the tags of the labels of entities, in the order of the outputs of a model."""
    return "O", *(f"{prefix}-{label}" for label in labels for prefix in "BI")


class Window(NamedTuple):
    """Tokens of a text that a model reads at once."""

    ids: list[int]
    ranges: list[tuple[int, int] | None]  # characters of each token, without whitespace; None for special tokens


def windows(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Iterator[list[Window]]:
    """Yield the windows of each text. A text of more tokens is divided, if possible at the end of a
    sentence, otherwise between words.
    """
    for batch in batches(texts):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            ids, is_special = encoding.ids, [*encoding.special_tokens_mask, 0]
            first = is_special.index(0) if 0 in is_special[:-1] else len(ids)
            last = len(ids) - is_special[-2::-1].index(0) if first < len(ids) else first
            ranges = [without_whitespace(text, *offsets) for offsets in encoding.offsets]
            cuts, longest = [first], max(1, max_tokens - first - len(ids) + last)
            while last - cuts[-1] > longest:
                cuts.append(_cut(text, ranges, cuts[-1], cuts[-1] + longest))
            yield [
                Window(
                    [*ids[:first], *ids[start:end], *ids[last:]],
                    [*[None] * first, *ranges[start:end], *[None] * (len(ids) - last)],
                )
                for start, end in zip(cuts, [*cuts[1:], last], strict=True)
            ]


def _cut(text: str, ranges: Sequence[tuple[int, int]], start: int, end: int) -> int:
    """Return the index of the token after which a window from `start` to at most `end` is cut."""
    indices = range(end, start + (end - start) // 2, -1)
    before = {index: text[max(0, ranges[index][0] - 2) : ranges[index][0]] for index in indices}
    between_words = next((index for index in indices if before[index][-1:].isspace()), end)
    return next((index for index in indices if _SENTENCE_END.fullmatch(before[index])), between_words)


def encode_tagged(
    tokenizer: Tokenizer, records: Sequence[TaggedRecord], tags: Sequence[str], max_tokens: int
) -> list[Example]:
    """Encode each text with entities as one example or, if it is long, several: the token ids, and
    the index of the tag of each token, from 1 on, or `NO_TAG`. A token has the tag of an entity if
    they share a character.
    """
    index_of, examples = {tag: index for index, tag in enumerate(tags, start=1)}, list[Example]()
    for record, parts in zip(records, windows(tokenizer, [one.text for one in records], max_tokens), strict=True):
        for window in parts:
            indices, rest, before = list[int](), list(reversed(record.entities)), None
            for token in window.ranges:
                while token is not None and rest and rest[-1].end <= token[0]:
                    rest.pop()
                tag = "O"
                if token is not None and rest and rest[-1].start < token[1]:
                    tag = f"{'I' if rest[-1] is before else 'B'}-{rest[-1].label}"
                    before = rest[-1]
                indices.append(NO_TAG if token is None else index_of[tag])
            examples.append((window.ids, indices))
    return examples


def entities_of(window: Window, tags: Sequence[str]) -> list[Entity]:
    """Return the entities of the tags of tokens, as `/v1/tag` merges them."""
    tokens = [(token, tag) for token, tag in zip(window.ranges, tags, strict=True) if token is not None]
    found = entities_of_tags([tag for _, tag in tokens])
    return [Entity(tokens[start][0][0], tokens[end - 1][0][1], label) for start, end, label in found]
