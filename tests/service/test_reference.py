"""The reference pages name every endpoint, object and field."""

import re
from pathlib import Path

import pytest

from docs.generate import api_schemas, is_request
from sightline.service.api_errors import CLIENT_GONE
from sightline.service.app import create_app
from sightline.service.body_fields import RequestBody, fields_of
from sightline.service.compat.openai.chat_schemas import ChatBody
from sightline.service.compat.openai.responses_schemas import ResponsesBody
from sightline.service.compat.openai.schemas import CompletionBody, EmbeddingBody, StreamOptions
from sightline.service.compat.tei import EmbedBody, PredictBody, SimilarityBody
from sightline.service.compat.tgi import TextGenerationParameters
from sightline.service.settings import Settings

REFERENCE = Path("docs/reference")
API = (REFERENCE / "api.md").read_text(encoding="utf-8")
COMPATIBLE = (REFERENCE / "compatible-apis.md").read_text(encoding="utf-8")


def test_every_endpoint_is_described() -> None:
    app = create_app(Settings(), lambda *_: pytest.fail("nothing is loaded"))
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}`" in API + COMPATIBLE


def test_every_request_of_the_native_api_has_a_table_of_its_fields() -> None:
    tables = set(re.findall(r"<!-- generated: (\w+) -->", API))
    assert {name for name in api_schemas() if is_request(name)} <= tables
    assert "results" in tables


@pytest.mark.parametrize(
    "body",
    [
        *(CompletionBody, StreamOptions, EmbeddingBody, ChatBody, ResponsesBody, TextGenerationParameters),
        *(EmbedBody, SimilarityBody, PredictBody),
    ],
)
def test_every_field_of_a_compatible_api_is_described(body: type[RequestBody]) -> None:
    for name in fields_of(body):
        assert f"`{name}`" in COMPATIBLE, name


def test_the_code_of_clients_that_left_is_described() -> None:
    assert f"`{CLIENT_GONE}`" in (REFERENCE / "errors.md").read_text(encoding="utf-8")
