"""A service with the fake model: in process, or on a real socket for tests of the protocol."""

import asyncio
import contextlib
import dataclasses
import http.client
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sightline.base.bundle import Alignment, AlignmentStep, Coverage, LabelKind, Languages, Manifest
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api.endpoint import Endpoint
from sightline.service.app import create_app
from sightline.service.engine.engine import Engine
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import GenerateRequest
from sightline.service.engine.worker import Worker
from sightline.service.http.application import Application
from sightline.service.http.dispatch import EndpointRoute
from sightline.service.inference.service import Backend, LoadedModel, ServedModel
from sightline.service.inference.submission import Arrival, Submission
from sightline.service.runtime.runner import Runner
from sightline.service.server import DrainingServer
from sightline.service.settings import Settings
from tests.support.dialogues import LINES
from tests.support.fake_runner import HIDDEN, LABELS, FakeRunner, Faults, fake_classifier_manifest, fake_manifest

FAKE_ROWS = 32  # default number of rows in tests
FAKE_LOAD_SECONDS = 0.25  # duration that loads of a FakeRepository report
PAD, START, END = "<pad>", "<s>", "</s>"
MERGES = [("Ġ", "d"), ("o", "g"), ("Ġd", "og"), ("Ġ", "H"), ("u", "n"), ("Ġ", "a")]
# Words in the examples of the documentation that must be one token.
EXAMPLE_MERGES = [("Ġ", "b"), ("o", "y"), ("Ġb", "oy"), ("Ġboy", "s")]


MASK = "[MASK]"  # of the examples in the documentation
MANY = Languages(
    sources=("en", "de", "zh-Hant"),
    targets=("de", "en", "zh-Hant"),
    source_prefix={"en": (10,), "de": (11,), "zh-Hant": (12,)},
    source_prefix_of_target={"en": (20,), "zh-Hant": (21, 22)},
    target_prefix={"de": (30,), "en": (31, 32), "zh-Hant": (33,)},
)


def byte_level_tokenizer(merges: list[tuple[str, str]] = MERGES) -> Tokenizer:
    """Return a tokenizer like those of `sightline.model.data.tokenizer_training` with a tiny
    vocabulary.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [PAD, START, END, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {word: id_ for id_, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens([PAD, START, END])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, vocabulary[END])]
    )
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(byte_level_tokenizer())


@dataclass
class FakeBackend:
    """Creates backends with FakeRunners and keeps them for tests."""

    tokenizer: TextTokenizer
    manifests: tuple[Manifest, ...]
    faults: Faults | None = None
    step_s: float = 0.0
    encode_s: float = 0.0
    num_prefix_blocks: int = 0
    wait_for: threading.Event | None = None  # loading waits for it
    error: Exception | None = None  # loading raises it
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # bundles that fail to load, with the reason
    wrap: Callable[[FakeRunner], Runner] = lambda runner: runner  # wraps the runner of the engine
    runners: list[FakeRunner] = dataclasses.field(default_factory=list)
    engines: list[Engine] = dataclasses.field(default_factory=list)
    repository: "FakeRepository" = dataclasses.field(init=False)  # set by `load`

    def load(self, settings: Settings, observer_of: Callable[[str], EngineObserver]) -> Backend:
        if self.wait_for is not None:
            self.wait_for.wait()
        if self.error is not None:
            raise self.error
        lazy = {one.name: one for one in self.manifests if settings.is_lazy(one.name)}
        eager = [one for one in self.manifests if one.name not in lazy]
        loaded = {one.name: self.load_model(one, settings, observer_of) for one in eager}
        worker = Worker({name: one.engine for name, one in loaded.items()})
        self.repository = FakeRepository(self, settings, observer_of)
        return Backend(loaded, settings.max_rows or FAKE_ROWS, worker, self.repository, self.failed, lazy)

    def load_model(
        self, manifest: Manifest, settings: Settings, observer_of: Callable[[str], EngineObserver]
    ) -> LoadedModel:
        max_rows = settings.max_rows or FAKE_ROWS
        runner = FakeRunner(
            manifest,
            max_rows,
            faults=self.faults,
            num_prefix_blocks=self.num_prefix_blocks,
            step_s=self.step_s,
            encode_s=self.encode_s,
        )
        self.runners.append(runner)
        engine = Engine(
            self.wrap(runner), max_batch_tokens=settings.max_batch_tokens, observer=observer_of(manifest.name)
        )
        self.engines.append(engine)
        model = ServedModel(
            manifest.name, manifest, self.tokenizer, self.tokenizer, "cpu", HIDDEN, max_rows, threads={}
        )
        return LoadedModel(model, engine)

    @property
    def num_busy(self) -> int:
        return sum(engine.num_running + engine.num_waiting for engine in self.engines)


@dataclass
class FakeRepository:
    """Loads models with FakeRunners. Changing `manifests` is like changing the bundles folder."""

    backend: FakeBackend
    settings: Settings
    observer_of: Callable[[str], EngineObserver]
    manifests: dict[str, Manifest] = dataclasses.field(default_factory=dict)
    error: Exception | None = None  # `load` and `check` raise it
    wait_for: threading.Event | None = None  # `load` waits for it
    loads: list[str] = dataclasses.field(default_factory=list)  # names of the loads that have started

    def __post_init__(self) -> None:
        self.manifests |= {manifest.name: manifest for manifest in self.backend.manifests}

    def find(self) -> dict[str, Manifest]:
        return self.manifests

    def check(self, name: str) -> None:
        if self.error is not None:
            raise self.error

    def load(self, name: str, reserved_bytes: int) -> LoadedModel:
        self.loads.append(name)
        if self.wait_for is not None:
            self.wait_for.wait()
        if self.error is not None:
            raise self.error
        loaded = self.backend.load_model(self.manifests[name], self.settings, self.observer_of)
        return dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, load_seconds=FAKE_LOAD_SECONDS))


MakeBackend = Callable[..., FakeBackend]


@pytest.fixture(scope="session")
def make_backend(tokenizer: TextTokenizer) -> MakeBackend:
    def make(*names: str, **options: Any) -> FakeBackend:
        sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64, "max_target_tokens": 64}
        return FakeBackend(tokenizer, tuple(fake_manifest(name, **sizes) for name in names or ("fake",)), **options)

    return make


def reading_examples(backend: FakeBackend) -> FakeBackend:
    """Return the backend with languages and words of the examples in the documentation."""
    tokenizer = byte_level_tokenizer([*MERGES, *EXAMPLE_MERGES])
    tokenizer.add_tokens(["runs", "sleeps"])
    tokenizer.add_special_tokens([MASK])
    backend.tokenizer = TextTokenizer(tokenizer)
    languages = Languages(sources=("en",), targets=("de",))
    backend.manifests = tuple(
        one.model_copy(
            update={
                "limits": one.limits.model_copy(update={"vocabulary": len(backend.tokenizer)}),
                "languages": languages,
            }
        )
        for one in backend.manifests
    )
    return backend


def changed(backend: FakeBackend, **fields: Any) -> FakeBackend:
    """Return the backend with other values of these fields of all its manifests."""
    backend.manifests = tuple(manifest.model_copy(update=fields) for manifest in backend.manifests)
    return backend


def with_heads(backend: FakeBackend, heads: int) -> FakeBackend:
    """Return the backend with so many heads in all its attention maps."""
    manifests = []
    for manifest in backend.manifests:
        maps = tuple(kind.model_copy(update={"heads": heads}) for kind in manifest.attention)
        manifests.append(manifest.model_copy(update={"attention": maps}))
    backend.manifests = tuple(manifests)
    return backend


def with_languages(backend: FakeBackend, **pairs: str) -> FakeBackend:
    """Return the backend whose models have these languages, such as `fake="en-de"`, or none."""
    languages = {name: Languages(sources=(pair[:2],), targets=(pair[3:],)) for name, pair in pairs.items()}
    backend.manifests = tuple(
        manifest.model_copy(update={"languages": languages.get(manifest.name)}) for manifest in backend.manifests
    )
    return backend


def multilingual_backend(make_backend: MakeBackend) -> FakeBackend:
    """Return a multilingual model, two models of one pair, and one that does not translate."""
    pairs = {"a-en-fr": "en-fr", "b-en-de": "en-de"}
    backend = with_languages(make_backend("many", *pairs, "plain"), **pairs)
    many, *others = backend.manifests
    backend.manifests = (many.model_copy(update={"languages": MANY}), *others)
    return backend


def classifying(
    backend: FakeBackend, name: str = "judge", label_kind: LabelKind = "classes", labels: Sequence[str] = LABELS
) -> FakeBackend:
    """Return the backend with an additional classifier."""
    sizes: dict[str, Any] = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
    backend.manifests = (*backend.manifests, fake_classifier_manifest(name, label_kind, labels, **sizes))
    return backend


@dataclass(frozen=True)
class Running:
    """A started app and an in-process client."""

    app: FastAPI
    client: httpx.AsyncClient
    backend: FakeBackend
    exit_codes: list[int]

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = orjson.dumps(body)
        return await self.client.post(path, content=content, headers={"content-type": "application/json"} | headers)

    async def result(self, path: str, body: Any) -> Any:
        """Return the content of a response with status 200."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def get(self, path: str) -> Any:
        """Return the content of a response with status 200 to a GET request."""
        response = await self.client.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, path: str, body: Any) -> tuple[int, str, str | None]:
        """Return the status, the code and the parameter of an error of the native API."""
        response = await self.post(path, body)
        error = response.json()["error"]
        return response.status_code, error["code"], error["param"]

    async def events(self, path: str, body: Any, *, has_end_mark: bool = True) -> list[Any]:
        """Return the events of a complete stream, without the mark `[DONE]` at its end."""
        response = await self.post(path, body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *frames, rest = response.text.split("\n\n")
        assert rest == ""
        if has_end_mark:
            assert frames.pop() == "data: [DONE]"
        return [orjson.loads(frame.removeprefix("data: ")) for frame in frames]

    async def metric(self, line: str) -> float:
        """Return the value of a metric, 0 by default; `line` is its name with its labels."""
        text = (await self.client.get("/metrics")).text
        values = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.rsplit(" ", 1)[0] == line]
        return float(values[0]) if values else 0.0


Start = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture(scope="session")
def start(make_backend: MakeBackend) -> Start:
    """Return a function that starts an app and waits until it is ready, unless loading waits."""

    @contextlib.asynccontextmanager
    async def run(backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[Running]:
        backend = backend or make_backend()
        if len(backend.manifests) > 1:  # most tests name no model
            settings = {"default_model": min(one.name for one in backend.manifests), **settings}
        exit_codes: list[int] = []
        settings = {"allowed_hosts": "*", **settings}  # tests call the service "test" or "x"
        app = create_app(Settings(**settings), backend.load, exit_codes.append)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            running = Running(app, client, backend, exit_codes)
            if backend.wait_for is None and backend.error is None:
                await until(lambda: app.state.service.unavailable_code is None)
            yield running

    return run


def with_coverage(backend: FakeBackend, coverage: Coverage | None) -> FakeBackend:
    """Return the backend with another head that shows omitted words."""
    backend.manifests = (backend.manifests[0].model_copy(update={"coverage": coverage}),)
    return backend


def with_alignment(backend: FakeBackend, step: AlignmentStep) -> FakeBackend:
    """Let the second head of the first layer of the only model align words at a step."""
    alignment = Alignment(step=step, layer=0, heads=(1,), criterion="test", agreement=0.5, baseline=0.25, sentences=1)
    (manifest,) = backend.manifests
    backend.manifests = (manifest.model_copy(update={"alignment": alignment}),)
    return backend


def responses_of(document: Any, method: str, path: str) -> dict[str, Any]:
    """Return the responses of an operation by status, and the shared ones instead of references."""
    shared = document["components"]["responses"]
    responses = document["paths"][path][method.lower()]["responses"]
    return {
        status: shared[response["$ref"].rsplit("/", 1)[1]] if "$ref" in response else response
        for status, response in responses.items()
    }


@pytest.fixture(scope="session")
def openapi(start: Start) -> Any:
    """OpenAPI document that a service with default settings serves; tests must not change it."""

    async def get() -> Any:
        async with start() as running:
            return (await running.client.get("/openapi.json")).json()

    return asyncio.run(get())


@pytest.fixture(scope="session", autouse=True)
def _documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the OpenAPI document, which takes a second, once for apps with the same endpoints."""
    documents: dict[Any, Any] = {}
    describe = Application.openapi

    def describe_once(app: Application) -> Any:
        if app.openapi_schema is None:
            endpoints = tuple(route.declared for route in app.routes if isinstance(route, EndpointRoute))
            app.openapi_schema = documents.get(endpoints)
            documents[endpoints] = describe(app)
        return app.openapi_schema

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("documents")))  # of the store of each service
        patch.setattr(Application, "openapi", describe_once)
        yield


@pytest.fixture
async def running(start: Start) -> AsyncIterator[Running]:
    async with start() as running:
        yield running


def causal_backend(tokenizer: TextTokenizer) -> FakeBackend:
    """Return a backend with a decoder-only model."""
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 40, "max_target_tokens": 40}
    return FakeBackend(tokenizer, (fake_manifest(decoder_start="source", **sizes),))


def chat_backend(tokenizer: TextTokenizer) -> FakeBackend:
    """Return a backend with a chat model, `fake`, and `mute`, a model without a template."""
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 90, "max_target_tokens": 120}
    manifest = fake_manifest(decoder_start="source", **sizes).model_copy(update={"chat": LINES})
    return FakeBackend(tokenizer, (manifest, fake_manifest("mute", **sizes)))


@pytest.fixture
async def causal(start: Start, tokenizer: TextTokenizer) -> AsyncIterator[Running]:
    async with start(causal_backend(tokenizer)) as running:
        yield running


@pytest.fixture
async def chat(start: Start, tokenizer: TextTokenizer) -> AsyncIterator[Running]:
    async with start(chat_backend(tokenizer)) as running:
        yield running


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, GenerateRequest]]:
    """Return a list that gets the model and each generation of requests to its engine."""
    seen: list[tuple[str, GenerateRequest]] = []
    submit = Worker.submit

    def note(worker: Worker, model: str, request: Any, on_event: Any) -> Any:
        if isinstance(request, GenerateRequest):
            seen.append((model, request))
        return submit(worker, model, request, on_event)

    monkeypatch.setattr(Worker, "submit", note)
    return seen


@pytest.fixture(params=[0, 0.03], ids=["as they come", "many at once"])
def arrivals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliver the events of streams one by one, or many at once."""
    next_arrivals = Submission.next_arrivals

    async def wait(submission: Submission) -> list[Arrival]:
        await asyncio.sleep(request.param)
        return await next_arrivals(submission)

    monkeypatch.setattr(Submission, "next_arrivals", wait)


def add_endpoint(app: FastAPI, endpoint: Endpoint) -> None:
    """Serve another endpoint."""
    app.router.routes.append(EndpointRoute(endpoint))


async def generate(running: Running, inputs: Any, **parameters: Any) -> Any:
    return await running.result("/v1/generate", {"inputs": inputs, "parameters": parameters})


async def until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until a condition is true; fail after a timeout."""
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.001)


@dataclass(frozen=True)
class Wire:
    """A service on a real socket, in a thread with its own event loop."""

    app: FastAPI
    server: DrainingServer
    backend: FakeBackend
    thread: threading.Thread
    exit_codes: list[int]  # exit codes with which the process would have ended

    @property
    def port(self) -> int:
        return self.server.port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def http(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        connection = self.http()
        with contextlib.closing(connection):
            connection.request("POST", path, orjson.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, orjson.loads(response.read())

    def result(self, path: str, body: Any) -> Any:
        """Return the content of a response with status 200."""
        status, result = self.post(path, body)
        assert status == 200, result
        return result

    def get(self, path: str) -> tuple[int, bytes]:
        connection = self.http()
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def wait_idle(self) -> None:
        wait_until(lambda: self.backend.num_busy == 0)

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()


Serve = Callable[..., contextlib.AbstractContextManager[Wire]]


@pytest.fixture(scope="session")
def _quick_uvicorn() -> Iterator[None]:
    """Let uvicorn look every 0.01 instead of 0.1 seconds whether it must end."""
    quick = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", quick)
        yield


@pytest.fixture(scope="session")
def serve(make_backend: MakeBackend, _quick_uvicorn: None) -> Serve:
    """Return a function that starts a server and waits until it is ready, unless loading waits."""

    @contextlib.contextmanager
    def run(backend: FakeBackend | None = None, **settings: Any) -> Iterator[Wire]:
        backend = backend or make_backend()
        all_settings = Settings(
            port=0, **{"shutdown_timeout_s": 5, "keep_alive_s": 60, "allowed_hosts": "*", **settings}
        )
        app = create_app(all_settings, backend.load)
        exit_codes: list[int] = []
        server = DrainingServer(app, all_settings, exit_codes.append)
        thread = threading.Thread(target=server.run)
        thread.start()
        wire = Wire(app, server, backend, thread, exit_codes)
        try:
            wait_until(
                lambda: server.started and (backend.wait_for is not None or app.state.service.unavailable_code is None)
            )
            yield wire
        finally:
            wire.end()

    return run


def wait_until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def read_all(connection: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received
