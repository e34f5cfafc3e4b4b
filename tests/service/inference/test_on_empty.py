"""Blank inputs fail their call with their index, or yield an empty output with
`on_empty: "pass"`.
"""

from typing import Any

import pytest

from tests.service.conftest import MakeBackend, Running, Start, reading_examples

pytestmark = pytest.mark.anyio

LINES = ["", "a dog", " \n", "Hund x", "\u3000"]
EMPTY = {"rank": 0, "text": "", "tokens": [], "finish_reason": "empty", "score": 0.0, "seed": None, "attention": None}


async def generate(running: Running, inputs: Any, **body: Any) -> Any:
    return await running.result("/v1/generate", {"inputs": inputs, **body})


@pytest.mark.parametrize("options", [{}, {"on_empty": "error"}])
async def test_a_blank_input_fails_the_call_with_its_index(running: Running, options: dict[str, Any]) -> None:
    response = await running.post("/v1/generate", {"inputs": ["a", *LINES[2:]], **options})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "empty_input", "inputs[1]")
    assert error["message"] == "inputs[1] is empty or contains only whitespace."
    assert running.backend.runners[0].num_encodes == 0


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"return_attention": True}])
async def test_blank_inputs_pass_with_empty_outputs(running: Running, parameters: dict[str, Any]) -> None:
    response = await generate(running, LINES, on_empty="pass", parameters=parameters)
    expected = await generate(running, ["a dog", "Hund x"], parameters=parameters)
    of_texts = [{**output, "index": 1 + 2 * output["index"]} for output in expected["outputs"]]
    empty = [{"index": index, **EMPTY} for index in (0, 2, 4)]
    assert response["outputs"] == sorted(of_texts + empty, key=lambda output: (output["index"], output["rank"]))
    assert response["usage"] == expected["usage"]


async def test_prefixes_stay_with_their_inputs(running: Running) -> None:
    prefixes = ["x", "a", "x", "Hund", "x"]
    response = await generate(running, LINES, on_empty="pass", parameters={"target_prefix": prefixes})
    expected = await generate(running, ["a dog", "Hund x"], parameters={"target_prefix": ["a", "Hund"]})
    assert [one["text"] for one in response["outputs"] if one["text"]] == [one["text"] for one in expected["outputs"]]


@pytest.mark.parametrize("inputs", ["", ["", " "]])
async def test_blank_inputs_alone_need_no_model_run(running: Running, inputs: Any) -> None:
    response = await generate(running, inputs, on_empty="pass")
    count = 1 if isinstance(inputs, str) else 2
    assert response["outputs"] == [{"index": index, **EMPTY} for index in range(count)]
    assert response["usage"] == {"input_tokens": 0, "output_tokens": 0}
    assert running.backend.runners[0].num_encodes == 0


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"inputs": ["", "a", "x" * 70]}, "inputs[2]", "inputs[2] must have at most 64 tokens"),
        (
            {"inputs": ["", "a"], "parameters": {"target_prefix": ["x", "x" * 70]}},
            "parameters.target_prefix[1]",
            "parameters.target_prefix[1] must have at most",
        ),
        ({"inputs": ["", "a"], "parameters": {"target_prefix": ["a"]}}, "parameters.target_prefix", ""),
        ({"inputs": ["", 3]}, "inputs[1]", "inputs[1] must be a string."),
        ({"inputs": []}, "inputs", "inputs is an empty list."),
        (
            {"inputs": [""] * 2049},
            "inputs",
            "inputs must have at most 2048 strings (or fewer, see SIGHTLINE_MAX_INPUTS), got 2049.",
        ),
        ({"inputs": "a", "stream": True}, "on_empty", "on_empty: pass cannot be combined with stream: true"),
        ({"inputs": "a", "on_empty": "skip"}, "on_empty", "on_empty must be"),
    ],
)
async def test_errors_name_the_index_in_the_request(
    running: Running, body: dict[str, Any], param: str, message: str
) -> None:
    response = await running.post("/v1/generate", {"on_empty": "pass", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, param)
    assert error["message"].startswith(message)


async def test_translate_passes_blank_lines(start: Start, make_backend: MakeBackend) -> None:
    async with start(reading_examples(make_backend())) as running:
        languages = {"source": "en", "target": "de"}
        response = await running.post("/translate", {"q": ["a dog", " "], **languages})
        assert (response.status_code, response.json()["error"][:4]) == (422, "q[1]")
        (expected,) = (await running.post("/translate", {"q": ["a dog"], **languages})).json()["translatedText"]
        response = await running.post("/translate", {"q": ["a dog", " "], "on_empty": "pass", **languages})
        assert response.json() == {"translatedText": [expected, ""]}
        body = {"q": ["", "a dog"], "on_empty": "pass", "alternatives": 2, **languages}
        assert (await running.post("/translate", body)).json()["alternatives"][0] == []
        response = await running.post("/translate", {"q": " ", "on_empty": "pass", **languages})
        assert response.json() == {"translatedText": ""}
