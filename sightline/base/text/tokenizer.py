"""Tokenizers of the `tokenizers` library, with character offsets and the bytes of each token.

All kinds whose decoder works token by token are supported: byte-level BPE (GPT-2, Llama 3, Qwen,
BART), SentencePiece with Metaspace (T5, XLM-R, NLLB, Marian), SentencePiece with byte fallback
(Llama 2, Mistral) and WordPiece (BERT). A token then adds the same bytes to a text whatever the
other tokens are, except for the first token, which may lose its leading space.
"""

import codecs
import copy
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from tokenizers import Encoding, Tokenizer

from sightline.base.bundle import BundleError
from sightline.base.text.tokenizer_parts import (
    BYTE_TOKEN,
    check_decoder,
    checked_names,
    config_of,
    split_special_tokens,
    steps_of,
    token_bytes,
    without_first_space,
)
from sightline.base.threads import INTERRUPTIONS

T = TypeVar("T")
S = TypeVar("S", bound=Sized)
Offsets = list[tuple[int, int] | None]  # start and end of each token's characters; None for special tokens
# For texts of at least this many characters, a lower bound of the length is checked before
# tokenization.
LONG_TEXT = 2048
# A long text is cut before it is tokenized to its first tokens. The cut changes only tokens near
# it: at most 100 in WordPiece, which replaces longer words by one unknown token.
CUT_TOKENS = 512
CHARACTERS_PER_TOKEN = 8  # more than almost all texts have
# A text with more characters for each token of a model is too long for it. No vocabulary that is in
# use has longer tokens. One token can still stand for more characters: a word that is unknown, or
# spaces that are merged.
MAX_CHARACTERS_PER_TOKEN = 128
FIRST = "a"  # a token before another one, to find the text that the other adds


class TokenSpan(NamedTuple):
    """A token and its character range in the input; `end` is exclusive."""

    id: int
    start: int
    end: int
    is_special: bool  # True for tokens that the template adds to the text


@dataclass(frozen=True)
class PairWindow:
    """A pair of texts with a part of its second text."""

    ids: tuple[int, ...]
    first: int  # index of the first token of the second text
    starts_special: bool  # the first token is one that the template adds
    tokens: list[tuple[int, int]]  # character range of each token of the second text
    words: list[tuple[int, int]]  # the same of the word that each of these tokens belongs to


class TokenBytes(dict[int, bytes]):
    """The bytes of each token after another one, by its id; empty for ids without a token.

    They are found when a token is first used: all at once take longer than opening a small model.
    """

    def __init__(self, tokenizer: Tokenizer, is_byte_level: bool, has_byte_tokens: bool) -> None:
        self._tokenizer, self._is_byte_level, self._has_byte_tokens = tokenizer, is_byte_level, has_byte_tokens

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = data = self._decode(token) if token else b""
        return data

    def _decode(self, token: str) -> bytes:
        if self._is_byte_level:
            return token_bytes(token)
        if self._has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        decoder = self._tokenizer.decoder
        text: str = decoder.decode([FIRST, token])[len(FIRST) :] if decoder else f" {token}"
        return text.encode()


class TextTokenizer:
    """Tokenizer of the source or of the target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read how a tokenizer decodes. Raises `ValueError` if it is unsupported or not bounded."""
        name_of = checked_names(tokenizer)
        decoder = config_of(tokenizer.decoder)
        check_decoder(decoder)
        tokenizer.encode_special_tokens = True  # special tokens in the input text are plain text
        tokenizer.no_padding()
        tokenizer.no_truncation()
        special = {id_: added for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        split_special_tokens(tokenizer, special.keys())
        self._tokenizer = tokenizer
        self._continuing = without_first_space(tokenizer)
        self._with_mask: dict[int, Tokenizer] = {}  # made when they are needed, see `encode_masked`
        self.special_ids = frozenset(special)
        self._id_of_special = {added.content: id_ for id_, added in special.items()}
        self.special_names = [name for name in self._id_of_special if name]
        # The longest name first: one name may be the start of another.
        names = sorted(self._id_of_special, key=len, reverse=True)
        self._special_names = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        # Two flags of each special token: it absorbs the whitespace before it, and after it.
        self.absorbs_whitespace = {id_: (added.lstrip, added.rstrip) for id_, added in special.items()}
        kinds = [step["type"] for step in steps_of(decoder)]
        self._is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        self._num_ids = max(name_of) + 1
        self._unused_ids = frozenset(range(self._num_ids)).difference(name_of)
        self._skipped_ids = self.special_ids | self._unused_ids  # ids that add nothing to a text
        self._bytes = TokenBytes(tokenizer, self._is_byte_level, self._has_byte_tokens)
        encoding = tokenizer.encode("a")
        in_text = [index for index, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        begin, end = (in_text[0], in_text[-1] + 1) if in_text else (0, len(encoding))
        # Ids of special tokens that the model expects before a text, and after it.
        self.template_ids: tuple[list[int], list[int]] = encoding.ids[:begin], encoding.ids[end:]

    def __len__(self) -> int:
        """Return the number of ids; all ids are smaller."""
        return self._num_ids

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        return max(len(self._bytes[id_]) for id_ in range(self._num_ids))

    def showing(self, names: str, hidden: Collection[int] = ()) -> "TextTokenizer":
        """Return a tokenizer that adds the special tokens whose names are in a text to texts.

        Those that are `hidden`, and all others, still add nothing.
        """
        shown = {id_ for name, id_ in self._id_of_special.items() if name and name in names}
        other = copy.copy(self)
        other._skipped_ids = self._skipped_ids - shown.difference(hidden)
        return other

    # Encoding

    def encode(self, text: str, *, add_special_tokens: bool = True, is_start: bool = True) -> list[int]:
        """Tokenize a text; `add_special_tokens` are those of the model's template.

        `is_start` is False if special tokens precede the text. Some tokenizers insert a space only
        at the start of a prompt.
        """
        tokenizer = self._tokenizer if is_start else self._continuing
        return _encode(tokenizer, text, add_special_tokens).ids

    def encode_masked(self, text: str, mask_id: int) -> list[int]:
        """Tokenize a text in which the name of one special token stands for it; others are text."""
        if mask_id not in self._with_mask:
            document = json.loads(self._tokenizer.to_str())
            for token in document["added_tokens"]:
                if token["id"] == mask_id:
                    token["special"] = False  # only special tokens are read as plain text
            copied = Tokenizer.from_str(json.dumps(document))
            copied.encode_special_tokens = True
            self._with_mask[mask_id] = copied
        return _encode(self._with_mask[mask_id], text).ids

    def token_id(self, name: str) -> int | None:
        """Return the id of a token of the vocabulary by its name there, such as `##s` or `Ġdog`."""
        return self._tokenizer.token_to_id(name)

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None = None, *, cuts_first: bool = False
    ) -> list[int]:
        """Tokenize a pair of texts with the special tokens of the model's template for pairs.

        If there are more than `max_tokens`, the longer text is truncated first, until both have the
        same length (`longest_first` of the `tokenizers` library). If a single token is left then,
        it goes to the longer text, or to either if both are very long. With `cuts_first`, only the
        first text is truncated (`only_first` of Transformers), and the result is too long if the
        second one leaves no token for it. Raises `ValueError` if `max_tokens` leaves no token for
        the texts.
        """
        if max_tokens is None:
            return _encode(self._tokenizer, (first, second)).ids
        budget = max_tokens - self._tokenizer.num_special_tokens_to_add(True)
        if budget < 1:
            raise ValueError(f"max_tokens must be greater than the {max_tokens - budget} special tokens of a pair")
        parts = [self._encode_start(text, budget) for text in (first, second)]
        if cuts_first:
            parts[0].truncate(max(1, budget - len(parts[1])))
        else:
            shorter, longer = sorted(parts, key=len)
            shorter.truncate(min(len(shorter), budget // 2))
            longer.truncate(budget - len(shorter))
        return self._tokenizer.post_process(parts[0], parts[1]).ids

    def windows(
        self, first: str, second: str, max_tokens: int, max_first_tokens: int, overlap: int
    ) -> list[PairWindow]:
        """Tokenize a pair of texts, a long second one of which is read in overlapping parts.

        A window has at most `max_tokens` ids, and `max_first_tokens` of the first text. Consecutive
        windows share `overlap` tokens. Raises `ValueError` if the first text leaves no more than
        `overlap` tokens for the second one.
        """
        question = self._encode_start(first, max_first_tokens)
        question.truncate(max_first_tokens)
        pair = self._tokenizer.post_process(question, _encode(self._tokenizer, second, False))
        places = [index for index, sequence in enumerate(pair.sequence_ids) if sequence == 1]
        if not places:
            return []
        begin, end = places[0], places[-1] + 1
        num_others = len(pair) - (end - begin)
        size = max_tokens - num_others
        if size <= overlap:
            raise ValueError(f"{num_others} tokens of a window of {max_tokens} leave only {size} for the second text")
        ids, tokens = pair.ids, pair.offsets[begin:end]
        # A token that belongs to no word is one.
        words = [
            (None if word is None else pair.word_to_chars(word, 1)) or token
            for word, token in zip(pair.word_ids[begin:end], tokens, strict=True)
        ]
        starts_special, windows = bool(pair.special_tokens_mask[0]), []
        for start in range(begin, max(begin + 1, end - overlap), size - overlap):
            stop = min(start + size, end)
            window_ids, part = (*ids[:begin], *ids[start:stop], *ids[end:]), slice(start - begin, stop - begin)
            windows.append(PairWindow(window_ids, begin, starts_special, tokens[part], words[part]))
        return windows

    def min_num_tokens(self, text: str, max_tokens: int) -> int:
        """Return a lower bound of the number of tokens; the time does not grow with long texts.

        It serves to reject texts that are much too long without tokenizing all of them: it is 0
        unless the first tokens of the text, without special tokens, already exceed `max_tokens`.
        """
        for start in _starts(text, max_tokens):
            if len(start) == len(text):
                return 0
            bound = len(self.encode(start, add_special_tokens=False)) - CUT_TOKENS
            if bound > max_tokens:
                return bound
        return 0

    def encode_truncated(self, text: str, max_tokens: int) -> list[int]:
        """Tokenize a text and truncate it to `max_tokens` ids; final special tokens are kept."""
        return self._truncate(_encode_starts(text, max_tokens, self.encode), max_tokens)

    def _truncate(self, tokens: list[T], max_tokens: int) -> list[T]:
        """Return the first tokens of a text; final special tokens are kept."""
        if len(tokens) <= max_tokens:
            return tokens
        num_final = min(len(self.template_ids[1]), max_tokens)
        return [*tokens[: max_tokens - num_final], *tokens[len(tokens) - num_final :]]

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the text of the first `max_tokens` tokens; special tokens are not counted."""
        encoding = self._encode_start(text, max_tokens)
        return text if len(encoding) <= max_tokens else text[: encoding.offsets[max_tokens - 1][1]]

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Tokenize a text and return the tokens with their character ranges in the original text.

        A character that normalization removes or merges belongs to the token before it. Whitespace
        belongs to a token only if the tokenizer keeps it. Tokens that are not in the text (special
        tokens of the template, an inserted leading space) have empty ranges. Tokens that share one
        character, such as the bytes of an emoji, have the same range.
        """
        spans: list[TokenSpan] = []
        following = len(text)  # start of the next token
        shared, shared_end = (-1, -1), -1  # offsets of the next token, and the end of its range
        for id_, start, end, is_special in reversed(self.encode_offsets(text, add_special_tokens=add_special_tokens)):
            if is_special:
                spans.append(TokenSpan(id_, following, following, True))
                continue
            if self._bytes[id_] == b" " and start == following < len(text) and text[start] != " ":
                spans.append(TokenSpan(id_, start, start, False))  # a leading space that was inserted
                continue
            if shared != (start, end):
                # Characters that no token has, up to whitespace, belong to this one.
                spaces = (index for index in range(end, following) if text[index].isspace())
                shared_end = next(spaces, max(end, following))
            shared = (start, end)
            spans.append(TokenSpan(id_, start, shared_end, False))
            following = min(following, start)
        spans.reverse()
        return spans

    def encode_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Tokenize a text and return the tokens with the ranges that the tokenizer gives them.

        Transformers uses these for the entities of a text. They may include the space before a
        word, and leave out characters that normalization removes.
        """
        encoding = _encode(self._tokenizer, text, add_special_tokens)
        parts = zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
        return [TokenSpan(id_, start, end, bool(is_added)) for id_, (start, end), is_added in parts]

    def offsets(self, text: str, num_tokens: int) -> Offsets:
        """Return the character range of each token of a text; see `encode_spans`.

        `num_tokens` is the number of tokens from `encode` or `encode_truncated`.
        """
        kept = self._truncate(_encode_starts(text, num_tokens, self.encode_spans), num_tokens)
        return [None if span.is_special else (span.start, span.end) for span in kept]

    def split_special(self, text: str) -> list[str | int]:
        """Split a text at the names of special tokens; return their ids and the texts between."""
        parts: list[str | int] = []
        for index, part in enumerate(self._special_names.split(text) if self._id_of_special else [text]):
            if part:
                parts.append(self._id_of_special[part] if index % 2 else part)
        return parts

    # Decoding

    def name(self, token_id: int) -> str:
        """Return the text of a token for display, or the name of a special token.

        The text includes a leading space. Incomplete characters are replaced by U+FFFD.
        """
        if token_id in self.special_ids:
            return self._tokenizer.id_to_token(token_id) or ""
        return self._bytes[token_id].decode("utf-8", "replace") if token_id < self._num_ids else ""

    def bytes_of(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to the text; empty for special tokens.

        A first token, before which none adds anything, may lose its leading space.
        """
        if not self.adds_text(token_id):
            return b""
        return self._first_bytes(token_id) if is_first else self._bytes[token_id]

    def adds_text(self, token_id: int) -> bool:
        """Return False for special tokens and for ids without a token."""
        return token_id < self._num_ids and token_id not in self._skipped_ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        It equals the result of the `tokenizers` library, with two exceptions. Byte-level tokenizers
        that insert a space before a text remove it again. Bytes that are not valid UTF-8 are
        replaced by U+FFFD without damage to complete characters next to them.
        """
        size, skipped = self._num_ids, self._skipped_ids if skip_special_tokens else self._unused_ids
        shown = [id_ for id_ in ids if id_ < size and id_ not in skipped]
        if not shown:
            return ""
        known = self._bytes
        return (self._first_bytes(shown[0]) + b"".join([known[id_] for id_ in shown[1:]])).decode("utf-8", "replace")

    def decoded_offsets(self, ids: Sequence[int]) -> Offsets:
        """Return the range of characters in `decode(ids)` that each token contributes to.

        Tokens that share a character, such as the bytes of an emoji, have overlapping ranges.
        """
        offsets: Offsets = []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        num_complete = end = 0  # `end` also counts a character whose last bytes are missing so far
        is_first, known, skipped = True, self._bytes, self._skipped_ids
        for id_ in ids:
            if id_ in skipped or id_ >= self._num_ids:
                offsets.append(None)
                continue
            data, is_first = self._first_bytes(id_) if is_first else known[id_], False
            start = end
            if end == num_complete and data.isascii():
                num_complete = end = end + len(data)
            else:
                for number, byte in enumerate(data):
                    num_complete += len(decoder.decode(bytes([byte])))
                    end = num_complete + bool(decoder.getstate()[0])
                    if number == 0:
                        start = end - 1
            offsets.append((start, end))
        return offsets

    def decode_parts(self, ids: Sequence[int]) -> tuple[str, Offsets]:
        """Return a text with a space at special tokens, and the range of each token in it.

        It stands for an input that is not a single text, such as a pair of texts or a dialogue.
        """
        text, offsets = "", Offsets()
        for adds_text, run in itertools.groupby(ids, key=self.adds_text):
            part = list(run)
            if adds_text:
                text += " " if text else ""
                offsets += [span and (len(text) + span[0], len(text) + span[1]) for span in self.decoded_offsets(part)]
                text += self.decode(part)
            else:
                offsets += [None] * len(part)
        return text, offsets

    def _first_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        data, token = self._bytes[token_id], self._tokenizer.id_to_token(token_id) or ""
        # A token of bytes has the same ones everywhere in a text.
        if self._is_byte_level or (self._has_byte_tokens and BYTE_TOKEN.fullmatch(token)):
            return data.removeprefix(b" ") if self.strips_leading_space else data
        decoder = self._tokenizer.decoder
        text: str = decoder.decode([token]) if decoder else token
        return text.encode()

    @functools.cached_property
    def strips_leading_space(self) -> bool:
        """True if decoding removes the space before the first word."""
        if self._is_byte_level:
            steps = steps_of(config_of(self._tokenizer.pre_tokenizer))
            return any(step.get("add_prefix_space") is True for step in steps)
        decoder = config_of(self._tokenizer.decoder)
        if not decoder or decoder["type"] == "WordPiece":
            return True
        mark = next((step["replacement"] for step in steps_of(decoder) if step["type"] == "Metaspace"), " ")
        text: str = self._tokenizer.decoder.decode([f"{mark}{FIRST}"])
        return not text.startswith(" ")

    def first_ids(self, text: str, max_tokens: int, *, is_start: bool = True) -> list[int]:
        """Return the first ids of a text without special tokens; see `encode`."""
        return self._encode_start(text, max_tokens, is_start=is_start).ids[:max_tokens]

    def _encode_start(self, text: str, max_tokens: int, *, is_start: bool = True) -> Encoding:
        """Return the encoding without special tokens of a start of a text; see `_encode_starts`."""
        tokenizer = self._tokenizer if is_start else self._continuing
        return _encode_starts(text, max_tokens, lambda start: _encode(tokenizer, start, False))


def read_tokenizer(path: Path) -> TextTokenizer:
    """Read a `tokenizer.json`.

    Raises `BundleError`, also if the decoder is not supported or rules make texts much longer.
    """
    try:
        return TextTokenizer(Tokenizer.from_file(str(path)))
    except INTERRUPTIONS:
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics
        raise BundleError(f"{path} cannot be used: {error}") from None


def _encode(tokenizer: Tokenizer, text: str | tuple[str, str], add_special_tokens: bool = True) -> Encoding:
    """Tokenize a text or a pair of texts. Raises `RuntimeError` if the library panics.

    The library holds Python's global lock while it encodes one input, but not for a batch, which
    costs more for a short text.
    """
    first, second = (text, None) if isinstance(text, str) else text
    try:
        if len(first) + len(second or "") < LONG_TEXT:
            return tokenizer.encode(first, second, add_special_tokens=add_special_tokens)
        return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except (*INTERRUPTIONS, Exception):
        raise
    except BaseException as panic:  # no subclass of Exception
        raise RuntimeError(f"the tokenizer panics: {panic}") from panic


def _encode_starts(text: str, max_tokens: int, encode: Callable[[str], S]) -> S:
    """Encode a start of a text that is long enough for its first `max_tokens` tokens."""
    for start in _starts(text, max_tokens):
        encoded = encode(start)
        if len(encoded) >= max_tokens + CUT_TOKENS:
            break
    return encoded


def _starts(text: str, max_tokens: int) -> Iterator[str]:
    """Yield longer and longer starts of a text; the last is the text itself."""
    size = CHARACTERS_PER_TOKEN * (max_tokens + CUT_TOKENS)
    while size < len(text):
        yield text[:size]
        size *= 2
    yield text
