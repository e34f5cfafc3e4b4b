"""Routes of OpenAI, in process, over the fake model: fields, errors, streams."""

import base64
from codecs import getincrementaldecoder
from typing import Any

import numpy as np
import orjson
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.compat.common import PLACEHOLDER_MODELS
from sightline.service.parameters import MAX_SEED
from tests.service.conftest import MakeBackend, Running, Start, generate, with_languages
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio


async def complete(running: Running, prompt: Any, **options: Any) -> Any:
    return await running.result("/v1/completions", {"prompt": prompt, **options})


async def stream(running: Running, prompt: Any, **options: Any) -> list[Any]:
    return await running.events("/v1/completions", {"prompt": prompt, "stream": True, **options})


async def test_a_completion_equals_the_text_of_generate(running: Running) -> None:
    response = await complete(running, ["a dog", "Hund"], model="fake", max_tokens=20)
    own = await generate(running, ["a dog", "Hund"], max_new_tokens=20)
    assert [choice["text"] for choice in response["choices"]] == [output["text"] for output in own["outputs"]]
    assert [choice["index"] for choice in response["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in response["choices"]} == {"stop"}
    assert {choice["logprobs"] for choice in response["choices"]} == {None}
    input_tokens, output_tokens = own["usage"].values()
    assert response["usage"] == {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    assert (response["object"], response["model"]) == ("text_completion", "fake")
    assert response["id"].startswith("cmpl-")


async def test_nulls_and_default_values_change_nothing(running: Running) -> None:
    harmless: dict[str, Any] = read_table(__file__)
    plain = await complete(running, "a dog")
    assert (await complete(running, "a dog", **harmless))["choices"] == plain["choices"]


async def test_penalties_are_those_of_the_native_parameters(running: Running) -> None:
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -2}
    (own,) = (await generate(running, "a dog", **penalties, max_new_tokens=8))["outputs"]
    whole = await complete(running, "a dog", **penalties, max_tokens=8)
    assert whole["choices"][0]["text"] == own["text"]


async def test_filters_and_several_choices_imply_samples_at_the_default_temperature(running: Running) -> None:
    options = {"seed": 3, "max_tokens": 8}
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    cases = (({"top_p": 0.9}, {"top_p": 0.9}), ({"top_k": 5}, {"top_k": 5}), ({"n": 3}, {}))
    for given, own in cases:
        drawn = await complete(running, "a dog", **options, **given)
        assert drawn["choices"] == (await complete(running, "a dog", **options, **given, temperature=1))["choices"]
        native = await generate(running, ["a dog"] * given.get("n", 1), **own, do_sample=True, seed=3, max_new_tokens=8)
        assert [one["text"] for one in drawn["choices"]] == [one["text"] for one in native["outputs"]]
    plain = await complete(running, "a dog", max_tokens=8)
    assert (await complete(running, "a dog", max_tokens=8, temperature=0, top_p=0.9))["choices"] == plain["choices"]
    beams = await complete(running, "a dog", max_tokens=8, num_beams=3, n=3)
    texts = [
        one["text"]
        for one in (await generate(running, "a dog", num_beams=3, num_return_sequences=3, max_new_tokens=8))["outputs"]
    ]
    assert [one["text"] for one in beams["choices"]] == texts


async def test_prompts_of_token_ids_are_continued_as_their_texts(
    running: Running, causal: Running, tokenizer: TextTokenizer
) -> None:
    texts = ["a dog", "Hund"]
    for server in (running, causal):
        lists = [tokenizer.encode(text) for text in texts]
        whole = await complete(server, texts, max_tokens=8)
        assert await choices_of(server, lists) == whole["choices"]
        assert await choices_of(server, lists[1]) == [whole["choices"][1] | {"index": 0}]
        chunks = await stream(server, lists[0], max_tokens=8)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    (echoed,) = await choices_of(causal, lists[0], echo=True)
    (written,) = (await complete(causal, texts[0], max_tokens=8, echo=True))["choices"]
    assert echoed["text"] == written["text"]


async def choices_of(running: Running, prompt: Any, **options: Any) -> Any:
    return (await complete(running, prompt, max_tokens=8, **options))["choices"]


async def test_biases_are_those_of_the_native_parameter(running: Running) -> None:
    biases = {"7": 3.5, "9": -100}
    (own,) = (await generate(running, "a dog", logit_bias=biases, max_new_tokens=8))["outputs"]
    whole = await complete(running, "a dog", logit_bias=biases, max_tokens=8)
    assert whole["choices"][0]["text"] == own["text"]
    assert own["text"] != (await complete(running, "a dog", max_tokens=8))["choices"][0]["text"]
    *chunks, _ = await stream(running, "a dog", logit_bias=biases, max_tokens=8)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == own["text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
async def test_a_placeholder_is_the_default_model_and_the_response_names_it(
    start: Start, make_backend: MakeBackend, path: str, body: dict[str, Any]
) -> None:
    async with start(make_backend("first", "second"), default_model="second") as running:
        for name in sorted(PLACEHOLDER_MODELS):
            response = await running.post(path, {**body, "model": name})
            assert response.status_code == 200
            assert '"model":"second"' in response.text
        assert (await running.post(path, {**body, "model": "TGI"})).status_code == 404


async def test_a_served_model_can_have_the_name_of_a_placeholder(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend("a", "tgi"), default_model="a") as running:
        response = await running.post("/v1/completions", {"prompt": "x", "model": "tgi"})
        assert response.json()["model"] == "tgi"


@pytest.mark.parametrize("prefix", ["a Hund", ["a", "Hund"]])
async def test_several_samples_of_several_prompts_start_with_their_prefix(running: Running, prefix: Any) -> None:
    drawn = await complete(
        running, ["a dog", "Hund"], target_prefix=prefix, temperature=2.0, seed=4, n=2, max_tokens=8, logprobs=0
    )
    prefixes = [prefix] * 4 if isinstance(prefix, str) else [one for one in prefix for _ in range(2)]
    options = {"do_sample": True, "temperature": 2.0, "seed": 4, "max_new_tokens": 8, "target_prefix": prefixes}
    own = await generate(running, ["a dog", "a dog", "Hund", "Hund"], **options)
    assert [choice["text"] for choice in drawn["choices"]] == [output["text"] for output in own["outputs"]]
    for choice, begins_with in zip(drawn["choices"], prefixes, strict=True):
        assert choice["text"].startswith(begins_with)
        assert choice["logprobs"]["text_offset"][0] == len(begins_with)


async def test_seeds_of_samples_are_consecutive_and_each_prompt_is_counted_once(running: Running) -> None:
    drawn = await complete(running, ["a dog", "Hund"], temperature=2.0, seed=MAX_SEED, n=3, max_tokens=8, top_p=0.9)
    options = {"do_sample": True, "temperature": 2.0, "seed": MAX_SEED, "max_new_tokens": 8, "top_p": 0.9}
    own = await generate(running, ["a dog"] * 3 + ["Hund"] * 3, **options)
    assert [choice["text"] for choice in drawn["choices"]] == [output["text"] for output in own["outputs"]]
    assert [choice["index"] for choice in drawn["choices"]] == list(range(6))
    assert drawn["usage"]["prompt_tokens"] * 3 == own["usage"]["input_tokens"]
    assert drawn["usage"]["completion_tokens"] == own["usage"]["output_tokens"]
    one = await complete(running, "a dog", temperature=2.0, seed=5, max_tokens=8, top_k=3)
    alone = await generate(running, "a dog", do_sample=True, temperature=2.0, seed=5, max_new_tokens=8, top_k=3)
    assert one["choices"][0]["text"] == alone["outputs"][0]["text"]


async def test_with_beams_n_selects_the_best_beams(running: Running) -> None:
    response = await complete(running, ["a dog", "Hund"], num_beams=4, n=2, best_of=2, length_penalty=0.6, max_tokens=9)
    options = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.6, "max_new_tokens": 9}
    own = await generate(running, ["a dog", "Hund"], **options)
    assert [choice["text"] for choice in response["choices"]] == [output["text"] for output in own["outputs"]]
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]


async def test_lengths_can_be_fixed(running: Running) -> None:
    fixed = await complete(running, "a dog", max_tokens=40, ignore_eos=True)
    assert (fixed["usage"]["completion_tokens"], fixed["choices"][0]["finish_reason"]) == (40, "length")
    until_the_limit = await complete(running, "a dog", ignore_eos=True)
    assert until_the_limit["usage"]["completion_tokens"] == 64
    least = await complete(running, "a dog", max_tokens=40, min_tokens=30)
    assert 30 <= least["usage"]["completion_tokens"] <= 40


async def test_a_stop_string_ends_the_text_with_the_reason_stop(running: Running) -> None:
    whole = (await complete(running, "two men", min_tokens=12))["choices"][0]["text"]
    choice = (await complete(running, "two men", min_tokens=12, stop=[whole[4:7]]))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(whole[4:7])], "stop")


@pytest.mark.parametrize("prefix", [None, "a dog", "naïve 🙂"])
async def test_logprobs_have_each_token_with_its_offset_in_the_text(running: Running, prefix: str | None) -> None:
    response = await complete(running, "a dog", logprobs=2, max_tokens=20, target_prefix=prefix)
    own = await generate(running, "a dog", top_logprobs=2, max_new_tokens=20, target_prefix=prefix)
    text, logprobs = response["choices"][0]["text"], response["choices"][0]["logprobs"]
    tokens = own["outputs"][0]["tokens"]
    assert logprobs["tokens"] == [token["text"] for token in tokens]
    assert logprobs["token_logprobs"] == [token["logprob"] for token in tokens]
    for token, best in zip(tokens, logprobs["top_logprobs"], strict=True):
        assert best[token["text"]] >= token["logprob"]
        assert {one["text"] for one in token["alternatives"]} <= set(best)
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == len(prefix or "")
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if "\ufffd" not in token and token != "</s>":
            assert text[offset:].startswith(token if offset else token.removeprefix(" "))


@pytest.mark.parametrize("prefix", [None, "naïve 🙂"])
async def test_the_offset_of_a_token_follows_all_characters_of_earlier_tokens(
    running: Running, tokenizer: TextTokenizer, prefix: str | None
) -> None:
    num_after_half_a_character = 0
    for seed in range(8):
        drawn = {"max_tokens": 24, "temperature": 5.0, "seed": seed, "ignore_eos": True, "logprobs": 0}
        choice = (await complete(running, "a dog", target_prefix=prefix, **drawn))["choices"][0]
        options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": True, "temperature": 5.0, "seed": seed}
        own = (await generate(running, "a dog", target_prefix=prefix, **options))["outputs"][0]
        assert choice["text"] == own["text"]
        before = (f" {prefix}" if prefix else "").encode()
        for token, offset in zip(own["tokens"], choice["logprobs"]["text_offset"], strict=True):
            begun = before.decode("utf-8", "replace")  # half a character is one U+FFFD
            assert offset == len(begun.removeprefix(" "))
            num_after_half_a_character += getincrementaldecoder("utf-8")("replace").decode(before) != begun
            before += tokenizer.bytes_of(token["id"])
    assert num_after_half_a_character > 8


async def test_without_alternatives_logprobs_have_the_generated_tokens(running: Running) -> None:
    logprobs = (await complete(running, "a dog", logprobs=0, max_tokens=3))["choices"][0]["logprobs"]
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in pairs]


async def test_tokens_with_equal_texts_keep_their_logprobs(running: Running) -> None:
    num_equal = 0
    for prompt in ("x", "é", "日本"):
        response = await complete(running, prompt, logprobs=5, max_tokens=20)
        own = await generate(running, prompt, top_logprobs=5, max_new_tokens=20)
        for token, logprobs in zip(
            own["outputs"][0]["tokens"], response["choices"][0]["logprobs"]["top_logprobs"], strict=True
        ):
            tops = {one["id"]: one for one in (token, *token["alternatives"])}
            assert sorted(logprobs.values()) == sorted(one["logprob"] for one in tops.values())
            assert logprobs[token["text"]] == token["logprob"]
            texts = [one["text"] for one in tops.values()]
            first = {text: next(one for one in tops.values() if one["text"] == text) for text in texts}
            for id_, one in tops.items():
                name = one["text"] if one is first[one["text"]] else f"token_id:{id_}"
                assert logprobs[name] == one["logprob"]
            num_equal += len(texts) - len(set(texts))
    assert num_equal


RAW: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a<s>dog", "x"], "max_tokens": 6, "model": "{}"}),
    ("/generate?model={}", {"inputs": "a<s>dog", "parameters": {"max_new_tokens": 6}}),
    ("/?model={}", {"inputs": "a<s>dog", "parameters": {"max_new_tokens": 6}}),
    (
        "/api/generate",
        {"prompt": "a<s>dog", "options": {"num_predict": 6}, "model": "{}", "raw": True, "stream": False},
    ),
]


@pytest.mark.parametrize(("path", "body"), RAW)
async def test_special_tokens_are_read_in_raw_prompts_and_not_in_sources(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer, path: str, body: dict[str, Any]
) -> None:
    before, after = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("dog", is_start=False)
    raw, plain = [*before, tokenizer.token_id("<s>"), *after], tokenizer.encode("a<s>dog")
    backend = with_languages(make_backend("plain", "sentences", "pair"), pair="en-de")
    first, sentences, pair = backend.manifests
    backend.manifests = (first, sentences.model_copy(update={"training_unit": "sentence"}), pair)
    async with start(backend, default_model="plain") as running:
        for model, ids in (("plain", raw), ("sentences", plain), ("pair", plain)):
            fields = {name: model if value == "{}" else value for name, value in body.items()}
            answer = (await running.post(path.format(model), fields)).text
            (output,) = (await complete(running, [ids], model=model, max_tokens=6))["choices"]
            assert orjson.dumps(output["text"]).decode()[1:-1] in answer, (model, answer)
        native = await generate(running, "a<s>dog", max_new_tokens=6)
        assert native["usage"]["input_tokens"] == len(plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 2, "target_prefix": "a Hund"},
        {"temperature": 1.5, "seed": 3, "n": 2},
        {"stop": ["a", "q"], "max_tokens": 30},
        {"ignore_eos": True, "max_tokens": 12, "logprobs": 0},
    ],
)
async def test_a_stream_forms_the_whole_response(running: Running, options: dict[str, Any]) -> None:
    prompt = ["a dog", "naïve 🙂"]
    whole = await complete(running, prompt, **options)
    frames = await stream(running, prompt, **options, stream_options={"include_usage": True})
    *events, last = frames
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None for event in events)
    assert {(frame["id"], frame["object"], frame["model"]) for frame in frames} == {
        (frames[0]["id"], "text_completion", "fake")
    }
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [value for one in mine for value in one["logprobs"][name]] == values


@pytest.mark.usefixtures("arrivals")
async def test_every_event_has_the_current_usage_on_request(running: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = await stream(running, "a dog", max_tokens=4, ignore_eos=True, stream_options=options)
    assert [frame["usage"]["completion_tokens"] for frame in frames] == [1, 2, 3, 4, 4, 4]
    assert {frame["usage"]["prompt_tokens"] for frame in frames} == {3}
    assert all("usage" not in frame for frame in await stream(running, "a dog"))


async def test_a_causal_model_continues_the_prompt_and_echo_returns_it(causal: Running) -> None:
    for text in ("a dog", "Hund x"):
        own = (await generate(causal, text, max_new_tokens=6))["outputs"][0]
        blank = " " if own["tokens"][0]["text"].startswith(" ") else ""
        choice = (await complete(causal, text, max_tokens=6))["choices"][0]
        assert choice["text"] == blank + own["text"]
        echoed = (await complete(causal, text, max_tokens=6, echo=True))["choices"][0]
        assert echoed["text"] == text + choice["text"]
        frames = await stream(causal, text, max_tokens=6, echo=True)
        assert "".join(frame["choices"][0]["text"] for frame in frames) == echoed["text"]
    for prefix in (None, "dog"):
        choice = (await complete(causal, "a", target_prefix=prefix, max_tokens=6, logprobs=0))["choices"][0]
        assert choice["text"].startswith(f" {prefix}" if prefix else "")
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert offsets[0] == (len(" dog") if prefix else 0)
        for token, offset in zip(tokens, offsets, strict=True):
            assert "\ufffd" in token or token == "</s>" or choice["text"][offset:].startswith(token)


async def test_an_embedding_is_the_normalized_mean_in_both_encodings(running: Running) -> None:
    inputs = ["a dog", "Hund"]
    response = (await running.post("/v1/embeddings", {"input": inputs, "dimensions": 4, "user": "x"})).json()
    own = (await running.post("/v1/encode", {"inputs": inputs, "normalize": True})).json()
    assert [one["embedding"] for one in response["data"]] == own["embeddings"]
    assert [(one["index"], one["object"]) for one in response["data"]] == [(0, "embedding"), (1, "embedding")]
    tokens = own["usage"]["input_tokens"]
    assert response["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (response["object"], response["model"]) == ("list", "fake")
    packed = (await running.post("/v1/embeddings", {"input": "a dog", "encoding_format": "base64"})).json()
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, response["data"][0]["embedding"], rtol=1e-6)


async def test_metrics_and_limits_apply_to_the_openai_api(start: Start) -> None:
    async with start(max_body_bytes=200) as running:
        await complete(running, "a dog")
        assert await running.metric('sightline_http_requests_total{route="/v1/completions",status="200"}') == 1
        response = await running.post("/v1/completions", {"prompt": "x" * 300})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        late = await running.post("/v1/completions", {"prompt": "x"}, **{"x-request-timeout-ms": "no"})
        assert late.json()["error"]["param"] == "X-Request-Timeout-Ms"
