"""Routes of DeepL's API; languages select the models."""

import io
import secrets
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from sightline.base.text.languages import language_name
from sightline.service.api.endpoint import (
    BINARY,
    ENGINE_ERRORS,
    JSON_OR_FORM,
    WITH_FILE,
    Call,
    Endpoint,
    ErrorFormat,
    LanguageInQuery,
    Raw,
    TypeInQuery,
    attachment,
    described,
    to_json,
)
from sightline.service.api.glossaries import GlossaryId, delete_glossary
from sightline.service.api.types import ModelName
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import AnyTexts, File, RequestBody, construct, must_equal
from sightline.service.compat.common import Ignored
from sightline.service.inference import glossaries
from sightline.service.inference.document_store import State
from sightline.service.inference.documents import read_file, sample_of, translate_document, translate_later
from sightline.service.inference.glossaries import Dictionary, Language, StoredGlossary, use_glossaries
from sightline.service.inference.language_choice import language_pairs
from sightline.service.inference.routing import AUTO, routes_of, translate_by_languages
from sightline.service.inference.translation import NO_TERMS
from sightline.translation.glossary import read_terms
from sightline.translation.markup import MarkupKind, Tags

Info = dict[str, Any]
TSV = "text/tab-separated-values"
OPTIONAL_BODY = replace(JSON_OR_FORM, media_types=(*JSON_OR_FORM.media_types, ""), is_optional=True)
NO_LIMIT = 10**12  # characters; clients expect a limit
TagNames = Annotated[
    str | list[str] | None, Field(description="Names of elements, in a list or with commas between them.")
]
DocumentId = Annotated[str, described("Id of the document.")]


class DeeplBody(RequestBody):
    target_language: str = Field(alias="target_lang", description="Language of the translation, such as DE or PT-BR.")
    source_language: str | None = Field(
        default=None, alias="source_lang", description="Language of the texts; detected if absent."
    )
    formality: Annotated[
        Literal["default", "prefer_more", "prefer_less"] | None, Field(description="Accepted; models have one form.")
    ] = None
    auth_key: Annotated[str | None, Field(description="API key, if the service needs one.")] = None
    glossary_id: Annotated[str | None, Field(description="Id of a glossary for the languages.")] = None


class DeeplTranslateBody(DeeplBody):
    inputs: Annotated[AnyTexts, Field(alias="text", description="Text to translate, or a list of texts.")]
    markup: MarkupKind | None = Field(
        default=None, alias="tag_handling", description="Tags are set where the words inside of them went."
    )
    split_sentences: Ignored[str | bool] = None
    preserve_formatting: Ignored[str | bool] = None
    context: Ignored[str] = None
    model_type: Ignored[str] = None
    outline_detection: Annotated[
        str | bool | None,
        Field(description="If false, elements of XML end a sentence only if `splitting_tags` has them."),
    ] = None
    tag_handling_version: Ignored[str] = None
    show_billed_characters: Ignored[str | bool] = None
    glossary_ids: Annotated[Any, must_equal(instead="name one in glossary_id")] = None
    style_id: Annotated[Any, must_equal()] = None
    custom_instructions: Annotated[Any, must_equal()] = None
    splitting_tags: TagNames = None
    non_splitting_tags: TagNames = None
    ignore_tags: TagNames = None

    EXAMPLES = (
        {"text": ["A dog runs."], "target_lang": "DE"},
        {"text": ["A <b>dog</b> runs."], "source_lang": "EN", "target_lang": "DE", "tag_handling": "html"},
    )


class DeeplDocumentBody(DeeplBody):
    file: File
    model: ModelName = None
    filename: Ignored[str] = None
    output_format: Annotated[Any, must_equal(instead="a translation has the format of its document")] = None

    EXAMPLES = ({"file": "A `dog` runs.", "target_lang": "DE", "source_lang": "EN"},)


class DeeplHandle(TypedDict):
    """A document that is being translated."""

    document_id: Annotated[str, Field(description="Id of the document.")]
    document_key: Annotated[str, Field(description="Key that its status and its download need.")]


class DeeplKeyBody(RequestBody):
    document_key: Annotated[str, Field(description="Key of the document.")]
    auth_key: Annotated[str | None, Field(description="API key, if the service needs one.")] = None

    EXAMPLES = ({"document_key": "0123456789abcdef"},)


class DeeplStatus(TypedDict):
    document_id: Annotated[str, Field(description="Id of the document.")]
    status: Annotated[State, Field(description="State of the translation.")]
    seconds_remaining: Annotated[int | None, Field(description="Estimate, once a part is translated.")]
    error_message: Annotated[str | None, Field(description="Explanation of an error.")]


class DeeplTranslation(TypedDict):
    detected_source_language: Annotated[str, Field(description="Language of the text, given or detected.")]
    text: Annotated[str, Field(description="The translation.")]
    billed_characters: Annotated[int, Field(description="Characters of the text.")]


class DeeplTranslations(TypedDict):
    """The translations, in order."""

    translations: Annotated[list[DeeplTranslation], Field(description="The translation of each text.")]


class DeeplLanguage(TypedDict):
    language: Annotated[str, Field(description="Code of the language.")]
    name: Annotated[str, Field(description="English name.")]
    supports_formality: Annotated[bool, Field(description="Always false.")]


class DeeplLanguagesBody(RequestBody):
    """The body of a GET request, as the package `deepl` sends it."""

    type: Annotated[str | None, Field(description="`source` (default) or `target`.")] = None

    EXAMPLES = ({"type": "target"},)


class DeeplDictionary(RequestBody):
    source_lang: Annotated[Language, Field(description="Language of the terms.")]
    target_lang: Annotated[Language, Field(description="Language of their translations.")]
    entries: str = Field(description="A term and its translation in each line.")
    entries_format: Literal["tsv", "csv"] = Field(default="tsv", description="A tab is between them, or a comma.")

    EXAMPLES = ({"source_lang": "EN", "target_lang": "DE", "entries": "dog\tRüde"},)


class DeeplGlossaryBody(DeeplDictionary):
    name: str = Field(description="Name of the glossary.")

    EXAMPLES = ({"name": "animals", **DeeplDictionary.EXAMPLES[0]},)


class DeeplMultilingualBody(RequestBody):
    name: str | None = Field(default=None, description="Name of the glossary.")
    dictionaries: list[DeeplDictionary] = Field(default=[], description="Terms for pairs of languages.")

    EXAMPLES = ({"name": "animals", "dictionaries": [*DeeplDictionary.EXAMPLES]},)


class DeeplError(BaseModel):
    message: str = Field(description="Explanation, after the path of the value at fault.")


ERRORS = ErrorFormat(
    lambda error, message, param, request_id: to_json({"message": complete_message(message, param)}),
    DeeplError,
    invalid_status=400,
)


async def translate(call: Call, body: DeeplTranslateBody) -> DeeplTranslations:
    """Translate texts, HTML or XML, sentence by sentence."""
    source, tags = body.source_language or AUTO, None
    if body.markup is not None:
        has_outline = body.outline_detection not in (False, "0", "false")
        kept, blocks, inline = map(_names, (body.ignore_tags, body.splitting_tags, body.non_splitting_tags))
        tags = Tags(body.markup, kept, blocks, inline, has_outline)
    results = await translate_by_languages(
        call, body.inputs, source, body.target_language, tags, glossary_id=body.glossary_id
    )
    return {
        "translations": [
            {
                "detected_source_language": result[0].route[0].source.upper(),
                "text": result[0].text,
                "billed_characters": len(text),
            }
            for text, result in zip(body.inputs.texts, results, strict=True)
        ]
    }


def _names(tags: str | list[str] | None) -> frozenset[str]:
    listed = [tags] if isinstance(tags, str) else tags or ()
    return frozenset(name.strip() for each in listed for name in each.split(",")) - {""}


async def upload_document(call: Call, body: DeeplDocumentBody) -> DeeplHandle:
    """Begin to translate a document."""
    stored = await use_glossaries(call, glossaries.find, body.glossary_id) if body.glossary_id else None
    document = await read_file(call, body.file)
    requested = {"source_language": body.source_language or AUTO, "target_language": body.target_language}
    [(_, route)] = await routes_of(call, [sample_of(document)], requested, body.model)
    terms = stored.terms(route[0].source, route[-1].target) if stored else NO_TERMS
    translate = partial(translate_document, document=document, requested=requested, name=body.model, glossary=terms)
    document_id, document_key = f"{secrets.token_hex(16)}.{body.file.extension}", secrets.token_hex(32)
    translate_later(call, f"{document_id}:{document_key}", translate)
    return {"document_id": document_id, "document_key": document_key}


async def document_status(call: Call, document_id: DocumentId, body: DeeplKeyBody) -> DeeplStatus:
    """Return the state of a translation."""
    state, data = call.service.documents.get(f"{document_id}:{body.document_key}")
    return {
        "document_id": document_id,
        "status": state,
        "seconds_remaining": int(data) if state == "translating" and data else None,
        "error_message": data.decode() if state == "error" else None,
    }


async def download_document(call: Call, document_id: DocumentId, body: DeeplKeyBody) -> Raw:
    """Return a translated document, and delete it."""
    key = f"{document_id}:{body.document_key}"
    state, data = call.service.documents.get(key)
    if state == "translating":
        raise ApiError("loading", "The document is still being translated. Retry later.")
    if state == "error":
        raise ApiError("invalid_parameter", f"The document could not be translated. {data.decode()}")
    call.service.documents.remove(key)
    return attachment(data, document_id)


async def languages(call: Call, body: DeeplLanguagesBody, type: TypeInQuery = None) -> list[DeeplLanguage]:  # noqa: A002
    """List the source languages, or the target languages."""
    pairs = language_pairs(call)
    codes = {code for targets in pairs.values() for code in targets} if "target" in (type, body.type) else {*pairs}
    return [
        {"language": code.upper(), "name": language_name(code), "supports_formality": False} for code in sorted(codes)
    ]


async def usage(call: Call) -> Info:
    """Return a usage of nothing, for clients that ask before they translate; keys have quotas."""
    return {"character_count": 0, "character_limit": NO_LIMIT}


_post = partial(Endpoint, "POST", body_format=JSON_OR_FORM, key_field="auth_key")


async def glossary_languages(call: Call) -> Info:
    """List the pairs of languages."""
    pairs = language_pairs(call)
    return {"supported_languages": [{"source_lang": one, "target_lang": each} for one in pairs for each in pairs[one]]}


async def create_glossary(call: Call, body: DeeplGlossaryBody) -> Info:
    """Store a glossary for a pair of languages."""
    return await create_multilingual_glossary(call, DeeplMultilingualBody(name=body.name, dictionaries=[body]))


async def create_multilingual_glossary(call: Call, body: DeeplMultilingualBody) -> Info:
    """Store a glossary."""
    glossary = StoredGlossary.new(str(uuid4()), body.name or "", map(_read, body.dictionaries))
    return _info(await use_glossaries(call, glossaries.put, glossary))


async def list_glossaries(call: Call) -> Info:
    """List the glossaries."""
    return {"glossaries": list(map(_info, await use_glossaries(call, glossaries.read_all)))}


async def get_glossary(call: Call, glossary_id: GlossaryId) -> Info:
    """Describe a glossary."""
    return _info(await use_glossaries(call, glossaries.find, glossary_id))


async def get_glossary_entries(call: Call, glossary_id: GlossaryId) -> Raw:
    """Return the terms of a glossary, for its first pair of languages, as a table."""
    glossary = await use_glossaries(call, glossaries.find, glossary_id)
    return Raw("".join(map(_table, glossary.dictionaries[:1])).encode(), TSV)


async def get_dictionary(
    call: Call, glossary_id: GlossaryId, source_lang: LanguageInQuery = None, target_lang: LanguageInQuery = None
) -> Info:
    """Return the terms of a glossary for a pair of languages."""
    found = _find(await use_glossaries(call, glossaries.find, glossary_id), source_lang, target_lang)
    return {"dictionaries": [{**_count(found), "entries": _table(found), "entries_format": "tsv"}]}


async def change_glossary(call: Call, glossary_id: GlossaryId, body: DeeplMultilingualBody) -> Info:
    """Change the name of a glossary, and add or replace terms."""
    glossary = await use_glossaries(call, glossaries.find, glossary_id)
    known = {each.pair: each.terms for each in glossary.dictionaries}
    more = [
        each.model_copy(update={"terms": {**known.get(each.pair, {}), **each.terms}})
        for each in map(_read, body.dictionaries)
    ]
    changed = glossary.replacing(more).model_copy(update={"name": body.name or glossary.name})
    return _info(await use_glossaries(call, glossaries.put, changed))


async def replace_dictionary(call: Call, glossary_id: GlossaryId, body: DeeplDictionary) -> Info:
    """Replace the terms of a glossary for a pair of languages."""
    glossary, dictionary = await use_glossaries(call, glossaries.find, glossary_id), _read(body)
    await use_glossaries(call, glossaries.put, glossary.replacing([dictionary]))
    return _count(dictionary)


async def delete_dictionary(
    call: Call, glossary_id: GlossaryId, source_lang: LanguageInQuery = None, target_lang: LanguageInQuery = None
) -> Info:
    """Delete the terms of a glossary for a pair of languages; others must remain."""
    glossary = await use_glossaries(call, glossaries.find, glossary_id)
    found = _find(glossary, source_lang, target_lang)
    changed = glossary.model_copy(update={"dictionaries": [each for each in glossary.dictionaries if each != found]})
    return _info(await use_glossaries(call, glossaries.put, changed))


def _read(body: DeeplDictionary) -> Dictionary:
    try:
        terms = read_terms(io.StringIO(body.entries), "\t" if body.entries_format == "tsv" else ",")
    except ValueError as error:
        raise ApiError("invalid_parameter", f"It must be a table of terms: {error}.", path="entries") from None
    source, target = body.source_lang.lower(), body.target_lang.lower()
    return construct(Dictionary, source_language=source, target_language=target, terms=terms)


def _find(glossary: StoredGlossary, source: str | None, target: str | None) -> Dictionary:
    for dictionary in glossary.dictionaries:
        if dictionary.pair == ((source or "").casefold(), (target or "").casefold()):
            return dictionary
    raise ApiError("not_found", "The glossary has no terms for these languages, source_lang and target_lang.")


def _table(dictionary: Dictionary) -> str:
    return "\n".join(f"{term}\t{translation}" for term, translation in dictionary.terms.items())


def _count(dictionary: Dictionary) -> Info:
    pair = {"source_lang": dictionary.source_language, "target_lang": dictionary.target_language}
    return {**pair, "entry_count": len(dictionary.terms)}


def _info(glossary: StoredGlossary) -> Info:
    """Return what version 3 tells of a glossary, and version 2 of its first pair of languages."""
    created = datetime.fromtimestamp(glossary.created, UTC).isoformat(timespec="microseconds")
    counts = list(map(_count, glossary.dictionaries))
    info = {"glossary_id": glossary.id, "name": glossary.name, "creation_time": created, "ready": True}
    return {**info, "dictionaries": counts, **(counts[0] if counts else {})}


def _glossary_endpoints(path: str, version: str) -> Iterable[Endpoint]:
    """Return the endpoints that both versions have."""
    yield Endpoint("GET", path, list_glossaries, Info, name=f"list_glossaries{version}")
    of_id = partial(Endpoint, path=f"{path}/{{glossary_id}}", response=Info, errors=("not_found",))
    yield of_id("GET", handler=get_glossary, name=f"get_glossary{version}")
    yield of_id("DELETE", handler=delete_glossary, name=f"delete_glossary{version}")


V2, V3 = "/v2/glossaries", "/v3/glossaries"
_of_id = partial(Endpoint, errors=("not_found",))
ENDPOINTS = (
    _post(
        "/v2/translate",
        translate,
        DeeplTranslations,
        errors=(*ENGINE_ERRORS, "not_found", "response_too_large", "unsupported_parameter"),
    ),
    _post(
        "/v2/document",
        upload_document,
        DeeplHandle,
        errors=("model_not_found", "not_found", "unsupported_parameter", "unsupported_task"),
        body_format=WITH_FILE,
    ),
    _post("/v2/document/{document_id}", document_status, DeeplStatus, errors=("not_found",)),
    _post("/v2/document/{document_id}/result", download_document, errors=("not_found",), media_types=(BINARY,)),
    Endpoint("GET", "/v2/languages", languages, list[DeeplLanguage], body_format=OPTIONAL_BODY),
    Endpoint("GET", "/v2/usage", usage, Info),
    Endpoint("GET", "/v2/glossary-language-pairs", glossary_languages, Info, errors=("loading",)),
    Endpoint("POST", V2, create_glossary, Info, errors=("forbidden",)),
    Endpoint("POST", V3, create_multilingual_glossary, Info, errors=("forbidden",)),
    *_glossary_endpoints(V2, ""),
    *_glossary_endpoints(V3, "_v3"),
    _of_id("GET", f"{V2}/{{glossary_id}}/entries", get_glossary_entries, media_types=(TSV,)),
    _of_id("GET", f"{V3}/{{glossary_id}}/entries", get_dictionary, Info),
    _of_id("PATCH", f"{V3}/{{glossary_id}}", change_glossary, Info),
    _of_id("PUT", f"{V3}/{{glossary_id}}/dictionaries", replace_dictionary, Info),
    _of_id("DELETE", f"{V3}/{{glossary_id}}/dictionaries", delete_dictionary, Info),
)
