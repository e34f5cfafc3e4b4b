"""Endpoints of stored glossaries."""

from typing import Annotated, Any

from pydantic import Field

from sightline.service.api.endpoint import Call, Endpoint, described
from sightline.service.body_fields import RequestBody
from sightline.service.inference import glossaries
from sightline.service.inference.glossaries import Dictionary, StoredGlossary, use_glossaries

GlossaryId = Annotated[str, described("Id of the glossary.")]


class GlossaryBody(RequestBody):
    dictionaries: Annotated[list[Dictionary], Field(description="Terms for pairs of languages.")]

    EXAMPLES = ({"dictionaries": [{"source_language": "en", "target_language": "de", "terms": {"dog": "Rüde"}}]},)


async def list_glossaries(call: Call) -> dict[str, list[list[str]]]:
    """List the pairs of languages of each glossary, by id."""
    found = await use_glossaries(call, glossaries.read_all)
    return {
        glossary.id: [[each.source_language, each.target_language] for each in glossary.dictionaries]
        for glossary in found
    }


async def put_glossary(call: Call, glossary_id: GlossaryId, body: GlossaryBody) -> dict[str, Any]:
    """Store a glossary, also in place of another one with this id."""
    glossary = StoredGlossary.new(glossary_id, glossary_id, body.dictionaries)
    return (await use_glossaries(call, glossaries.put, glossary)).model_dump()


async def show_glossary(call: Call, glossary_id: GlossaryId) -> dict[str, Any]:
    """Return a glossary with its terms."""
    return (await use_glossaries(call, glossaries.find, glossary_id)).model_dump()


async def delete_glossary(call: Call, glossary_id: GlossaryId) -> dict[str, Any]:
    """Delete a glossary, and return what it was."""
    return (await use_glossaries(call, glossaries.delete, glossary_id)).model_dump()


PATH = "/v1/glossaries/{glossary_id}"
ENDPOINTS = (
    Endpoint("GET", "/v1/glossaries", list_glossaries, dict[str, list[list[str]]]),
    Endpoint("PUT", PATH, put_glossary, StoredGlossary, errors=("forbidden",)),
    Endpoint("GET", PATH, show_glossary, StoredGlossary, errors=("not_found",)),
    Endpoint("DELETE", PATH, delete_glossary, StoredGlossary, errors=("not_found",)),
)
