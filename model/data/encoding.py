"""Encoding of records as the examples of a task (see `sightline.model.data.examples.Example`)."""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.base.text.tokenizer_parts import without_first_space
from sightline.model.data.chat_format import BETWEEN, IM_END, IM_START, exchanges, header, system_messages, text_of
from sightline.model.data.examples import Example
from sightline.model.data.records import DialogueMessage, DialogueRecord, LabelledRecord, PairRecord, Record, TextRecord
from sightline.model.data.tags import encode_tagged
from sightline.model.data.tokenizer_training import BOS, encode_lines, special_id

Tokens = tuple[list[int], list[int]]  # ids, and 1 for each token that is part of the loss, otherwise 0


def encode(
    tokenizer: Tokenizer, records: Sequence[Record], *, labels: Sequence[str] = (), max_length_tokens: int = 2**30
) -> list[Example]:
    """Encode records as examples of the task that has such records.

    - Pairs: the token ids of both texts, each with the end token.
    - Labelled texts: the token ids with the end token, and the indices in `labels` in order. Raises
      `ValueError` for another label.
    - Texts with entities: see `sightline.model.data.tags.encode_tagged`; `labels` are tags.
    - Texts and dialogues: see `encode_texts` and `encode_dialogues`. A record longer than
      `max_length_tokens`, at least 2, gives several examples.
    """
    if all(isinstance(record, PairRecord) for record in records):
        pairs = [record for record in records if isinstance(record, PairRecord)]
        sources = encode_lines(tokenizer, [pair.source for pair in pairs])
        return list(zip(sources, encode_lines(tokenizer, [pair.target for pair in pairs]), strict=True))
    if all(isinstance(record, LabelledRecord) for record in records):
        return _encode_labelled(tokenizer, [record for record in records if isinstance(record, LabelledRecord)], labels)
    if not any(isinstance(record, TextRecord | DialogueRecord) for record in records):
        return encode_tagged(tokenizer, records, labels, max_length_tokens)
    texts = [record.text for record in records if isinstance(record, TextRecord)]
    dialogues = [_checked(record) for record in records if isinstance(record, DialogueRecord)]
    encoded_texts = iter(encode_texts(tokenizer, texts, max_length_tokens))
    encoded_dialogues = iter(encode_dialogues(tokenizer, dialogues, max_length_tokens) if dialogues else [])
    examples: list[Example] = []
    for record in records:
        examples += next(encoded_texts if isinstance(record, TextRecord) else encoded_dialogues)
    return examples


def _encode_labelled(tokenizer: Tokenizer, records: Sequence[LabelledRecord], labels: Sequence[str]) -> list[Example]:
    index_of = {label: index for index, label in enumerate(labels)}
    for record in records:
        for label in record.labels:
            if label not in index_of:
                raise ValueError(f"the label {label!r} is not one of {', '.join(labels)}")
    ids = encode_lines(tokenizer, [record.text for record in records])
    indices = [sorted(index_of[label] for label in record.labels) for record in records]
    return list(zip(ids, indices, strict=True))


def _checked(record: DialogueRecord) -> Sequence[DialogueMessage]:
    """Return the messages of a dialogue without tools."""
    if record.tools or any(message.role == "tool" or message.tool_calls for message in record.messages):
        raise UsageError(
            "the dialogue has tools, for which the chat format of new models has no form; start from a checkpoint "
            "whose chat template has one with --from, or remove tools and calls"
        )
    return record.messages


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], max_length_tokens: int) -> list[list[Tokens]]:
    """Encode each text as the start token, its tokens and the end token, in windows.

    All tokens but the start token are part of the loss. A window begins with the last token of the
    window before it, which is only read there: each token is predicted exactly once.
    """
    start_id = special_id(tokenizer, BOS)
    return [windows([start_id, *ids], max_length_tokens) for ids in encode_lines(tokenizer, texts)]


def windows(ids: Sequence[int], max_length_tokens: int) -> list[Tokens]:
    """Divide the tokens of a text as `encode_texts` does."""
    assert max_length_tokens >= 2, "a window has a token that is read and a token that is predicted"
    cuts = [list(ids[start : start + max_length_tokens]) for start in range(0, len(ids) - 1, max_length_tokens - 1)]
    return [(cut, [0] + [1] * (len(cut) - 1)) for cut in cuts]


def encode_dialogues(
    tokenizer: Tokenizer, dialogues: Sequence[Sequence[DialogueMessage]], max_length_tokens: int
) -> list[list[Tokens]]:
    """Encode each dialogue in the chat format (`sightline.model.data.chat_format`), with the ids
    that the service computes for a prompt with the same messages.

    The contents of replies and the tokens that end them are part of the loss. A dialogue that is
    too long is split between exchanges; each part begins with the system messages. An exchange that
    is too long by itself stays whole, so that the caller can drop it. Parts without loss are left
    out.
    """
    encoder = _Messages(tokenizer)
    return [
        [window for window in encoder.windows(messages, max_length_tokens) if any(window[1])] for messages in dialogues
    ]


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[DialogueMessage]) -> list[int]:
    """Return the ids of messages and the start of a reply."""
    encoder = _Messages(tokenizer)
    return [*encoder.encode(messages)[0], encoder.start_id, *encoder.ids(header("assistant"))]


class _Messages:
    """Encoder of messages, whose texts follow a special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = without_first_space(tokenizer)
        self.start_id, self._end_id = special_id(tokenizer, IM_START), special_id(tokenizer, IM_END)
        self._between = self.ids(BETWEEN)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, messages: Sequence[DialogueMessage]) -> Tokens:
        encodings = self._tokenizer.encode_batch([text_of(message) for message in messages], add_special_tokens=False)
        ids, is_counted = list[int](), list[int]()
        for message, encoding in zip(messages, encodings, strict=True):
            is_reply, start = int(message.is_trained), len(header(message.role))
            ids += [self.start_id, *encoding.ids, self._end_id, *self._between]
            is_counted += [0, *(is_reply & (end > start) for _, end in encoding.offsets), is_reply]
            is_counted += [0] * len(self._between)
        return ids, is_counted

    def windows(self, messages: Sequence[DialogueMessage], max_length_tokens: int) -> Iterator[Tokens]:
        first = system_messages(messages)
        system = self.encode(first)
        ids, is_counted = system
        for exchange in exchanges(messages[len(first) :]):
            more_ids, more_counted = self.encode(exchange)
            # The line break after the last message is left out.
            if len(ids) > len(system[0]) and len(ids) + len(more_ids) - len(self._between) > max_length_tokens:
                yield self._ended(ids, is_counted)
                ids, is_counted = system
            ids, is_counted = ids + more_ids, is_counted + more_counted
        if len(ids) > len(system[0]):
            yield self._ended(ids, is_counted)

    def _ended(self, ids: list[int], is_counted: list[int]) -> Tokens:
        end = len(ids) - len(self._between)
        return ids[:end], is_counted[:end]
