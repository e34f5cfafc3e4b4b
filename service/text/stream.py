"""Incremental detokenization with stop strings."""

import codecs
import copy
from collections.abc import Sequence

from service.text.tokenizer import TextTokenizer


class TextStream:
    """Converts token ids to text incrementally.

    Incomplete characters, and text that may be the start of a stop string, are held back. The
    concatenated pieces are the complete text. The time for a token does not depend on earlier
    tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> None:
        """Create a stream.

        Args:
            tokenizer: tokenizer of the target.
            stop: stop strings. The text ends before the first one.
            prefix: ids of a target prefix. Its text is part of the first piece, and is not searched
                for stop strings.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        prefix_text = self._decoder.decode(b"".join(map(tokenizer.bytes_of, prefix)))
        self._is_at_start = not prefix_text
        self._prefix = prefix_text.removeprefix(" ")  # not yet returned
        self._held = ""  # held back: possible start of a stop string
        self.has_stopped = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final now; empty after a stop string."""
        if self.has_stopped:
            return ""
        text = self._decoder.decode(self._tokenizer.bytes_of(token_id))
        if self._is_at_start and text:
            self._is_at_start = False
            text = text.removeprefix(" ")
        return self._after_prefix(self._cut(self._held + text) if self._stop else text)

    def finish(self) -> str:
        """Return the text that is still held back at the end of the generation."""
        if self.has_stopped:
            return ""
        rest = self._decoder.decode(b"", final=True)
        text, self._held = self._held + rest, ""
        return self._after_prefix(text.removeprefix(" ") if self._is_at_start else text)

    @property
    def is_within_character(self) -> bool:
        """True if the last token ends within a multi-byte character."""
        return bool(self._decoder.getstate()[0])

    def copy(self) -> "TextStream":
        """Return a copy with the same state."""
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def _after_prefix(self, text: str) -> str:
        prefix, self._prefix = self._prefix, ""
        return prefix + text

    def _cut(self, text: str) -> str:
        found = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.has_stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class StopStrings:
    """A StopCondition that matches stop strings in the generated text, also across tokens."""

    def __init__(self, text: TextStream) -> None:
        """Create a condition; `text` has the stop strings and must not be used elsewhere."""
        self._text = text

    def update(self, token_id: int) -> bool:
        self._text.push(token_id)
        return self._text.has_stopped

    def copy(self) -> "StopStrings":
        return StopStrings(self._text.copy())


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
