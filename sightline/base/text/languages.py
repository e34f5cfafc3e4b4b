"""Tags and English names of languages, from the Unicode Common Locale Data Repository (CLDR)."""

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import takewhile
from operator import eq

from babel import Locale
from babel.core import get_global


def find_language(tag: str, available: Iterable[str]) -> str | None:
    """Return the available language that fits a BCP 47 tag best; None if there is none.

    Letter case, underscores for hyphens, codes of three letters for languages that have one of two,
    and "nb" for "no" make no difference. The script must be the same ("zh-TW" finds "zh-Hant", but
    "zh-Hans" does not), unless the available tag names none; other subtags need not be.
    """
    return _find(tag, tuple(available))


@lru_cache(maxsize=4096)  # a search for a route asks for each language of each model
def _find(tag: str, available: tuple[str, ...]) -> str | None:
    language, script, subtags = _parts(tag)
    fitting: dict[str, tuple[int, int, int]] = {}
    for other in available:
        other_language, other_script, other_subtags = _parts(other)
        if language == other_language and (script == other_script or not other_subtags):
            common = sum(1 for _ in takewhile(bool, map(eq, subtags, other_subtags)))
            fitting.setdefault(other, (script == other_script, common, -len(other_subtags)))
    return max(fitting, key=fitting.__getitem__, default=None)


@lru_cache(maxsize=4096)
def _parts(tag: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the language, the script, which may follow from the region, and the other subtags."""
    language, *subtags = tag.replace("_", "-").casefold().split("-")
    if language == "x":
        return tag.casefold(), "", ()  # a private tag
    language = shortest_code(language)
    named = [_subtag(subtag) for subtag in subtags]
    likely = get_global("likely_subtags")  # such as "zh_TW": "zh_Hant_TW"
    full = [likely[key] for key in (*(f"{language}_{subtag}" for subtag in named), language) if key in likely]
    scripts = [subtag for subtag in named if len(subtag) == 4 and subtag.isalpha()]
    script = [*scripts, *(each.split("_")[1] for each in full), ""][0]
    return "no" if language == "nb" else language, script, tuple(subtags)


def shortest_code(language: str) -> str:
    """Return the code of a language in CLDR: "en" for "eng"."""
    alias = get_global("language_aliases").get(language, language)
    return alias if "_" not in alias else language


@cache
def language_name(tag: str) -> str:
    """Return the English name of a BCP 47 tag, or the tag if its language is not known.

    "pt-BR" is "Brazilian Portuguese", and "ace-Arab" is "Acehnese (Arabic)".
    """
    english = Locale("en")
    language, *subtags = tag.replace("_", "-").split("-")
    language = shortest_code(language.lower())
    # CLDR's keys: a script is capitalized, a region is in capital letters.
    codes = [_subtag(subtag) for subtag in subtags]
    keys = ("_".join([language, *codes[:count]]) for count in range(len(codes), -1, -1))
    key = next((key for key in keys if key in english.languages), None)
    if key is None:
        return tag
    rest = codes[key.count("_") :]
    details = [english.scripts.get(code) or english.territories.get(code) or code for code in rest]
    return f"{english.languages[key]} ({', '.join(details)})" if details else english.languages[key]


def _subtag(subtag: str) -> str:
    return subtag.title() if len(subtag) == 4 else subtag.upper()
