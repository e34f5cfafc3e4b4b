"""The setting `max_inputs` limits the sequences of a call on every route, within the limits of the
queue.
"""

import asyncio
import threading
from typing import Any

import pytest

from tests.service.conftest import MakeBackend, Start, classifying, reading_examples, until
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio

CALLS: list[tuple[str, str, dict[str, Any]]] = read_table(__file__)


def body_of(path: str, field: str, options: dict[str, Any], count: int) -> dict[str, Any]:
    values: list[Any] = [[5]] * count if field == "ids" else ["x"] * count
    targets = {"targets": values} if path == "/v1/score" else {}
    model = {} if path in ("/translate", "/embed") else {"model": "fake"}
    return {field: values, **model, **targets, **options}


def error_text(running_response: Any) -> str:
    error = running_response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(("path", "field", "options"), CALLS)
async def test_a_call_has_as_many_inputs_as_the_setting_allows(
    start: Start, make_backend: MakeBackend, path: str, field: str, options: dict[str, Any]
) -> None:
    async with start(classifying(reading_examples(make_backend())), max_inputs=3) as running:
        assert (await running.post(path, body_of(path, field, options, 3))).status_code == 200
        response = await running.post(path, body_of(path, field, options, 4))
        assert response.status_code in (400, 422)  # OpenAI's API, and the others
        assert error_text(response) == f"{field} must have at most 3 entries (SIGHTLINE_MAX_INPUTS), got 4."


async def test_the_default_is_2048_which_is_also_the_maximum(start: Start) -> None:
    async with start() as running:
        vectors = (await running.post("/v1/encode", {"inputs": ["x"] * 2047 + ["a dog"]})).json()["embeddings"]
        alone = (await running.post("/v1/encode", {"inputs": ["x", "a dog"]})).json()["embeddings"]
        assert (len(vectors), vectors[0], vectors[-1]) == (2048, *alone)
        assert await running.metric('sightline_limit{setting="max_inputs"}') == 2048


async def test_a_call_with_256_inputs_has_the_outputs_of_each_alone(start: Start) -> None:
    inputs = [f"a dog {index}" for index in range(256)]
    async with start() as running:
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 3}}
        outputs = (await running.post("/v1/generate", body)).json()["outputs"]
        assert [output["index"] for output in outputs] == list(range(256))
        for index in (0, 100, 255):
            alone = await running.post("/v1/generate", {**body, "inputs": inputs[index]})
            assert alone.json()["outputs"] == [{**outputs[index], "index": 0}]


async def test_a_call_with_many_tokens_leaves_space_for_small_and_other_large_ones(
    start: Start, make_backend: MakeBackend
) -> None:
    """Regression: one call of 1 MB made all others of its model fail for half a minute."""
    async with start(make_backend(step_s=0.01), max_waiting_tokens=600) as running:
        large = asyncio.create_task(running.post("/v1/encode", {"inputs": ["a dog x"] * 2048}))
        admission = running.app.state.service.models["fake"].admission
        await until(lambda: admission.num_tokens > 0)
        assert admission.num_tokens <= 600 // 4
        calls = [running.post("/v1/encode", {"inputs": ["a dog x"] * count}) for count in (1, 1, 1, 64)]
        responses = [*await asyncio.gather(*calls), await large]
        assert [response.status_code for response in responses] == [200] * 5


async def test_samples_of_all_inputs_count_together(start: Start) -> None:
    parameters = {"do_sample": True, "num_return_sequences": 8, "max_new_tokens": 1}
    body = {"inputs": ["x"] * 2, "parameters": parameters}
    async with start(max_inputs=16) as running:
        assert (await running.post("/v1/generate", body)).status_code == 200
        response = await running.post("/v1/generate", {**body, "inputs": ["x"] * 3})
        assert "at most 16 sequences (SIGHTLINE_MAX_INPUTS), got 24" in error_text(response)


async def test_a_large_call_is_still_subject_to_the_queue_and_its_token_limit(
    start: Start, make_backend: MakeBackend
) -> None:
    hang = threading.Event()
    limits = {"max_waiting_sequences": 512, "max_waiting_tokens": 1}
    async with start(make_backend(faults=Faults(hang=hang)), **limits) as running:
        first = asyncio.ensure_future(
            running.post("/v1/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
        )
        await until(lambda: running.backend.num_busy == 1)
        response = await running.post("/v1/encode", {"inputs": ["a dog x"] * 256})
        assert response.status_code == 429
        assert "256 times SIGHTLINE_MAX_WAITING_SEQUENCES" in error_text(response)
        running.app.state.service.models["fake"].admission.max_sequences = 255  # a slice of 128 and the first call
        response = await running.post("/v1/encode", {"inputs": ["x"] * 256})
        assert response.status_code == 429
        assert "SIGHTLINE_MAX_WAITING_SEQUENCES" in error_text(response)
        hang.set()
        assert (await first).status_code == 200
