"""Incremental detokenization with stop strings."""

import codecs
import copy
from collections.abc import Sequence

from sightline.base.text.tokenizer import TextTokenizer


class TextStream:
    """Converts token ids to text incrementally.

    Incomplete characters, and text that may be the start of a stop string, are held back. The
    concatenated pieces equal `TextTokenizer.decode` of all ids. The time for a token does not
    depend on earlier tokens. (`DecodeStream` of the `tokenizers` library decodes several tokens in
    each step, keeps bytes that can never become a character until the end, and cannot be copied for
    a beam.)
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> None:
        """Create a stream whose text ends before the first stop string.

        `prefix` has the ids of a target prefix. Its text is part of the first piece, and is not
        searched for stop strings.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_at_start = True  # no token has added anything
        self._prefix = "".join(map(self._decode, prefix))  # not yet returned
        self._held = ""  # held back: possible start of a stop string
        self.has_stopped = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final now; empty after a stop string."""
        if self.has_stopped:
            return ""
        text = self._decode(token_id)
        return self._after_prefix(self._cut(self._held + text) if self._stop else text)

    def update(self, token_id: int) -> bool:
        """Add a token, as a `StopCondition` of the engine; return True after a stop string."""
        self.push(token_id)
        return self.has_stopped

    def finish(self) -> str:
        """Return the text that is still held back at the end of the generation."""
        if self.has_stopped:
            return ""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return self._after_prefix(text)

    @property
    def is_within_character(self) -> bool:
        """True if the last token ends within a multi-byte character."""
        return bool(self._decoder.getstate()[0])

    def copy(self) -> "TextStream":
        other = copy.copy(self)
        other._decoder = copy.copy(self._decoder)
        return other

    def _decode(self, token_id: int) -> str:
        """Return the characters that a token completes."""
        data = self._tokenizer.bytes_of(token_id, is_first=self._is_at_start)
        self._is_at_start = self._is_at_start and not self._tokenizer.adds_text(token_id)
        return self._decoder.decode(data)

    def _after_prefix(self, text: str) -> str:
        prefix, self._prefix = self._prefix, ""
        return prefix + text

    def _cut(self, text: str) -> str:
        positions = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if positions:
            self.has_stopped = True
            self._held = ""
            return text[: min(positions)]
        starts = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        keep = max((len(start) for start in starts if text.endswith(start)), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
