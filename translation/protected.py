"""Parts of a text that a translation must not change: addresses, code, placeholders, numbers with
units, and the like.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Kept(NamedTuple):
    """A part of a text that is copied."""

    start: int
    end: int
    is_symbol: bool = False  # it has no part in the grammar of its sentence, such as an emoji


_CURRENCY = "[$€£¥₹₽₩₺₴₫₪฿₿¢]|(?:US|A|C|NZ|HK|S|R)\\$|CHF|EUR|USD|GBP|JPY|CNY|BRL|R\\$"
_UNIT = (
    "%|‰|°[CF]?|℃|℉|[kKMGTP]i?[Bb](?:/s|ps)?|[cmkdnµμ]m[²³23]?|m[²³]|[mkµμ]?g|[mckdµμ]?[lL]|[kMG]?Hz|[kMG]?Wh?|[kmM]?V"
    "|m?Ah?|[nmµμ]s|min|hrs?|sec|mph|fps|dpi|ppi|rpm|px|pt|rem|lbs?|oz|ft|mi|kcal|k?cal|k?J|[kMG]?Pa|bar|psi"
    f"|[kM]?Ω|dB|lm|lx|ha|t|x|[ap]m|{_CURRENCY}"
)
_PER = "(?:/[a-zµμ]{1,3}[²³]?(?!\\w))?"  # such as "km/h"
_SPACED_UNIT = f"(?!(?:[AVWJxLkKMGTP]|[ap]m)\\b)(?:{_UNIT})|[kKMGTP]i?B"
_MORE_DIGITS = "(?:[.,:/'’·٫٬×x^–-]\\d+|[ \u00a0\u202f]\\d{3}(?!\\d))"
_DIGITS = f"\\d+{_MORE_DIGITS}*"
_SIGN = r"(?<![\w.])[+−±~≈-]?"
_EMOJI = (
    "(?:[\U0001f1e6-\U0001f1ff]{2}|[0-9#*]\ufe0f?\u20e3|[\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf\u2900-\u297f"
    "\u2b00-\u2bff\u3030\u303d©®™\U0001f000-\U0001faff][\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]*"
    "(?:\u200d[\u2190-\u2bff\U0001f000-\U0001faff][\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]*)*)"
)
_URL_CHARACTERS = "[\\w!#$%&*+,./:;=?@~\\[\\]()'|^{}-]"
_FILE_TYPES = (
    "bash|bat|bmp|c|cc|cfg|conf|cpp|cs|css|csv|db|deb|dll|docx?|env|epub|exe|gif|go|gz|h|hpp|html?|ini|ipynb|iso|jar|java"
    "|jpe?g|js|json|jsx|kt|log|lua|md|mjs|mp[34]|msi|odp|ods|odt|pdf|php|png|po|pot|pptx?|ps1|py|rar|rb|rs|rst|rtf|sh"
    "|sql|srt|svg|tar|tex|tgz|tiff?|toml|ts|tsv|tsx|txt|vtt|wasm|wav|webp|whl|xlf|xliff|xlsx?|xml|ya?ml|zip|zst"
)
_DOMAINS = "com|org|net|edu|gov|io|dev|app|ai|co|info|eu|uk|de|fr|es|it|nl|pl|pt|br|ru|jp|cn|in|ch|at|se|no|fi|dk|cz|us"
_PLURALS = "plural|select|selectordinal|number|date|time|spellout|ordinal|duration|choice"
NESTED = "[^{}]*(?:\\{[^{}]*(?:\\{[^{}]*(?:\\{[^{}]*\\}[^{}]*)*\\}[^{}]*)*\\}[^{}]*)*"  # balanced braces
# Symbols have no part in the grammar of their sentence, and punctuation may follow URLs. The order
# decides between patterns that match at the same character.
_PATTERNS = {
    "code": r"(?<!`)(?P<ticks>`{1,3})(?!`)[^\n]{1,500}?(?<!`)(?P=ticks)(?!`)",
    "math": r"\$\$[^$]{1,500}\$\$|(?<![\w$])\$(?![\s\d$])[^$\n]{0,200}?[^\s$]\$(?![\w$])|\\\([^\n]{1,200}?\\\)",
    "latex": r"\\[a-zA-Z]+(?:\[[^\[\]\n]{0,50}\])?(?:\{[^{}\n]{0,200}\})+",
    "icu": rf"\{{\s*[\w.-]{{1,64}}\s*,\s*(?:{_PLURALS})\b{NESTED}\}}",
    "template": r"\{\{\{?[^{}\n]{0,200}\}?\}\}%?|\{%[^{}\n]{0,200}%\}|\*\|[^|\n]{1,100}\|\*",  # {{ name }}
    "placeholder": r"[$#%@]\{[^{}\n]{0,200}\}|%?\{\s*[\w.,:$!|%\[\]<>^+-]*\s*\}%?|\$t\([^()\n]{1,200}\)",  # {name}
    "autolink": r"<[^<>\s]*(?:@|://)[^<>\s]*>",
    "tag": r"<!--(?s:.{0,2000}?)-->|</?\d+/?>|</?[A-Za-z][\w:.-]*(?:\s[^<>\n]{0,1000})?/?>|<%[^\n]{0,200}?%>",
    "url": rf"(?<![\w])(?:[a-zA-Z][a-zA-Z0-9+.-]{{1,15}}://|www\.|mailto:|tel:\+?\d){_URL_CHARACTERS}{{1,2000}}",
    "email": r"(?<![\w.+%-])[\w.+%-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}",
    "url_path": r"(?<![\w/.~:@])(?:~|\.{1,2})?/(?=[\w.~])[\w.@%+=~-]+(?:/[\w.@%+=~-]+)*/?",  # /var/log
    "url_windows": r"(?<!\w)[A-Za-z]:\\[^\s\"'<>|*?]*|(?<!\\)\\\\[\w.$-]+\\[^\s\"'<>|*?]+",  # C:\Temp
    "url_relative": r"(?<![\w/.@-])[\w-]+(?:[/\\][\w.-]+)*[/\\][\w-]+\.\w{1,6}(?!\w)",  # src/main.py
    "file": rf"(?<![\w/.@-])[\w-]+(?:\.[\w-]+){{0,4}}\.(?:{_FILE_TYPES})(?![\w-]|\.\w)",
    "url_domain": (
        rf"(?<![\w.@-])(?:[a-z0-9-]{{1,63}}\.){{1,6}}(?:{_DOMAINS})(?:/{_URL_CHARACTERS}{{0,2000}})?(?![\w-]|\.\w)"
    ),
    "printf": (  # %s, %(n)d, %Y
        r"%(?:\(\w+\)|\d+\$)?[-+#0_^]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|ll|[hlLzjt])?[A-Za-z@](?![A-Za-z])"
    ),
    "percent": r"%\w+%(?:\\[\w.\\-]+)?|%L?\d{1,2}(?![\w%])|%%",  # %PATH%, %1
    "variable": r"(?<![\w$])\$(?:\([\w.]+\)|[A-Za-z_]\w*|\d+(?![\d.,]))|(?<!\w)__\w+__(?!\w)",
    "symbol_name": r"(?<![\w:]):[a-z0-9_+-]*[a-z][a-z0-9_+-]*:(?!\w)",  # :smile:
    "symbol_note": r"\[\^[^\]\s]{1,40}\]:?",
    "symbol_hashtag": r"(?<![\w&#/])#\w+",
    "handle": r"(?<![\w@/.])@:?\w[\w.-]*\w(?:@[\w-]+(?:\.[\w-]+)+)?",
    "entity": r"&(?:#\d{1,7}|#x[\da-fA-F]{1,6}|[A-Za-z]\w{1,30});|(?<=\w )#(?= [^\W\d_])",  # and numbers of ICU
    "symbol_emoji": f"{_EMOJI}(?:[ ]?{_EMOJI})*",
    "flag": r"(?<![\w-])--[a-zA-Z][\w-]*(?:=[^\s.,;]+)?",
    "symbol_emoticon": r"(?<!\S)[:;=][-^']?[()DPp|/*](?!\w)",
    "ip_address": r"(?<![\w:])(?=[\d:]*(?:[a-fA-F]|::))(?:[\da-fA-F]{0,4}:){2,7}[\da-fA-F]{0,4}(?![\w:])",
    "iban": r"(?<!\w)[A-Z]{2}\d\d(?: ?[A-Z\d]{4}){3,7}(?: ?[A-Z\d]{1,3})?(?!\w)",
    "version": r"(?<![\w.])[vV]?\d+(?:\.\d+)+[-+.]?(?:alpha|beta|rc|dev|post|pre|a|b)[.-]?\d*(?!\w)",
    "time": r"(?<!\w)\d{4}-\d\d-\d\dT[\d:.]{4,20}(?:Z|[+-]\d\d:?\d\d)?",
    "price": (  # $1,234.50, € 5
        rf"{_SIGN}(?:{_CURRENCY})[ \u00a0\u202f]?{_DIGITS}(?:[ \u00a0\u202f]?(?:{_UNIT}|[kKMB]n?)(?![\w({{%]))?(?!\w)"
    ),
    "measure": (  # 5kg, 60 km/h
        rf"{_SIGN}{_DIGITS}(?:(?:{_UNIT}){_PER}(?!\w)|[ \u00a0\u202f](?:{_SPACED_UNIT}){_PER}(?![\w'’({{%-]))"
    ),
    "number": rf"(?<![\w.])[vV+−±~≈-]?\d+{_MORE_DIGITS}+(?!\w)|{_SIGN}\d{{4,}}(?!\w)",  # 1.5, 2026
    "name": r"(?<![\w.])[A-Za-z][\w.]*\(\)|(?<!\w)_?[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+_?(?!\w)|(?<![\w-])[A-Za-z]+\d\w*"
    r"|(?<!\w)[A-Za-zµμ]{1,3}[²³]",
    "uuid": r"(?<!\w)(?=[a-fA-F]*\d)[\da-fA-F]{8}(?:-[\da-fA-F]{4}){3}-[\da-fA-F]{12}",
    "hash": r"(?<!\w)0x[\da-fA-F]+(?!\w)|(?<!\w)(?=\d*[a-f])[\da-f]{7,64}(?!\w)",
    "phone": rf"(?<![\w+])(?:\+\d|\(\d{{2,5}}\) ?\d)(?:[ /.-]?(?:\d|\(\d{{1,5}}\))){{3,18}}"
    rf"(?!\d|[:.,×–^]\d| ?(?:{_SPACED_UNIT})\b)",
}
_ANY = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PATTERNS.items()))
_AFTER_URL = re.compile(r"[.,:;!?'*_…]+\Z")
# Without an end, it has the rest of the text. On the first line, a backtick ends a span of code.
_FENCED = re.compile(
    r"^[ \t>]*(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?s:.*?)(?:^[ \t>]*(?P=fence)[`~]*(?=[ \t]*\r?$)|\Z)", re.MULTILINE
)
_INDENTED = re.compile(r"(?: {4}|\t)\s*\S")
_LIST_ITEM = re.compile(r"\s*(?:[-*+•]|\(?\w{1,3}[.)])\s")
_CODE = re.compile(
    r"[;{}]\s*\Z|\)\s*:?\s*\Z|\w\(|\w\[\w|\w\s*(?:=|\+=|:=|==|->|=>|&&)\s*\S|^\s*(?:[$>%#] |//|/\*|<\w|@\w|\w+:\s*\Z)"
    r"|^\s*(?:return|import|from|def|class|if|elif|else|for|while|try|with|print|let|const|var|function|end|pass|break)\b"
)


def protected_spans(text: str, given: Iterable[Kept] = ()) -> list[Kept]:
    """Return the parts of a text that are copied, in order and without overlap.

    Those that are `given` come first: others that they overlap are left out.
    """
    kept: list[Kept] = []
    for span in sorted(span for span in given if span.start < span.end):
        if kept and span.start < kept[-1].end:
            kept[-1] = Kept(kept[-1].start, max(kept[-1].end, span.end))
        else:
            kept.append(span)
    fenced = [Kept(*match.span()) for match in _FENCED.finditer(text)]
    for span in [*fenced, *_indented_code(text)]:
        index = bisect_right(kept, span.start, key=lambda other: other.start)
        if (index == 0 or kept[index - 1].end <= span.start) and (index == len(kept) or kept[index].start >= span.end):
            kept.insert(index, span)
    edges = [0, *(edge for span in kept for edge in (span.start, span.end)), len(text)]
    found = [match for gap in [*pairwise(edges)][::2] for match in _matches(text, *gap)]
    return sorted([*kept, *found])


def kept_within(kept: Sequence[Kept], start: int, end: int) -> list[Kept]:
    """Return what is kept of a part of a text."""
    first = bisect_right(kept, start, key=lambda span: span.end)
    return list(kept[first : bisect_left(kept, end, key=lambda span: span.start)])


def _matches(text: str, start: int, end: int) -> Iterable[Kept]:
    for match in _ANY.finditer(text, start, end):
        name, (start, end) = match.lastgroup or "", match.span()
        if name.startswith("url"):
            end = start + len(_trimmed_url(match[0]))
        yield Kept(start, end, name.startswith("symbol"))


def _trimmed_url(url: str) -> str:
    """Return a URL without the punctuation and closing brackets of the sentence around it."""
    while True:
        trimmed = _AFTER_URL.sub("", url)
        opening = {")": "(", "]": "[", "}": "{"}.get(trimmed[-1:])
        if opening and trimmed.count(trimmed[-1]) > trimmed.count(opening):
            trimmed = trimmed[:-1]
        if trimmed == url:
            return url
        url = trimmed


def _indented_code(text: str) -> Iterable[Kept]:
    """Yield blocks of indented lines that look like code."""
    block: list[str] | None = None  # indented lines after a blank line
    start, position, is_after_blank, is_in_list = 0, 0, True, False
    for line in [*text.splitlines(keepends=True), ""]:
        is_indented = bool(_INDENTED.match(line))
        if block is not None and not is_indented:
            if any(map(_CODE.search, block)):
                yield Kept(start, start + len("".join(block).rstrip()))
            block = None
        if block is not None:
            block.append(line)
        elif is_indented and is_after_blank and not is_in_list:
            block, start = [line], position
        if line.strip():
            is_in_list = bool(_LIST_ITEM.match(line)) or (is_in_list and line[:1].isspace())
        is_after_blank = not line.strip()
        position += len(line)
