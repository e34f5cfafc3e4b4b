import base64
import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from sightline.base.bundle import AttentionMaps, Window
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, changed
from tests.support.fake_runner import fake_manifest, fake_slots_manifest

pytestmark = pytest.mark.anyio


async def respond(running: Running, **body: Any) -> Any:
    return await running.result("/v1/attention", {"inputs": "a dog", **body})


async def attention(running: Running, **body: Any) -> Any:
    """Return the only output of a call, with the call's token counts."""
    response = await respond(running, **body)
    (output,) = response["outputs"]
    assert output["index"] == 0
    return {**output, "usage": response["usage"]}


def maps_of(response: Any) -> dict[str, Any]:
    return {one["kind"]: np.reshape(one["data"], one["shape"]) for one in response["maps"]}


async def test_every_kind_of_map_is_returned_with_the_tokens_of_its_rows_and_columns(running: Running) -> None:
    response = await attention(running, inputs="Hund x")
    sizes = {
        "encoder": (len(response["source_tokens"]),) * 2,
        "cross": (len(response["target_tokens"]), len(response["source_tokens"])),
        "decoder": (len(response["target_tokens"]), len(response["decoder_input_tokens"])),
    }
    assert [one["kind"] for one in response["maps"]] == ["encoder", "cross", "decoder"]
    for one in response["maps"]:
        assert (one["rows"], one["columns"]) == sizes[one["kind"]]
        assert one["shape"] == [2, 2, one["rows"], one["columns"]]
        assert (one["layers"], one["heads"], one["normalized"]) == ([0, 1], [0, 1], True)
        np.testing.assert_allclose(np.reshape(one["data"], one["shape"]).sum(axis=-1), 1, rtol=1e-5)
    assert response["source_tokens"] == [" H", "un", "d", " ", "x", "</s>"]
    assert response["decoder_input_tokens"] == ["<s>", *response["target_tokens"][:-1]]
    assert response["target_tokens"][-1] == "</s>"


async def test_attention_is_that_of_the_text_that_generate_returns(running: Running) -> None:
    generated = (await running.post("/v1/generate", {"inputs": "Hund x"})).json()["outputs"][0]
    response = await attention(running, inputs="Hund x", kinds=["cross"])
    assert response["text"] == generated["text"]
    assert response["target_tokens"] == [token["text"] for token in generated["tokens"]]
    assert response["finish_reason"] == generated["finish_reason"]


async def test_entries_above_the_diagonal_of_a_decoder_map_are_zero(running: Running) -> None:
    decoder = maps_of(await attention(running, inputs="Hund x", kinds=["decoder"]))["decoder"]
    assert np.all(np.triu(decoder, k=1) == 0)
    assert np.all(decoder[..., 0] > 0)


async def test_a_target_is_forced_with_its_end_token(running: Running) -> None:
    response = await attention(running, targets="a Hund")
    assert response["target_tokens"] == [" a", " H", "un", "d", "</s>"]
    assert response["finish_reason"] == "forced"
    assert response["text"] == "a Hund"
    assert response["usage"] == {"input_tokens": 3, "output_tokens": 5}
    assert maps_of(response)["cross"].shape == (2, 2, 5, 3)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"targets": ["a Hund", "dog", "x"]},
        {"reduce": "mean", "kinds": ["cross"], "encoding": "base64"},
        {"parameters": {"num_beams": 3, "target_prefix": ["a", "dog", "x"]}},
    ],
)
async def test_each_input_of_a_list_has_the_output_that_it_has_alone(running: Running, body: dict[str, Any]) -> None:
    inputs = ["a dog", "Hund x", "two men run"]
    response = await respond(running, inputs=inputs, **body)
    assert [output["index"] for output in response["outputs"]] == [0, 1, 2]
    counts = {"input_tokens": 0, "output_tokens": 0}
    for index, output in enumerate(response["outputs"]):
        own = dict(body)
        if "targets" in own:
            own["targets"] = own["targets"][index]
        if "parameters" in own:
            own["parameters"] = {**own["parameters"], "target_prefix": own["parameters"]["target_prefix"][index]}
        alone = await respond(running, inputs=inputs[index], **own)
        assert [{**alone["outputs"][0], "index": index}] == [output]
        counts = {name: count + alone["usage"][name] for name, count in counts.items()}
    assert response["usage"] == counts


async def test_a_string_has_the_same_response_as_a_list_with_one_string(running: Running) -> None:
    whole, listed = [
        await respond(running, inputs=inputs, targets=targets) for inputs, targets in (("a", "x"), (["a"], ["x"]))
    ]
    assert whole | {"timings_ms": None} == listed | {"timings_ms": None}


async def test_input_i_of_a_call_is_sampled_with_seed_plus_i(running: Running) -> None:
    parameters = {"do_sample": True, "seed": 5, "max_new_tokens": 6}
    response = await respond(running, inputs=["a dog", "a dog"], parameters=parameters)
    assert [output["seed"] for output in response["outputs"]] == [5, 6]
    alone = await attention(running, parameters={**parameters, "seed": 6})
    assert alone["maps"] == response["outputs"][1]["maps"]


async def test_layers_and_heads_are_returned_in_the_requested_order(running: Running) -> None:
    whole = maps_of(await attention(running))["encoder"]
    response = await attention(running, kinds=["encoder"], layers=[1], heads=[1, 0])
    assert (response["maps"][0]["layers"], response["maps"][0]["heads"]) == ([1], [1, 0])
    np.testing.assert_array_equal(maps_of(response)["encoder"], whole[[1]][:, [1, 0]])


async def test_negative_layers_and_heads_count_from_the_end(running: Running) -> None:
    (expected,) = (await attention(running, kinds=["cross"], layers=[1], heads=[1, 0]))["maps"]
    (found,) = (await attention(running, kinds=["cross"], layers=[-1], heads=[-1, -2]))["maps"]
    assert found == expected
    assert (found["layers"], found["heads"]) == ([1], [1, 0])


@pytest.mark.parametrize(("reduce", "function", "is_normalized"), [("mean", np.mean, True), ("max", np.max, False)])
async def test_reduce_applies_to_heads_only(running: Running, reduce: str, function: Any, is_normalized: bool) -> None:
    whole = maps_of(await attention(running, kinds=["cross"]))["cross"]
    response = await attention(running, kinds=["cross"], reduce=reduce)
    reduced = maps_of(response)["cross"]
    assert response["maps"][0]["shape"] == [2, 1, *whole.shape[2:]]
    assert response["maps"][0]["normalized"] == is_normalized
    np.testing.assert_allclose(reduced, function(whole, axis=1, keepdims=True), rtol=1e-6)


async def test_base64_is_little_endian_float32(running: Running) -> None:
    plain = maps_of(await attention(running, kinds=["cross"]))["cross"]
    packed = (await attention(running, kinds=["cross"], encoding="base64"))["maps"][0]
    data = np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])
    np.testing.assert_array_equal(data, plain.astype(np.float32))


async def test_sampling_and_stop_strings_work_as_in_generate(running: Running) -> None:
    response = await attention(running, parameters={"do_sample": True, "seed": 5, "max_new_tokens": 6}, kinds=["cross"])
    body = {"inputs": "a dog", "parameters": {"do_sample": True, "seed": 5, "max_new_tokens": 6}}
    output = (await running.post("/v1/generate", body)).json()["outputs"][0]
    assert (response["text"], response["seed"]) == (output["text"], 5)


async def test_a_beam_search_returns_the_attention_of_its_best_text(running: Running) -> None:
    parameters = {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 20}
    response = await attention(running, parameters=parameters, kinds=["cross"])
    body = {"inputs": "a dog", "parameters": {**parameters, "num_return_sequences": 2}}
    best, second = (await running.post("/v1/generate", body)).json()["outputs"]
    assert response["target_tokens"] == [token["text"] for token in best["tokens"]]
    assert response["text"] == best["text"] != second["text"]


async def test_a_prefix_is_in_the_text_and_the_rows_but_not_in_the_token_count(running: Running) -> None:
    parameters = {"target_prefix": ["a dog"], "max_new_tokens": 4, "min_new_tokens": 4}
    response = await attention(running, parameters=parameters, kinds=["cross", "decoder"])
    assert response["target_tokens"][:2] == [" a", " dog"]
    assert response["text"].startswith("a dog")
    assert response["usage"]["output_tokens"] == 4
    assert [one["rows"] for one in response["maps"]] == [6, 6]


async def test_offsets_are_ranges_of_the_input_and_of_the_text(running: Running) -> None:
    """Tokens that share a character share its range; the inserted leading space is empty."""
    response = await attention(running, inputs="é Hund", targets="x 🙂")
    assert response["source_tokens"] == [" ", "\ufffd", "\ufffd", " H", "un", "d", "</s>"]
    assert response["source_offsets"] == [[0, 0], [0, 1], [0, 1], [1, 3], [3, 5], [5, 6], None]
    assert response["target_tokens"] == [" ", "x", " ", *["\ufffd"] * 4, "</s>"]
    assert response["target_offsets"] == [[0, 0], [0, 1], [1, 2], *[[2, 3]] * 4, None]


async def test_offsets_include_the_prefix_and_exclude_the_stop_string(running: Running) -> None:
    plain = await attention(running, parameters={"target_prefix": "Hund", "max_new_tokens": 8, "min_new_tokens": 8})
    assert plain["target_offsets"][:3] == [[0, 1], [1, 3], [3, 4]]
    stop = plain["text"][6:8]
    body = {"target_prefix": "Hund", "max_new_tokens": 8, "min_new_tokens": 8, "stop": stop}
    response = await attention(running, parameters=body)
    assert response["finish_reason"] == "stop"
    cut = len(response["text"])
    assert cut < 8
    for before, after in zip(plain["target_offsets"], response["target_offsets"], strict=False):
        assert after == (None if before[0] >= cut else [before[0], min(before[1], cut)])


async def test_every_output_with_maps_has_offsets(running: Running) -> None:
    expected = await attention(running, inputs="a dog")
    for options in ({}, {"stream": True}):
        body = {"inputs": "a dog", "parameters": {"return_attention": True}, **options}
        response = await running.post("/v1/generate", body)
        output = (
            json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))
            if options
            else response.json()["outputs"][0]
        )
        for name in ("source_offsets", "target_offsets"):
            assert output["attention"][name] == expected[name]
            assert len(expected[name]) == len(expected[name.replace("offsets", "tokens")])


async def test_hidden_tokens_have_columns_of_zeros(running: Running) -> None:
    """The fake decoder reads its source only: hiding tokens equals a source without them."""
    inputs = ["a dog x", "x"]
    response = await respond(running, inputs=inputs, parameters={"hidden_source_tokens": [-1]})
    for text, output in zip(inputs, response["outputs"], strict=True):
        maps = maps_of(output)
        assert not maps["cross"][..., -1].any()
        np.testing.assert_allclose(maps["cross"][..., :-1].sum(axis=-1), 1, rtol=1e-5)
        np.testing.assert_allclose(maps["encoder"].sum(axis=-1), 1, rtol=1e-5)
        assert output["source_tokens"][-1] == "</s>"
        body = {"inputs": text, "parameters": {"hidden_source_tokens": [-1]}}
        generated = (await running.post("/v1/generate", body)).json()["outputs"][0]
        assert generated["text"] == output["text"]
        plain = (await running.post("/v1/generate", {"inputs": text})).json()["outputs"][0]
        assert plain["text"] != output["text"]


async def test_tokens_can_be_hidden_from_a_forced_target(running: Running) -> None:
    response = await attention(running, targets="a Hund", parameters={"hidden_source_tokens": [1]})
    assert not maps_of(response)["cross"][..., 1].any()
    scored = await running.post("/v1/score", {"inputs": "a dog", "targets": "a Hund", "hidden_source_tokens": [1]})
    plain = await running.post("/v1/score", {"inputs": "a dog", "targets": "a Hund"})
    assert scored.json()["outputs"][0]["score"] != plain.json()["outputs"][0]["score"]


MESSAGES = [{"role": "user", "content": "a dog"}]


async def chat_attention(running: Running, **body: Any) -> Any:
    (output,) = (await running.result("/v1/attention", {"messages": MESSAGES, **body}))["outputs"]
    return output


async def test_messages_are_read_as_by_chat_completions(chat: Running) -> None:
    response = await chat_attention(chat, parameters={"max_new_tokens": 6})
    completion = await chat.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6})
    assert response["text"] == completion.json()["choices"][0]["message"]["content"]
    text = await attention(chat, inputs="U: a dog\nB:", parameters={"max_new_tokens": 6})
    assert response["maps"] == text["maps"]
    assert response["source_offsets"] == [None] * len(response["source_tokens"])
    assert text["source_offsets"][1] == [0, 1]
    prompt, inputs = response["source_tokens"], response["decoder_input_tokens"]
    assert inputs == [*prompt, *response["target_tokens"][:-1]]
    assert maps_of(response)["decoder"].shape[2:] == (len(response["target_tokens"]), len(inputs))


@pytest.mark.parametrize("options", [{"parameters": {"max_new_tokens": 6}}, {"targets": "Hund x"}])
async def test_rows_of_the_prompt_precede_those_of_the_target(chat: Running, options: dict[str, Any]) -> None:
    plain = await chat_attention(chat, **options)
    response = await chat_attention(chat, prompt_rows=True, **options)
    prompt = response["source_tokens"]
    assert response["target_tokens"] == [*prompt[1:], *plain["target_tokens"]]
    assert response["target_offsets"] == [*[None] * len(prompt[1:]), *plain["target_offsets"]]
    assert response["decoder_input_tokens"] == plain["decoder_input_tokens"]
    maps = maps_of(response)["decoder"]
    assert maps.shape[2:] == (len(response["target_tokens"]), len(response["decoder_input_tokens"]))
    np.testing.assert_array_equal(maps[:, :, len(prompt) - 1 :], maps_of(plain)["decoder"])
    np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
    assert not np.triu(maps, k=1).any()


async def test_every_sample_has_the_rows_of_the_prompt(chat: Running) -> None:
    parameters = {"do_sample": True, "seed": 1, "num_return_sequences": 3, "max_new_tokens": 4}
    body = {"inputs": "a dog", "parameters": {**parameters, "return_attention": {"prompt_rows": True, "layers": [1]}}}
    outputs = (await chat.post("/v1/generate", body)).json()["outputs"]
    maps = [maps_of(output["attention"])["decoder"] for output in outputs]
    size = len(outputs[0]["attention"]["source_tokens"]) - 1
    for one, output in zip(maps, outputs, strict=True):
        assert one.shape == (1, 2, size + len(output["tokens"]), size + len(output["tokens"]))
        np.testing.assert_array_equal(one[:, :, :size, :size], maps[0][:, :, :size, :size])


async def test_rows_of_a_prompt_are_counted_before_it_is_read(start: Start, tokenizer: TextTokenizer) -> None:
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 90, "max_target_tokens": 120}
    manifest = fake_manifest(decoder_start="source", heads=100, **sizes)
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        body = {"inputs": "x" * 80, "prompt_rows": True}  # 80 rows before the last token's: 1,280,000 numbers
        response = await running.post("/v1/attention", body)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "response_too_large")
        assert running.backend.runners[0].num_prefills == 0
        assert (await running.post("/v1/attention", {**body, "layers": [0]})).status_code == 200
        sampled = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 1}
        selection = {"prompt_rows": True, "layers": [0]}
        body = {"inputs": "x" * 80, "parameters": {**sampled, "return_attention": selection}}
        assert (await running.post("/v1/generate", body)).json()["error"]["code"] == "response_too_large"


async def test_only_the_kinds_of_the_model_are_returned(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend()
    async with start(changed(backend, attention=(backend.manifests[0].attention_of("cross"),))) as running:
        assert list(maps_of(await attention(running))) == ["cross"]


async def test_projected_keys_are_columns_and_maps_that_are_no_distributions_are_marked(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64, "max_target_tokens": 64}
    backend.manifests = (fake_slots_manifest(slots=3, **sizes),)
    async with start(backend) as running:
        response = await attention(running, inputs="Hund x")
        assert [one["kind"] for one in response["maps"]] == ["encoder", "encoder_slots", "cross", "decoder"]
        assert [one["normalized"] for one in response["maps"]] == [False, True, True, True]
        assert [one.get("columns_are") for one in response["maps"]] == [None, "slots", None, None]
        slots = response["maps"][1]
        assert slots["shape"] == [2, 2, len(response["source_tokens"]), 3] == [2, 2, slots["rows"], slots["columns"]]
        np.testing.assert_allclose(maps_of(response)["encoder_slots"].sum(axis=-1), 1, rtol=1e-5)
        (mean,) = (await attention(running, kinds=["encoder"], reduce="mean"))["maps"]
        assert mean["normalized"] is False
        (card,) = [one for one in (await describe(running, "fake-slots")) if one["kind"] == "encoder_slots"]
        assert card == {
            "kind": "encoder_slots",
            "layers": 2,
            "heads": 2,
            "normalized": True,
            "columns": 3,
            "window": None,
        }


async def test_maps_of_windows_are_marked(start: Start, make_backend: MakeBackend) -> None:
    backend, window = make_backend(), Window(centre="predicted", radius=5)
    (manifest,) = backend.manifests
    maps = tuple(
        one.model_copy(update={"window": window}) if one.kind == "cross" else one for one in manifest.attention
    )
    backend.manifests = (manifest.model_copy(update={"attention": maps}),)
    expected = {"cross": {"centre": "predicted", "radius": 5}}
    async with start(backend) as running:
        for entries in ((await attention(running))["maps"], await describe(running, manifest.name)):
            assert {one["kind"]: one["window"] for one in entries if one["window"]} == expected


async def describe(running: Running, name: str) -> Any:
    return (await running.client.get(f"/v1/models/{name}")).json()["attention"]


async def test_maps_of_projected_keys_are_counted_before_they_are_computed(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64, "max_target_tokens": 64}
    backend.manifests = (fake_slots_manifest(slots=125_000, **sizes),)
    async with start(backend) as running:
        body = {"inputs": "a", "kinds": ["encoder_slots"]}  # 2 source tokens in 2 layers and 2 heads: a million
        assert (await running.post("/v1/attention", {**body, "encoding": "base64"})).status_code == 200
        encodes = running.backend.runners[0].num_encodes
        response = await running.post("/v1/attention", {**body, "inputs": "a a"})
        assert (response.status_code, response.json()["error"]["code"]) == (422, "response_too_large")
        assert running.backend.runners[0].num_encodes == encodes


def test_only_maps_of_projected_keys_have_a_number_of_columns_in_the_manifest() -> None:
    for kind, columns in (("encoder", 3), ("encoder_slots", None)):
        with pytest.raises(ValidationError, match="columns is required if kind is 'encoder_slots'"):
            AttentionMaps(kind=kind, outputs=("a",), layers=1, heads=1, columns=columns)  # type: ignore[arg-type]
