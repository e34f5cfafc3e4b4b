"""`split_sentences` in /v1/generate, and the same in /translate. Over the fake model."""

from collections.abc import Callable
from typing import Any

import pytest

from service.bundle import Languages
from service.inference.sentences import MAX_COUNTED_SENTENCES
from service.settings import DEFAULT_MAX_INPUTS
from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, generate

pytestmark = pytest.mark.anyio

TEXT = "  A dog.  A man!\r\n\r\n\tHund?\n"
SENTENCES = ["A dog.", "A man!", "Hund?"]
FRAME = "  {}  {}\r\n\r\n\t{}\n"
PAIR = {"source": "en", "target": "de"}
Translating = Callable[..., FakeBackend]


@pytest.fixture
def translating(make_backend: MakeBackend) -> Translating:
    """Return a function that creates a backend whose models translate from English to German."""

    def make(**options: Any) -> FakeBackend:
        backend = make_backend(**options)
        languages = Languages(sources=("en",), targets=("de",))
        backend.manifests = tuple(one.model_copy(update={"languages": languages}) for one in backend.manifests)
        return backend

    return make


async def error_of(running: Running, inputs: Any = TEXT, *, stream: Any = False, **parameters: Any) -> tuple[Any, ...]:
    body = {"inputs": inputs, "parameters": {"split_sentences": True, **parameters}, "stream": stream}
    response = await running.post("/v1/generate", body)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    return error["code"], error["param"], error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"max_new_tokens": 3},
        {"num_beams": 4, "num_return_sequences": 3, "top_logprobs": 2},
        {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    ],
    ids=str,
)
async def test_outputs_join_those_of_the_sentences(
    start: Start, translating: Translating, parameters: dict[str, Any]
) -> None:
    async with start(translating()) as running:
        whole = await generate(running, [TEXT, "Hund"], split_sentences=True, **parameters)
        alone = await generate(running, [*SENTENCES, "Hund"], **parameters)
    count = parameters.get("num_return_sequences", 1)
    assert [(one["index"], one["rank"]) for one in whole["outputs"]] == [(i, r) for i in (0, 1) for r in range(count)]
    for rank, output in enumerate(whole["outputs"][:count]):
        parts = [one for one in alone["outputs"] if one["rank"] == rank][:3]
        assert output["text"] == FRAME.format(*(part["text"] for part in parts))
        assert output["tokens"] == [token for part in parts for token in part["tokens"]]
        assert output["score"] == pytest.approx(sum(part["score"] for part in parts))
        assert output["finish_reason"] == ("length" if any(p["finish_reason"] == "length" for p in parts) else "eos")
        assert output["seed"] == parts[0]["seed"]
        assert output["attention"] is None
    assert whole["outputs"][count:] == [{**one, "index": 1} for one in alone["outputs"] if one["index"] == 3]
    assert whole["usage"] == alone["usage"]


async def test_sentences_run_in_one_call(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        await generate(running, TEXT, split_sentences=True)
        (runner,) = running.backend.runners
        assert runner.num_encodes == 1


async def test_a_stop_string_in_one_sentence_is_the_reason_of_the_text(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        (first, second) = (await generate(running, SENTENCES[:2], min_new_tokens=12))["outputs"]
        stop = next(piece for piece in (first["text"][i : i + 3] for i in range(3, 9)) if piece not in second["text"])
        text = " ".join(SENTENCES[:2])
        (output,) = (await generate(running, text, min_new_tokens=12, stop=stop, split_sentences=True))["outputs"]
        assert output["finish_reason"] == "stop"
        assert output["text"] == f"{first['text'][: first['text'].index(stop)]} {second['text']}"


async def test_one_sentence_is_an_input_as_without_the_parameter(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        split = await generate(running, ["a dog", "Hund"], split_sentences=True)
        plain = await generate(running, ["a dog", "Hund"], split_sentences=False)
        assert (split["outputs"], split["usage"]) == (plain["outputs"], plain["usage"])


async def test_a_long_text_is_split_in_a_thread(start: Start, translating: Translating) -> None:
    text = "A dog." + "\n" * 20_000 + "A man!"
    async with start(translating()) as running:
        (output,) = (await generate(running, text, split_sentences=True))["outputs"]
        alone = (await generate(running, SENTENCES[:2]))["outputs"]
        assert output["text"] == ("\n" * 20_000).join(one["text"] for one in alone)


async def test_combinations_that_are_not_supported_are_named(start: Start, translating: Translating) -> None:
    path = "parameters.split_sentences"
    async with start(translating()) as running:
        for field, value in (("target_prefix", "Ein"), ("return_attention", True)):
            message = f"{path} cannot be combined with parameters.{field}; leave out one of them."
            assert await error_of(running, **{field: value}) == ("unsupported_parameter", path, message)
        code, param, message = await error_of(running, stream=True)
        assert (code, param) == ("unsupported_parameter", path)
        assert message == (f"Texts split into sentences cannot be streamed: set {path} to false, or do not stream.")
        body = {"inputs": TEXT, "parameters": {"split_sentences": True}}
        response = await running.post("/v1/attention", body)
        assert response.json()["error"]["message"] == (
            f"This endpoint returns the maps of one target for each input; use POST /v1/generate for {path}."
        )


async def test_a_model_without_languages_is_refused(start: Start) -> None:
    path = "parameters.split_sentences"
    async with start() as running:
        message = f"{path} is supported only by models that translate, and fake does not."
        assert await error_of(running) == ("unsupported_parameter", path, message)


async def test_too_many_sentences_are_refused_with_both_numbers(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        fitting = "A dog.\n" * (DEFAULT_MAX_INPUTS - 1)
        assert (await generate(running, [fitting, "a"], split_sentences=True, max_new_tokens=1))["outputs"]
        limit = f"A call generates at most {DEFAULT_MAX_INPUTS} sequences (SIGHTLINE_MAX_INPUTS), "
        limit += "one for each sentence, got"
        advice = "Send the text in several calls."
        for inputs, parameters, found in (
            ([fitting, "A man. A cat."], {}, f"{DEFAULT_MAX_INPUTS + 1} sentences"),
            (
                TEXT,
                {"do_sample": True, "num_return_sequences": 11},
                "3 sentences, each with parameters.num_return_sequences 11",
            ),
            ("A dog.\n" * (MAX_COUNTED_SENTENCES + 1), {}, f"more than {MAX_COUNTED_SENTENCES} sentences"),
        ):
            expected = ("invalid_parameter", "inputs", f"inputs: {limit} {found}. {advice}")
            assert await error_of(running, inputs, **parameters) == expected
        response = await running.post("/translate", {"q": fitting + "A man. A cat.", **PAIR})
        assert response.status_code == 422
        assert response.json()["error"].startswith(f"q: {limit} ")


async def test_a_sentence_that_is_too_long_is_named(start: Start, translating: Translating) -> None:
    long = "y" * 70
    limit = "must have at most 64 tokens for this model, got 72."
    advice = "Line breaks split a sentence further."
    async with start(translating()) as running:
        expected = ("input_too_long", "inputs[1]", f"inputs[1]: Sentence 2 {limit} {advice}")
        assert await error_of(running, ["A dog. A man.", f"A dog.\n{long}"]) == expected
        expected = ("input_too_long", "inputs", f"inputs: Sentence 1 {limit} {advice}")
        assert await error_of(running, f"{long}\nA dog.") == expected
        assert await error_of(running, long) == ("input_too_long", "inputs", f"inputs {limit}")
        response = await running.post("/translate", {"q": ["a", f"A dog.\n{long}"], **PAIR})
        assert response.json()["error"] == f"q[1]: Sentence 2 {limit} {advice}"


async def test_translate_keeps_lines_and_spacing(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        alone = [one["text"] for one in (await generate(running, SENTENCES))["outputs"]]
        response = await running.post("/translate", {"q": TEXT, **PAIR})
        assert response.json() == {"translatedText": FRAME.format(*alone)}
        beams = (await generate(running, SENTENCES, num_beams=3, num_return_sequences=3))["outputs"]
        joined = [FRAME.format(*(one["text"] for one in beams if one["rank"] == rank)) for rank in range(3)]
        response = await running.post("/translate", {"q": [TEXT, "a dog"], **PAIR, "alternatives": 2})
        assert response.json()["translatedText"][0] == joined[0]
        assert response.json()["alternatives"][0] == list(dict.fromkeys(joined))[1:]


async def test_openapi_describes_the_parameter_and_its_rules(start: Start) -> None:
    async with start() as running:
        schemas = (await running.client.get("/openapi.json")).json()["components"]["schemas"]
    parameters = schemas["GenerateParameters"]
    field = parameters["properties"]["split_sentences"]
    assert (field["type"], field["default"]) == ("boolean", False)
    assert field["description"].startswith("Translate each sentence of the inputs, and join the translations")
    assert "split_sentences" in str(parameters["allOf"])
    assert "split_sentences" in str(schemas["GenerateBody"]["allOf"])
    assert "split_sentences" not in schemas["InferParameters"]["properties"]
