"""Token ids to text as they are generated: whole characters only, and stop strings across tokens."""

import codecs
import copy
from collections.abc import Sequence

from service.text.tokenizer import TextTokenizer


class TextStream:
    """Token ids to text as they come: never half a character, nothing that a stop string may still take back.

    The pieces joined are the whole text. Each token costs time by its own length, not by what came before.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> None:
        """The text of `prefix` comes out with the first piece; stop strings are looked for after it."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        prefix_text = self._decoder.decode(b"".join(map(tokenizer.bytes_of, prefix)))
        self._is_at_start = not prefix_text
        self._prefix = prefix_text.removeprefix(" ")  # what of it has not come out
        self._held = ""  # what may be the beginning of a stop string
        self.has_stopped = False

    def push(self, token_id: int) -> str:
        """The characters that this token makes certain; empty once a stop string was met."""
        if self.has_stopped:
            return ""
        text = self._decoder.decode(self._tokenizer.bytes_of(token_id))
        if self._is_at_start and text:
            self._is_at_start = False
            text = text.removeprefix(" ")
        return self._after_prefix(self._cut(self._held + text) if self._stop else text)

    def finish(self) -> str:
        """What is still held back at the end of the generation."""
        if self.has_stopped:
            return ""
        rest = self._decoder.decode(b"", final=True)
        text, self._held = self._held + rest, ""
        return self._after_prefix(text.removeprefix(" ") if self._is_at_start else text)

    @property
    def is_within_character(self) -> bool:
        """True if the last token ends with the first bytes of a character that has not come out."""
        return bool(self._decoder.getstate()[0])

    def copy(self) -> "TextStream":
        """One in the same state."""
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def _after_prefix(self, text: str) -> str:
        prefix, self._prefix = self._prefix, ""
        return prefix + text

    def _cut(self, text: str) -> str:
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.has_stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_beginning(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class StopStrings:
    """A StopCondition: true once the generated text contains one of the strings, be it over several tokens."""

    def __init__(self, text: TextStream) -> None:
        """`text` knows the strings, and is told of each token here alone."""
        self._text = text

    def update(self, token_id: int) -> bool:
        self._text.push(token_id)
        return self._text.has_stopped

    def copy(self) -> "StopStrings":
        return StopStrings(self._text.copy())


def _beginning(text: str, stop: str) -> int:
    """How many of the text's last characters are the first of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
