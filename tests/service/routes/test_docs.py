"""The API describes itself: completely, with examples that work, and without the internet."""

from typing import Any

import pytest

from service import schemas
from service.errors import ERRORS
from service.families.libretranslate import TranslateBody
from service.families.openai_schemas import CompletionBody, EmbeddingBody
from service.parameters import Parameters
from service.runtime.fake import fake_classifier_manifest
from tests.service.conftest import MakeBackend, Start, reading_examples

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
    ("get", "/v1/models"),
    ("get", "/v1/models/{model_id}"),
    ("get", "/health/live"),
    ("get", "/health/ready"),
    ("get", "/metrics"),
    ("get", "/openapi.json"),
    ("get", "/docs"),
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
                codes = [] if status in ("200", "default") else answer["description"].split(", ")
                assert all(ERRORS[code].status == int(status) for code in codes)


async def test_openapi_declares_the_headers_that_a_call_may_have(start: Start) -> None:
    openapi = await described(start)
    for method, path in ROUTES:
        names = [one["name"] for one in openapi["paths"][path][method]["parameters"] if one["in"] == "header"]
        assert names == ["X-Request-Id", *(["X-Request-Timeout-Ms"] if method == "post" else [])], path


BODIES = {
    "/v1/generate": schemas.GenerateBody,
    "/v1/score": schemas.ScoreBody,
    "/v1/encode": schemas.EncodeBody,
    "/v1/attention": schemas.AttentionBody,
    "/v1/classify": schemas.ClassifyBody,
    "/v1/similar": schemas.SimilarBody,
    "/v1/tokenize": schemas.TokenizeBody,
    "/v1/detokenize": schemas.DetokenizeBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/translate": TranslateBody,
}


async def test_the_examples_in_openapi_are_answered(start: Start, make_backend: MakeBackend) -> None:
    openapi = await described(start)
    backend = reading_examples(make_backend())
    sizes = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
    backend.manifests = (*backend.manifests, fake_classifier_manifest("judge", **sizes))
    async with start(backend, default_model="fake") as running:
        for path, body in BODIES.items():
            examples = openapi["components"]["schemas"][body.__name__]["examples"]
            assert examples
            for example in examples:
                model = {"model": "judge"} if path == "/v1/classify" else {}
                answer = await running.post(path, example | model)
                assert answer.status_code == 200, answer.text


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
