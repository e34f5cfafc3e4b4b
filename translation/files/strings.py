"""Catalogues of strings: PO, JSON and YAML. All but the translated strings stays as it is."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from sightline.translation.files.document import DocumentError, decode, ends_of_tags
from sightline.translation.marks import SPACE, TextBuilder, Texts, TranslatedText, unchanged
from sightline.translation.markup import CODE, Markup, MarkupError, Tags
from sightline.translation.protected import NESTED, kept_within, protected_spans

# Numbers in place of names of tags, such as <0>.
_NUMBERED, _NUMBER = re.compile(r"(</?)(?=\d+/?>)"), "sightline-number-"
_ENDS = re.compile(r"(?:</[\w-]+>)*")
_HAS_TAG = re.compile(r"</[A-Za-z]|<(?:br|hr|img|wbr)\b[^>]*>")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"(?=(\s*:)?)')
_ANCHOR = re.compile(r"(?:[&!]\S*\s+)*")  # and tags
# A message of ICU: {count, plural, one {# file} other {# files}}, and the forms in it.
_MESSAGE = re.compile(rf"\{{\s*[\w.-]+\s*,\s*(?:plural|select|selectordinal)\s*,{NESTED}\}}")
_FORM = re.compile(rf"(\w\s*\{{)({NESTED})(?=\}})")
# The key of a menu: &File, _File, E&xit, or "(&F)" after a text.
_KEY = re.compile(r"\s?\(&(\w)\)|((?<![\w&])[&_]|(?:(?<=^[A-Z])|(?<=^[A-Z][a-z]))[&_](?=[a-z]))(?=[^\W_])(?!\w+;)")
# Values in ASCII that programs read.
_IDENTIFIER = re.compile(
    r"(?=\S*[\d_])[^\s<>&{}%]+"  # snake_case, versions, colours, hashes
    r"|[A-Z]+|[a-z]{2,3}-[A-Z]{2}|:[a-z]+"  # CONSTANT, languages, :symbol
    r"|\w*[a-z][A-Z]\w*|\w+(?:(?:\.|::)\w\w+)+"  # camelCase, names.with.parts
    r"|(?:([a-z]+) (?=\1-))?[a-z]+(?:-[a-z]+)+(?: [a-z]+(?:-[a-z]+)+)*"  # lists of class-names
    r"|[a-z]+\([\d.,%/ -]*\)"  # rgb(0, 0, 0)
)
# A list of symbols of Ruby, [:year, :month], which YAML 1.2 allows, but not the library.
_SYMBOLS, _COLON = re.compile(r"(?m)(?<=[:-] )\[\s*:\w+(?:,\s*:\w+)*\s*\](?=[\s,}]*(?:#|$))"), "\ue001"
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:[-_][A-Z][A-Za-z]{1,3})?")


class Strings(Texts):
    """Strings that are translated one by one; those with tags as HTML."""

    def add_string(self, string: str, write: Callable[[str], None]) -> None:
        key = _KEY.search(string)
        if key and string.count(key[2] or "&") == 1 and "=" not in string:
            plain = string[: key.start()] + string[key.end() :]
            self.add_string(plain, lambda text: write(_with_key(text, key[2] or "&", key[1] or string[key.end()])))
            return
        forms: dict[str, str] = {}
        messages = _MESSAGE.findall(string)
        for _, form in chain.from_iterable(map(_FORM.findall, messages)):
            self.add_string(form, partial(forms.__setitem__, form))

        def finish(text: str) -> None:
            for message in messages:
                text = text.replace(message, _FORM.sub(lambda form: form[1] + forms.get(form[2], form[2]), message))
            write(text)

        if not self.add_markup(string, finish, keeps_spaces=True):
            self.add_plain(string, finish)

    def add_markup(
        self, string: str, write: Callable[[str], None], *, keeps_spaces: bool = False, may_be_open: bool = False
    ) -> bool:
        """Add the texts of HTML, of which end tags may be missing at the end if it `may_be_open`;
        return False if it is none, or is damaged.
        """
        found = _markup_of(_NUMBERED.sub(rf"\1{_NUMBER}", string), Tags("html", keeps_spaces=keeps_spaces))
        if found is None or (found[1] and not may_be_open):
            return False
        markup, missing = found
        results: list[TranslatedText] = []

        def writer(result: TranslatedText) -> None:
            results.append(result)
            if len(results) == len(markup.texts):
                write(markup.write(results, "").replace(_NUMBER, "").removesuffix(missing))

        for text in markup.texts:
            self.add(text, writer)
        return True


def _with_key(text: str, sign: str, key: str) -> str:
    """Return a text with a sign before the letter of a key, at the start of a word if possible."""
    kept = protected_spans(text)
    for pattern in (rf"(?<!\w){key}", key, "[A-Za-z\u00c0-\u1fff]"):
        for place in re.finditer(pattern, text, re.IGNORECASE):
            if not kept_within(kept, *place.span()):
                return text[: place.start()] + sign + text[place.start() :]
    return f"{text}({sign}{key.upper()})"


def _markup_of(string: str, tags: Tags) -> tuple[Markup, str] | None:
    """Return HTML that can be written again as it was, but for spaces, and the end tags that it
    lacks at its end; None for other strings.
    """
    if not _HAS_TAG.search(string):
        return None
    try:
        markup = Markup(string, tags)
        texts = [unchanged(text) for text in markup.texts]
        written = Markup(string, tags).write(texts, "")
    except (MarkupError, ModuleNotFoundError):
        return None
    given, written = SPACE.sub("", string), SPACE.sub("", written)
    missing = written.removeprefix(given)
    return (markup, missing) if markup.texts and written == given + missing and _ENDS.fullmatch(missing) else None


class Replacements(Strings):
    """A text file, of which parts are replaced."""

    def __init__(self, text: str, encoding: str) -> None:
        super().__init__()
        self._text, self._encoding = text, encoding
        self._parts: list[tuple[int, int, str]] = []

    def replace(self, start: int, end: int, dump: Callable[[str], str] = str) -> Callable[[str], None]:
        """Return a function that replaces a part of the file by a text, in the form of the file."""
        return lambda text: self._parts.append((start, end, dump(text)))

    def add_value(self, string: str, write: Callable[[str], None]) -> None:
        """Add a string that may be an identifier, which is not translated."""
        if not (string.isascii() and _IDENTIFIER.fullmatch(string)):
            self.add_string(string, write)

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        written, position = "", 0
        for start, end, text in sorted(self._parts):
            written += self._text[position:start] + text
            position = end
        return (written + self._text[position:]).encode(self._encoding)


def add_pieces(builder: TextBuilder, pieces: Sequence[tuple[str, str]]) -> None:
    """Add the parts of a text, of which the starts and ends of elements become marks."""
    ends = ends_of_tags(
        (at, tag_name(what), kind == "end") for at, (kind, what) in enumerate(pieces) if kind in ("start", "end")
    )
    last, code_end = {*ends.values()}, -1
    for at, (kind, what) in enumerate(pieces):
        if at <= code_end:
            continue
        if tag_name(what) in CODE and at in ends:
            code_end = ends[at]
            code = "".join(what for _, what in pieces[at : code_end + 1])
            builder.point((code, ""), code)
        elif kind in ("text", "escape"):
            builder.add(what)
        elif at in ends:
            builder.open((what, pieces[ends[at]][1]))
        elif at in last:
            builder.close()
        else:
            builder.point((what, ""), what if kind == "keep" else "")


def tag_name(tag: str) -> str:
    """Return the name of a tag of HTML; other marks have none."""
    name = re.match(r"</?([A-Za-z][\w-]*)", tag)
    return name[1] if name else ""


class JsonStrings(Replacements):
    """The strings in a JSON file, without the keys."""

    def __init__(self, data: bytes) -> None:
        super().__init__(*decode(data))
        try:
            json.loads(self._text)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise DocumentError(f"is not JSON, at line {line}; repair it") from None
        is_ascii = self._text.isascii() and "\\u" in self._text
        for match in _JSON_STRING.finditer(self._text):
            if match[1] is None:
                dump = partial(json.dumps, ensure_ascii=is_ascii)
                self.add_value(json.loads(match[0]), self.replace(*match.span(), dump))


class YamlStrings(Replacements):
    """The strings in a YAML file, without the keys, and with the style that each has."""

    def __init__(self, data: bytes) -> None:
        import yaml  # type: ignore[import-untyped]

        super().__init__(*decode(data))
        self._language: tuple[int, int] | None = None  # the only key of the root, if it is a language
        try:
            text = _SYMBOLS.sub(lambda symbols: symbols[0].replace(":", _COLON), self._text)
            roots = [root for root in yaml.compose_all(text, yaml.SafeLoader) if root is not None]
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            raise DocumentError(f"is not YAML, at line {mark.line + 1 if mark else 1}; repair it") from None
        if len(roots) == 1 and isinstance(roots[0], yaml.MappingNode) and len(roots[0].value) == 1:
            key, value = roots[0].value[0]
            if isinstance(value, yaml.MappingNode) and _LANGUAGE.fullmatch(str(key.value)):
                self._language = key.start_mark.index, key.end_mark.index
        for node in _scalars(roots, set()):
            if node.tag == "tag:yaml.org,2002:str":
                self._add_scalar(node)

    def _add_scalar(self, node: Any) -> None:
        start, end = node.start_mark.index, node.end_mark.index
        start += len(_ANCHOR.match(self._text[start:end])[0])  # type: ignore[index]
        source = self._text[start:end]
        dump = partial(_block, source) if node.style in ("|", ">") else partial(_scalar, node.style)
        self.add_value(node.value.replace(_COLON, ":"), self.replace(start, end, dump))

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        if self._language is not None:
            self.replace(*self._language)(language)
        return super().write(translations, language)


def _scalars(nodes: Sequence[Any], seen: set[int]) -> Iterator[Any]:
    """Yield the scalars that are values; those with several names once."""
    for node in nodes:
        if id(node) not in seen:
            seen.add(id(node))
            inner = [each[1] if isinstance(each, tuple) else each for each in node.value]
            yield from [node] if isinstance(node.value, str) else _scalars(inner, seen)


def _block(source: str, text: str) -> str:
    """Return a text as a block with the header, the indentation and the end of another."""
    header, _, body = source.partition("\n")
    end = body[len(body.rstrip()) :]
    indent = min((len(line) - len(line.lstrip(" ")) for line in body.splitlines() if line.strip()), default=2)
    lines = [f"{' ' * indent}{line}" if line else "" for line in text.rstrip("\n").split("\n")]
    between = "\n\n" if header.startswith(">") else "\n"
    return f"{header}\n{between.join(lines)}{end}"


def _scalar(style: str | None, text: str) -> str:
    """Return a text as a scalar in a style, or in quotes where the style cannot hold it."""
    import yaml

    style = '"' if "\n" in text else style
    written: str = yaml.safe_dump(
        [text], default_style=style or None, default_flow_style=True, allow_unicode=True, width=float("inf")
    )
    return written.strip()[1:-1]


class PoStrings(Strings):
    """A PO file. Messages that have a translation keep it."""

    def __init__(self, data: bytes) -> None:
        import polib

        super().__init__()
        text, _ = decode(data)
        try:
            self._file = polib.pofile(text, wrapwidth=78)
        except (OSError, ValueError) as error:
            line = re.search(r"line (\d+)", str(error))
            raise DocumentError(f"is not a PO file, at line {line[1] if line else 1}; repair it") from None
        self._entries: list[tuple[Any, list[str]]] = []
        for entry in self._file:
            if not entry.obsolete and not entry.translated():
                forms = [entry.msgid, entry.msgid_plural]
                self._entries.append((entry, forms))
                for index, form in enumerate(filter(None, forms)):
                    self.add_string(form, partial(forms.__setitem__, index))

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        from babel.messages.plurals import DEFAULT_PLURAL, PLURALS

        self.apply(translations)
        metadata, tag = self._file.metadata, language.replace("-", "_")
        if metadata.get("Language", "").replace("-", "_").split("_")[0] != tag.split("_")[0]:
            metadata.pop("Plural-Forms", None)
            metadata["Language"] = tag
        if not re.match(r"\s*nplurals\s*=\s*\d", metadata.get("Plural-Forms", "")):
            number, rule = PLURALS.get(tag) or PLURALS.get(tag.split("_")[0], DEFAULT_PLURAL)
            metadata["Plural-Forms"] = f"nplurals={number}; plural={rule};"
        metadata["Content-Type"] = "text/plain; charset=UTF-8"
        count = int(re.findall(r"\d+", metadata["Plural-Forms"])[0])
        for entry, (one, other) in self._entries:
            entry.flags = [flag for flag in entry.flags if flag != "fuzzy"]
            if entry.msgid_plural:
                entry.msgstr_plural = {index: one if index == 0 and count > 1 else other for index in range(count)}
            else:
                entry.msgstr = one
        self._file.metadata_is_fuzzy = 0
        return str(self._file).encode()
