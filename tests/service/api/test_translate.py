"""POST /v1/translate over the fake model."""

from typing import Any

import pytest

from tests.service.conftest import MakeBackend, Start, generate, with_languages

pytestmark = pytest.mark.anyio


async def test_texts_and_markup_come_back_whole(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(make_backend(), fake="en-de")) as running:
        (whole,) = (await generate(running, "a dog"))["outputs"]

        async def translate(inputs: Any, **body: Any) -> Any:
            return await running.result("/v1/translate", {"inputs": inputs, **body})

        response = await translate(["# a dog\n\n\t12 {name}", "a dog"])
        expected = [f"# {whole['text']}\n\n\t12 {{name}}", whole["text"]]
        assert [(one["text"], one["tags"]) for one in response["outputs"]] == [(text, []) for text in expected]
        assert response["usage"]["output_tokens"] == 2 * len(whole["tokens"])
        (output,) = (await translate("<p>a dog</p><p>A <b>red</b> dog<br><!-- x -->", markup="html"))["outputs"]
        assert [tag["name"] for tag in output["tags"]] == ["b", "br"]
        assert all(0 <= tag["confidence"] <= 1 for tag in output["tags"])
        for part in ("<p>", "<b>", "</b>", "<br>", "<!-- x -->"):
            assert output["text"].count(part) == (2 if part == "<p>" else 1)
        (output,) = (await translate("a &lt; b", markup="xml"))["outputs"]
        assert "&lt;" in output["text"] or "<" not in output["text"]


async def test_what_cannot_be_translated_is_rejected(start: Start, make_backend: MakeBackend) -> None:
    backend = with_languages(make_backend("fake", "plain"), fake="en-de")
    async with start(backend, default_model="fake") as running:
        for body, code, param in (
            ({"model": "plain"}, "unsupported_task", "model"),
            ({"inputs": "<a><b>x", "markup": "xml"}, "invalid_parameter", "inputs"),
            ({"inputs": ["x", "<a>"], "markup": "xml"}, "invalid_parameter", "inputs[1]"),
            ({"parameters": {"top_logprobs": 1}}, "unsupported_parameter", "parameters.top_logprobs"),
            ({"parameters": {"return_attention": True}}, "unsupported_parameter", "parameters.return_attention"),
        ):
            error = (await running.post("/v1/translate", {"inputs": "a dog", **body})).json()["error"]
            assert (error["code"], error["param"]) == (code, param)
