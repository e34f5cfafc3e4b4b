"""Generation defaults of a model are used for parameters that a request omits, in every API."""

from typing import Any

import pytest

from sightline.base.bundle import GenerationDefaults, Languages
from sightline.service.engine.request import GenerateRequest
from sightline.service.parameters import GenerateParameters, complete_parameters
from tests.service.conftest import FakeBackend, MakeBackend, Start, changed
from tests.support.dialogues import LINES

pytestmark = pytest.mark.anyio
BEAMS = GenerationDefaults(num_beams=4, length_penalty=0.6, early_stopping=True, max_new_tokens=20)
SAMPLING = GenerationDefaults(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
FILTERS = GenerationDefaults(do_sample=True, min_p=0.1, typical_p=0.8)
ALWAYS = ("suppress_tokens", "bad_words", "force_end")  # settings that are no parameters
BOTH = GenerationDefaults(do_sample=True, temperature=0.7, num_beams=2)
LENGTHS = GenerationDefaults(min_new_tokens=3, max_new_tokens=9)


@pytest.mark.parametrize(
    ("given", "defaults", "options", "expected"),
    [
        ({}, GenerationDefaults(), {}, {}),
        ({}, BEAMS, {}, {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "max_new_tokens": 20}),
        ({}, SAMPLING, {}, SAMPLING.model_dump(exclude_none=True, exclude=set(ALWAYS))),
        ({}, FILTERS, {}, {"do_sample": True, "min_p": 0.1, "typical_p": 0.8}),
        ({"do_sample": False}, FILTERS, {}, {}),
        # A parameter of the request wins, also with the value that the service has by default.
        ({"num_beams": 1}, BEAMS, {}, {"num_beams": 1, "max_new_tokens": 20}),
        ({"do_sample": False}, SAMPLING, {}, {"repetition_penalty": 1.1}),
        ({"temperature": 1.0}, SAMPLING, {}, {"do_sample": True, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}),
        ({"num_beams": 2}, BEAMS, {}, {**BEAMS.model_dump(exclude_none=True), "num_beams": 2}),
        # Contradictions
        ({"do_sample": True}, BEAMS, {}, {"do_sample": True, "max_new_tokens": 20}),
        ({}, BEAMS, {"stream": True}, {"max_new_tokens": 20}),
        ({"num_beams": 3}, SAMPLING, {}, {"num_beams": 3, "repetition_penalty": 1.1}),
        ({}, BOTH, {}, {"num_beams": 2}),
        ({}, BOTH, {"stream": True}, {"do_sample": True, "temperature": 0.7}),
        ({"num_beams": 1}, BOTH, {}, {"do_sample": True, "temperature": 0.7}),
        ({"max_new_tokens": 2}, LENGTHS, {}, {"max_new_tokens": 2}),
        ({"min_new_tokens": 12}, LENGTHS, {}, {"min_new_tokens": 12}),
        ({"max_new_tokens": 5}, LENGTHS, {}, {"max_new_tokens": 5, "min_new_tokens": 3}),
        # Limits of the service and of the model
        ({}, BEAMS, {"max_beams": 2, "max_new_tokens": 8}, {**BEAMS.model_dump(), "num_beams": 2, "max_new_tokens": 8}),
        ({}, BEAMS, {"max_beams": 1}, {"max_new_tokens": 20}),
        # Sampling parameters of the request that are used only if tokens are sampled
        ({"top_k": 1}, SAMPLING, {"is_lenient": True}, {**SAMPLING.model_dump(exclude_none=True), "top_k": 1}),
        ({"top_k": 1}, GenerationDefaults(), {"is_lenient": True}, {}),
    ],
)
def test_defaults_yield_to_the_request(
    given: dict[str, Any], defaults: GenerationDefaults, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    own = {name: value for name, value in expected.items() if name not in ALWAYS}
    own = {name: value for name, value in own.items() if value is not None}
    assert complete_parameters(given, defaults, **options) == GenerateParameters(**own)


def test_a_default_has_the_limits_of_the_parameter() -> None:
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

    def limits(schema: dict[str, Any]) -> dict[str, Any]:
        return {key: one[key] for one in [schema, *schema.get("anyOf", ())] for key in bounds if key in one}

    given = GenerationDefaults.model_json_schema()["properties"]
    expected = GenerateParameters.model_json_schema()["properties"]
    for name in set(given) - set(ALWAYS):
        assert limits(given[name]) == limits(expected[name]), name


Submitted = list[tuple[str, GenerateRequest]]


def values(submitted: Submitted, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of these parameters of all requests to the engine."""
    return [tuple(getattr(request.parameters, name) for name in names) for _, request in submitted]


def backend_with(make_backend: MakeBackend, defaults: GenerationDefaults, **update: Any) -> FakeBackend:
    return changed(make_backend("own"), generation=defaults, **update)


INFER = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a dog"]}]}
MESSAGES = [{"role": "user", "content": "a dog"}]
# Requests that set no parameter, and the field with their parameters.
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/generate", {"inputs": "a dog"}, "parameters"),
    ("/v1/attention", {"inputs": "a dog"}, "parameters"),
    ("/v1/completions", {"prompt": "a dog"}, ""),
    ("/v1/chat/completions", {"messages": MESSAGES}, ""),
    ("/generate", {"inputs": "a dog"}, "parameters"),
    ("/", {"inputs": "a dog"}, "parameters"),
    ("/v2/models/own/infer", INFER, "parameters"),
]


@pytest.mark.parametrize(("path", "body", "field"), REQUESTS, ids=[path for path, *_ in REQUESTS])
async def test_every_api_uses_the_defaults(
    start: Start, make_backend: MakeBackend, submitted: Submitted, path: str, body: dict[str, Any], field: str
) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.5}
    requested = {**body, field: options} if field else body | options
    beams, sampling = ("num_beams", "length_penalty", "max_new_tokens"), ("do_sample", "temperature", "top_k")
    for defaults, penalty, names, expected in (
        (BEAMS, 1.0, beams, (4, 0.6, 20)),
        (SAMPLING, 1.1, sampling, (True, 0.7, 5)),
    ):
        submitted.clear()
        async with start(backend_with(make_backend, defaults, chat=LINES)) as running:
            await running.result(path, body)
            await running.result(path, requested)
        assert values(submitted, *names, "repetition_penalty") == [(*expected, penalty), (*expected, 1.5)]


async def test_a_stream_does_not_use_beam_search_by_default(
    start: Start, make_backend: MakeBackend, submitted: Submitted
) -> None:
    async with start(backend_with(make_backend, BEAMS, chat=LINES)) as running:
        await running.events("/v1/generate", {"inputs": "x", "stream": True})
        await running.events("/v1/completions", {"prompt": "x", "stream": True})
        await running.events("/generate_stream", {"inputs": "x"}, has_end_mark=False)
        assert values(submitted, "num_beams", "max_new_tokens") == [(1, 20)] * 3
        response = await running.post("/v1/generate", {"inputs": "x", "stream": True, "parameters": {"num_beams": 2}})
        assert response.json()["error"]["code"] == "unsupported_parameter"


async def test_the_temperature_of_openai_enables_or_disables_sampling(
    start: Start, make_backend: MakeBackend, submitted: Submitted
) -> None:
    async with start(backend_with(make_backend, SAMPLING)) as running:
        for fields in ({"temperature": 0}, {"temperature": 0.5}, {"top_p": 0.5, "n": 2}, {"num_beams": 2}):
            await running.result("/v1/completions", {"prompt": "x", **fields})
    expected = [(False, 1, 1, 1), (True, 0.5, 0.9, 1), *[(True, 0.7, 0.5, 1)] * 2, (False, 1, 1, 2)]
    assert values(submitted, "do_sample", "temperature", "top_p", "num_beams") == expected


async def test_tgi_can_turn_sampling_off(start: Start, make_backend: MakeBackend, submitted: Submitted) -> None:
    async with start(backend_with(make_backend, SAMPLING)) as running:
        for parameters in ({"do_sample": False}, {"temperature": 1.0, "seed": 3}):
            await running.result("/generate", {"inputs": "x", "parameters": parameters})
    assert values(submitted, "do_sample", "temperature") == [(False, 1), (True, 1)]


async def test_a_translation_uses_the_beams_of_the_model(
    start: Start, make_backend: MakeBackend, submitted: Submitted
) -> None:
    languages = Languages(sources=("en",), targets=("de",))
    async with start(backend_with(make_backend, BEAMS, languages=languages)) as running:
        for alternatives in (None, 1, 5):
            body = {"q": "a dog", "source": "en", "target": "de", "alternatives": alternatives}
            await running.result("/translate", body)
    assert values(submitted, "num_beams", "num_return_sequences") == [(4, 1), (4, 2), (6, 6)]


async def test_the_defaults_are_shown(start: Start, make_backend: MakeBackend) -> None:
    async with start(backend_with(make_backend, BEAMS)) as running:
        (card,) = (await running.client.get("/v1/models")).json()["data"]
        expected = BEAMS.model_dump(exclude=set(ALWAYS))
        assert card["generation_defaults"] == expected


def with_parameters(*parameters: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("/v1/generate", {"inputs": "x", "parameters": one}) for one in parameters]


def with_fields(*fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("/v1/completions", {"prompt": "x", **one}) for one in fields]


ACCEPTED = [  # by a model that samples by default, one with beam search, or one with neither
    *with_parameters(
        {"temperature": 0.5},
        {"top_k": 3, "num_return_sequences": 2},
        {"length_penalty": 2.0},
        {"num_return_sequences": 3},
        {"do_sample": True, "temperature": 0.5},
        {"num_beams": 2, "length_penalty": 2.0},
    ),
    *with_fields(
        {"top_p": 0.5},
        {"n": 2},
        {"length_penalty": 2.0},
        {"temperature": 0.5, "top_p": 0.5, "n": 2},
        {"temperature": None, "num_beams": None, "n": 2},
    ),
]
REJECTED = [
    *with_parameters(
        {"do_sample": False, "temperature": 0.5},
        {"num_beams": 1, "length_penalty": 2.0},
        {"temperature": 0.5, "length_penalty": 2.0},
        {"do_sample": True, "num_beams": 2},
    ),
    *with_fields(
        {"temperature": 0, "n": 2, "num_beams": 1},
        {"num_beams": 2, "top_p": 0.5},
        {"temperature": 0.5, "num_beams": 2},
        {"temperature": 0.5, "length_penalty": 2.0},
    ),
]


async def test_a_model_accepts_the_parameters_of_its_default_method(start: Start, make_backend: MakeBackend) -> None:
    is_accepted = [False] * len(ACCEPTED + REJECTED)
    for defaults in (GenerationDefaults(), SAMPLING, BEAMS):
        async with start(backend_with(make_backend, defaults)) as running:
            for index, (path, body) in enumerate(ACCEPTED + REJECTED):
                is_accepted[index] |= (await running.post(path, body)).status_code == 200
    assert is_accepted == [True] * len(ACCEPTED) + [False] * len(REJECTED)
