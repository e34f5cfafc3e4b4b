"""Encoding of records as the examples of a task (see `sightline.model.data.examples.Example`)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.base.text.tokenizer_parts import without_first_space
from sightline.model.data.chat_format import BETWEEN, IM_END, IM_START, divided, header, text_of
from sightline.model.data.examples import Example
from sightline.model.data.records import (
    DialogueMessage,
    DialogueRecord,
    LabelledRecord,
    PairRecord,
    Record,
    TaggedRecord,
    TextRecord,
)
from sightline.model.data.tags import encode_tagged
from sightline.model.data.tokenizer_training import BOS, encode_lines, special_id


def encode(
    tokenizer: Tokenizer, records: Sequence[Record], *, labels: Sequence[str] = (), max_length_tokens: int = 2**30
) -> list[Example]:
    """Encode records as examples of the task that has such records.

    - Pairs: the token ids of both texts, each with the end token.
    - Labelled texts: the token ids with the end token, and the indices in `labels` in order. Raises
      `ValueError` for another label.
    - Texts with entities: see `sightline.model.data.tags.encode_tagged`; `labels` are tags.
    - Texts and dialogues: see `_encode_texts` and `_encode_dialogues`. A record longer than
      `max_length_tokens`, at least 2, gives several examples.
    """
    return [
        example
        for kind, group in groupby(records, type)
        for example in _ENCODERS[kind](tokenizer, list(group), labels, max_length_tokens)
    ]


def _encode_pairs(tokenizer: Tokenizer, records: Sequence[PairRecord], *_: object) -> list[Example]:
    sources = encode_lines(tokenizer, [record.source for record in records])
    return list(zip(sources, encode_lines(tokenizer, [record.target for record in records]), strict=True))


def _encode_labelled(
    tokenizer: Tokenizer, records: Sequence[LabelledRecord], labels: Sequence[str], *_: object
) -> list[Example]:
    index_of = {label: index for index, label in enumerate(labels)}
    for record in records:
        for label in record.labels:
            if label not in index_of:
                raise ValueError(f"the label {label!r} is not one of {', '.join(labels)}")
    ids = encode_lines(tokenizer, [record.text for record in records])
    indices = [sorted(index_of[label] for label in record.labels) for record in records]
    return list(zip(ids, indices, strict=True))


def _encode_texts(
    tokenizer: Tokenizer, records: Sequence[TextRecord], _: Sequence[str], max_length_tokens: int
) -> list[Example]:
    """Encode each text as the start token, its tokens and the end token, in windows.

    All tokens but the start token are part of the loss. A window begins with the last token of the
    window before it, which is only read there: each token is predicted exactly once.
    """
    start_id, lines = special_id(tokenizer, BOS), [record.text for record in records]
    return [window for ids in encode_lines(tokenizer, lines) for window in windows([start_id, *ids], max_length_tokens)]


def windows(ids: Sequence[int], max_length_tokens: int) -> list[Example]:
    """Divide the tokens of a text as `_encode_texts` does."""
    assert max_length_tokens >= 2, "a window has a token that is read and a token that is predicted"
    cuts = [list(ids[start : start + max_length_tokens]) for start in range(0, len(ids) - 1, max_length_tokens - 1)]
    return [(cut, [0] + [1] * (len(cut) - 1)) for cut in cuts]


def _encode_dialogues(
    tokenizer: Tokenizer, records: Sequence[DialogueRecord], _: Sequence[str], max_length_tokens: int
) -> list[Example]:
    """Encode each dialogue in the chat format (`sightline.model.data.chat_format`), with the ids
    that the service computes for a prompt with the same messages.

    The contents of replies and the tokens that end them are part of the loss. Dialogues that are
    too long are divided; parts without loss are left out.
    """
    encoder, examples = _ChatEncoder(tokenizer), list[Example]()
    for record in records:
        if record.tools or any(message.role == "tool" or message.tool_calls for message in record.messages):
            raise UsageError(
                "the dialogue has tools, for which the chat format of new models has no form; start from a checkpoint "
                "whose chat template has one with --from, or remove tools and calls"
            )
        examples += divided(record.messages, encoder.examples, max_length_tokens)
    return [(ids, is_counted) for ids, is_counted in examples if any(is_counted)]


_ENCODERS: Mapping[type, Callable[[Tokenizer, Sequence[Any], Sequence[str], int], list[Example]]] = {
    PairRecord: _encode_pairs,
    LabelledRecord: _encode_labelled,
    TaggedRecord: encode_tagged,
    TextRecord: _encode_texts,
    DialogueRecord: _encode_dialogues,
}


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[DialogueMessage]) -> list[int]:
    """Return the ids of messages and the start of a reply."""
    encoder = _ChatEncoder(tokenizer)
    return [*encoder.encode(messages)[0], encoder.start_id, *encoder.ids(header("assistant"))]


class _ChatEncoder:
    """Encoder of messages, whose texts follow a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = without_first_space(tokenizer)
        self.start_id, self._end_id = special_id(tokenizer, IM_START), special_id(tokenizer, IM_END)
        self._between = self.ids(BETWEEN)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, messages: Sequence[DialogueMessage]) -> tuple[list[int], list[int]]:
        """Return the ids of messages, and 1 for each token that is part of the loss."""
        encodings = self._tokenizer.encode_batch([text_of(message) for message in messages], add_special_tokens=False)
        ids, is_counted = list[int](), list[int]()
        for message, encoding in zip(messages, encodings, strict=True):
            is_reply, start = int(message.is_trained), len(header(message.role))
            ids += [self.start_id, *encoding.ids, self._end_id, *self._between]
            is_counted += [0, *(is_reply & (end > start) for _, end in encoding.offsets), is_reply]
            is_counted += [0] * len(self._between)
        return ids, is_counted

    def examples(self, messages: Sequence[DialogueMessage]) -> list[Example]:
        """Return the example of messages, without the line break after the last one."""
        ids, is_counted = self.encode(messages)
        end = len(ids) - len(self._between)
        return [(ids[:end], is_counted[:end])]
