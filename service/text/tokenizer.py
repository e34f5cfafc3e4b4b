"""Byte-level BPE tokenizer with character offsets.

Each token is a sequence of UTF-8 bytes. The files are those of the `tokenizers` library.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from service.bundle import BundleError

# For texts of at least this many characters, a lower bound of the length is checked before
# tokenization.
LONG_TEXT = 2048


@dataclass(frozen=True)
class TokenSpan:
    """A token and its character range in the input; `end` is exclusive."""

    id: int
    start: int
    end: int
    is_special: bool


class TextTokenizer:
    """Tokenizer of the source or of the target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the table of each token's bytes.

        Raises:
            ValueError: the tokenizer is not byte-level.
        """
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ValueError("its decoder must be ByteLevel: the service supports byte-level BPE only")
        tokenizer.encode_special_tokens = True  # special tokens in the input text are plain text
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        special_ids = {id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        byte_of = _byte_alphabet()
        self._special_ids = frozenset(special_ids)
        self._bytes: list[bytes] = []  # by id; empty for special tokens and for ids without a token
        self._names: list[str] = []  # by id: text of the token in responses
        for id_ in range(size):
            token = tokenizer.id_to_token(id_) or ""
            data = b"" if id_ in special_ids else _token_bytes(token, byte_of)
            self._bytes.append(data)
            self._names.append(token if id_ in special_ids else data.decode("utf-8", "replace"))
        self.longest_token_bytes = max(map(len, self._bytes))

    def __len__(self) -> int:
        """Return the number of ids; all ids are smaller."""
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens, which is much faster than tokenization.

        The bound of texts shorter than `LONG_TEXT` is 0.
        """
        if len(text) < LONG_TEXT:
            return 0
        # The tokenizer's normalizer: unicodedata takes minutes for a megabyte of mixed combining
        # marks.
        normalizer = self._tokenizer.normalizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return math.ceil(len(normalized.encode()) / self.longest_token_bytes)

    def encode_truncated(self, text: str, max_tokens: int) -> list[int]:
        """Tokenize a text and truncate it to `max_tokens` ids; a final special token is kept."""
        # The text is cut before tokenization, because tokenizing a megabyte takes hundreds of
        # megabytes of memory. The factor 4 covers normalization, which maps at most three
        # characters to two bytes, and keeps tokens that are affected by the cut beyond
        # `max_tokens`.
        ids = self.encode(text[: 4 * max_tokens * self.longest_token_bytes])
        if len(ids) > max_tokens and self.is_special(ids[-1]):
            return [*ids[: max_tokens - 1], ids[-1]]
        return ids[:max_tokens]

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Tokenize a text and return the tokens with their character ranges in the original text.

        Every character belongs to a token, even if normalization merged several characters. Tokens
        that are not in the text (special tokens, an inserted leading space) have empty ranges.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        offsets: list[tuple[int, int]] = encoding.offsets
        spans: list[TokenSpan] = []
        following = len(text)  # start of the next token
        shared, shared_end = (-1, -1), -1  # offsets of the next token, and the end of its range
        for id_, (start, end) in zip(reversed(ids), reversed(offsets), strict=True):
            if id_ in self._special_ids:
                spans.append(TokenSpan(id_, following, following, True))
                continue
            if start == 0 and self._bytes[id_] == b" " and not text.startswith(" "):
                spans.append(TokenSpan(id_, 0, 0, False))
                continue
            # Tokens that share one character have the same offsets, and get the same end.
            shared_end = shared_end if shared == (start, end) else max(end, following)
            shared = (start, end)
            spans.append(TokenSpan(id_, start, shared_end, False))
            following = min(following, start)
        spans.reverse()
        return spans

    def name(self, token_id: int) -> str:
        """Return the text of a token for display.

        The text includes a leading space. Special tokens have their names. Incomplete characters
        are replaced by U+FFFD.
        """
        return self._names[token_id] if token_id < len(self._names) else ""

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for special tokens."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids without the space before the first word."""
        known, size = self._bytes, len(self._bytes)
        parts = [known[id_] if id_ < size else b"" for id_ in ids]
        if not skip_special_tokens:
            parts = [self.name(id_).encode() if self.is_special(id_) else self.bytes_of(id_) for id_ in ids]
        return b"".join(parts).decode("utf-8", "replace").removeprefix(" ")


def read_tokenizer(path: Path) -> TextTokenizer:
    """Read a `tokenizer.json`.

    Raises:
        BundleError: the file cannot be read, or has another kind of tokenizer.
    """
    try:
        return TextTokenizer(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare exceptions
        raise BundleError(f"{path} cannot be used: {error}") from None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of the byte-level BPE alphabet of GPT-2.

    See Radford et al. 2019, section 2.2. Printable bytes are represented by their own character,
    other bytes by characters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:  # an added token is stored as plain text
        return token.encode()
