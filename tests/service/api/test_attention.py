import base64
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from service.bundle import Attention, Window
from service.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Running, Start
from tests.support.fake_runner import fake_slots_manifest

pytestmark = pytest.mark.anyio


async def respond(running: Running, **body: Any) -> Any:
    answer = await running.post("/v1/attention", {"inputs": "a dog", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def attention(running: Running, **body: Any) -> Any:
    """Return the only output of a call, with the call's token counts."""
    response = await respond(running, **body)
    (output,) = response["outputs"]
    assert output["index"] == 0
    return {**output, "usage": response["usage"]}


def maps_of(answer: Any) -> dict[str, Any]:
    return {one["kind"]: np.reshape(one["data"], one["shape"]) for one in answer["maps"]}


async def test_all_kinds_come_with_the_tokens_that_their_rows_and_columns_stand_for(running: Running) -> None:
    answer = await attention(running, inputs="Hund x")
    sizes = {
        "encoder": (len(answer["source_tokens"]),) * 2,
        "cross": (len(answer["target_tokens"]), len(answer["source_tokens"])),
        "decoder": (len(answer["target_tokens"]), len(answer["decoder_input_tokens"])),
    }
    assert [one["kind"] for one in answer["maps"]] == ["encoder", "cross", "decoder"]
    for one in answer["maps"]:
        assert (one["rows"], one["columns"]) == sizes[one["kind"]]
        assert one["shape"] == [2, 2, one["rows"], one["columns"]]
        assert (one["layers"], one["heads"], one["normalized"]) == ([0, 1], [0, 1], True)
        np.testing.assert_allclose(np.reshape(one["data"], one["shape"]).sum(axis=-1), 1, rtol=1e-5)
    assert answer["source_tokens"] == [" H", "un", "d", " ", "x", "</s>"]
    assert answer["decoder_input_tokens"] == ["<s>", *answer["target_tokens"][:-1]]
    assert answer["target_tokens"][-1] == "</s>"


async def test_it_explains_what_generate_gives(running: Running) -> None:
    generated = (await running.post("/v1/generate", {"inputs": "Hund x"})).json()["outputs"][0]
    answer = await attention(running, inputs="Hund x", kinds=["cross"])
    assert answer["text"] == generated["text"]
    assert answer["target_tokens"] == [token["text"] for token in generated["tokens"]]
    assert answer["finish_reason"] == generated["finish_reason"]


async def test_entries_above_the_diagonal_of_a_decoder_map_are_zero(running: Running) -> None:
    decoder = maps_of(await attention(running, inputs="Hund x", kinds=["decoder"]))["decoder"]
    assert np.all(np.triu(decoder, k=1) == 0)
    assert np.all(decoder[..., 0] > 0)


async def test_a_target_is_forced_with_its_end_token(running: Running, tokenizer: TextTokenizer) -> None:
    answer = await attention(running, targets="a Hund")
    assert answer["target_tokens"] == [" a", " H", "un", "d", "</s>"]
    assert answer["finish_reason"] == "forced"
    assert answer["text"] == "a Hund"
    assert answer["usage"] == {"input_tokens": 3, "output_tokens": 5}
    assert maps_of(answer)["cross"].shape == (2, 2, 5, 3)


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


async def test_a_string_has_the_response_of_a_list_of_one(running: Running) -> None:
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


async def test_layers_and_heads_are_picked_in_the_order_that_is_asked_for(running: Running) -> None:
    whole = maps_of(await attention(running))["encoder"]
    answer = await attention(running, kinds=["encoder"], layers=[1], heads=[1, 0])
    assert (answer["maps"][0]["layers"], answer["maps"][0]["heads"]) == ([1], [1, 0])
    np.testing.assert_array_equal(maps_of(answer)["encoder"], whole[[1]][:, [1, 0]])


async def test_negative_layers_and_heads_count_from_the_end(running: Running) -> None:
    (expected,) = (await attention(running, kinds=["cross"], layers=[1], heads=[1, 0]))["maps"]
    (found,) = (await attention(running, kinds=["cross"], layers=[-1], heads=[-1, -2]))["maps"]
    assert found == expected
    assert (found["layers"], found["heads"]) == ([1], [1, 0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"layers": [-3]}, "layers[0] must be from -2 to 1 for encoder attention, got -3."),
        ({"heads": [0, 2]}, "heads[1] must be from -2 to 1 for encoder attention, got 2."),
        ({"layers": [1, -1]}, "layers[1] must not repeat a layer of encoder attention: 1 and -1 are the same."),
    ],
)
async def test_an_index_that_cannot_be_selected_is_refused_with_the_range(
    running: Running, body: dict[str, Any], message: str
) -> None:
    answer = await running.post("/v1/attention", {"inputs": "a dog", **body})
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(("reduce", "function", "is_normalized"), [("mean", np.mean, True), ("max", np.max, False)])
async def test_reduce_acts_on_the_heads_alone(
    running: Running, reduce: str, function: Any, is_normalized: bool
) -> None:
    whole = maps_of(await attention(running, kinds=["cross"]))["cross"]
    answer = await attention(running, kinds=["cross"], reduce=reduce)
    reduced = maps_of(answer)["cross"]
    assert answer["maps"][0]["shape"] == [2, 1, *whole.shape[2:]]
    assert answer["maps"][0]["normalized"] == is_normalized
    np.testing.assert_allclose(reduced, function(whole, axis=1, keepdims=True), rtol=1e-6)


async def test_base64_is_little_endian_float32(running: Running) -> None:
    plain = maps_of(await attention(running, kinds=["cross"]))["cross"]
    packed = (await attention(running, kinds=["cross"], encoding="base64"))["maps"][0]
    data = np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])
    np.testing.assert_array_equal(data, plain.astype(np.float32))


async def test_sampling_and_stop_strings_work_as_in_generate(running: Running) -> None:
    answer = await attention(running, parameters={"do_sample": True, "seed": 5, "max_new_tokens": 6}, kinds=["cross"])
    body = {"inputs": "a dog", "parameters": {"do_sample": True, "seed": 5, "max_new_tokens": 6}}
    output = (await running.post("/v1/generate", body)).json()["outputs"][0]
    assert (answer["text"], answer["seed"]) == (output["text"], 5)


async def test_a_beam_search_is_explained_by_its_best_text(running: Running) -> None:
    parameters = {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 20}
    answer = await attention(running, parameters=parameters, kinds=["cross"])
    body = {"inputs": "a dog", "parameters": {**parameters, "num_return_sequences": 2}}
    best, second = (await running.post("/v1/generate", body)).json()["outputs"]
    assert answer["target_tokens"] == [token["text"] for token in best["tokens"]]
    assert answer["text"] == best["text"] != second["text"]


async def test_a_prefix_stands_in_the_text_and_in_the_rows_but_not_in_the_count(running: Running) -> None:
    parameters = {"target_prefix": ["a dog"], "max_new_tokens": 4, "min_new_tokens": 4}
    answer = await attention(running, parameters=parameters, kinds=["cross", "decoder"])
    assert answer["target_tokens"][:2] == [" a", " dog"]
    assert answer["text"].startswith("a dog")
    assert answer["usage"]["output_tokens"] == 4
    assert [one["rows"] for one in answer["maps"]] == [6, 6]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"targets": " "}, "empty_input", "targets"),
        ({"targets": "x" * 70}, "input_too_long", "targets"),
        ({"targets": ["x"]}, "invalid_parameter", "targets"),
        ({"inputs": ["a"], "targets": "x"}, "invalid_parameter", "targets"),
        ({"inputs": ["a", "b"], "targets": ["x"]}, "invalid_parameter", "targets"),
        ({"inputs": ["a", "b"], "targets": ["x", "x" * 70]}, "input_too_long", "targets[1]"),
        ({"inputs": "x" * 70}, "input_too_long", "inputs"),
        ({"inputs": ["a", "x" * 70]}, "input_too_long", "inputs[1]"),
        ({"inputs": ""}, "empty_input", "inputs"),
        ({"inputs": ["a", " "]}, "empty_input", "inputs[1]"),
        ({"inputs": []}, "empty_input", "inputs"),
        ({"input": "a"}, "invalid_parameter", "input"),
        ({"target": "a"}, "invalid_parameter", "target"),
        ({"targets": "x", "parameters": {}}, "invalid_parameter", "parameters"),
        ({"parameters": None}, "invalid_parameter", "parameters"),
        ({"parameters": {"target_prefix": ["a", "b"]}}, "invalid_parameter", "parameters.target_prefix"),
        ({"parameters": {"target_prefix": "x" * 70}}, "input_too_long", "parameters.target_prefix"),
        ({"parameters": {"top_logprobs": 1}}, "unsupported_parameter", "parameters.top_logprobs"),
        ({"parameters": {"return_attention": True}}, "unsupported_parameter", "parameters.return_attention"),
        (
            {"parameters": {"num_beams": 2, "num_return_sequences": 2}},
            "unsupported_parameter",
            "parameters.num_return_sequences",
        ),
        ({"kinds": []}, "invalid_parameter", "kinds"),
        ({"kinds": ["self"]}, "invalid_parameter", "kinds[0]"),
        ({"kinds": ["cross", "cross"]}, "invalid_parameter", "kinds"),
        ({"layers": [0, 2]}, "invalid_parameter", "layers[1]"),
        ({"layers": [-3]}, "invalid_parameter", "layers[0]"),
        ({"layers": [1, -1]}, "invalid_parameter", "layers[1]"),
        ({"heads": [-2, 1, 0]}, "invalid_parameter", "heads[2]"),
        ({"layers": [True]}, "invalid_parameter", "layers[0]"),
        ({"heads": [5]}, "invalid_parameter", "heads[0]"),
        ({"heads": [0, 0]}, "invalid_parameter", "heads"),
        ({"reduce": "sum"}, "invalid_parameter", "reduce"),
        ({"encoding": "hex"}, "invalid_parameter", "encoding"),
    ],
)
async def test_what_cannot_be_shown_is_refused(running: Running, body: Any, code: str, param: str) -> None:
    answer = await running.post("/v1/attention", {"inputs": "a dog", **body})
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (422, code, param)


async def test_a_kind_that_the_model_lacks_is_unsupported(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend()
    only_cross = tuple(one for one in backend.manifests[0].attention if one.kind == "cross")
    backend.manifests = (backend.manifests[0].model_copy(update={"attention": only_cross}),)
    async with start(backend) as running:
        answer = await running.post("/v1/attention", {"inputs": "x", "kinds": ["cross", "encoder"]})
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert answer.json()["error"]["param"] == "kinds[1]"
        assert [one["kind"] for one in (await attention(running))["maps"]] == ["cross"]


async def test_slots_are_columns_of_their_own_and_what_is_no_distribution_says_so(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64, "max_target_tokens": 64}
    backend.manifests = (fake_slots_manifest(slots=3, **sizes),)
    async with start(backend) as running:
        answer = await attention(running, inputs="Hund x")
        assert [one["kind"] for one in answer["maps"]] == ["encoder", "encoder_slots", "cross", "decoder"]
        assert [one["normalized"] for one in answer["maps"]] == [False, True, True, True]
        assert [one.get("columns_are") for one in answer["maps"]] == [None, "slots", None, None]
        slots = answer["maps"][1]
        assert slots["shape"] == [2, 2, len(answer["source_tokens"]), 3] == [2, 2, slots["rows"], slots["columns"]]
        np.testing.assert_allclose(maps_of(answer)["encoder_slots"].sum(axis=-1), 1, rtol=1e-5)
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


async def test_a_map_of_windows_says_so(start: Start, make_backend: MakeBackend) -> None:
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


async def test_the_numbers_of_slots_are_counted_before_they_are_computed(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 64, "max_target_tokens": 64}
    backend.manifests = (fake_slots_manifest(slots=125_000, **sizes),)
    async with start(backend) as running:
        body = {"inputs": "a", "kinds": ["encoder_slots"]}  # 2 source tokens in 2 layers and 2 heads: a million
        assert (await running.post("/v1/attention", {**body, "encoding": "base64"})).status_code == 200
        encodes = running.backend.runners[0].num_encodes
        answer = await running.post("/v1/attention", {**body, "inputs": "a a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "response_too_large")
        assert running.backend.runners[0].num_encodes == encodes


def test_only_maps_of_slots_have_a_number_of_columns_in_the_manifest() -> None:
    for kind, columns in (("encoder", 3), ("encoder_slots", None)):
        with pytest.raises(ValidationError, match="columns is required if kind is 'encoder_slots'"):
            Attention(kind=kind, outputs=("a",), layers=1, heads=1, columns=columns)  # type: ignore[arg-type]
