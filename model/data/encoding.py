"""Encoding of records as the examples of a task (see `sightline.model.data.examples.Example`)."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from sightline.model.config import ArchitectureConfig, PretrainedConfig
from sightline.model.data.chat_template import dialogue_encoder
from sightline.model.data.examples import Example
from sightline.model.data.records import DialogueRecord, LabelledRecord, PairRecord, TaggedRecord, TextRecord
from sightline.model.data.tags import encode_tagged
from sightline.model.data.tokenizer_training import BOS, EOS, encode_lines, special_id


def encode(
    tokenizer: Tokenizer,
    records: Sequence[Any],
    *,
    model: ArchitectureConfig | None = None,
    labels: Sequence[str] = (),
    max_length_tokens: int = 2**30,
) -> list[Example]:
    """Encode records as examples of the task that has such records. `model` is None for a new one
    of this project, whose configuration follows from the examples.

    - Pairs: the token ids of both texts, each with the end token. For a third-party model, a target
      also has its first tokens.
    - Labelled texts: the token ids with the end token, and the indices in `labels` in order.
    - Texts with entities: see `sightline.model.data.tags.encode_tagged`; `labels` are tags.
    - Texts and dialogues: see `encode_language`. A record longer than `max_length_tokens`, at least
      2, gives several examples.
    """
    match records[0] if records else None:  # all of a corpus have the same form
        case PairRecord():
            return _encode_pairs(tokenizer, records, model)
        case LabelledRecord():
            return _encode_labelled(tokenizer, records, labels)
        case TaggedRecord():
            return encode_tagged(tokenizer, records, labels, max_length_tokens)
    return list(chain.from_iterable(encode_language(tokenizer, records, model, max_length_tokens)))


def _encode_pairs(
    tokenizer: Tokenizer, records: Sequence[PairRecord], model: ArchitectureConfig | None
) -> list[Example]:
    sources = encode_lines(tokenizer, [record.source for record in records])
    targets = [record.target for record in records]
    if not isinstance(model, PretrainedConfig):
        return list(zip(sources, encode_lines(tokenizer, targets), strict=True))
    encoded = target_tokenizer(model, tokenizer).encode_batch_fast(targets, add_special_tokens=False)
    ids = ([*model.target_prefix, *target.ids, model.eos_id] for target in encoded)
    return list(zip(sources, ids, strict=True))


def target_tokenizer(config: PretrainedConfig, source: Tokenizer) -> Tokenizer:
    """Return the tokenizer of the targets of a translation, given that of its sources."""
    if not config.target_tokenizer:
        return source
    tokenizer = Tokenizer.from_str(config.target_tokenizer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encode_labelled(tokenizer: Tokenizer, records: Sequence[LabelledRecord], labels: Sequence[str]) -> list[Example]:
    index_of = {label: index for index, label in enumerate(labels)}
    ids = encode_lines(tokenizer, [record.text for record in records])
    indices = [sorted(index_of[label] for label in record.labels) for record in records]
    return list(zip(ids, indices, strict=True))


def encode_language(
    tokenizer: Tokenizer,
    records: Sequence[TextRecord | DialogueRecord],
    model: ArchitectureConfig | None,
    max_length_tokens: int,
) -> list[list[Example]]:
    """Return the examples of each text or dialogue, several if it is longer than a limit.

    A text ends with the end token. The texts of a model of this project begin with the start token.
    All tokens but the first one are part of the loss. For dialogues, see
    `sightline.model.data.chat_template.DialogueEncoder`.
    """
    if isinstance(model, PretrainedConfig):
        start, end = list[int](), model.eos_id
    else:
        start, end = [special_id(tokenizer, BOS)], special_id(tokenizer, EOS)
    dialogues, encoded = None, list[list[Example]]()
    texts = iter(encode_lines(tokenizer, [record.text for record in records if isinstance(record, TextRecord)]))
    for record in records:
        if isinstance(record, TextRecord):
            ids = [*start, *next(texts)]
            encoded.append(windows(ids if ids[-1:] == [end] else [*ids, end], max_length_tokens))
        else:
            dialogues = dialogues or dialogue_encoder(model, tokenizer)
            encoded.append(dialogues.encode(record, max_length_tokens))
    return encoded


def windows(ids: Sequence[int], max_length_tokens: int) -> list[Example]:
    """Divide the tokens of a text. A window begins with the last token of the window before it,
    which is only read there: each token is predicted exactly once.
    """
    assert max_length_tokens >= 2, "a window has a token that is read and a token that is predicted"
    cuts = [list(ids[start : start + max_length_tokens]) for start in range(0, len(ids) - 1, max_length_tokens - 1)]
    return [(cut, [0] + [1] * (len(cut) - 1)) for cut in cuts]
