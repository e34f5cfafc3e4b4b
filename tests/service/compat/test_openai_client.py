"""The openai package, unmodified, over real sockets: results, retries, errors, broken streams."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Serve, Wire, changed, chat_backend, wait_until
from tests.support.fake_runner import Faults

PROMPTS = ["a dog", "Hund"]


@pytest.fixture(scope="module")
def chatting(serve: Serve, tokenizer: TextTokenizer) -> Iterator[Wire]:
    """A service with a decoder-only chat model, `fake`, and an encoder-decoder, `mute`."""
    with serve(chat_backend(tokenizer)) as wire:
        yield wire


@pytest.fixture
def client(chatting: Wire) -> Iterator[OpenAI]:
    with client_of(chatting) as client:
        yield client


def client_of(wire: Wire, max_retries: int = 2) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{wire.port}/v1", api_key="none", max_retries=max_retries, timeout=20)


def test_a_completion_equals_the_text_of_generate(chatting: Wire, client: OpenAI) -> None:
    completion = client.completions.create(model="mute", prompt=PROMPTS, max_tokens=16, logprobs=2)
    own = chatting.result("/v1/generate", {"model": "mute", "inputs": PROMPTS, "parameters": {"max_new_tokens": 16}})
    assert [choice.text for choice in completion.choices] == [output["text"] for output in own["outputs"]]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "stop"]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == tuple(own["usage"].values())
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [token["text"] for token in own["outputs"][0]["tokens"]]
    assert completion.model == "mute"


def test_beams_and_samples_give_n_choices(client: OpenAI) -> None:
    beams = client.completions.create(model="mute", prompt="a dog", n=2, max_tokens=12, extra_body={"num_beams": 4})
    assert [choice.index for choice in beams.choices] == [0, 1]
    drawn = [
        client.completions.create(model="mute", prompt="a dog", n=3, temperature=1.2, seed=7, max_tokens=12)
        for _ in range(2)
    ]
    assert drawn[0].choices == drawn[1].choices
    assert len({choice.text for choice in drawn[0].choices}) == 3


def test_a_stream_forms_the_whole_text_and_every_event_has_its_usage_on_request(client: OpenAI) -> None:
    # Tools that measure load fix the length so.
    sent = {"ignore_eos": True, "min_tokens": 20, "stop": None}
    whole = client.completions.create(model="mute", prompt="a dog", max_tokens=20, extra_body=sent)
    options = {"include_usage": True, "continuous_usage_stats": True}
    extra = sent | {"stream_options": options}
    first, *events, last = client.completions.create(
        model="mute", prompt="a dog", max_tokens=20, stream=True, extra_body=extra
    )
    assert "".join(event.choices[0].text for event in (first, *events)) == whole.choices[0].text
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert (last.choices, last.usage) == ([], whole.usage)
    assert last.usage is not None and last.usage.completion_tokens == 20
    assert first.usage is not None and first.usage.completion_tokens == 1


@pytest.mark.anyio
async def test_the_asynchronous_client_gives_the_same(chatting: Wire, client: OpenAI) -> None:
    whole = client.completions.create(model="mute", prompt="a dog", max_tokens=16)
    async with AsyncOpenAI(base_url=client.base_url, api_key="none") as other:
        same = await other.completions.create(model="mute", prompt="a dog", max_tokens=16)
        assert same.choices == whole.choices
        stream = await other.completions.create(model="mute", prompt="a dog", max_tokens=16, stream=True)
        assert "".join([event.choices[0].text async for event in stream]) == whole.choices[0].text


def test_embeddings_come_as_base64_by_default_and_as_floats(chatting: Wire, client: OpenAI) -> None:
    packed = client.embeddings.create(model="mute", input=PROMPTS)
    plain = client.embeddings.create(model="mute", input=PROMPTS, encoding_format="float")
    own = chatting.result("/v1/encode", {"model": "mute", "inputs": PROMPTS, "normalize": True})
    for mine, same, expected in zip(packed.data, plain.data, own["embeddings"], strict=True):
        assert mine.embedding == pytest.approx(expected, rel=1e-6)
        assert same.embedding == expected
    assert packed.usage.prompt_tokens == own["usage"]["input_tokens"]


def test_models_are_listed_and_shown(client: OpenAI) -> None:
    first, second = client.models.list()
    assert (first.id, first.object, first.owned_by, second.id) == ("fake", "model", "sightline", "mute")
    assert client.models.retrieve("fake").created == first.created


def test_a_chat_model_continues_the_dialogue_and_echo_returns_a_prompt(chatting: Wire, client: OpenAI) -> None:
    said: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "y"},
        {"role": "user", "content": [{"type": "text", "text": "a dog"}]},
    ]
    reply = client.chat.completions.create(model="fake", messages=said, max_tokens=9, logprobs=True)
    own = chatting.result(
        "/v1/generate", {"model": "fake", "inputs": "S: y\nU: a dog\nB:", "parameters": {"max_new_tokens": 9}}
    )
    content = reply.choices[0].message.content
    assert content == own["outputs"][0]["text"]
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content
    chunks = list(client.chat.completions.create(model="fake", messages=said, max_tokens=9, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    with client.chat.completions.stream(model="fake", messages=said, max_tokens=9) as events:
        assert events.get_final_completion().choices[0].message.content == content
    said += [{"role": "assistant", "content": content}, {"role": "user", "content": "x"}]
    assert client.chat.completions.create(model="fake", messages=said, max_tokens=9).choices[0].message.content
    plain = client.completions.create(model="fake", prompt="a dog", max_tokens=9).choices[0].text
    echoed = client.completions.create(model="fake", prompt="a dog", max_tokens=9, echo=True).choices[0].text
    assert echoed == "a dog" + plain
    with pytest.raises(BadRequestError, match="has no chat template"):
        client.chat.completions.create(model="mute", messages=said)


def test_a_response_is_the_reply_whole_and_streamed_and_can_be_sent_back(client: OpenAI) -> None:
    said: Any = [{"role": "user", "content": "a dog"}]
    cut: dict[str, Any] = {"model": "fake", "extra_body": {"ignore_eos": True}}
    reply = client.chat.completions.create(messages=said, max_tokens=9, **cut).choices[0].message.content
    whole = client.responses.create(input="a dog", max_output_tokens=9, **cut)
    assert (whole.output_text, whole.status) == (reply, "incomplete")
    with client.responses.stream(model="fake", input=said) as events:
        final: Any = events.get_final_response()
    assert final.output_text == client.responses.create(model="fake", input=said).output_text
    said += [*final.output, {"role": "user", "content": "x"}]
    assert client.responses.create(model="fake", input=said).status == "completed"
    with pytest.raises(BadRequestError, match="nothing is stored"):
        client.responses.create(model="fake", input="x", previous_response_id=final.id)


def num_rejected_calls(wire: Wire) -> int:
    """Return the number of completions that got 429."""
    _, text = wire.get("/metrics")
    prefix = b'sightline_http_requests_total{route="/v1/completions",status="429"} '
    return sum(int(float(line.removeprefix(prefix))) for line in text.splitlines() if line.startswith(prefix))


def test_a_full_queue_is_retried_after_the_time_of_retry_after(serve: Serve, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    backend = make_backend(faults=Faults(hang=hang))
    with serve(backend, max_rows=1, max_waiting_sequences=1) as wire, client_of(wire) as client:
        others = [threading.Thread(target=wire.post, args=("/v1/generate", {"inputs": "x"})) for _ in range(2)]
        for other in others:
            other.start()
        wait_until(lambda: backend.num_busy == 2)

        def release() -> None:
            wait_until(lambda: num_rejected_calls(wire) == 1)
            hang.set()

        releasing = threading.Thread(target=release)
        releasing.start()
        started = time.monotonic()
        completion = client.completions.create(model="fake", prompt="a dog")
        assert completion.choices[0].text
        assert time.monotonic() - started >= 1  # Retry-After; without it the package waits half a second at the most
        for thread in (*others, releasing):
            thread.join()


def test_a_loading_service_is_retried(serve: Serve, make_backend: MakeBackend) -> None:
    loading = threading.Event()
    with serve(make_backend(wait_for=loading)) as wire:
        with client_of(wire, max_retries=0) as impatient, pytest.raises(InternalServerError) as caught:
            impatient.completions.create(model="fake", prompt="a dog")
        assert (caught.value.status_code, caught.value.code) == (503, "loading")
        assert caught.value.response.headers["retry-after"] == "1"
        loading.set()
        with client_of(wire) as client:
            assert client.completions.create(model="fake", prompt="a dog").choices[0].finish_reason == "stop"


def test_warnings_are_extra_fields_of_a_completion(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(changed(make_backend(), training_unit="sentence")) as wire, client_of(wire) as client:
        prompt: dict[str, Any] = {"model": "fake", "prompt": "A dog. A man.", "extra_body": {"target_prefix": "Ein"}}
        whole = client.completions.create(**prompt)
        assert whole.model_extra is not None
        assert [one["param"] for one in whole.model_extra["warnings"]] == ["prompt"]
        events = list(client.completions.create(**prompt, stream=True))
        found = [event.model_extra["warnings"] for event in events if event.model_extra]
        assert found == [whole.model_extra["warnings"]]
        assert not client.completions.create(model="fake", prompt="A dog. A man.").model_extra


def test_an_invalid_request_raises_its_own_class_of_error_that_names_the_field(serve: Serve) -> None:
    with serve() as wire, client_of(wire) as client:
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="fake", prompt="a dog", best_of=2)
        assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="fake", prompt="a dog", max_tokens=10_000)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "invalid_parameter")
        assert "max_tokens must be at most 64 for fake, got 10000." in caught.value.message
        with pytest.raises(NotFoundError) as missing:
            client.completions.create(model="gpt", prompt="a dog")
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        with pytest.raises(BadRequestError) as malformed:
            client.post(
                "/completions", content=b"{", options={"headers": {"content-type": "application/json"}}, cast_to=object
            )
        assert malformed.value.code == "malformed_json"


def test_a_broken_stream_raises_after_the_received_events(serve: Serve, make_backend: MakeBackend) -> None:
    with (
        serve(make_backend(faults=Faults(step_calls=frozenset({4})))) as wire,
        client_of(wire) as client,
        client.completions.create(model="fake", prompt="a dog", stream=True, extra_body={"min_tokens": 20}) as stream,
    ):
        assert next(stream).choices[0].finish_reason is None
        with pytest.raises(APIError) as caught:
            list(stream)
        assert caught.value.code == "internal"
