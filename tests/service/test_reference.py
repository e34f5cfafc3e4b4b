"""The reference pages name every endpoint, object and field."""

import re
from pathlib import Path

import pytest

from docs.generate import api_schemas, is_request
from sightline.service.api_errors import CLIENT_GONE
from sightline.service.app import create_app, endpoints_of
from sightline.service.body_fields import RequestBody, fields_of
from sightline.service.compat.openai.schemas import StreamOptions
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


def test_every_field_is_described() -> None:
    endpoints = endpoints_of(Settings())
    bodies = {one.body_type for one in [*endpoints, *(one.with_file for one in endpoints if one.with_file)]}
    for body in {StreamOptions, TextGenerationParameters, *bodies}:
        if body is not None and issubclass(body, RequestBody):
            for name in fields_of(body):
                assert re.search(f'[`"]{re.escape(name)}[`"]', API + COMPATIBLE), (body, name)


def test_the_code_of_clients_that_left_is_described() -> None:
    assert f"`{CLIENT_GONE}`" in (REFERENCE / "errors.md").read_text(encoding="utf-8")
