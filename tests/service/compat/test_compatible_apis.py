"""Every compatible API can be disabled, and all errors on its routes have its own shape."""

import asyncio
import json
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from pydantic import BaseModel

from sightline.base.errors import UsageError
from sightline.service import compat
from sightline.service.api.endpoint import NDJSON, Call, Endpoint, ErrorFormat, EventEncoder, EventStream, line_of
from sightline.service.api_errors import ERRORS, ApiError, ErrorCode
from sightline.service.inference.generate import GenerateResult
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.streaming import StreamedSequence, StreamEnd, StreamToken, stream
from sightline.service.settings import COMPATIBLE_APIS, make_settings
from sightline.service.tasks.generate import GenerateBody, NativeEventEncoder
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, add_endpoint, responses_of, until
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio
NAMES = tuple(COMPATIBLE_APIS)


class PlainError(BaseModel):
    error: str
    reported: str


FORMAT = ErrorFormat(
    lambda error, message, param, request_id: orjson.dumps({"error": message, "reported": error.code}), PlainError
)


def reported(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["reported"]


async def plain(call: Call, body: GenerateBody) -> GenerateResult | EventStream:
    """Generate, with errors of another shape."""
    model = await call.model(body.model, "generate")
    if body.stream:
        return EventStream(await stream(call, model, body.inputs, body.parameters), NativeEventEncoder({}))
    return await generate_texts(call, model, body.inputs, body.parameters)


class LineEncoder(EventEncoder):
    """Writes each event as a JSON line."""

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        return line_of({"text": event.text})

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        return line_of({"text": event.text, "done": True})

    def error(self, body: bytes) -> bytes:
        return body + b"\n"


async def lines(call: Call, body: GenerateBody) -> EventStream:
    """Generate, as a stream of JSON lines."""
    model = await call.model(body.model, "generate")
    return EventStream(await stream(call, model, body.inputs, body.parameters), LineEncoder(), NDJSON)


def with_plain_route(running: Running) -> Running:
    add_endpoint(running.app, Endpoint("POST", "/plain", plain, errors=("empty_input",), error_format=FORMAT))
    return running


async def test_the_settings_list_every_compatible_api() -> None:
    assert make_settings({}, {}).api_names == NAMES
    modules = {path.stem for path in Path("service/compat").iterdir()}
    with_endpoints = {
        name for name in modules if hasattr(import_module(f"sightline.service.compat.{name}"), "ENDPOINTS")
    }
    assert {module for of_api in COMPATIBLE_APIS.values() for module in of_api} == with_endpoints
    assert {name.replace("-", "_") for name in NAMES} <= with_endpoints
    served = compat.endpoints(NAMES)
    assert len({(endpoint.method, endpoint.path) for endpoint in served}) == len(served)


@pytest.mark.parametrize("value", ["opneai", "openai,x", "openai;x"])
async def test_an_unknown_api_is_rejected_by_name(value: str) -> None:
    with pytest.raises(UsageError, match="unknown API"):
        make_settings({"compatible_apis": value}, {})


@pytest.mark.parametrize(("value", "names"), [("", ()), ("openai", ("openai",)), (" openai , ", ("openai",))])
async def test_names_of_apis_are_separated_by_commas(value: str, names: tuple[str, ...]) -> None:
    assert make_settings({}, {"SIGHTLINE_COMPATIBLE_APIS": value}).api_names == names


def routes_of(*names: str) -> set[tuple[str, str]]:
    """Return the method and the path of each route of these APIs."""
    return {(endpoint.method.lower(), endpoint.path) for endpoint in compat.endpoints(names)}


def described_in(document: Any) -> set[tuple[str, str]]:
    """Return the method and the path of each route in an OpenAPI document."""
    return {(method, path) for path, operations in document["paths"].items() for method in operations}


async def test_only_the_routes_of_enabled_apis_are_described(start: Start, openapi: Any) -> None:
    """A document takes a second, so that every second API is enabled at a time."""
    native: set[tuple[str, str]] = set()
    for names in ((), NAMES[::2], NAMES[1::2]):
        async with start(compatible_apis=",".join(names)) as running:
            document = (await running.client.get("/openapi.json")).json()
            await running.result("/v1/generate", {"inputs": "a dog"})
        native = native or described_in(document)
        assert described_in(document) == native | routes_of(*names)
        schemas = document["components"]["schemas"].keys() & {"GenerateBody", "CompletionBody", "InferBody"}
        bodies = {"openai": "CompletionBody", "open-inference": "InferBody"}
        assert schemas == {"GenerateBody", *(body for api, body in bodies.items() if api in names)}
    assert not native & routes_of(*NAMES)
    assert described_in(openapi) == native | routes_of(*NAMES)


@pytest.mark.parametrize("api", NAMES)
async def test_a_disabled_api_is_404(start: Start, api: str) -> None:
    others = [name for name in NAMES if name != api]
    of_api = routes_of(*NAMES) - routes_of(*others)
    assert len(of_api) >= 2
    async with start(compatible_apis=",".join(others)) as without, start() as whole:
        for method, path in of_api:
            address = path.replace("{model_name}", "fake").replace("{model_version}", "1")
            response = await without.client.request(method, address, json={"inputs": "a dog"})
            error = response.json()["error"]  # with the prefix of another API, it has the form of that API
            assert response.status_code == 404 and (isinstance(error, str) or error["code"] == "not_found"), path
            response = await whole.client.request(method, address, json={"inputs": "a dog"})
            assert "There is no such route" not in response.text, path


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"inputs": ""}, 422, "empty_input"),
        ({"inputs": "x" * 70}, 422, "input_too_long"),
        ({"inputs": "x", "model": "y"}, 404, "model_not_found"),
        ({"inputs": "x" * 5000}, 413, "body_too_large"),
    ],
)
async def test_an_error_has_the_shape_of_its_route(start: Start, body: dict[str, Any], status: int, code: str) -> None:
    async with start(max_body_bytes=4000) as running:
        assert reported(await with_plain_route(running).post("/plain", body)) == (status, code)
        own = await running.post("/v1/generate", body)
        assert (own.status_code, own.json()["error"]["code"]) == (status, code)


async def test_errors_of_the_router_and_the_engine_have_the_shape_of_the_route(
    start: Start, make_backend: MakeBackend
) -> None:
    async with start(make_backend(faults=Faults(step_calls=frozenset({1})))) as running:
        assert reported(await with_plain_route(running).client.get("/plain")) == (405, "method_not_allowed")
        assert reported(await running.post("/plain", {"inputs": "x"})) == (500, "internal")
        response = await running.post("/plain", {"inputs": "x"}, **{"content-type": "text/plain"})
        assert reported(response) == (415, "unsupported_media_type")


async def test_errors_of_overload_and_deadlines_have_the_shape_of_the_route(
    start: Start, make_backend: MakeBackend
) -> None:
    loading = threading.Event()
    async with start(make_backend(wait_for=loading)) as running:
        response = await with_plain_route(running).post("/plain", {"inputs": "x"})
        assert reported(response) == (503, "loading") and response.headers["retry-after"] == "1"
        loading.set()
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_rows=1, max_waiting_sequences=1) as running:
        plain, body = with_plain_route(running), {"inputs": "x"}
        late = asyncio.gather(*[plain.post("/plain", body, **{"x-request-timeout-ms": "500"}) for _ in range(2)])
        await until(lambda: running.backend.num_busy == 2)
        response = await running.post("/plain", {"inputs": "x"})
        assert reported(response) == (429, "overloaded") and response.headers["retry-after"] == "1"
        assert list(map(reported, await late)) == [(504, "deadline_exceeded")] * 2
        hang.set()


async def test_an_error_in_a_stream_has_the_shape_of_its_route(start: Start, make_backend: MakeBackend) -> None:
    backend: FakeBackend = make_backend(faults=Faults(step_calls=frozenset({4})))
    async with start(backend) as running:
        body = {"inputs": "x", "stream": True, "parameters": {"min_new_tokens": 20}}
        response = await with_plain_route(running).post("/plain", body)
        assert response.status_code == 200
        kind, data = response.text.rstrip().splitlines()[-2:]
        assert kind == "event: error"
        assert json.loads(data.removeprefix("data: "))["reported"] == "internal"


@pytest.mark.parametrize("faults", [Faults(), Faults(step_calls=frozenset({4}))])
async def test_a_stream_can_be_json_lines(start: Start, make_backend: MakeBackend, faults: Faults) -> None:
    async with start(make_backend(faults=faults)) as running:
        add_endpoint(running.app, Endpoint("POST", "/lines", lines, media_types=(NDJSON,), error_format=FORMAT))
        response = await running.post("/lines", {"inputs": "x", "parameters": {"min_new_tokens": 20}})
        assert response.status_code == 200
        names = ("content-type", "cache-control", "x-accel-buffering")
        assert [response.headers[name] for name in names] == ["application/x-ndjson", "no-cache", "no"]
        assert response.text.endswith("\n")
        *tokens, last = [json.loads(line) for line in response.text.splitlines()]
        assert tokens
        if faults.step_calls:
            assert last["reported"] == "internal"
        else:
            assert last == {"text": "".join(token["text"] for token in tokens), "done": True}


async def test_openapi_declares_the_shape_of_each_routes_errors(running: Running) -> None:
    responses = responses_of(with_plain_route(running).app.openapi(), "post", "/plain")
    expected: list[tuple[str, ErrorCode]] = [("422", "empty_input"), ("500", "internal")]
    for status, code in expected:
        content = responses[status]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith("/PlainError")
        assert content["examples"][code]["value"] == {"error": ERRORS[code].message, "reported": code}
    # A slow head is rejected before its route is known, a slow body by its route.
    shapes = responses["408"]["content"]["application/json"]["schema"]["anyOf"]
    assert [one["$ref"].rsplit("/", 1)[1] for one in shapes] == ["ErrorResponse", "PlainError"]


@pytest.mark.parametrize(("field", "index", "expected"), read_table(__file__))
async def test_canonical_field_names_are_replaced_by_those_of_the_api(
    field: str, index: int | None, expected: str
) -> None:
    names = {"max_new_tokens": "max_tokens", "inputs": "prompt", "inputs[3]": "first"}
    message = "{max_new_tokens} (3) and {inputs}, not {stop}."
    error = ApiError("invalid_parameter", message, field=field, index=index)
    assert (error.param(names), error.message(names)) == (expected, "max_tokens (3) and prompt, not stop.")
    assert error.param({}) == (field if index is None else f"{field}[{index}]")
    assert error.message({}) == "max_new_tokens (3) and inputs, not stop."


@pytest.mark.parametrize("path", ["X-Request-Timeout-Ms", "inputs[3]", None])
async def test_a_path_from_the_client_is_unchanged(path: str | None) -> None:
    names = {"inputs": "prompt", "inputs[3]": "first", "X-Request-Timeout-Ms": "timeout"}
    error = ApiError("invalid_parameter", "It has {inputs} and {.", path=path)
    assert (error.param(names), error.message(names)) == (path, "It has {inputs} and {.")
