"""Each route returns exactly the errors that it declares, with their codes and the keys of their
examples.

The routes and errors are read from the OpenAPI document, so that new routes are covered.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest

from sightline.base.bundle import ChatTemplate
from sightline.service import logs
from sightline.service.api.endpoint import JSON, MULTIPART
from sightline.service.api_errors import ERRORS, ApiError, ErrorCode
from sightline.service.app import create_app, endpoints_of
from sightline.service.http.dispatch import EndpointRoute
from sightline.service.http.openapi import HEAD_ERRORS
from sightline.service.inference import results, submission
from sightline.service.loading import load_backend
from sightline.service.settings import Settings
from sightline.service.tasks import tokens
from tests.service.conftest import (
    MASK,
    MakeBackend,
    Running,
    Serve,
    Start,
    read_all,
    reading_examples,
    responses_of,
    until,
)
from tests.support.fake_runner import NLI_LABELS, fake_classifier_manifest, fake_manifest, fake_masked_manifest

pytestmark = pytest.mark.anyio

MODELS = ("fake", "judge", "chat", "encoder", "ranker", "tagger", "reader", "masked")  # together they have every task
# Fields that make an example exceed the abilities of a model or a route.
BEYOND: tuple[Mapping[str, Any], ...] = (
    {"stream": True, "parameters": {"num_beams": 2}},
    {"parameters": {"top_logprobs": 1}},
    {"return_attention": {"kinds": ["cross"]}},
    {"dimensions": 3},
    {"suffix": "x"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"background": True},
    {"parameters": {"watermark": True}},
    {"parameters": {"priority": 1}},
    {"parameters": {"prompt_name": "query"}},
    {"prompt_name": "query"},
    {"style_id": "x"},
    {"output_format": "x"},
    {"cid": ["x"]},
    {"raw_scores": True},
    {"source_language": "en"},
    {"rank_fields": ["title"]},
    {"truncation_direction": "left"},
)
# Fields that request a response of unlimited size.
UNBOUNDED: tuple[Mapping[str, Any], ...] = ({"return_attention": True}, {"parameters": {"return_attention": True}})


ENDPOINTS = endpoints_of(Settings())


@cache
def document() -> dict[str, Any]:
    return create_app(Settings(), load_backend).openapi()


@dataclass(frozen=True)
class Operation:
    """One route as the document describes it."""

    method: str
    path: str
    described: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @cached_property
    def errors(self) -> dict[str, Any]:
        """An example of each error that is declared, by its code."""
        return {code: example for code, _, example in self._declared}

    @cached_property
    def statuses(self) -> dict[str, int]:
        """The status of each error that is declared, by its code."""
        return {code: status for code, status, _ in self._declared}

    @cached_property
    def _declared(self) -> list[tuple[str, int, Any]]:
        return [
            (code, int(status), example["value"])
            for status, response in responses_of(document(), self.method, self.path).items()
            if status != "200"
            for code, example in response["content"]["application/json"]["examples"].items()
        ]

    @cached_property
    def media_type(self) -> str:
        content = self.described["requestBody"]["content"] if self.reads_body else ()
        return JSON if JSON in content or not content else f"{MULTIPART}; boundary=x"

    @cached_property
    def _schema(self) -> Mapping[str, Any]:
        if self.media_type != JSON:
            bodies = (endpoint.body_type for endpoint in ENDPOINTS if endpoint.path == self.path and endpoint.body_type)
            return next(bodies).model_json_schema()
        reference = self.described["requestBody"]["content"][JSON]["schema"]["$ref"]
        schema: Mapping[str, Any] = document()["components"]["schemas"][reference.rsplit("/", 1)[1]]
        return schema

    @property
    def examples(self) -> list[dict[str, Any]]:
        """Examples of the body."""
        examples: list[dict[str, Any]] = self._schema["examples"]
        return examples

    def encode(self, body: Mapping[str, Any]) -> bytes:
        if self.media_type == JSON:
            return orjson.dumps(body)
        names = {name: "; filename=x.md" * (name == "file") for name in body}
        parts = (
            f'--x\r\nContent-Disposition: form-data; name="{name}"{names[name]}\r\n\r\n{value}\r\n'
            for name, value in body.items()
        )
        return f"{''.join(parts)}--x--".encode()

    @property
    def reads_body(self) -> bool:
        return "requestBody" in self.described

    def at(self, model: str, body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The path and the body that ask this model."""
        parameters = {one["name"]: one["in"] for one in self.described["parameters"]}
        path, query = self.path, {}
        for name, location in parameters.items():
            if location == "path":
                path = path.replace(f"{{{name}}}", "1" if "version" in name else model)
            elif name == "model":
                query[name] = model
        named = {"model": model} if self.reads_body and "model" in self._schema.get("properties", ()) else {}
        return str(httpx.URL(path, params=query)) if query else path, {**body, **named}


@cache
def operations() -> list[Operation]:
    return [
        Operation(method.upper(), path, described)
        for path, methods in document()["paths"].items()
        for method, described in methods.items()
    ]


def as_it_is(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield body


def each_text_as(text: str, body: Any) -> Iterator[Any]:
    """Copies of a body, in each of which another of its strings, at any depth, is this text."""
    if isinstance(body, str):
        yield text
    if isinstance(body, dict | list):
        for key, inner in body.items() if isinstance(body, dict) else enumerate(body):
            for changed in each_text_as(text, inner):
                copied = body.copy()
                copied[key] = changed
                yield copied


def long(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return each_text_as("x " * 200, body)


def empty(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from each_text_as(" ", body)
    yield from ({**body, name: []} for name in body)


def with_any_of(more: Iterable[Mapping[str, Any]], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield body
    yield from ({**body, **one} for one in more)


async def never_whole() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(0.2)
    yield b"}"


async def rejected_body(code: ErrorCode) -> AsyncIterator[bytes]:
    """Body that the connection rejects, reported to the route by `receive`."""
    yield b"{"
    raise ApiError(code)


@contextlib.asynccontextmanager
async def full(running: Running) -> AsyncIterator[None]:
    """Reserve the capacity of every admission controller."""
    reservations = []
    for model in running.app.state.service.models.values():
        with contextlib.suppress(ApiError):
            while True:
                reservations.append((model.admission, model.admission.reserve(1, 0)))
    yield
    for admission, reservation in reservations:
        admission.release(reservation)


@contextlib.asynccontextmanager
async def busy(running: Running) -> AsyncIterator[None]:
    """Keep the engine busy."""
    runner, may_end = running.backend.runners[0], threading.Event()
    run_encoder, begun = runner.run_encoder, threading.Event()

    def wait_and_encode(*arguments: Any) -> Any:
        begun.set()
        may_end.wait()
        return run_encoder(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_encoder", wait_and_encode)
        patch.setattr(submission, "DEADLINE_SLACK_S", 0.0)  # otherwise each call waits for the engine that long
        work = asyncio.ensure_future(running.post("/v1/encode", {"model": "fake", "inputs": "x"}))
        await until(begun.is_set)
        try:
            yield
        finally:
            may_end.set()
            await work


@contextlib.asynccontextmanager
async def narrow(running: Running) -> AsyncIterator[None]:
    """Set all limits on the size of responses to 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "MAX_NUMBERS", 0)
        patch.setattr(tokens, "MAX_TEXT_BYTES", 0)
        patch.setattr(tokens, "MAX_IDS", 0)
        yield


async def bug(*_: Any, **__: Any) -> None:
    raise RuntimeError


@contextlib.asynccontextmanager
async def wrong(running: Running) -> AsyncIterator[None]:
    """Every route has a bug."""
    routes = [route for route in running.app.routes if isinstance(route, EndpointRoute)]
    assert len(routes) == len(operations())
    with pytest.MonkeyPatch.context() as patch:
        for route in routes:
            patch.setitem(vars(route.declared), "handler", bug)  # the same arguments, which are cached
        yield


@contextlib.asynccontextmanager
async def draining(running: Running) -> AsyncIterator[None]:
    running.app.state.service.drain()
    yield


@contextlib.asynccontextmanager
async def dead(running: Running) -> AsyncIterator[None]:
    running.app.state.service.worker.abandon_thread()
    yield


@contextlib.asynccontextmanager
async def fine(running: Running) -> AsyncIterator[None]:
    yield


@dataclass(frozen=True)
class Cause:
    """Cause of an error: the state of the service, and requests of which one must be rejected."""

    state: Callable[[Running], contextlib.AbstractAsyncContextManager[None]] = fine
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_loading: bool = False
    models: Sequence[str] = MODELS
    change: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = as_it_is
    content: Callable[[bytes], Any] = bytes  # from the bytes of the body
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""

    async def responses(self, running: Running, operation: Operation) -> AsyncIterator[httpx.Response]:
        for body in self.bodies(operation) if operation.reads_body else [{}]:
            async for response in self.responses_to(body, running, operation):
                yield response

    def bodies(self, operation: Operation) -> Iterator[dict[str, Any]]:
        for example in operation.examples:
            yield from self.change(example)

    async def responses_to(
        self, body: dict[str, Any], running: Running, operation: Operation
    ) -> AsyncIterator[httpx.Response]:
        """Yield the response of each model, or one response if the request names no model or has no
        body, so that it does not depend on the tasks of the model.
        """
        requests = (operation.at(model, body) for model in self.models[: None if operation.reads_body else 1])
        for path, named in dict.fromkeys((path, operation.encode(named)) for path, named in requests):
            path += f"{'&' if '?' in path else '?'}{self.query}" if self.query else ""
            content = self.content(named) if operation.reads_body else None
            headers = {"content-type": operation.media_type, **self.headers}
            yield await running.client.request(operation.method, path, content=content, headers=headers)


TIMEOUT = "x-request-timeout-ms"
KEYS = Path("tests/data/keys.json")  # alice has the role use; temp may send one request a minute
CAUSES: Mapping[ErrorCode, Cause] = {
    "malformed_request": Cause(content=lambda body: rejected_body("malformed_request")),
    "headers_too_large": Cause(content=lambda body: rejected_body("headers_too_large")),
    "malformed_json": Cause(content=lambda body: body[:-1]),
    "unauthorized": Cause(settings={"keys": KEYS}),
    "forbidden": Cause(headers={"x-api-key": "sl-alice"}, settings={"keys": KEYS}, models=["fake"]),
    "not_found": Cause(change=partial(with_any_of, ({"glossary_id": "x"},))),
    "model_not_found": Cause(models=["nobody"], settings={"model_control": "explicit"}),
    "client_too_slow": Cause(content=lambda body: never_whole(), settings={"client_timeout_s": 0.02}),
    "body_too_large": Cause(content=lambda body: body.ljust(10_001), settings={"max_body_bytes": 10_000}),
    "unsupported_media_type": Cause(headers={"content-type": "text/csv"}),
    "misdirected_request": Cause(headers={"host": "evil.example"}, settings={"allowed_hosts": "test"}),
    "invalid_parameter": Cause(query="unknown=1", change=partial(with_any_of, ({"unknown": 1},))),
    "empty_input": Cause(change=empty),
    "input_too_long": Cause(change=long),
    "unsupported_parameter": Cause(change=partial(with_any_of, BEYOND)),
    "unsupported_task": Cause(models=["idle"]),
    "response_too_large": Cause(narrow, change=partial(with_any_of, UNBOUNDED)),
    "internal": Cause(wrong),
    "rate_limit_exceeded": Cause(headers={"x-api-key": "sl-temp"}, settings={"keys": KEYS}),
    "overloaded": Cause(content=lambda body: rejected_body("overloaded")),
    "loading": Cause(is_loading=True),
    "draining": Cause(draining),
    "engine_dead": Cause(dead),
    "deadline_exceeded": Cause(busy, headers={TIMEOUT: "20"}),
}
# Errors of the router, which belong to no route.
OF_NO_ROUTE: set[ErrorCode] = {"method_not_allowed"}


OF_DOCUMENTS = {"/v2/document/{document_id}", "/v2/document/{document_id}/result"}  # that were sent before


def keys(value: Any) -> Any:
    """Return the keys of a JSON value, without its content."""
    return {name: keys(inner) for name, inner in value.items()} if isinstance(value, dict) else None


@contextlib.asynccontextmanager
async def caused(start: Start, make_backend: MakeBackend, cause: Cause) -> AsyncIterator[Running]:
    may_load = threading.Event()
    backend = reading_examples(make_backend(wait_for=may_load if cause.is_loading else None))
    sizes: dict[str, Any] = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
    fake, judge = backend.manifests[0], fake_classifier_manifest("judge", labels=NLI_LABELS, **sizes)
    chat = fake_manifest("chat", **sizes, max_target_tokens=128, decoder_start="source")
    backend.manifests = (
        *(fake, judge),
        chat.model_copy(update={"chat": ChatTemplate(program="{{ messages[-1].content }}")}),
        judge.model_copy(update={"name": "encoder", "tasks": ("encode",)}),
        fake_classifier_manifest("ranker", "score", ["LABEL_0"], **sizes),
        fake_classifier_manifest("tagger", "tokens", **sizes),
        fake_classifier_manifest("reader", "span", ["start", "end"], **sizes),
        fake_masked_manifest("masked", mask_id=len(backend.tokenizer) - 1, **sizes),
        fake.model_copy(update={"name": "idle", "tasks": (), "languages": None}),
    )
    async with start(backend, **cause.settings) as running:
        try:
            yield running
        finally:
            may_load.set()


def test_every_code_has_a_cause() -> None:
    assert CAUSES.keys() | set(HEAD_ERRORS) | OF_NO_ROUTE == ERRORS.keys()


@pytest.mark.parametrize("code", CAUSES)
async def test_every_route_returns_exactly_its_declared_errors(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, code: ErrorCode
) -> None:
    caplog.set_level(logging.DEBUG, logs.access_logger.name)
    cause, num_failed = CAUSES[code], 0
    async with caused(start, make_backend, cause) as running:
        for operation in operations():
            found = set()
            async with cause.state(running):
                async for response in cause.responses(running, operation):
                    reported = getattr(caplog.records[-1], logs.FIELDS)["code"]  # in the log; not every API returns it
                    check(operation, response, reported)
                    found.add(reported)
                    num_failed += reported is not None
                    if reported == code:
                        break
            is_declared = code in operation.errors and (operation.reads_body or code not in HEAD_ERRORS)
            assert (code in found) == is_declared, f"{operation}: {found}"
        (failures,) = running.app.state.service.metrics._failure.collect()
        assert sum(one.value for one in failures.samples if one.name.endswith("_total")) == num_failed


async def test_every_route_that_uses_a_model_is_subject_to_admission(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logs.access_logger.name)
    cause = Cause(full)
    async with caused(start, make_backend, cause) as running, full(running):
        for operation in filter(lambda one: one.reads_body, operations()):
            responses = cause.responses(running, operation)
            found = {getattr(caplog.records[-1], logs.FIELDS)["code"] async for _ in responses}
            names_model = bool({"model_not_found", "deadline_exceeded"} & operation.errors.keys())
            # Loading, unloading and describing a model use no queue, and documents wait for it.
            asks_model = names_model and "forbidden" not in operation.errors
            asks_model = asks_model and operation.path not in ("/api/show", "/v2/document")
            assert ("overloaded" in found) == asks_model, f"{operation}: {found}"
            assert None not in found or not asks_model, operation


def check(operation: Operation, response: httpx.Response, code: ErrorCode | None) -> None:
    """Check that a response conforms to the document."""
    if code is None:
        assert response.status_code == 200
        return
    assert code in operation.errors, f"{operation} does not declare {code}"
    assert response.status_code == operation.statuses[code]
    assert keys(response.json()) == keys(operation.errors[code])
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-error-code"] == code
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))


HEADS: Mapping[ErrorCode, bytes] = {
    "malformed_request": b"no header\r\n\r\n",
    "client_too_slow": b"Host: ",
    "headers_too_large": b"X-Long: " + b"x" * 40_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("code", HEADS)
def test_an_invalid_head_is_a_native_error_on_every_route(serve: Serve, code: ErrorCode) -> None:
    assert HEADS.keys() == set(HEAD_ERRORS)
    with serve(client_timeout_s=0.01 if code == "client_too_slow" else 30) as wire:
        for operation in operations():
            with wire.connect() as connection:
                connection.sendall(f"{operation.method} {operation.path} HTTP/1.1\r\n".encode() + HEADS[code])
                head, body = read_all(connection).split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % ERRORS[code].status)
            assert orjson.loads(body)["error"]["code"] == code
            assert code in operation.errors


async def test_every_example_of_a_body_succeeds(start: Start, make_backend: MakeBackend, tmp_path: Path) -> None:
    cause = Cause(settings={"model_control": "explicit", "glossaries": tmp_path})
    async with caused(start, make_backend, cause) as running:
        for operation in sorted(
            filter(lambda one: one.reads_body and one.path not in OF_DOCUMENTS, operations()),
            key=lambda one: one.path.endswith("/unload"),
        ):  # after all others
            for example in operation.examples:
                responses = Cause().responses_to(example, running, operation)
                statuses = [response.status_code async for response in responses]
                assert 200 in statuses, f"{operation}: {example}"


MARKER = "unmistakable"
# Routes with bodies that have no free text, only ids, the name of a model or a table.
WITHOUT_TEXT = {"/v1/detokenize", "/v3/glossaries/{glossary_id}/dictionaries", *OF_DOCUMENTS}


async def test_no_text_of_a_body_is_in_a_log_metric_trace_or_error(
    start: Start,
    make_backend: MakeBackend,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # slow to import
    from opentelemetry.sdk.trace.export import SpanExportResult

    caplog.set_level(logging.DEBUG)
    spans: list[str] = []

    def export(exporter: OTLPSpanExporter, batch: Sequence[Any]) -> SpanExportResult:
        spans.extend(span.to_json() for span in batch)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    cause = Cause(
        settings={"model_control": "explicit", "keys": KEYS, "glossaries": tmp_path},
        headers={"x-api-key": "sl-boss"},
        change=partial(each_text_as, f"{MARKER} {MASK}"),
    )
    shown: list[str] = []
    served = set[str]()
    reading = [one for one in operations() if one.reads_body and "/repository/" not in one.path]
    async with caused(start, make_backend, cause) as running:
        for operation in reading:
            for body in cause.bodies(operation):
                async for response in cause.responses_to(body, running, operation):
                    if response.status_code == 200:
                        served.add(operation.path)
                        break
                    shown.append(f"{operation}: {response.headers} {response.text}")
                    if response.headers["x-error-code"] != "unsupported_task":
                        break
        shown.append((await running.client.get("/metrics", headers=cause.headers)).text)
    assert served == {one.path for one in reading} - WITHOUT_TEXT
    shown += [caplog.text, *(str(vars(record).get(logs.FIELDS)) for record in caplog.records), *spans]
    assert len(spans) > 100
    assert not any(secret in one for one in shown for secret in (MARKER, "sl-boss"))
