"""Routes of Text Generation Inference, in process, over the fake model: fields, errors, streams."""

import asyncio
import threading
from typing import Any

import pytest

from tests.service.conftest import MakeBackend, Running, Start, classifying, generate, until
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio


async def text_generation(running: Running, inputs: str, **parameters: Any) -> Any:
    return await running.result("/generate", {"inputs": inputs, "parameters": parameters})


async def stream(running: Running, inputs: str, path: str = "/generate_stream", **parameters: Any) -> list[Any]:
    body = {"inputs": inputs, "parameters": parameters}
    whole = body if path == "/generate_stream" else body | {"stream": True}
    return await running.events(path, whole, has_end_mark=False)


async def test_the_text_equals_that_of_generate(running: Running) -> None:
    own = (await generate(running, "a dog", max_new_tokens=20))["outputs"][0]
    assert await text_generation(running, "a dog", max_new_tokens=20) == {"generated_text": own["text"]}
    bare = (await running.post("/generate", {"inputs": "a dog"})).json()
    assert bare == {"generated_text": (await generate(running, "a dog"))["outputs"][0]["text"]}


async def test_details_have_the_tokens_and_the_finish_reason(running: Running) -> None:
    own = (await generate(running, "a dog"))["outputs"][0]
    details = (await text_generation(running, "a dog", details=True))["details"]
    assert details == {
        "finish_reason": "eos_token",
        "generated_tokens": len(own["tokens"]),
        "seed": None,
        "prefill": [],
        "tokens": [token | {"special": token["text"] == "</s>"} for token in own["tokens"]],
    }
    assert details["tokens"][-1]["special"]


async def test_top_n_tokens_are_the_alternatives_of_each_token(running: Running) -> None:
    own = (await generate(running, "a dog", top_logprobs=3))["outputs"][0]
    details = (await text_generation(running, "a dog", details=True, top_n_tokens=3))["details"]
    for token, top in zip(own["tokens"], details["top_tokens"], strict=True):
        assert top == [one | {"special": one["text"] in ("</s>", "<s>", "<pad>")} for one in token["alternatives"]]
    assert "top_tokens" not in (await text_generation(running, "a dog", details=True, top_n_tokens=0))["details"]


async def test_nulls_and_default_values_change_nothing(running: Running) -> None:
    harmless: dict[str, Any] = read_table(__file__)
    plain = await text_generation(running, "a dog")
    assert await text_generation(running, "a dog", **harmless) == plain
    nulls = {"inputs": "a dog", "parameters": dict.fromkeys(harmless), "stream": None}
    assert (await running.post("/generate", nulls)).json() == plain
    assert (await running.post("/generate", {"inputs": "a dog", "parameters": None})).json() == plain


@pytest.mark.parametrize(
    "sent",
    [
        {"do_sample": True, "seed": 5},
        {"temperature": 2.0, "seed": 5},
        {"top_k": 3, "seed": 5},
        {"top_p": 0.9, "seed": 5},
        {"do_sample": False, "temperature": 2.0, "top_k": 40, "top_p": 0.95, "seed": 5},
    ],
)
async def test_sampling_parameters_enable_sampling(running: Running, sent: dict[str, Any]) -> None:
    options = {"details": True, "max_new_tokens": 12}
    drawn = await text_generation(running, "a dog", **sent, **options)
    own = (await generate(running, "a dog", **sent | {"do_sample": True}, max_new_tokens=12))["outputs"][0]
    assert (drawn["generated_text"], drawn["details"]["seed"]) == (own["text"], 5)


async def test_a_returned_seed_reproduces_the_text(running: Running) -> None:
    first = await text_generation(running, "a dog", do_sample=True, details=True)
    seed = first["details"]["seed"]
    assert await text_generation(running, "a dog", do_sample=True, details=True, seed=seed) == first


async def test_a_stop_string_ends_the_text_and_is_removed_from_it(running: Running) -> None:
    own = (await generate(running, "two men", repetition_penalty=1.5))["outputs"][0]["text"]
    stop = own[2:4]
    response = await text_generation(running, "two men", repetition_penalty=1.5, stop=[stop], details=True)
    assert response["generated_text"] == own[: own.index(stop)]
    assert response["details"]["finish_reason"] == "stop_sequence"
    short = await text_generation(running, "two men", max_new_tokens=2, details=True)
    assert (short["details"]["finish_reason"], short["details"]["generated_tokens"]) == ("length", 2)


@pytest.mark.usefixtures("arrivals")
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"details": True},
        {"details": True, "top_n_tokens": 2, "max_new_tokens": 1},
        {"details": True, "do_sample": True, "temperature": 1.5, "seed": 3},
        {"details": True, "stop": ["a", "q"], "max_new_tokens": 30},
    ],
)
async def test_the_pieces_of_a_stream_form_the_whole_response(
    running: Running, path: str, parameters: dict[str, Any]
) -> None:
    whole = await text_generation(running, "naïve 🙂", **parameters | {"details": True})
    details = whole["details"]
    *events, last = frames = await stream(running, "naïve 🙂", path, **parameters)
    assert [one["index"] for one in frames] == list(range(1, len(frames) + 1))
    assert "".join(one["token"]["text"] for one in frames) == whole["generated_text"] == last["generated_text"]
    assert all(one["generated_text"] is None and one["details"] is None for one in events)
    for one, token in zip(frames, details["tokens"], strict=True):
        assert one["token"] | {"text": ""} == token | {"text": ""}
    if "top_n_tokens" in parameters:
        assert [one["top_tokens"] for one in frames] == details["top_tokens"]
    else:
        assert all("top_tokens" not in one for one in frames)
    if parameters:
        usage = (await generate(running, "naïve 🙂"))["usage"]
        ended = {name: details[name] for name in ("finish_reason", "generated_tokens", "seed")}
        assert last["details"] == ended | {"input_length": usage["input_tokens"]}
    else:
        assert last["details"] is None


async def test_a_causal_model_continues_the_prompt(causal: Running) -> None:
    blanks = set()
    for text in ("a dog", "eb", "Hund x"):
        own = (await generate(causal, text, max_new_tokens=6))["outputs"][0]
        blank = " " if own["tokens"][0]["text"].startswith(" ") else ""
        blanks.add(blank)
        assert await text_generation(causal, text, max_new_tokens=6) == {"generated_text": blank + own["text"]}
        full = await text_generation(causal, text, max_new_tokens=6, return_full_text=True)
        assert full == {"generated_text": text + blank + own["text"]}
        frames = await stream(causal, text, max_new_tokens=6, return_full_text=True)
        assert "".join(one["token"]["text"] for one in frames) == blank + own["text"]
        assert frames[-1]["generated_text"] == text + blank + own["text"]
    assert blanks == {"", " "}


async def test_the_url_can_name_another_model_than_the_default(start: Start, make_backend: MakeBackend) -> None:
    async with start(classifying(make_backend()), default_model="judge") as running:
        own = await running.result("/v1/generate", {"model": "fake", "inputs": "a dog"})
        named = await running.result("/generate?model=fake", {"inputs": "a dog"})
        assert named == {"generated_text": own["outputs"][0]["text"]}


async def test_errors_have_the_statuses_of_the_service_and_the_types_of_tgi(
    start: Start, make_backend: MakeBackend
) -> None:
    hang, loading = threading.Event(), threading.Event()
    async with start(make_backend(wait_for=loading)) as running:
        response = await running.post("/generate", {"inputs": "x"})
        assert (response.status_code, response.json()["error_type"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        loading.set()
    backend = make_backend(faults=Faults(hang=hang))
    async with start(backend, max_rows=1, max_waiting_sequences=1, max_body_bytes=100) as running:
        late = [
            asyncio.ensure_future(running.post("/generate", {"inputs": "x"}, **{"x-request-timeout-ms": "500"}))
            for _ in range(2)
        ]
        await until(lambda: running.backend.num_busy == 2)
        full = await running.post("/generate", {"inputs": "x"})
        assert (full.status_code, full.json()["error_type"], full.headers["retry-after"]) == (429, "overloaded", "1")
        assert (await late[0]).status_code == 504
        assert (await late[0]).json()["error_type"] == "incomplete_generation"
        hang.set()
        large = await running.post("/generate", {"inputs": "x" * 100})
        assert (large.status_code, large.json()["error_type"]) == (413, "validation")
        plain = await running.post("/generate", {"inputs": "x"}, **{"content-type": "text/plain"})
        assert (plain.status_code, plain.json()["error_type"]) == (415, "validation")
        assert (await running.client.get("/generate")).json()["error_type"] == "validation"
    async with start(make_backend(faults=Faults(step_calls=frozenset({1})))) as running:
        response = await running.post("/generate", {"inputs": "x"})
        assert (response.status_code, response.json()["error_type"]) == (500, "generation")


async def test_an_error_in_a_stream_is_its_last_event(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend(faults=Faults(step_calls=frozenset({4})))) as running:
        frames = await stream(running, "two men", repetition_penalty=1.5)
        assert len(frames) > 1
        assert frames[0]["token"]["text"]
        assert set(frames[-1]) == {"error", "error_type"}
        assert frames[-1]["error_type"] == "generation"
