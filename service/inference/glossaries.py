"""Glossaries that clients store: a folder with a file for each, which all processes share."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Concatenate, ParamSpec, Self, TypeVar
from uuid import uuid4

from pydantic import BaseModel, Field

from sightline.base.errors import list_of
from sightline.base.text.languages import find_language
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody
from sightline.service.inference.call import Call
from sightline.translation.glossary import MAX_CHARACTERS

P = ParamSpec("P")
T = TypeVar("T")
MAX_TERMS = 10_000  # of a glossary
MAX_GLOSSARIES = 100  # of an API key
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Term = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Terms = Annotated[Mapping[Term, Annotated[Term, Field(pattern=r"\S")]], Field(max_length=MAX_TERMS)]
Language = Annotated[str, Field(pattern=r"^[A-Za-z]{1,8}([-_][A-Za-z0-9]{1,8}){0,4}$")]
logger = logging.getLogger(__name__)


class Dictionary(RequestBody):
    """The terms of a glossary for a pair of languages."""

    source_language: Annotated[Language, Field(description="BCP 47 tag of the language of the terms.")]
    target_language: Annotated[Language, Field(description="BCP 47 tag of the language of their translations.")]
    terms: Annotated[Terms, Field(description="Translations of terms.")]

    @property
    def pair(self) -> tuple[str, str]:
        return self.source_language.casefold(), self.target_language.casefold()


class StoredGlossary(BaseModel):
    """A glossary with a dictionary for each pair of languages."""

    id: Annotated[str, Field(description="Id, for `glossary_id` of a translation.")]
    name: Annotated[str, Field(description="The id, or the name that a client of DeepL's API gave.")]
    created: Annotated[int, Field(description="Time of its creation, in seconds since 1970.")]
    dictionaries: Annotated[list[Dictionary], Field(description="Terms for each pair of languages.")]

    @classmethod
    def new(cls, glossary_id: str, name: str, dictionaries: Iterable[Dictionary]) -> Self:
        return cls(id=glossary_id, name=name, created=int(time.time()), dictionaries=[]).replacing(dictionaries)

    def replacing(self, dictionaries: Iterable[Dictionary]) -> Self:
        """Return the glossary with other dictionaries for their pairs of languages."""
        by_pair = {each.pair: each for each in (*self.dictionaries, *dictionaries)}
        return self.model_copy(update={"dictionaries": [*by_pair.values()]})

    def terms(self, source: str, target: str) -> Mapping[str, str]:
        """Return the terms for a translation. Raises `ApiError` if there are none."""
        fitting = {
            each.target_language: each.terms
            for each in self.dictionaries
            if find_language(source, [each.source_language]) is not None
        }
        language = find_language(target, fitting)
        if language is None:
            pairs = [f"{each.source_language} to {each.target_language}" for each in self.dictionaries]
            message = (
                f"The glossary has no terms for {source} to {target}, only for {list_of(pairs) or 'no languages'}."
            )
            raise ApiError("invalid_parameter", message, field="glossary_id")
        return fitting[language]


async def use_glossaries(
    call: Call, function: Callable[Concatenate[Path | None, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what a function below returns for the folder of a caller: each API key has its own."""
    folder = call.service.settings.glossaries
    return await asyncio.to_thread(function, None if folder is None else folder / call.caller, *args, **kwargs)


def read_all(folder: Path | None) -> list[StoredGlossary]:
    files = [] if folder is None else sorted(folder.glob("*.json"))
    return [glossary for glossary in map(_read, files) if glossary is not None]


def find(folder: Path | None, glossary_id: str) -> StoredGlossary:
    """Return a glossary. Raises `ApiError` if there is none."""
    glossary = _read(folder / f"{glossary_id}.json") if folder and ID.fullmatch(glossary_id) else None
    if glossary is None:
        message = "There is no glossary with this id; GET /v1/glossaries lists them."
        raise ApiError("not_found", message, field="glossary_id")
    return glossary


def put(folder: Path | None, glossary: StoredGlossary) -> StoredGlossary:
    """Write a glossary, also in place of another one, and return it. Raises `ApiError`.

    Of two changes at the same time, the last one wins.
    """
    if folder is None:
        message = "The service stores no glossaries; its operator can set SIGHTLINE_GLOSSARIES to a folder."
        raise ApiError("forbidden", message)
    if not ID.fullmatch(glossary.id):
        message = (
            "It must have 1 to 64 letters, digits, dots, hyphens or underscores, and begin with a letter or digit."
        )
        raise ApiError("invalid_parameter", message, field="glossary_id")
    number = sum(len(each.terms) for each in glossary.dictionaries)
    if not 1 <= number <= MAX_TERMS:
        raise ApiError("invalid_parameter", f"A glossary must have 1 to {MAX_TERMS} terms, got {number}.")
    path = folder / f"{glossary.id}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if len({*folder.glob("*.json")} - {path}) >= MAX_GLOSSARIES:
        message = f"There must be at most {MAX_GLOSSARIES} glossaries; delete others first."
        raise ApiError("invalid_parameter", message)
    temporary = folder / f".{uuid4()}"  # other processes read the old or the new one
    temporary.write_text(glossary.model_dump_json(exclude={"id"}), encoding="utf-8")
    temporary.replace(path)
    return glossary


def delete(folder: Path | None, glossary_id: str) -> StoredGlossary:
    """Delete a glossary, and return what it was. Raises `ApiError`."""
    glossary = find(folder, glossary_id)
    assert folder is not None, "it has a glossary"
    (folder / f"{glossary_id}.json").unlink(missing_ok=True)
    return glossary


def _read(path: Path) -> StoredGlossary | None:
    try:
        return StoredGlossary.model_validate({**json.loads(path.read_bytes()), "id": path.stem})
    except (FileNotFoundError, IsADirectoryError):
        return None
    except (TypeError, ValueError) as error:
        logger.error("%s is not a glossary: %s", path, type(error).__name__)
        return None
