"""Models are loaded and unloaded by request while the service runs."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from sightline.base.bundle import BundleError
from tests.service.conftest import MakeBackend, Running, Start, generate, until
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio
LONG = {"min_new_tokens": 60, "max_new_tokens": 60}


@contextlib.asynccontextmanager
async def two_models(start: Start, make_backend: MakeBackend, **settings: Any) -> AsyncIterator[Running]:
    backend = make_backend("one", "two", step_s=settings.pop("step_s", 0.0))
    async with start(backend, model_control="explicit", **settings) as running:
        yield running


async def change(running: Running, verb: str, name: str, body: Any = None) -> httpx.Response:
    return await running.post(f"/v2/repository/models/{name}/{verb}", {} if body is None else body)


async def states(running: Running) -> dict[str, str]:
    response = await running.client.post("/v2/repository/index")
    return {one["name"]: one["state"] for one in response.json()}


async def names(running: Running) -> list[str]:
    return [one["id"] for one in (await running.client.get("/v1/models")).json()["data"]]


def generate_with(running: Running, model: str, **parameters: Any) -> Any:
    return running.post("/v1/generate", {"model": model, "inputs": "a dog", "parameters": parameters})


async def test_an_unloaded_model_is_not_found_until_it_is_loaded_again(start: Start, make_backend: MakeBackend) -> None:
    async with two_models(start, make_backend) as running:
        expected = (await generate_with(running, "two")).json()["outputs"]
        response = await change(running, "unload", "two", {"parameters": {"unload_dependents": False}})
        assert response.status_code == 200
        assert response.json() == {"name": "two", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        assert await states(running) == {"one": "READY", "two": "UNAVAILABLE"}
        assert (await running.post("/v2/repository/index", {"ready": True})).json() == [
            {"name": "one", "version": "1", "state": "READY", "reason": ""}
        ]
        assert await names(running) == ["one"]
        failed = await generate_with(running, "two")
        assert (failed.status_code, failed.json()["error"]["code"]) == (404, "model_not_found")
        assert (await running.client.get("/v2/models/two/ready")).status_code == 404
        assert (await running.client.get("/health/ready")).status_code == 200
        assert (await change(running, "unload", "two")).status_code == 200  # does nothing
        response = await change(running, "load", "two")
        assert response.json() == {"name": "two", "version": "1", "state": "READY", "reason": ""}
        assert await names(running) == ["one", "two"]
        assert (await generate_with(running, "two")).json()["outputs"] == expected


async def test_all_models_can_be_unloaded_and_the_default_model_is_named_in_the_error(
    start: Start, make_backend: MakeBackend
) -> None:
    async with two_models(start, make_backend) as running:
        for name, left in (("one", "the models are two"), ("two", "no model is loaded")):
            assert (await change(running, "unload", name)).status_code == 200
            failed = await running.post("/v1/generate", {"inputs": "x"})
            assert failed.json()["error"]["message"] == f"The default model one is not loaded; {left}."
        assert await names(running) == []
        assert (await change(running, "load", "one")).status_code == 200
        assert (await running.post("/v1/generate", {"inputs": "x"})).status_code == 200


async def test_a_model_that_was_not_there_at_the_start_can_be_loaded(start: Start, make_backend: MakeBackend) -> None:
    async with two_models(start, make_backend) as running:
        repository = running.backend.repository
        repository.manifests["new"] = repository.manifests["one"].model_copy(update={"name": "new"})
        assert await states(running) == {"new": "UNAVAILABLE", "one": "READY", "two": "READY"}
        assert (await change(running, "load", "new")).status_code == 200
        assert (await generate_with(running, "new")).status_code == 200
        assert await running.metric('sightline_model_max_state_bytes{model_name="new"}') > 0


async def test_a_loaded_model_is_loaded_again_only_if_its_bundle_has_changed(
    start: Start, make_backend: MakeBackend
) -> None:
    async with two_models(start, make_backend) as running:
        repository = running.backend.repository
        assert (await change(running, "load", "one")).status_code == 200
        assert repository.loads == []
        repository.manifests["one"] = repository.manifests["one"].model_copy(update={"description": "newer"})
        assert (await change(running, "load", "one")).status_code == 200
        assert repository.loads == ["one"]
        assert (await running.client.get("/v1/models/one")).json()["description"] == "newer"
        assert (await generate_with(running, "one")).status_code == 200


@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e", "..%2fone", "%2ftmp", "http:%2f%2fhost%2fone", "%ff"])
@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_a_name_is_never_a_path_or_a_url(start: Start, make_backend: MakeBackend, verb: str, name: str) -> None:
    async with two_models(start, make_backend) as running:
        response = await change(running, verb, name)
        assert (response.status_code, list(response.json())) == (404, ["error"])
        assert running.backend.repository.loads == []


@pytest.mark.parametrize("body", read_table(__file__))
async def test_paths_and_configurations_are_rejected(start: Start, make_backend: MakeBackend, body: Any) -> None:
    async with two_models(start, make_backend) as running:
        for verb in ("load", "unload"):
            response = await change(running, verb, "one", body)
            assert (response.status_code, list(response.json())) == (422, ["error"])
        assert await states(running) == {"one": "READY", "two": "READY"}
        assert running.backend.repository.loads == []


@pytest.mark.parametrize("error", [BundleError("/secret/one is damaged"), MemoryError("half-way")])
async def test_a_load_that_fails_leaves_the_old_state(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async with two_models(start, make_backend) as running:
        repository = running.backend.repository
        repository.manifests["one"] = repository.manifests["one"].model_copy(update={"description": "newer"})
        repository.manifests["new"] = repository.manifests["two"].model_copy(update={"name": "new"})
        repository.error = error
        for name in ("one", "new", "two"):  # the manifest of the last one has not changed
            response = await change(running, "load", name)
            assert response.status_code == 500
            assert response.json() == {"error": f"{name} failed to load; the log has the reason."}
            assert f"{name} is not loaded: {error}" in caplog.text
        assert await states(running) == {"new": "UNAVAILABLE", "one": "READY", "two": "READY"}
        assert (await generate_with(running, "one")).status_code == 200
        assert (await running.client.get("/v1/models/one")).json()["description"] != "newer"
        repository.error = None
        assert (await change(running, "load", "new")).status_code == 200


async def test_other_calls_are_served_during_a_load_and_a_second_load_waits_for_the_first(
    start: Start, make_backend: MakeBackend
) -> None:
    async with two_models(start, make_backend) as running:
        repository = running.backend.repository
        assert (await change(running, "unload", "two")).status_code == 200
        repository.wait_for = may_load = threading.Event()
        loads = [asyncio.create_task(change(running, "load", "two")) for _ in range(2)]
        await until(lambda: bool(repository.loads))
        assert (await generate_with(running, "one")).status_code == 200
        assert (await generate_with(running, "two")).status_code == 404
        assert repository.loads == ["two"]
        may_load.set()
        assert [(await load).status_code for load in loads] == [200, 200]
        assert repository.loads == ["two"], "the second load finds the model loaded"
        assert (await generate_with(running, "two")).status_code == 200


async def test_a_stream_ends_normally_while_its_model_is_unloaded(start: Start, make_backend: MakeBackend) -> None:
    async with two_models(start, make_backend, step_s=0.002) as running:
        call = asyncio.create_task(
            running.post("/v1/generate", {"model": "two", "inputs": "a dog", "stream": True, "parameters": LONG})
        )
        await until(lambda: running.backend.num_busy > 0)
        unload = asyncio.create_task(change(running, "unload", "two"))
        await until(lambda: "two" not in running.app.state.service.models)
        assert (await generate_with(running, "two")).status_code == 404
        assert not call.done() and not unload.done()
        stream = await call
        assert stream.status_code == 200 and "error" not in stream.text
        assert stream.text.count('"token"') >= 60
        assert (await unload).status_code == 200


async def test_calls_that_outlast_the_timeout_fail_when_their_model_is_unloaded(
    start: Start, make_backend: MakeBackend
) -> None:
    async with two_models(start, make_backend, step_s=0.05, shutdown_timeout_s=0.1) as running:
        call = asyncio.create_task(generate_with(running, "two", **LONG))
        await until(lambda: running.backend.num_busy > 0)
        assert (await change(running, "unload", "two")).status_code == 200
        failed = await call
        assert (failed.status_code, failed.json()["error"]["code"]) == (404, "model_not_found")
        assert await generate(running, "Hund", max_new_tokens=2)  # the default model, on the same thread


async def test_a_changed_model_replaces_the_old_one_after_its_calls(start: Start, make_backend: MakeBackend) -> None:
    async with two_models(start, make_backend, step_s=0.002) as running:
        repository = running.backend.repository
        repository.manifests["two"] = repository.manifests["two"].model_copy(update={"description": "newer"})
        call = asyncio.create_task(generate_with(running, "two", **LONG))
        await until(lambda: running.backend.num_busy > 0)
        load = asyncio.create_task(change(running, "load", "two"))
        await until(lambda: "two" not in running.app.state.service.models)
        waiting = await generate_with(running, "two")
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "loading")
        assert (await call).status_code == 200
        assert (await load).status_code == 200
        assert (await generate_with(running, "two")).status_code == 200


async def test_an_unloaded_engine_is_freed_and_its_gauges_are_zero(start: Start, make_backend: MakeBackend) -> None:
    async with two_models(start, make_backend) as running:
        for name in ("one", "two"):
            assert (await generate_with(running, name)).status_code == 200
        engine = weakref.ref(running.backend.engines.pop())
        running.backend.runners.pop()
        gc.disable()  # nothing may depend on the garbage collector, because loaded objects are frozen
        try:
            assert (await change(running, "unload", "two")).status_code == 200
            assert engine() is None
        finally:
            gc.enable()
        for gauge in ("model_weight_bytes", "model_max_state_bytes", "num_requests_running"):
            assert await running.metric(f'sightline_{gauge}{{model_name="two"}}') == 0
        assert await running.metric('sightline_model_max_state_bytes{model_name="one"}') > 0
