"""Plain text: paragraphs, whose spacing is copied."""

import re
from bisect import bisect_right
from collections.abc import Sequence

from sightline.translation.files.document import decode
from sightline.translation.marks import MarkedText, TranslatedText
from sightline.translation.protected import protected_spans

# Line ends before a line that is not indented.
_LINE_END = re.compile(r"(\r?\n)[ \t\r\n]*(?<=\n)(?=\S)")
_MOST = 4_000  # characters of a paragraph that is not divided at the end of a line


class PlainText:
    """A text file."""

    def __init__(self, data: bytes) -> None:
        text, self._encoding = decode(data)
        kept = protected_spans(text)  # fenced code may have blank lines
        bounds = [0]
        for match in _LINE_END.finditer(text):
            before = bisect_right(kept, match.start(), key=lambda span: span.start) - 1
            is_end = match[0] != match[1] or match.end() - bounds[-1] > _MOST
            if is_end and (before < 0 or kept[before].end <= match.end()):
                bounds.append(match.end())
        self.texts = [MarkedText(text[start:end]) for start, end in zip(bounds, [*bounds[1:], len(text)], strict=True)]

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        return "".join(translation.text for translation in translations).encode(self._encoding)
