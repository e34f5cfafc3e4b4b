"""The API describes itself: completely, with examples that work, and without the internet."""

from typing import Any

import pytest

from service import schemas
from service.errors import ERRORS
from service.families import tei_schemas, tgi_schemas
from service.families.huggingface import TaskBody
from service.families.libretranslate import TranslateBody
from service.families.open_inference_schemas import GenerateTextBody, InferBody, RepositoryIndexBody
from service.families.openai_schemas import CompletionBody, EmbeddingBody
from service.parameters import Parameters
from tests.service.conftest import MakeBackend, Start, classifying, reading_examples

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
                codes = [] if status in ("200", "default") else answer["description"].split(", ")
                assert all(ERRORS[code].status == int(status) for code in codes)


async def test_openapi_declares_the_headers_that_a_call_may_have(start: Start) -> None:
    openapi = await described(start)
    for method, path in ROUTES:
        names = [one["name"] for one in openapi["paths"][path][method]["parameters"] if one["in"] == "header"]
        reads_body = "requestBody" in openapi["paths"][path][method]
        length = ["Inference-Header-Content-Length"] if path.endswith("/infer") else []
        assert names == ["X-Request-Id", *(["X-Request-Timeout-Ms"] if reads_body else []), *length], path


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
    "/generate": tgi_schemas.TextGenerationBody,
    "/generate_stream": tgi_schemas.StreamedTextGenerationBody,
    "/embed": tei_schemas.EmbedBody,
    "/embed_all": tei_schemas.EmbedAllBody,
    "/similarity": tei_schemas.SimilarityBody,
    "/predict?model=judge": tei_schemas.PredictBody,
    "/tokenize": tei_schemas.TokensBody,
    "/decode": tei_schemas.DecodeBody,
    "/": TaskBody,
    "/v2/models/fake/infer": InferBody,
    "/v2/models/fake/versions/1/generate": GenerateTextBody,
    "/v2/models/fake/generate_stream": GenerateTextBody,
    "/v2/repository/index": RepositoryIndexBody,
}


async def test_the_examples_in_openapi_are_answered(start: Start, make_backend: MakeBackend) -> None:
    openapi = await described(start)
    backend = classifying(reading_examples(make_backend()))
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
