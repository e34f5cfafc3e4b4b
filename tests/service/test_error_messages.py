"""Mistakes over HTTP, with the whole error of each: many clients show only the message."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from sightline.base.bundle import SentenceEmbedding
from sightline.service.api_errors import ERRORS
from tests.service.conftest import (
    FakeBackend,
    MakeBackend,
    Running,
    Start,
    causal_backend,
    chat_backend,
    classifying,
    multilingual_backend,
    with_languages,
)
from tests.support.fake_runner import NLI_LABELS, fake_masked_manifest

pytestmark = pytest.mark.anyio

GENERATE = "/v1/generate"
NO_JSON = "The Content-Type must be application/json, in UTF-8."
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


class Loader(yaml.CSafeLoader):  # type: ignore[misc]
    """Reads `!times [x, 3]` as three times the string or the list x."""


def times(loader: Loader, node: Any) -> Any:
    unit, count = loader.construct_sequence(node, deep=True)
    return unit * count


Loader.add_constructor("!times", times)
MISTAKES = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), Loader)


def backend_of(service: str, make_backend: MakeBackend) -> tuple[FakeBackend, dict[str, Any]]:
    """Return a backend and its settings by the name of the service in the table."""
    backend = make_backend()
    match service:
        case "causal":
            return causal_backend(backend.tokenizer), {}
        case "chat":
            return chat_backend(backend.tokenizer), {}
        case "translating":
            return with_languages(make_backend("a", "plain"), a="en-de"), {"max_rows": 4}
        case "multilingual":
            return multilingual_backend(make_backend), {"default_model": "many"}
        case "undecided":
            return classifying(chat_backend(backend.tokenizer)), {"default_model": ""}
        case "partial":
            backend = classifying(make_backend("blind", "crossed", "encoder", "trained"))
            embedding = SentenceEmbedding(pooling="mean", normalize=True, prompts={"query": "a ", "passage": "x "})
            changes: dict[str, dict[str, Any]] = {
                "blind": {"tasks": ("generate",), "attention": ()},
                "crossed": {"tasks": ("attention",), "attention": (backend.manifests[1].attention_of("cross"),)},
                "encoder": {"tasks": ("encode",)},
                "trained": {"tasks": ("encode",), "embedding": embedding},
                "judge": {"tasks": ("encode", "classify"), "attention": ()},
            }
            backend.manifests = tuple(
                manifest.model_copy(update=changes[manifest.name]) for manifest in backend.manifests
            )
        case "several":
            classifying(backend)
            classifying(backend, "reader", "span", ("start", "end"))
            classifying(backend, "ranker", "score", ["LABEL_0"])
            classifying(backend, "tagger", "tokens", ENTITIES)
            classifying(backend, "nli", labels=NLI_LABELS)
            sizes: dict[str, Any] = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
            backend.manifests += (
                fake_masked_manifest("masked", mask_id=1, **sizes),
                fake_masked_manifest("maskless", mask_id=None, **sizes),
            )
            return backend, {"default_model": "fake,judge,reader,ranker,tagger,masked", "max_inputs": 6}
    return backend, {}


async def error_of(running: Running, path: str, body: Any, media_type: str) -> list[Any]:
    """Return the status of an error and what its body tells, as the table has it."""
    if media_type == "multipart/form-data":
        response = await running.client.post(path, data=body, files={"file": ("a.txt", b"x")})
    else:
        content = body.encode("latin-1") if isinstance(body, str) else json.dumps(body).encode()
        response = await running.client.post(path, content=content, headers={"content-type": media_type})
    answer = response.json()
    error = answer.pop("error", None) or answer.pop("message")
    if isinstance(error, dict) and error.keys() == {"code", "message"}:  # of Google
        error = error["message"]
    if isinstance(error, str):
        assert answer.keys() <= {"error_type"}
        return [response.status_code, *answer.values(), error]
    assert not answer and error.keys() == {"code", "type", "message", "param", "request_id"}
    assert error["type"] == ERRORS[error["code"]].type
    assert error["request_id"] == response.headers["x-request-id"]
    return [response.status_code, error["code"], error["param"], error["message"]]


@pytest.mark.parametrize("service", MISTAKES)
async def test_a_mistake_is_explained_and_counted_before_a_model_runs(
    start: Start, make_backend: MakeBackend, service: str
) -> None:
    backend, settings = backend_of(service, make_backend)
    messages: list[str] = []
    async with start(backend, **settings) as running:
        for section in MISTAKES[service]:
            bodies = [section["with"] | body if "with" in section else body for body, *_ in section["mistakes"]]
            expected = [error for _, *error in section["mistakes"]]
            media_type = section.get("type", "application/json")
            for path in section["paths"]:
                errors = [await error_of(running, path, body, media_type) for body in bodies]
                assert errors == expected, path
                messages += [error[-1] for error in expected]
        metrics = (await running.client.get("/metrics")).text
    failures = [line for line in metrics.splitlines() if line.startswith("sightline_request_failure_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in failures) == len(messages)
    assert not any(one.num_encodes or one.num_prefills or one.num_steps for one in backend.runners)


async def test_the_documentation_lists_requests_of_clients_that_get_an_error(
    start: Start, make_backend: MakeBackend
) -> None:
    """Each code span of the second column has fields of a request; the error names one of them."""
    page = Path("docs/reference/compatible-apis.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`/.*) \| (.*) \| (\d{3}) \|.*\|$", page, re.MULTILINE)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    dialogue, ranking = {"messages": [{"role": "user", "content": "x"}]}, {"query": "x", "documents": ["x"]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": dialogue,
        "/v1/responses": {"input": "x"},
        "/v1/completions": {"prompt": "x"},
        "/v1/embeddings": {"input": "x"},
        "/v2/models/fake/infer": {"inputs": [tensor]},
        "/translate": {"q": "x", "source": "en", "target": "de"},
        "/v2/translate": {"text": "x", "target_lang": "de"},
        "/v2/document": {"target_lang": "de"},
        "/language/translate/v2": {"q": "x", "target": "de"},
        "/api/chat": {"model": "fake", **dialogue},
        "/api/generate": {"model": "fake", "prompt": "x"},
        "/api/show": {"model": "fake"},
        "/v1/rerank": ranking,
        "/v2/rerank": ranking,
    }
    backend = classifying(chat_backend(make_backend().tokenizer), "tagger", "tokens", ENTITIES)
    async with start(backend, default_model="fake,tagger") as running:
        schemas = (await running.client.get("/openapi.json")).json()["components"]["schemas"].values()
        for routes, requests, status in rows:
            for route in re.findall("`(.+?)`", routes.format(model_name="fake")):
                for fields in re.findall("`(.+?)`", requests) or [""]:
                    body = bodies.get(route, {"inputs": "x"}) | json.loads(f"{{{fields}}}")
                    media_type = "multipart/form-data" if route == "/v2/document" else "application/json"
                    error = await error_of(running, route, body, media_type)
                    field = re.findall(r"\w+", error[-1].split()[0])[-1]
                    assert error[0] == int(status) and (f'"{field}"' in fields or not fields), (route, fields, error)
    listed = "".join(requests for _, requests, _ in rows)
    for schema in schemas:
        for name, field in schema.get("properties", {}).items():
            assert "Accepted for compatibility; only" not in json.dumps(field) or f'"{name}"' in listed, name


@pytest.mark.parametrize(
    ("method", "path", "allowed", "message"),
    [
        ("GET", GENERATE, "POST", "/v1/generate accepts only POST."),
        ("PUT", "/v1/models/fake", "GET", "/v1/models/{model_id} accepts only GET."),
        ("POST", "/v1/models", "GET", "/v1/models accepts only GET."),
    ],
)
async def test_a_wrong_method_is_explained(
    running: Running, method: str, path: str, allowed: str, message: str
) -> None:
    response = await running.client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json()["error"]["message"] == message


async def test_a_body_that_is_too_large_is_explained_with_the_setting(start: Start) -> None:
    async with start(max_body_bytes=100) as running:
        response = await running.post(GENERATE, {"inputs": "x" * 100})
        message = "The body must be at most 100 bytes, got 113 (SIGHTLINE_MAX_BODY_BYTES)."
        assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content-type": "text/plain"}, 415, NO_JSON),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, NO_JSON),  # that of curl -d
        ({"content-type": "application/json; charset=utf-16"}, 415, NO_JSON),
        ({"content-type": ""}, 415, NO_JSON),
        ({"content-encoding": "br"}, 415, "Content-Encoding must be gzip, deflate or identity, and only one of them."),
        ({"content-encoding": "gzip"}, 400, "The body is not valid gzip; compress it, or send no Content-Encoding."),
        ({"x-request-timeout-ms": "1.5"}, 422, "X-Request-Timeout-Ms must be a whole number of milliseconds above 0."),
    ],
)
async def test_a_wrong_header_is_explained(
    running: Running, headers: dict[str, str], status: int, message: str
) -> None:
    response = await running.post(GENERATE, {"inputs": "x"}, **headers)
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
