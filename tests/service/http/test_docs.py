"""The OpenAPI document, complete and fit for generators of clients, and its page."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from sightline.service.api_errors import ERRORS
from sightline.service.http import docs
from sightline.service.http.application import Application
from sightline.service.settings import COMPATIBLE_APIS
from tests.prose import OPENING
from tests.service.conftest import Serve, Start, responses_of

pytestmark = pytest.mark.anyio

GET_PATHS = (
    *("/", "/docs", "/docs/{file}", "/openapi.json", "/page/{file}", "/metrics", "/ping", "/health"),
    *("/health/live", "/health/ready"),
    *("/v1/models", "/v1/models/{model_id}", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"),
    *("/api/ps", "/api/tags", "/api/version", "/info", "/languages", "/v2/languages", "/v2/usage"),
    *("/language/translate/v2/languages", "/v2/glossary-language-pairs"),
    *("/frontend/settings", "/download_file/{name}"),
)
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
CLOUD_PATHS = (
    *("/v2/translate", "/v2/document", "/v2/document/{document_id}", "/v2/document/{document_id}/result"),
    *("/language/translate/v2", "/language/translate/v2/detect"),
)
GLOSSARIES = (
    *(("get", "/v1/glossaries"), ("get", "/v2/glossaries/{glossary_id}/entries")),
    *((method, "/v1/glossaries/{glossary_id}") for method in ("get", "put", "delete")),
    *((method, f"/{version}/glossaries") for version in ("v2", "v3") for method in ("get", "post")),
    *((method, f"/{version}/glossaries/{{glossary_id}}") for version in ("v2", "v3") for method in ("get", "delete")),
    *(("patch", "/v3/glossaries/{glossary_id}"), ("get", "/v3/glossaries/{glossary_id}/entries")),
    *((method, "/v3/glossaries/{glossary_id}/dictionaries") for method in ("put", "delete")),
)
INVALID_400 = (
    *(*OPENAI_PATHS, *CLOUD_PATHS, "/v2/languages", "/v2/usage", "/v2/glossary-language-pairs"),
    *(path for _, path in GLOSSARIES if not path.startswith("/v1")),
)
POST_PATHS = (
    *OPENAI_PATHS,
    *CLOUD_PATHS,
    *("/detect", "/imme", "/translate/batch", "/translate_file"),
    *(f"/v1/{name}" for name in ("generate", "score", "encode", "attention", "align", "classify", "rerank")),
    *(f"/v1/{name}" for name in ("tag", "answer", "fill-mask", "tokenize", "detokenize")),
    *(f"/v2/repository/models/{{model_name}}/{verb}" for verb in ("load", "unload")),
    *(f"/api/{name}" for name in ("generate", "chat", "embed", "embeddings", "show")),
    *("/", "/generate", "/generate_stream", "/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict"),
    *("/v1/translate", "/rerank", "/translate", "/v2/rerank", "/v2/repository/index"),
)
ROUTES = {
    *(("get", path) for path in GET_PATHS),
    *(("post", path) for path in POST_PATHS),
    *GLOSSARIES,
    *(
        (method, f"/v2/models/{{model_name}}{version}{path}")
        for version in ("", "/versions/{model_version}")
        for method, path in (
            *(("get", path) for path in ("", "/ready", "/config", "/stats")),
            ("post", "/infer"),
        )
    ),
}


def test_openapi_has_every_route(openapi: Any) -> None:
    found = {(method, path) for path, operations in openapi["paths"].items() for method in operations}
    assert found == ROUTES


def test_openapi_declares_the_fields_of_requests_and_every_error_code_of_a_route(openapi: Any) -> None:
    generate = openapi["paths"]["/v1/generate"]["post"]
    assert generate["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/GenerateBody")
    assert set(generate["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert openapi["components"]["schemas"]["GenerateBody"]["additionalProperties"] is False
    for kind in ("schemas", "responses"):
        references = set(re.findall(rf"#/components/{kind}/([\w.]+)", json.dumps(openapi)))
        assert references == openapi["components"][kind].keys()
    for path, operations in openapi["paths"].items():
        invalid = {422: 400} if path in INVALID_400 else {}
        for method in operations:
            for status, response in responses_of(openapi, method, path).items():
                codes = [] if status == "200" else response["description"].split(", ")
                statuses = {ERRORS[code].status for code in codes}
                assert {invalid.get(one, one) for one in statuses} == ({int(status)} if codes else set())
                assert "X-Request-Id" in response["headers"] and ("Retry-After" in response["headers"]) == (
                    status in ("429", "503")
                )


def test_every_operation_has_the_tags_of_its_apis_and_the_schemes_of_its_key(openapi: Any) -> None:
    schemes = openapi["components"]["securitySchemes"]
    assert {(scheme["type"], scheme.get("name")) for scheme in schemes.values()} == {
        ("http", None),
        ("apiKey", "X-API-Key"),
    }
    for operations in openapi["paths"].values():
        for operation in operations.values():
            assert set(operation["tags"]) <= {"sightline", *COMPATIBLE_APIS}
            # Without the file of keys, a service asks for none.
            expected: Any = [*({name: []} for name in schemes), {}] if "401" in operation["responses"] else None
            assert operation.get("security") == expected
    assert openapi["paths"]["/v1/embeddings"]["post"]["tags"] == ["openai"]
    assert openapi["paths"]["/info"]["get"]["tags"] == ["tgi", "tei"]


def descriptions(openapi: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the name and description of every operation, parameter, header and property of a
    schema.
    """
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            yield f"{method} {path}", operation.get("summary")
            yield f"{method} {path}", operation.get("description")
            for parameter in operation["parameters"]:
                yield f"{method} {path}: {parameter['name']}", parameter.get("description")
            for response in responses_of(openapi, method, path).values():
                for name, header in response["headers"].items():
                    yield f"{method} {path}: {name}", header.get("description")
    for name, schema in openapi["components"]["schemas"].items():
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                if one.get("type") == "object":
                    for field, inner in one.get("properties", {}).items():
                        yield f"{name}.{field}", inner.get("description")
                waiting += [inner for key, inner in one.items() if key != "examples"]
            elif isinstance(one, list):
                waiting += one


def test_every_operation_parameter_header_and_field_has_a_description(openapi: Any) -> None:
    found = list(descriptions(openapi))
    assert len(found) > 1000
    assert [name for name, text in found if not text] == []
    assert [text for _, text in found if text and OPENING.match(text)] == []


def reachable(schema: Any, schemas: dict[str, Any]) -> set[str]:
    """The names of all schemas that one refers to, at any depth."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        if isinstance(one, dict) and "$ref" in one:
            name = one["$ref"].rsplit("/", 1)[1]
            if name not in found:
                found.add(name)
                waiting.append(schemas[name])
    return found


async def test_every_field_of_native_responses_is_required(start: Start) -> None:
    async with start(compatible_apis="") as running:
        openapi = (await running.client.get("/openapi.json")).json()
    schemas = openapi["components"]["schemas"]
    names: set[str] = set()
    for operations in openapi["paths"].values():
        for operation in operations.values():
            names |= reachable(operation["responses"]["200"].get("content"), schemas)
    assert {"GenerateResult", "AttentionResult", "EncodeResult", "ModelDetails", "Health"} <= names
    for name in names:
        assert schemas[name]["required"] == list(schemas[name]["properties"]), name
    # Of two kinds of tokens one has alternatives.
    assert schemas["RankedToken"]["required"] == [*schemas["OutputToken"]["required"], "alternatives"]
    for name in ("GenerateOutput", "ScoreOutput"):
        assert {"OutputToken", "RankedToken"} <= reachable(schemas[name], schemas)


def test_openapi_declares_the_headers_that_a_call_may_have(openapi: Any) -> None:
    for method, path in ROUTES:
        names = [one["name"] for one in openapi["paths"][path][method]["parameters"] if one["in"] == "header"]
        reads_body = "requestBody" in openapi["paths"][path][method]
        length = ["Inference-Header-Content-Length"] if path.endswith("/infer") else []
        assert names == ["X-Request-Id", *(["X-Request-Timeout-Ms"] if reads_body else []), *length], path


def test_operations_have_short_unique_names(openapi: Any) -> None:
    """Generators of clients make functions of them."""
    names = {operation["operationId"]: operation for path in openapi["paths"].values() for operation in path.values()}
    assert len(names) == len(ROUTES)
    for name, operation in names.items():
        assert re.fullmatch("[a-z][a-z0-9_]{3,45}", name)
        assert name.startswith(operation["tags"][0].replace("-", "_")) or operation["tags"] == ["sightline"]
    assert {"generate_text", "show_attention", "openai_chat_completions", "tei_embed"} <= names.keys()


def test_generators_of_clients_know_all_types(openapi: Any) -> None:
    """Some reject objects and lists as `const`, and values that differ in upper case only."""
    waiting: list[Any] = [openapi["components"]["schemas"]]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            assert not isinstance(one.get("const"), list | dict)
            values = [str(value).lower() for value in one.get("enum", ())]
            assert len(set(values)) == len(values)
            waiting += [inner for key, inner in one.items() if key not in ("default", "examples")]
        elif isinstance(one, list):
            waiting += one
    for operations in openapi["paths"].values():
        for operation in operations.values():
            assert all(content["schema"] for content in operation["responses"]["200"]["content"].values())


async def test_the_page_loads_its_own_files_only(start: Start) -> None:
    files = ("swagger-ui.css", "swagger-ui-bundle.js", "docs.js")
    async with start() as running:
        page = (await running.client.get("/docs")).text
        named = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert named == ["data:,", *(f"docs/{name}" for name in files), "openapi.json"]
        assert not re.search(r"<(script|style)>|\sstyle=|\son\w+=|https?://", page)
        for name in files:
            response = await running.client.get(f"/docs/{name}")
            assert response.status_code == 200
            assert "script-src 'self'; style-src 'self';" in response.headers["content-security-policy"]
        missing = await running.client.get("/docs/nothing.js")
        assert missing.status_code == 404 and all(name in missing.json()["error"]["message"] for name in files)


PAGES = ("/docs/swagger-ui.css", "/openapi.json")
CODINGS = [
    *(("gzip", "gzip"), ("GZIP", "gzip"), ("deflate, gzip;q=0.5, br", "gzip"), ("br;q=1.0,gzip; q=1", "gzip")),
    *(("", None), ("identity", None), ("br, zstd", None), ("gzip;q=0", None), ("br, gzip; q=0.00", None)),
    *(("gzipped", None), ("x;v=gzip", None)),
]


async def get(running: Any, path: str, coding: str, **headers: str) -> httpx.Response:
    response: httpx.Response = await running.client.get(path, headers={"accept-encoding": coding, **headers})
    return response


@pytest.mark.parametrize(
    ("path", "owner", "name"), [(PAGES[0], docs, "make_page"), (PAGES[1], Application, "openapi")], ids=PAGES
)
async def test_a_page_is_made_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, owner: Any, name: str
) -> None:
    num_made = 0
    make = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        nonlocal num_made
        num_made += 1
        time.sleep(0.3)  # as it takes where a machine is busy
        return make(*arguments)

    monkeypatch.setattr(owner, name, counted)
    async with start() as running:
        first = [asyncio.ensure_future(get(running, path, "")) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert (await running.client.get("/health/live")).status_code == 200
        assert not any(call.done() for call in first)  # other calls do not wait for it
        bodies = {(await call).content for call in first} | {(await get(running, path, "")).content for _ in range(3)}
        assert (len(bodies), num_made) == (1, 1)


async def test_a_page_takes_little_time_of_the_event_loop_after_the_first_call(start: Start) -> None:
    async with start() as running:
        for path in PAGES:
            await get(running, path, "")
            times = []
            for _ in range(20):
                started = time.process_time()
                await get(running, path, "gzip")
                times.append(time.process_time() - started)
            assert min(times) < 0.005, path  # compressing alone takes ten times as long


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_compressed_if_the_client_accepts_gzip(start: Start, path: str) -> None:
    async with start() as running:
        plain = await get(running, path, "")
        tags = {None: plain.headers["etag"], "gzip": (await get(running, path, "gzip")).headers["etag"]}
        assert tags[None] != tags["gzip"]
        for accepted, coding in CODINGS:
            response = await get(running, path, accepted)
            assert response.headers.get("content-encoding") == coding, accepted
            assert response.content == plain.content
            assert response.headers["etag"] == tags[coding]
            assert response.headers["vary"] == "Accept-Encoding"
            size = int(response.headers["content-length"])
            assert size < len(plain.content) / 3 if coding else size == len(plain.content)


@pytest.mark.parametrize("path", PAGES)
async def test_a_cached_page_is_not_sent_again(start: Start, path: str) -> None:
    async with start() as running:
        tag = (await get(running, path, "gzip")).headers["etag"]
        assert tag.startswith('"') and tag.endswith('"')
        for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
            response = await get(running, path, "gzip", **{"if-none-match": known})
            assert (response.status_code, response.content) == (304, b"")
            assert (response.headers["etag"], response.headers["vary"]) == (tag, "Accept-Encoding")
            assert response.headers["x-request-id"]
        for other in ('"x"', tag.strip('"'), (await get(running, path, "")).headers["etag"]):
            assert (await get(running, path, "gzip", **{"if-none-match": other})).status_code == 200


def test_on_the_wire_a_page_is_gzip_and_can_be_revalidated(serve: Serve) -> None:
    with serve() as wire:
        connection = wire.http()
        headers = {"Accept-Encoding": "gzip"}
        for path in PAGES:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            page, tag = gzip.decompress(response.read()), response.headers["ETag"]
            connection.request("GET", path, headers={**headers, "If-None-Match": tag})
            response = connection.getresponse()
            assert (response.status, response.read()) == (304, b"")
            connection.request("GET", path)
            assert connection.getresponse().read() == page  # on the same connection
        connection.close()


def test_summaries_are_whole_sentences(openapi: Any) -> None:
    for operations in openapi["paths"].values():
        for operation in operations.values():
            assert operation["description"].replace("\n", " ").startswith(operation["summary"] + ".")


def test_the_document_needs_no_docstrings() -> None:
    program = (
        "from sightline.service.app import create_app\n"
        "from sightline.service.settings import Settings\n"
        "print(create_app(Settings(), None).openapi()['paths']['/v1/models']['get']['description'])"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "List models\n"
