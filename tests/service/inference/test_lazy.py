"""Models that are loaded on their first use."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from sightline.base.bundle import BundleError, Languages
from sightline.service.api.models import MemoryUse
from sightline.service.inference import changes
from sightline.service.inference.changes import RETRY_DELAY_S
from sightline.service.logs import FIELDS, TEXT
from tests.service.conftest import FAKE_LOAD_SECONDS, FAKE_ROWS, FakeRepository, MakeBackend, Running, Start, until
from tests.support.fake_runner import fake_classifier_manifest
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio

NOT_LOADED = dict.fromkeys((field.name for field in dataclasses.fields(MemoryUse)), 0)


@contextlib.asynccontextmanager
async def one_eager_and_one_lazy(start: Start, make_backend: MakeBackend, **settings: Any) -> AsyncIterator[Running]:
    async with start(make_backend("eager", "lazy"), **{"lazy_models": "lazy", **settings}) as running:
        yield running


def repository_of(running: Running) -> FakeRepository:
    return running.backend.repository


async def state(running: Running, name: str = "lazy") -> str:
    return str((await running.get(f"/v1/models/{name}"))["state"])


def generate(running: Running, model: str = "lazy", **headers: str) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(running.post("/v1/generate", {"model": model, "inputs": "a dog"}, **headers))


def error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()["error"]
    return response.status_code, body["code"], body["message"]


async def test_a_lazy_model_is_listed_with_its_facts_and_without_memory(
    start: Start, make_backend: MakeBackend
) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        models = {one["id"]: one for one in (await running.get("/v1/models"))["data"]}
        assert {name: one.pop("state") for name, one in models.items()} == {"eager": "ready", "lazy": "unloaded"}
        assert models["lazy"] == {**models["eager"], "id": "lazy"}
        details = await running.get("/v1/models/lazy")
        eager = await running.get("/v1/models/eager")
        assert (details["state"], details["provider"], details["memory"]) == ("unloaded", None, NOT_LOADED)
        assert details["limits"] == eager["limits"] and eager["memory"]["max_rows"] == FAKE_ROWS
        root = await running.get("/")
        assert {one["id"]: one["state"] for one in root["models"]} == {"eager": "ready", "lazy": "unloaded"}
        assert root["status"] == "ready"
        assert (await running.get("/health/ready")) == {"status": "ready", "failed_models": []}
        for gauge in ("model_weight_bytes", "model_max_state_bytes", "model_load_seconds", "num_requests_running"):
            assert await running.metric(f'sightline_{gauge}{{model_name="lazy"}}') == 0


async def test_the_log_counts_lazy_models(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for lazy_models, models, text in (
        ("lazy", ["eager"], "serving 1 model; 1 more is loaded on first use; default: eager; "),
        ("*", [], "serving 0 models; 2 more are loaded on first use; default: eager; "),
    ):
        caplog.clear()
        async with one_eager_and_one_lazy(start, make_backend, lazy_models=lazy_models):
            (record,) = [one for one in caplog.records if one.getMessage() == "serving"]
        fields: Any = getattr(record, FIELDS)
        assert (fields["models"], len(fields["lazy_models"])) == (models, 2 - len(models))
        assert str(getattr(record, TEXT)).startswith(text)


async def test_descriptions_of_a_model_do_not_load_it(start: Start, make_backend: MakeBackend) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        for path in ("", "/ready", "/config", "/stats", "/versions/1", "/versions/1/ready"):
            assert (await running.client.get(f"/v2/models/lazy{path}")).status_code == 200, path
        for path in ("/v2/models/stats", "/info?model=lazy", "/languages", "/metrics"):
            assert (await running.client.get(path)).status_code == 200, path
        assert (await running.client.post("/v2/repository/index")).json() == [
            {"name": "eager", "version": "1", "state": "READY", "reason": ""},
            {"name": "lazy", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        ]
        assert [one["name"] for one in (await running.post("/v2/repository/index", {"ready": True})).json()] == [
            "eager"
        ]
        assert await state(running) == "unloaded"
        assert repository_of(running).loads == []


async def test_the_first_calls_share_one_load_while_another_model_is_served(
    start: Start, make_backend: MakeBackend
) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        repository = repository_of(running)
        repository.wait_for = may_load = threading.Event()
        calls = [generate(running) for _ in range(5)]
        await until(lambda: bool(repository.loads))
        assert await state(running) == "loading"
        index = (await running.client.post("/v2/repository/index")).json()
        assert (index[1]["state"], index[1]["reason"]) == ("LOADING", "loading")
        expected = (await generate(running, "eager")).json()["outputs"]
        assert not any(call.done() for call in calls)
        may_load.set()
        for call in calls:
            response = await call
            assert (response.status_code, response.json()["outputs"]) == (200, expected)
        assert repository.loads == ["lazy"]
        assert await state(running) == "ready"
        details = await running.get("/v1/models/lazy")
        assert details["memory"] == (await running.get("/v1/models/eager"))["memory"]
        assert await running.metric('sightline_model_load_seconds{model_name="lazy"}') == FAKE_LOAD_SECONDS
        assert await running.metric('sightline_model_max_state_bytes{model_name="lazy"}') > 0
        assert (await generate(running)).status_code == 200
        assert repository.loads == ["lazy"]


async def test_the_least_recently_used_lazy_model_without_calls_makes_room_for_another(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(make_backend("eager", "first", "second", "third"), lazy_models="first,second,third") as running:
        models = running.app.state.service.models
        limit, loaded = 2 * running.app.state.service.settings.max_state_bytes, ("first", "second", "third")

        def resident() -> int:
            """Return the memory of two of the lazy models beside the limit."""
            return int(limit * sum(models[name].state == "ready" for name in loaded) // 2)

        monkeypatch.setattr(changes, "resident_bytes", resident)
        for name, expected in (
            ("first", "ready unloaded unloaded"),
            ("second", "ready ready unloaded"),
            ("first", "ready ready unloaded"),
            ("third", "ready unloaded ready"),
            ("second", "unloaded ready ready"),
        ):
            assert (await generate(running, name)).status_code == 200
            assert [await state(running, each) for each in loaded] == expected.split()
        reservation = models["third"].admission.reserve(1, 1)  # of a call in progress
        assert (await generate(running, "first")).status_code == 200
        assert [await state(running, each) for each in (*loaded, "eager")] == ["ready", "unloaded", "ready", "ready"]
        models["third"].admission.release(reservation)


async def test_a_call_waits_until_its_deadline_and_the_load_continues(start: Start, make_backend: MakeBackend) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        repository = repository_of(running)
        repository.wait_for = may_load = threading.Event()
        response = await generate(running, **{"x-request-timeout-ms": "50"})
        message = "lazy is loaded on its first use, and its load has not finished in time. Retry later."
        assert error(response) == (503, "loading", message)
        assert response.headers["retry-after"] == "1"
        assert await state(running) == "loading"
        second = generate(running)
        may_load.set()
        assert (await second).status_code == 200
        assert repository.loads == ["lazy"]


@pytest.mark.parametrize("reason", [BundleError("/secret/lazy is damaged"), MemoryError("half-way")])
async def test_a_load_that_fails_is_an_error_and_is_repeated_after_a_delay(
    start: Start,
    make_backend: MakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: Exception,
) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        repository = repository_of(running)
        repository.error = reason
        failed = (500, "internal", "lazy failed to load; the log has the reason. Retry in 30 s.")
        for call in [generate(running) for _ in range(3)]:
            assert error(await call) == failed
        assert error(await generate(running)) == failed
        assert repository.loads == ["lazy"]
        assert f"lazy is not loaded: {reason}" in caplog.text
        assert await state(running) == "failed"
        index = (await running.client.post("/v2/repository/index")).json()
        assert (index[1]["state"], index[1]["reason"]) == ("UNAVAILABLE", "failed to load; the log has the reason")
        assert (await generate(running, "eager")).status_code == 200
        assert (await running.client.get("/health/ready")).status_code == 200
        lazy_model = running.app.state.service.models["lazy"]
        monkeypatch.setattr(lazy_model, "retry_at", lazy_model.retry_at - RETRY_DELAY_S)
        assert error(await generate(running)) == failed
        assert repository.loads == ["lazy", "lazy"]
        lazy_model.retry_at -= RETRY_DELAY_S
        repository.error = None
        assert (await generate(running)).status_code == 200
        assert await state(running) == "ready"


async def test_calls_that_wait_for_a_load_are_limited(start: Start, make_backend: MakeBackend) -> None:
    async with one_eager_and_one_lazy(start, make_backend, max_waiting_sequences=2) as running:
        repository = repository_of(running)
        repository.wait_for = may_load = threading.Event()
        waiting = [generate(running) for _ in range(2)]
        await until(lambda: running.app.state.service.models["lazy"].admission.num_calls == 2)
        status, code, message = error(await generate(running))
        assert (status, code) == (429, "overloaded")
        assert message.startswith("The queue is full: 2 of 2 sequences are running or waiting")
        may_load.set()
        assert [(await call).status_code for call in waiting] == [200, 200]
        assert running.app.state.service.models["lazy"].admission.num_calls == 0


async def test_calls_that_the_manifest_excludes_do_not_load_the_model(start: Start, make_backend: MakeBackend) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        response = await running.post("/v1/classify", {"model": "lazy", "inputs": "a dog"})
        assert error(response)[:2] == (422, "unsupported_task")
        status, code, message = error(await generate(running, "other"))
        assert (status, code) == (404, "model_not_found")
        assert message == "There is no model of this name; the models are eager, lazy."
        assert repository_of(running).loads == []


async def test_every_model_may_be_lazy_and_the_default_model_is_loaded_by_calls_that_name_none(
    start: Start, make_backend: MakeBackend
) -> None:
    async with one_eager_and_one_lazy(start, make_backend, lazy_models="*") as running:
        assert (await running.get("/"))["default_model"] == "eager"
        assert await running.metric('sightline_limit{setting="max_rows"}') == FAKE_ROWS
        assert (await running.post("/v1/generate", {"inputs": "a dog"})).status_code == 200
        assert repository_of(running).loads == ["eager"]
        assert (await state(running, "eager"), await state(running, "lazy")) == ("ready", "unloaded")


PATHS: tuple[tuple[str, dict[str, Any]], ...] = read_table(__file__)


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_every_route_loads_the_model_that_it_uses(
    start: Start, make_backend: MakeBackend, path: str, body: dict[str, Any]
) -> None:
    backend = make_backend("eager", "lazy")
    eager, own = backend.manifests
    backend.manifests = eager, own.model_copy(update={"languages": Languages(sources=("xx",), targets=("yy",))})
    async with start(backend, lazy_models="lazy") as running:
        response = await running.post(path, body)
        assert response.status_code == 200, response.text
        assert repository_of(running).loads == ["lazy"]


async def test_a_classifier_is_loaded_by_the_routes_of_classifiers(start: Start, make_backend: MakeBackend) -> None:
    for path in ("/v1/classify", "/predict", "/"):
        backend = make_backend()
        sizes: dict[str, Any] = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
        backend.manifests = (fake_classifier_manifest("judge", **sizes),)
        async with start(backend, lazy_models="judge") as running:
            assert (await running.post(path, {"inputs": "a dog"})).status_code == 200
            assert repository_of(running).loads == ["judge"]


async def test_a_lazy_model_can_be_loaded_and_unloaded_by_request(start: Start, make_backend: MakeBackend) -> None:
    async with one_eager_and_one_lazy(start, make_backend, model_control="explicit") as running:
        repository = repository_of(running)
        assert (await running.post("/v2/repository/models/lazy/load", {})).json()["state"] == "READY"
        assert (await generate(running)).status_code == 200
        assert repository.loads == ["lazy"]
        assert (await running.post("/v2/repository/models/lazy/unload", {})).status_code == 200
        assert error(await generate(running))[1] == "model_not_found"
        assert repository.loads == ["lazy"]


async def test_a_lazy_model_that_is_unloaded_before_its_first_use_is_not_found(
    start: Start, make_backend: MakeBackend
) -> None:
    async with one_eager_and_one_lazy(start, make_backend, model_control="explicit") as running:
        response = await running.post("/v2/repository/models/lazy/unload", {})
        assert response.json() == {"name": "lazy", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        assert [one["id"] for one in (await running.get("/v1/models"))["data"]] == ["eager"]
        assert error(await generate(running))[1] == "model_not_found"
        assert repository_of(running).loads == []


async def test_a_first_use_during_a_load_by_request_waits_for_it(start: Start, make_backend: MakeBackend) -> None:
    async with one_eager_and_one_lazy(start, make_backend, model_control="explicit") as running:
        repository = repository_of(running)
        repository.wait_for = may_load = threading.Event()
        load = asyncio.create_task(running.post("/v2/repository/models/lazy/load", {}))
        await until(lambda: bool(repository.loads))
        first_use = generate(running)
        await until(lambda: running.app.state.service.models["lazy"].admission.num_calls == 1)
        may_load.set()
        assert ((await load).status_code, (await first_use).status_code) == (200, 200)
        assert repository.loads == ["lazy"]


async def test_a_bundle_that_changed_before_its_first_use_is_checked_again(
    start: Start, make_backend: MakeBackend
) -> None:
    async with one_eager_and_one_lazy(start, make_backend) as running:
        repository = repository_of(running)
        sizes: dict[str, Any] = {"vocabulary": len(running.backend.tokenizer), "max_source_tokens": 64}
        repository.manifests["lazy"] = fake_classifier_manifest("lazy", **sizes)
        assert error(await generate(running))[:2] == (422, "unsupported_task")
        assert (await running.post("/v1/classify", {"model": "lazy", "inputs": "a dog"})).status_code == 200


async def test_the_end_of_the_service_ends_a_load(start: Start, make_backend: MakeBackend) -> None:
    may_load = threading.Event()
    async with one_eager_and_one_lazy(start, make_backend) as running:
        repository = repository_of(running)
        repository.wait_for = may_load
        call = generate(running)
        await until(lambda: bool(repository.loads))
        lazy_model = running.app.state.service.models["lazy"]
        await running.app.state.service.stop()
        assert lazy_model.load is None
        assert error(await call)[:2] == (503, "draining")
    may_load.set()


async def test_an_endless_load_holds_up_no_other_model(start: Start, make_backend: MakeBackend) -> None:
    release = threading.Event()
    async with start(make_backend("endless", "other"), lazy_models="*") as running:
        repository = repository_of(running)
        repository.wait_for = release
        waiting = generate(running, "endless", **{"X-Request-Timeout-Ms": "200"})
        await until(lambda: repository.loads == ["endless"])
        repository.wait_for = None
        assert (await generate(running, "other")).status_code == 200
        assert error(await waiting)[:2] == (503, "loading")
        release.set()
