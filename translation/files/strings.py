"""Catalogues of strings: PO, JSON and YAML. All but the translated strings stays as it is."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.translation.files.document import DocumentError, Texts, decode, unchanged
from sightline.translation.marks import MarkedText, TranslatedText
from sightline.translation.markup import Markup, MarkupError

_HAS_TAG = re.compile(r"</[A-Za-z]|<(?:br|hr|img|wbr)\b[^>]*>")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"(?=(\s*:)?)')
_ANCHOR = re.compile(r"(?:[&!]\S*\s+)*")  # and tags
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:[-_][A-Z][A-Za-z]{1,3})?")
# Rules of gettext by language; others have a singular for 1 and a plural.
_PLURALS = {
    "ja zh ko vi th id ms lo my": "nplurals=1; plural=0;",
    "fr pt_BR hy": "nplurals=2; plural=(n > 1);",
    "ru uk be sr hr bs": "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20)"
    " ? 1 : 2);",
    "pl": "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);",
    "cs sk": "nplurals=3; plural=(n==1 ? 0 : n>=2 && n<=4 ? 1 : 2);",
    "ar": "nplurals=6; plural=(n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5);",
}


class Strings(Texts):
    """Strings that are translated one by one; those with tags as HTML."""

    def add_string(self, string: str, write: Callable[[str], None]) -> None:
        if has_letter(string) and not self.add_markup(string, write):
            self.add(MarkedText(string), lambda result: write(result.text))

    def add_markup(self, string: str, write: Callable[[str], None]) -> bool:
        """Add the texts of HTML; return False if it is none, or is damaged."""
        markup = _markup_of(string)
        if markup is None:
            return False
        results: list[TranslatedText] = []

        def writer(result: TranslatedText) -> None:
            results.append(result)
            if len(results) == len(markup.texts):
                write(markup.write(results, ""))

        for text in markup.texts:
            self.add(text, writer)
        return True


def _markup_of(string: str) -> Markup | None:
    """Return a string as HTML, if it is HTML that can be written again as it was."""
    if not _HAS_TAG.search(string):
        return None
    try:
        markup = Markup(string, "html")
        texts = [unchanged(text) for text in markup.texts]
        is_same = Markup(string, "html").write(texts, "") == string
    except (MarkupError, ModuleNotFoundError):
        return None
    return markup if is_same and markup.texts else None


class Replacements(Strings):
    """A text file, of which parts are replaced."""

    def __init__(self, text: str, encoding: str) -> None:
        super().__init__()
        self._text, self._encoding = text, encoding
        self._parts: list[tuple[int, int, str]] = []

    def replace(self, start: int, end: int) -> Callable[[str], None]:
        return lambda text: self._parts.append((start, end, text))

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        written, position = "", 0
        for start, end, text in sorted(self._parts):
            written += self._text[position:start] + text
            position = end
        return (written + self._text[position:]).encode(self._encoding)


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
                replace = self.replace(*match.span())
                self.add_string(
                    json.loads(match[0]),
                    lambda text, replace=replace: replace(json.dumps(text, ensure_ascii=is_ascii)),  # type: ignore[misc]
                )


class YamlStrings(Replacements):
    """The strings in a YAML file, without the keys, and with the style that each has."""

    def __init__(self, data: bytes) -> None:
        import yaml  # type: ignore[import-untyped]

        super().__init__(*decode(data))
        self._language: tuple[int, int] | None = None  # the only key of the root, if it is a language
        try:
            roots = [root for root in yaml.compose_all(self._text, yaml.SafeLoader) if root is not None]
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
        replace = self.replace(start, end)
        if node.style in ("|", ">"):
            header, _, body = source.partition("\n")
            last = len(body) - len(body.rstrip())
            trailing = body[len(body) - last :] if last else ""
            lines = [line for line in body.splitlines() if line.strip()]
            indent = min((len(line) - len(line.lstrip(" ")) for line in lines), default=2)
            between = "\n\n" if node.style == ">" else "\n"

            def write(text: str) -> None:
                written = [f"{' ' * indent}{line}" if line else "" for line in text.rstrip("\n").split("\n")]
                replace(f"{header}\n{between.join(written)}{trailing}")
        else:

            def write(text: str) -> None:
                replace(_scalar(text, node.style))

        self.add_string(node.value, write)

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        if self._language is not None:
            self.replace(*self._language)(language)
        return super().write(translations, language)


def _scalars(nodes: Sequence[Any], seen: set[int]) -> Iterator[Any]:
    """Yield the scalars that are values; those with several names once."""
    import yaml

    for node in nodes:
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            yield node
        elif isinstance(node, yaml.MappingNode):
            yield from _scalars([value for _, value in node.value], seen)
        else:
            yield from _scalars(node.value, seen)


def _scalar(text: str, style: str | None) -> str:
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
        self._plurals: list[tuple[Any, list[str]]] = []
        for entry in self._file:
            if entry.obsolete or (entry.translated() and "fuzzy" not in entry.flags):
                continue
            if not entry.msgid_plural:
                self.add_string(entry.msgid, lambda text, entry=entry: setattr(entry, "msgstr", text))  # type: ignore[misc]
                continue
            forms = [entry.msgid, entry.msgid_plural]
            self._plurals.append((entry, forms))
            for index, form in enumerate(list(forms)):
                self.add_string(form, lambda text, index=index, forms=forms: forms.__setitem__(index, text))  # type: ignore[misc]
        self._untranslated = [entry for entry in self._file if not entry.obsolete and not entry.translated()]

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        metadata, tag = self._file.metadata, language.replace("-", "_")
        if metadata.get("Language", "").replace("-", "_").split("_")[0] != tag.split("_")[0]:
            metadata.pop("Plural-Forms", None)
            metadata["Language"] = tag
        rule = _plural_rule(tag)
        if not re.match(r"\s*nplurals\s*=\s*\d", metadata.get("Plural-Forms", "")):
            metadata["Plural-Forms"] = rule
        metadata.setdefault("Content-Type", "text/plain; charset=UTF-8")
        metadata["Content-Type"] = re.sub("charset=.*", "charset=UTF-8", metadata["Content-Type"])
        number = re.search(r"\d+", metadata["Plural-Forms"])
        count = int(number[0]) if number else 2
        for entry, (one, other) in self._plurals:
            entry.msgstr_plural = {index: one if index == 0 and count > 1 else other for index in range(count)}
        for entry in self._untranslated:
            entry.flags = [flag for flag in entry.flags if flag != "fuzzy"]
            if not entry.msgid_plural and not entry.msgstr:
                entry.msgstr = entry.msgid  # without a letter
        self._file.metadata_is_fuzzy = 0
        return str(self._file).encode()


def _plural_rule(tag: str) -> str:
    for languages, rule in _PLURALS.items():
        if tag in languages.split() or tag.split("_")[0] in languages.split():
            return rule
    return "nplurals=2; plural=(n != 1);"
