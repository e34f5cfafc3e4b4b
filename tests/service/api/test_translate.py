"""POST /v1/translate over the fake model."""

import re
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
        assert response["outputs"][0]["sentences"] == [[2, 7, 2, 2 + len(whole["text"])]]
        assert response["usage"]["output_tokens"] == 2 * len(whole["tokens"])
        (output,) = (await translate("<p>a dog</p><p>A <b>red</b> dog<br><!-- x -->", markup="html"))["outputs"]
        assert [tag["name"] for tag in output["tags"]] == ["b", "br"]
        assert all(0 <= tag["confidence"] <= 1 for tag in output["tags"])
        for part in ("<p>", "<b>", "</b>", "<br>", "<!-- x -->"):
            assert output["text"].count(part) == (2 if part == "<p>" else 1)
        (output,) = (await translate("<p>a <b>red</b> dog</p>", markup="html", glossary={"red dog": "Fuchs"}))[
            "outputs"
        ]
        assert "Fuchs" in output["text"] and output["text"].count("<b>") == 1
        (output,) = (await translate("a &lt; b", markup="xml"))["outputs"]
        assert "&lt;" in output["text"] or "<" not in output["text"]


async def test_a_language_between_connects_two_models(start: Start, make_backend: MakeBackend) -> None:
    backend = with_languages(make_backend("a", "b", "c"), a="de-en", b="en-fr", c="fr-en")
    async with start(backend) as running:

        async def translate(inputs: Any, source: str, target: str, **body: Any) -> Any:
            languages = {"source_language": source, "target_language": target}
            return await running.result("/v1/translate", {"inputs": inputs, "parameters": languages, **body})

        first = await translate("Ein Hund. 12 {name}", "de", "en")
        second = await translate(first["outputs"][0]["text"], "en", "fr")
        both = await translate("Ein Hund. 12 {name}", "de", "fr")
        assert both["outputs"][0]["text"] == second["outputs"][0]["text"]
        assert both["outputs"][0]["route"] == first["outputs"][0]["route"] + second["outputs"][0]["route"]
        tokens = [result["usage"]["output_tokens"] for result in (first, second, both)]
        assert tokens[0] + tokens[1] == tokens[2]
        (output,) = (await translate("<p>a <i>dog <b>runs</b></i>", "de", "fr", markup="html"))["outputs"]
        assert [tag["name"] for tag in output["tags"]] == ["i", "b"]
        assert all(output["text"].count(tag) == 1 for tag in ("<p>", "<i>", "</i>", "<b>", "</b>"))
        (one, other) = (await translate(["Der Hund läuft schnell", "Le chien court vite"], "auto", "en"))["outputs"]
        assert (one["detected"]["language"], other["detected"]["language"]) == ("de", "fr")
        assert (one["route"][0]["model"], other["route"][0]["model"]) == ("a", "c")
        languages = {"source_language": "en", "target_language": "de"}
        error = (await running.post("/v1/translate", {"inputs": "x", "parameters": languages})).json()["error"]
        assert error["message"].endswith("Supported: de to en, fr; en to fr; fr to en.")


async def test_what_cannot_be_translated_is_rejected(start: Start, make_backend: MakeBackend) -> None:
    backend = with_languages(make_backend("fake", "plain"), fake="en-de")
    async with start(backend, default_model="fake") as running:
        for body, code, param in (
            ({"model": "plain"}, "unsupported_task", "model"),
            ({"inputs": "<a><b>x", "markup": "xml"}, "invalid_parameter", "inputs"),
            ({"inputs": ["x", "<a>"], "markup": "xml"}, "invalid_parameter", "inputs[1]"),
            ({"glossary": {"dog": " "}}, "invalid_parameter", "glossary.dog"),
            ({"parameters": {"top_logprobs": 1}}, "unsupported_parameter", "parameters.top_logprobs"),
            ({"parameters": {"return_attention": True}}, "unsupported_parameter", "parameters.return_attention"),
        ):
            error = (await running.post("/v1/translate", {"inputs": "a dog", **body})).json()["error"]
            assert (error["code"], error["param"]) == (code, param)


async def test_tags_that_only_format_may_be_split(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(make_backend(), fake="en-de")) as running:
        body = {"inputs": '<p><b id="x">a dog</b> runs <a href="y">here</a></p>', "markup": "html"}
        whole = (await running.result("/v1/translate", body))["outputs"][0]["text"]
        split = (await running.result("/v1/translate", {**body, "split_tags": True}))["outputs"][0]["text"]
        for text in (whole, split):
            assert text.count(' id="x"') == text.count("<a ") == 1 and text.count("<b") == text.count("</b>") >= 1
        assert re.sub(r"</?[ab][^>]*>", "", whole) == re.sub(r"</?[ab][^>]*>", "", split)
