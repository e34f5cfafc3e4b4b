"""English names of languages, from the Unicode Common Locale Data Repository (CLDR)."""

from collections.abc import Iterable
from functools import cache

from babel import Locale
from babel.core import get_global


def find_language(tag: str, available: Iterable[str]) -> str | None:
    """Return the available language that fits a BCP 47 tag; None if there is none.

    Letter case, underscores for hyphens, and ISO 639-2 and 639-3 codes of languages that have a
    shorter one make no difference: "ENG" finds "en". If there is no such tag, the last subtags are
    left out, as in the lookup of RFC 4647, section 3.4: "en-GB" finds "en". Otherwise the first
    available tag with more subtags is used: "en" finds "en-Latn".
    """
    by_key: dict[str, str] = {}
    for language in available:
        by_key.setdefault(_key(language), language)
    full = key = _key(tag)
    while key not in by_key and "-" in key:
        key = key.rpartition("-")[0]
    longer = (language for other, language in by_key.items() if other.startswith(f"{full}-"))
    return by_key.get(key) or next(longer, None)


def _key(tag: str) -> str:
    language, *subtags = tag.replace("_", "-").casefold().split("-")
    return "-".join([_shortest_code(language), *subtags])


def _shortest_code(language: str) -> str:
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
    language = _shortest_code(language.lower())
    named, rest = english.languages.get(language), subtags
    for count in range(len(subtags), 0, -1):
        # CLDR's keys: a script is capitalized, a region is in capital letters.
        key = "_".join([language, *(_subtag(subtag) for subtag in subtags[:count])])
        if key in english.languages:
            named, rest = english.languages[key], subtags[count:]
            break
    if named is None:
        return tag
    details = [
        english.scripts.get(_subtag(code)) or english.territories.get(_subtag(code)) or _subtag(code) for code in rest
    ]
    return f"{named} ({', '.join(details)})" if details else str(named)


def _subtag(subtag: str) -> str:
    return subtag.title() if len(subtag) == 4 else subtag.upper()
