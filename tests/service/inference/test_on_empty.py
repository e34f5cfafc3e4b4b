"""Blank inputs fail their call with their index, or yield an empty output with
`on_empty: "pass"`.
"""

import re
import sys
from typing import Any

import pytest

from sightline.service.body_fields import NOT_BLANK
from tests.service.conftest import MakeBackend, Running, Start, reading_examples

pytestmark = pytest.mark.anyio

LINES = ["", "a dog", " \n", "Hund x", "\u3000"]
NOTHING: dict[str, Any] = {"seed": None, "attention": None, "coverage": None, "repair": None}
EMPTY: dict[str, Any] = {"rank": 0, "text": "", "tokens": [], "finish_reason": "empty", "score": 0.0, **NOTHING}


async def generate(running: Running, inputs: Any, **body: Any) -> Any:
    return await running.result("/v1/generate", {"inputs": inputs, **body})


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


async def test_translate_passes_blank_lines(start: Start, make_backend: MakeBackend) -> None:
    async with start(reading_examples(make_backend())) as running:
        languages = {"source": "en", "target": "de"}
        (expected,) = (await running.post("/translate", {"q": ["a dog"], **languages})).json()["translatedText"]
        response = await running.post("/translate", {"q": ["a dog", " "], "on_empty": "pass", **languages})
        assert response.json() == {"translatedText": [expected, ""]}
        body = {"q": ["", "a dog"], "on_empty": "pass", "alternatives": 2, **languages}
        assert (await running.post("/translate", body)).json()["alternatives"][0] == []
        response = await running.post("/translate", {"q": " ", "on_empty": "pass", **languages})
        assert response.json() == {"translatedText": ""}


def test_the_pattern_of_texts_matches_texts_that_are_not_blank() -> None:
    matched = {code for code in range(sys.maxunicode + 1) if re.search(NOT_BLANK, chr(code))}
    assert matched == {code for code in range(sys.maxunicode + 1) if chr(code).strip()}
