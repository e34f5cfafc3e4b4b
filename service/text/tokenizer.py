"""Text to token ids with places in the original text, and token ids back to text, whole or as they come.

It knows byte-level BPE (each token is a piece of UTF-8) as the `tokenizers` library stores it, and no model.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from service.bundle import BundleError

# A text this long may not be read at all: whether it fits is worth a look before it is tokenised.
LONG_TEXT = 2048


@dataclass(frozen=True)
class TokenSpan:
    """A token and the characters of the input that it stands for: `start` included, `end` not."""

    id: int
    start: int
    end: int
    is_special: bool


class TextTokenizer:
    """One side's tokenizer: text to ids and back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the table of each token's bytes.

        Raises:
            ValueError: the tokenizer is not byte-level.
        """
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ValueError("its decoder is not ByteLevel, the only kind that this service reads")
        tokenizer.encode_special_tokens = True  # text that spells a special token is text; the file does not say so
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        special_ids = {id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        byte_of = _byte_alphabet()
        self._special_ids = frozenset(special_ids)
        self._bytes: list[bytes] = []  # by id; empty for special tokens and for ids without a token
        self._names: list[str] = []  # by id: what a token is called in answers
        for id_ in range(size):
            token = tokenizer.id_to_token(id_) or ""
            data = b"" if id_ in special_ids else _token_bytes(token, byte_of)
            self._bytes.append(data)
            self._names.append(token if id_ in special_ids else data.decode("utf-8", "replace"))
        self.longest_token_bytes = max(map(len, self._bytes))

    def __len__(self) -> int:
        """Ids lie below."""
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at the least: much cheaper than to count them, where it is long."""
        if len(text) < LONG_TEXT:
            return 0
        # The tokenizer's own normaliser, not unicodedata: that takes minutes for a megabyte of mixed combining marks.
        normalizer = self._tokenizer.normalizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return math.ceil(len(normalized.encode()) / self.longest_token_bytes)

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Return the first ids of a text with its special tokens, at most `max_tokens`; the end token stays."""
        # Tokenizing a megabyte takes hundreds of megabytes. Normalisation makes at most three characters of two bytes;
        # the rest keeps the cut's own tokens far away.
        ids = self.encode(text[: 4 * max_tokens * self.longest_token_bytes])
        if len(ids) > max_tokens and self.is_special(ids[-1]):
            return [*ids[: max_tokens - 1], ids[-1]]
        return ids[:max_tokens]

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Tokens with their characters in `text` as it was given.

        Every character belongs to a token, also where normalisation made several into one. A token of which nothing is
        in the text (a special token, a space put before the text) has an empty span.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        offsets: list[tuple[int, int]] = encoding.offsets
        spans: list[TokenSpan] = []
        following = len(text)  # where the next token's characters begin
        shared, shared_end = (-1, -1), -1  # the next token's offsets, and the end that it was given
        for id_, (start, end) in zip(reversed(ids), reversed(offsets), strict=True):
            if id_ in self._special_ids:
                spans.append(TokenSpan(id_, following, following, True))
                continue
            if start == 0 and self._bytes[id_] == b" " and not text.startswith(" "):
                spans.append(TokenSpan(id_, 0, 0, False))
                continue
            # Tokens that share one character have the same offsets, and so the same end.
            shared_end = shared_end if shared == (start, end) else max(end, following)
            shared = (start, end)
            spans.append(TokenSpan(id_, start, shared_end, False))
            following = min(following, start)
        spans.reverse()
        return spans

    def name(self, token_id: int) -> str:
        """A token's own text with its leading space; a special token's name; U+FFFD for parts of characters."""
        return self._names[token_id] if token_id < len(self._names) else ""

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing where it is special."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text, without the space before its first word."""
        known, size = self._bytes, len(self._bytes)
        parts = [known[id_] if id_ < size else b"" for id_ in ids]
        if not skip_special_tokens:
            parts = [self.name(id_).encode() if self.is_special(id_) else self.bytes_of(id_) for id_ in ids]
        return b"".join(parts).decode("utf-8", "replace").removeprefix(" ")


def read_tokenizer(path: Path) -> TextTokenizer:
    """Read a `tokenizer.json`.

    Raises:
        BundleError: it cannot be read, or is of another kind.
    """
    try:
        return TextTokenizer(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare exceptions
        raise BundleError(f"{path} cannot be used: {error}") from None


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (Radford et al. 2019): itself where it can be seen."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:  # a token that was added as plain text
        return token.encode()
