"""Sentences of a text, found by the `sentencex` library and corrected, and the exact text between
them: whitespace, invisible characters, and the numbers of list items.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from unicodedata import category

import sentencex

from sightline.base.text.words import UNSPACED

# The time of `sentencex` grows with the square of the length for some texts, and it blocks all
# threads. Therefore it receives at most this many characters at once.
WINDOW_CHARACTERS = 2048
# Languages that write no space between sentences.
LANGUAGES_WITHOUT_SPACES = frozenset({"bo", "dz", "ja", "km", "lo", "my", "shn", "th", "yue", "zh"})
# Abbreviations that `sentencex` does not know, and that end no sentence whatever follows: of all
# languages, and those that are words of another language. After others, a word in lower case tells.
_IN_ALL = (
    "approx aprox avg bl.a ca cca cf d.w.z e.g esim excl exkl f.eks fig figs i.e i.p.v incl inkl insb insbes m.b.t "
    "m.in maks max máx min mín nr o.a pp pág t.a.v t.ex tel tlf versch vol vs zzgl św "
    "бл гл макс мин мін рис стр табл тел"
)
_IN_SOME = {
    "": "",
    "bn": "ডা ড মো",
    "de": "durchschn ehem entspr geb gest jährl mind staatl stellv Tsd urspr wiss",
    "el": "Αγ αρ εικ καθ κεφ περ πίν σελ τηλ",
    "en": "apt ch chap deg ed eq esp est Mx qty sect",
    "es": "Cía Dña Profa",
    "fi": "tri",
    "fr": "bd Dr env févr janv juil MM Me Mgr Mlle Mme no pag Pr St Ste Sté",
    "hi": "कु डॉ पं प्रो श्री",
    "hu": "ifj kb özv Szt",
    "it": "pag",
    "nb": "kl",
    "nl": "Ds gem Jhr Mw",
    "no": "kl",
    "pl": "al dr gen godz hr im inż ks mgr ok pl płk prof rys str ul woj",
    "pt": "Av",
    "ro": "bd bul dl dna dra jud mun nr pag Sf str",
    "ru": "ген им обл оз ок пл",
    "sv": "kl",
    "tr": "Av Bkz Cad Doç Mah Ort Sn Sok Yrd",
    "uk": "обл оз пл",
    "vi": "BS GS PGS ThS TP Tp TS",
}
ABBREVIATIONS = {language: frozenset(f"{_IN_ALL} {words}".split()) for language, words in _IN_SOME.items()}
# Languages in which `sentencex` ends a sentence after an initial, such as "J. Smith".
_INITIALS = frozenset({"am", "bg", "ca", "cs", "da", "es", "fr", "kk", "pl", "pt", "ru", "sk", "sr", "uk"})
# A text that is a sentence for certain, as most inputs are.
ONE_SENTENCE = re.compile(r"[^\W\d_]([\w ,'-]*\w)?[.?!]?")
_WHITESPACE = re.compile(r"\s")
# Whitespace, and characters that show nothing: control and format characters, such as a byte order
# mark, a zero-width space or a mark of the writing direction, and fillers.
_BLANK = "\u115f\u1160\u2800\u3164\ufeff\uffa0" + "".join(
    character for character in map(chr, range(0x3001)) if category(character) in ("Cc", "Cf", "Zl", "Zp", "Zs")
)
# Marks that change the character before them, and show nothing alone.
_SELECTORS = "\u034f" + "".join(map(chr, range(0xFE00, 0xFE10)))
_SHOWS_NOTHING = re.compile(f"[{re.escape(_BLANK)}{_SELECTORS}]*")
# A number or letter of a list item, such as "1.", "2.3.", "a)" or "(iv)". It belongs to the
# sentence after it.
_LIST_MARKER = re.compile(r"\(?(\d{1,3}(\.\d{1,3})*|[^\W\d_]|[ivxIVX]{2,5})[.)]\.?")
# A list marker that is copied, because models read a number as a count. A single letter with a
# period stays with its sentence, because it may be an initial: "J. Smith sleeps."
_COPIED_MARKER = re.compile(r"(\(?\d{1,3}(\.\d{1,3})*[.)]\.?|\(?([^\W\d_]|[ivxIVX]{2,5})\))\s+(?=\S)")
# Characters before and after the end of a sentence that decide about it. More are not read, so that
# the time is linear in the length of the text.
_CONTEXT = 64
# What may follow the end of a sentence without whitespace: quotes, brackets, combining marks, and
# what shows nothing.
_CLOSING = re.compile(f"[\"'”’»›)\\]}}*_¹²³⁰⁴-⁹」』）】〉》\u0300-\u036f\u20e3{_SELECTORS}{re.escape(_BLANK)}]*")
# Quotes, brackets and marks of emphasis, in which `sentencex` ends no sentence. It also takes the
# apostrophe of "boys' dogs" and the inches of 5" for quotes. A slash hides them from it.
_WRAPPING = re.compile("[\"“”„‟‘‚«»‹›()\\[\\]{}*_`¹²³⁰⁴-⁹]|(?<!\\w)['’]|['’](?!\\w)")
# Marks that open a pair, with those that close it; marks of emphasis close themselves.
_PARTNERS = {
    "“": ("”",), "„": ("“", "”"), "«": ("»",), "»": ("«",), "‹": ("›",), "(": (")",), "[": ("]",), "「": ("」",),
    "『": ("』",),
}  # fmt: skip
_OPENING_MARK, _CLOSING_MARK = re.compile('["“„«»‹(\\[「『]|[*_`]+'), re.compile('(?:["“”«»›)\\]」』]|[*_`]+)\\Z')
# Marks of the ends of sentences that `sentencex` does not know in all languages.
_MARKS = str.maketrans("។៕།༎", "。。。。")
# An ordinal number in German, such as in "im 19. Jahrhundert", before a noun.
_ORDINAL = re.compile(r"\b(?:[Dd](?:as|e[mnrs]|ie)|[Ii]m|[Aa]m|[Zz]u[mr]|[Bb]eim|[Vv]om|[Jj]ede[mnrs]?)\s\d{1,3}\Z")
_NO_NOUN = re.compile(r"(?:D(?:as|e[mnrs]|ie)|E[rs]|Sie|Wir|Ihr|Ich|Eine?|Man|Im|Am|Und|Aber|Dann|Da|Danach)\b")
_UNSPACED = f"(?:{UNSPACED}|[\u0f00-\u0fff])"  # also of Tibetan
# The end of a sentence that needs no whitespace: a mark of these scripts, or another one between
# two of their words.
_UNSPACED_MARK = re.compile("[。！？｡།༎။។៕][^\\w\\s]*\\Z")
_UNSPACED_WORD, _UNSPACED_NEXT = re.compile(f"{_UNSPACED}[^\\w\\s]*\\Z"), re.compile(f"[^\\w\\s]*{_UNSPACED}")
# The period or the dots at the end of a sentence, the word before them, and the next word.
_DOTS = re.compile("(\\.+|…)[\"'”’»›)\\]]*\\Z")
_LAST_WORD = re.compile("(\\d\\s?)?\\b([^\\W\\d_]([\\w.\u0900-\u0dff]*[\\w\u0900-\u0dff])?)\\Z")
_NEXT_WORD = re.compile(r"[^\w\s]*([^\W\d_])([^\W\d_]?)")
_FIRST = re.compile(r"[^\W_]")
# An abbreviation, such as a unit, also where sentences begin in lower case.
_CONSONANTS = re.compile("[bcdfghjklmnpqrstvwxz]{2,}")


@dataclass(frozen=True)
class SplitText:
    """A text as a list of sentences and the text around them."""

    sentences: Sequence[str]  # without whitespace and invisible characters at either end
    gaps: Sequence[str]  # what is copied; gaps[i] precedes sentence i; one more gap ends the text

    def join(self, sentences: Sequence[str], language: str) -> str:
        """Replace each sentence and keep the gaps. Unchanged sentences give the text again.

        `language` is that of the replacements, see `with_separators`.
        """
        is_changed = list(sentences) != list(self.sentences)
        gaps = self.with_separators(language).gaps if is_changed else self.gaps
        return "".join(chain.from_iterable(zip_longest(gaps, sentences, fillvalue="")))

    def with_separators(self, language: str) -> "SplitText":
        """Insert a space between two sentences without a gap, unless the language writes none."""
        if language.partition("-")[0] in LANGUAGES_WITHOUT_SPACES:
            return self
        last = len(self.gaps) - 1
        return replace(self, gaps=[gap or " " * (0 < index < last) for index, gap in enumerate(self.gaps)])

    def copying(self, language: str) -> "SplitText":
        """Make sentences without a letter a part of the gaps; the others become this language."""
        if all(map(has_letter, self.sentences)):
            return self
        gaps = self.with_separators(language).gaps
        sentences, kept = [], [gaps[0]]
        for sentence, gap in zip(self.sentences, gaps[1:], strict=True):
            if has_letter(sentence):
                sentences.append(sentence)
                kept.append(gap)
            else:
                kept[-1] += sentence + gap
        return SplitText(sentences, kept)


def has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))


def split_sentences(text: str, language: str, max_sentences: int) -> SplitText | None:
    """Split a text into sentences; None if there are more than `max_sentences`.

    A line break always ends a sentence. The language is a BCP 47 tag; for an unknown one, general
    rules are used.
    """
    language = language.partition("-")[0]  # `sentencex` knows ISO 639 codes
    sentences: list[str] = []
    gaps: list[str] = []
    position = gap_start = 0
    for segment in _segments(text, language):
        if not _SHOWS_NOTHING.fullmatch(segment):
            if len(sentences) == max_sentences:
                return None
            sentence = segment.lstrip(_BLANK)
            marker = _COPIED_MARKER.match(sentence)
            if marker and not _SHOWS_NOTHING.fullmatch(sentence, marker.end()):
                sentence = sentence[marker.end() :].lstrip(_BLANK)
            start = position + len(segment) - len(sentence)
            sentence = sentence.rstrip(_BLANK)
            gaps.append(text[gap_start:start])
            sentences.append(sentence)
            gap_start = start + len(sentence)
        position += len(segment)
    gaps.append(text[gap_start:])
    if len(sentences) > 1:
        for index, sentence in enumerate(sentences):
            kept = _without_lone_marks(sentence)
            before, _, after = sentence.partition(kept)
            sentences[index], gaps[index], gaps[index + 1] = kept, gaps[index] + before, after + gaps[index + 1]
    return SplitText(sentences, gaps)


def _without_lone_marks(sentence: str) -> str:
    """Return a sentence without quotes and brackets at its ends whose partners are in others.

    Models of sentences have not seen one half of a pair.
    """
    while (mark := _OPENING_MARK.match(sentence)) and not _SHOWS_NOTHING.fullmatch(sentence, mark.end()):
        if any(partner in sentence[mark.end() :] for partner in _PARTNERS.get(mark[0], (mark[0],))):
            break
        sentence = sentence[mark.end() :].lstrip(_BLANK)
    while (mark := _CLOSING_MARK.search(sentence)) and not _SHOWS_NOTHING.fullmatch(sentence, 0, mark.start()):
        opening = [left for left, right in _PARTNERS.items() if mark[0] in right] or [mark[0]]
        if any(partner in sentence[: mark.start()] for partner in opening):
            break
        sentence = sentence[: mark.start()].rstrip(_BLANK)
    return sentence


def _segments(text: str, language: str) -> Iterator[str]:
    """Yield blank lines, and sentences with the whitespace around them, in order."""
    for line in text.splitlines(keepends=True):
        if line.isspace():
            yield line
            continue
        start = position = 0  # of the current sentence; of the next window
        while position < len(line):
            window = line[position : position + WINDOW_CHARACTERS]
            ends = _segment_ends(window, language)
            if position + len(window) < len(line):
                del ends[len(window)]  # the window may have cut this sentence
            for length, is_wrapped in sorted(ends.items()):
                end = _sentence_end(line, start, position + length, language, is_wrapped)
                if end is not None:
                    yield line[start:end]
                    start = end
            # Without an end, the sentence continues beyond the window.
            position += max(ends, default=len(window))
        if start < len(line):
            yield line[start:]


def _sentence_end(line: str, start: int, position: int, language: str, is_wrapped: bool) -> int | None:
    """Return the end of the sentence that `sentencex` ends at a position; None if it goes on there.

    In scripts with spaces, a sentence ends only before whitespace. Abbreviations end none.
    `position` is the start of the next sentence, or of a part of this one. If it was found only
    without quotes and brackets (`is_wrapped`), the next sentence must not begin in lower case.
    """
    if position <= start:
        return None
    if position - start < _CONTEXT and _LIST_MARKER.fullmatch(line[start:position].strip(_BLANK)):
        return None
    end, before = position, line[max(start, position - _CONTEXT) : position]
    is_spaced = _WHITESPACE.search(before, len(before.rstrip(_BLANK))) is not None
    if not is_spaced or line[position : position + 1] in ("»", "›"):
        closing = _CLOSING.match(line, position, position + _CONTEXT)
        assert closing is not None, "it may be empty"
        if closing.end() == len(line):
            return None
        if space := _WHITESPACE.search(closing[0]):
            is_spaced, end = True, position + space.start()
            before += line[position:end]
            if is_wrapped and not line[end : end + _CONTEXT].lstrip(_BLANK + "*_([\"'“„«")[:1].isupper():
                return None
    before, after = before.rstrip(_BLANK), line[end : end + _CONTEXT].lstrip(_BLANK)
    if not is_spaced:
        is_between = _UNSPACED_WORD.search(before) and _UNSPACED_NEXT.match(after)
        return end if is_between or _UNSPACED_MARK.search(before) else None
    if is_wrapped and not _DOTS.search(before) and (letter := _NEXT_WORD.match(after)) and letter[1].islower():
        return None
    first = _FIRST.search(line, start, start + _CONTEXT)
    is_lower = first is not None and first[0] != first[0].title()
    return None if _goes_on(before, after, language, position - start <= _CONTEXT, is_lower) else end


def _goes_on(before: str, after: str, language: str, is_first: bool, is_lower: bool) -> bool:
    """Return True if a sentence goes on between `before` and `after`, after a period or dots.

    `is_first` means that `before` is all of the sentence so far, and `is_lower` that it begins in
    lower case, so that the next sentence may do so, too.
    """
    dots = _DOTS.search(before)
    if dots is None:
        return False
    if language == "de" and _ORDINAL.search(before, 0, dots.start()):
        return _NEXT_WORD.match(after) is not None and not _NO_NOUN.match(after)
    if dots[1] == "." and (last := _LAST_WORD.search(before, 0, dots.start())):
        word, abbreviations = last[2], ABBREVIATIONS.get(language, ABBREVIATIONS[""])
        is_first = is_first and not has_letter(before[: last.start(2)])
        is_initial = len(word) == 1 and language in _INITIALS
        if last[1] is None and (is_initial or {word, word.lower() if is_first else word} & abbreviations):
            return True
        is_lower = is_lower and not _CONSONANTS.fullmatch(word)
    letters = None if is_lower else _NEXT_WORD.match(after)
    return letters is not None and letters[1] != letters[1].title() and not letters[2].isupper()


def _segment_ends(text: str, language: str) -> dict[int, bool]:
    """Return the end of each sentence, with the whitespace after it; the last is that of the text.

    The value is True for ends that are found only without quotes and brackets.
    """
    ends = dict.fromkeys(accumulate(_segment_lengths(text, language)), False)
    if language not in LANGUAGES_WITHOUT_SPACES and _WRAPPING.search(text):
        for end in accumulate(_segment_lengths(_WRAPPING.sub("/", text), language)):
            ends.setdefault(end, True)
    return ends


def _segment_lengths(text: str, language: str) -> list[int]:
    """Return the number of characters of each sentence, with the whitespace around it.

    Version 1.0.32 of `sentencex` fails for some texts with whitespace of several bytes, so all
    whitespace is replaced by spaces. If it still fails, the text is one sentence.
    """
    plain = _WHITESPACE.sub(" ", text).translate(_MARKS)
    try:
        lengths = [len(segment) for segment in sentencex.segment(language, plain) if segment]
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library cannot be asked for this class
            raise
        return [len(text)]
    return lengths if sum(lengths) == len(text) else [len(text)]
