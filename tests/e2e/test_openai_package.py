"""The openai package, unmodified, against the service with a real model."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from lab.bench.server import RunningServer, serving
from tests.e2e.asking import post

PROMPT = "Two girls are playing."


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with serving(bundle.parent, workers=1) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture
async def async_client(server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def test_a_completion_equals_the_text_of_generate(server: RunningServer, client: OpenAI) -> None:
    completion = client.completions.create(model="toy", prompt=[PROMPT, "A man sleeps."], max_tokens=16, logprobs=2)
    own = post(server, "/v1/generate", {"inputs": [PROMPT, "A man sleeps."], "parameters": {"max_new_tokens": 16}})
    assert [choice.text for choice in completion.choices] == [output["text"] for output in own["outputs"]]
    assert {choice.finish_reason for choice in completion.choices} <= {"stop", "length"}
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == own["usage"]["input_tokens"]
    assert completion.usage.completion_tokens == own["usage"]["output_tokens"]
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.tokens == [token["text"] for token in own["outputs"][0]["tokens"]]
    assert completion.model == "toy"


def test_beams_and_samples_give_n_choices(client: OpenAI) -> None:
    beams = client.completions.create(model="toy", prompt=PROMPT, n=2, max_tokens=12, extra_body={"num_beams": 4})
    assert [choice.index for choice in beams.choices] == [0, 1]
    drawn = [
        client.completions.create(model="toy", prompt=PROMPT, n=3, temperature=1.2, seed=7, max_tokens=12)
        for _ in range(2)
    ]
    assert drawn[0].choices == drawn[1].choices
    assert len({choice.text for choice in drawn[0].choices}) == 3


def test_a_stream_forms_the_whole_text_and_ends_with_the_usage(client: OpenAI) -> None:
    whole = client.completions.create(model="toy", prompt=PROMPT, max_tokens=16)
    events = list(
        client.completions.create(
            model="toy", prompt=PROMPT, max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (events[-1].choices, events[-1].usage) == ([], whole.usage)


def test_the_parameters_of_load_tools_fix_the_length(client: OpenAI) -> None:
    sent = {"ignore_eos": True, "min_tokens": 20, "stop": None}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(
        client.completions.create(
            model="toy", prompt=PROMPT, max_tokens=20, stream=True, extra_body=sent | {"stream_options": options}
        )
    )
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 20
    assert events[0].usage is not None and events[0].usage.completion_tokens == 1


@pytest.mark.anyio
async def test_the_asynchronous_client_gives_the_same(client: OpenAI, async_client: AsyncOpenAI) -> None:
    whole = client.completions.create(model="toy", prompt=PROMPT, max_tokens=16)
    same = await async_client.completions.create(model="toy", prompt=PROMPT, max_tokens=16)
    assert same.choices == whole.choices
    stream = await async_client.completions.create(model="toy", prompt=PROMPT, max_tokens=16, stream=True)
    assert "".join([event.choices[0].text async for event in stream]) == whole.choices[0].text


def test_embeddings_come_as_base64_by_default_and_as_floats(server: RunningServer, client: OpenAI) -> None:
    packed = client.embeddings.create(model="toy", input=[PROMPT, "A man sleeps."])
    plain = client.embeddings.create(model="toy", input=[PROMPT, "A man sleeps."], encoding_format="float")
    own = post(server, "/v1/encode", {"inputs": [PROMPT, "A man sleeps."], "normalize": True})
    for mine, same, expected in zip(packed.data, plain.data, own["embeddings"], strict=True):
        assert mine.embedding == pytest.approx(expected, rel=1e-6)
        assert same.embedding == expected
    assert packed.usage.prompt_tokens == own["usage"]["input_tokens"]


def test_models_are_listed_and_shown(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "sightline")
    assert client.models.retrieve("toy").created == model.created


def test_a_causal_model_continues_the_prompt_that_echo_returns(shipped: RunningServer) -> None:
    with OpenAI(base_url=f"{shipped.url}/v1", api_key="none") as client:
        prompt = "User: Hello!\nBot:"
        plain = client.completions.create(model="smalltalk-chat-gatt", prompt=prompt).choices[0].text
        echoed = client.completions.create(model="smalltalk-chat-gatt", prompt=prompt, echo=True).choices[0].text
        assert plain.startswith(" ") and echoed == prompt + plain


def test_a_chat_model_replies_and_follows_the_system_message(shipped: RunningServer) -> None:
    with OpenAI(base_url=f"{shipped.url}/v1", api_key="none") as client:
        said: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": "Always finish with sunshine."},
            {"role": "user", "content": "Hello!"},
        ]
        first = client.chat.completions.create(model="smalltalk-chat-gatt", messages=said)
        content = first.choices[0].message.content
        assert content and content.endswith(", sunshine.")
        own = post(
            shipped,
            "/v1/generate",
            {"model": "smalltalk-chat-gatt", "inputs": "User: Always finish with sunshine. Hello!\nBot:"},
        )
        assert content == own["outputs"][0]["text"]
        said += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [{"type": "text", "text": "How are you?"}]},
        ]
        second = client.chat.completions.create(model="smalltalk-chat-gatt", messages=said, logprobs=True)
        content = second.choices[0].message.content
        assert content and content.endswith(", sunshine.")
        assert second.choices[0].logprobs is not None and second.choices[0].logprobs.content
        chunks = list(client.chat.completions.create(model="smalltalk-chat-gatt", messages=said, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
        with client.chat.completions.stream(model="smalltalk-chat-gatt", messages=said) as events:
            assert events.get_final_completion().choices[0].message.content == content


def test_a_model_that_translates_does_not_chat(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="has no chat template"):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": PROMPT}])
