"""The API describes itself: completely, with examples that work, and without the internet."""

import html
from typing import Any

import pytest

from service.errors import ERRORS
from service.parameters import Parameters
from tests.service.conftest import Start

pytestmark = pytest.mark.anyio

ROUTES = {
    ("post", "/v1/generate"),
    ("post", "/v1/score"),
    ("post", "/v1/encode"),
    ("post", "/v1/attention"),
    ("post", "/v1/classify"),
    ("post", "/v1/similar"),
    ("post", "/v1/tokenize"),
    ("post", "/v1/detokenize"),
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/embeddings"),
    ("post", "/translate"),
    ("get", "/languages"),
    ("post", "/generate"),
    ("post", "/generate_stream"),
    ("post", "/embed"),
    ("post", "/embed_all"),
    ("post", "/similarity"),
    ("post", "/predict"),
    ("post", "/tokenize"),
    ("post", "/decode"),
    ("post", "/"),
    ("get", "/info"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model_id}"),
    ("get", "/health"),
    ("get", "/health/live"),
    ("get", "/health/ready"),
    ("get", "/metrics"),
    ("get", "/openapi.json"),
    ("get", "/docs"),
    ("get", "/v2"),
    ("get", "/v2/health/live"),
    ("get", "/v2/health/ready"),
    ("get", "/v2/models/stats"),
    ("post", "/v2/repository/index"),
    ("post", "/v2/repository/models/{model_name}/load"),
    ("post", "/v2/repository/models/{model_name}/unload"),
    *(
        (method, f"/v2/models/{{model_name}}{version}{path}")
        for version in ("", "/versions/{model_version}")
        for method, path in (
            *(("get", path) for path in ("", "/ready", "/config", "/stats")),
            *(("post", path) for path in ("/infer", "/generate", "/generate_stream")),
        )
    ),
}


async def described(start: Start) -> Any:
    async with start() as running:
        return (await running.client.get("/openapi.json")).json()


async def test_openapi_has_every_route(start: Start) -> None:
    openapi = await described(start)
    found = {(method, path) for path, operations in openapi["paths"].items() for method in operations}
    assert found == ROUTES


async def test_openapi_declares_what_a_request_holds_and_every_code_that_a_route_can_answer(start: Start) -> None:
    openapi = await described(start)
    generate = openapi["paths"]["/v1/generate"]["post"]
    assert generate["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/GenerateBody")
    assert set(generate["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert openapi["components"]["schemas"]["GenerateBody"]["additionalProperties"] is False
    assert "HTTPValidationError" not in openapi["components"]["schemas"]
    for operations in openapi["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                codes = [] if status == "200" else answer["description"].split(", ")
                assert all(ERRORS[code].status == int(status) for code in codes)
                assert "X-Request-Id" in answer["headers"] and ("Retry-After" in answer["headers"]) == (status == "503")


async def test_openapi_declares_the_headers_that_a_call_may_have(start: Start) -> None:
    openapi = await described(start)
    for method, path in ROUTES:
        names = [one["name"] for one in openapi["paths"][path][method]["parameters"] if one["in"] == "header"]
        reads_body = "requestBody" in openapi["paths"][path][method]
        length = ["Inference-Header-Content-Length"] if path.endswith("/infer") else []
        assert names == ["X-Request-Id", *(["X-Request-Timeout-Ms"] if reads_body else []), *length], path


async def test_the_page_shows_every_route_and_loads_nothing(start: Start) -> None:
    async with start() as running:
        answer = await running.client.get("/docs")
        assert answer.headers["content-type"].startswith("text/html")
        for method, path in ROUTES:
            assert f"{method.upper()} {path}</h2>" in answer.text
        for word in ("<script", "http://", "https://", " src="):
            assert word not in answer.text
        for name in Parameters.model_fields:
            assert name in answer.text
        assert html.escape('"prompt": "A man is riding a bicycle."') in answer.text
        for code in set(ERRORS) - {"not_found", "method_not_allowed"}:
            assert html.escape(f'"code": "{code}"') in answer.text
