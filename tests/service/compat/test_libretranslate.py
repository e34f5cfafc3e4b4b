"""Routes of LibreTranslate over the fake model: the choice of the model, the fields, the errors."""

import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, generate, with_languages
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio

FORM = {"content-type": "application/x-www-form-urlencoded"}
Translating = Callable[..., FakeBackend]


@pytest.fixture
def translating(make_backend: MakeBackend) -> Translating:
    """`translating(a="en-de")`: a backend of models with these languages, and `plain`, which has
    none.
    """

    def make(options: dict[str, Any] | None = None, **pairs: str) -> FakeBackend:
        return with_languages(make_backend("plain", *pairs, **(options or {})), **pairs)

    return make


async def translate(running: Running, q: Any = "a dog", source: str = "en", target: str = "de", **options: Any) -> Any:
    return await running.result("/translate", {"q": q, "source": source, "target": target, **options})


async def error_message(running: Running, status: int = 422, **body: Any) -> str:
    response = await running.post("/translate", {"q": "a dog", "source": "en", "target": "de"} | body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    message: str = response.json()["error"]
    return message


async def test_a_translation_equals_the_text_of_generate(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de"), default_model="a") as running:
        own = [output["text"] for output in (await generate(running, ["a dog", "Hund"]))["outputs"]]
        assert await translate(running, ["a dog", "Hund"]) == {"translatedText": own}
        assert await translate(running, "a dog") == {"translatedText": own[0]}


async def test_fields_with_their_default_values_change_nothing(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de")) as running:
        plain = await translate(running)
        for harmless in ({"format": "text", "alternatives": 0, "api_key": "secret"}, {"format": None, "api_key": None}):
            assert await translate(running, **harmless) == plain


async def test_alternatives_are_the_next_distinct_texts_of_a_beam_search(
    start: Start, translating: Translating
) -> None:
    async with start(translating(a="en-de"), default_model="a") as running:
        own = await generate(running, ["a dog", "Hund"], num_beams=4, num_return_sequences=4)
        texts = [[output["text"] for output in own["outputs"] if output["index"] == index] for index in (0, 1)]
        response = await translate(running, ["a dog", "Hund"], alternatives=3)
        assert response["translatedText"] == [best for best, *_ in texts]
        assert response["alternatives"] == [list(dict.fromkeys(others)) for _, *others in texts]
        assert len(response["alternatives"][0]) == 3
        one = await translate(running, "Hund", alternatives=3)
        assert one == {key: value[1] for key, value in response.items()}


async def test_html_needs_a_library(start: Start, translating: Translating, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(translating(a="en-de")) as running:
        body = {"q": "<b>a dog</b>", "source": "en", "target": "de", "format": "html"}
        translated = (await running.post("/translate", body)).json()["translatedText"]
        assert (translated[:3], translated[-4:]) == ("<b>", "</b>")
        monkeypatch.setitem(sys.modules, "lxml", None)
        response = await running.post("/translate", body)
        message = (
            "This service cannot read markup, because lxml is missing; its operator can install the extra documents."
        )
        assert (response.status_code, response.json()) == (422, {"error": f"format: {message}"})


async def test_beams_that_differ_only_in_tokens_are_one_text(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de"), default_model="a") as running:
        own = await generate(running, "x", num_beams=8, num_return_sequences=8)
        texts = [output["text"] for output in own["outputs"]]
        assert len(set(texts)) < 8  # bytes that are no characters are all shown alike
        response = await translate(running, "x", alternatives=7)
        assert [response["translatedText"], *response["alternatives"]] == list(dict.fromkeys(texts))


@pytest.mark.parametrize(("pairs", "default", "source", "expected"), read_table(__file__))
async def test_the_default_model_is_used_if_it_has_the_languages_or_else_the_first_by_name(
    start: Start, translating: Translating, pairs: dict[str, str], default: str | None, source: str, expected: str
) -> None:
    backend = translating(**dict(reversed(pairs.items())))
    async with start(backend, default_model=default) as running:
        await translate(running, source=source)
        busy = [runner.manifest.name for runner in backend.runners if runner.num_encodes]
        assert busy == [expected]


async def test_letter_case_of_languages_makes_no_difference(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de")) as running:
        assert await translate(running, source="EN", target="De") == await translate(running)


async def test_languages_are_listed_with_their_target_languages(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de", b="en-de", c="en-cs", d="de-en")) as running:
        assert (await running.client.get("/languages")).json() == [
            {"code": "cs", "name": "Czech", "targets": []},
            {"code": "de", "name": "German", "targets": ["cs", "en"]},
            {"code": "en", "name": "English", "targets": ["cs", "de"]},
        ]
    async with start(translating()) as running:
        assert (await running.client.get("/languages")).json() == []


async def test_languages_are_detected_among_those_that_are_translated(start: Start, translating: Translating) -> None:
    texts = ["Ein Hund läuft über die grüne Wiese.", "Un chien court dans la prairie verte."]
    async with start(translating(a="de-en", b="fr-en", c="en-de")) as running:
        for source, text in zip(("de", "fr"), texts, strict=True):
            response = await translate(running, text, "auto", "en")
            assert response["detectedLanguage"]["language"] == source
            assert response["translatedText"] == (await translate(running, text, source, "en"))["translatedText"]
            (first, *others) = await running.result("/detect", {"q": text})
            assert first["language"] == source and first["confidence"] > 50
            assert {other["language"] for other in others} <= {"de", "en", "fr"}
        response = await translate(running, texts, "auto", "en")
        assert [found["language"] for found in response["detectedLanguage"]] == ["de", "fr"]


async def test_a_form_is_equivalent_to_json(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de")) as running:
        fields: dict[str, Any] = {
            "q": "a dog & “Hund” + ä",
            "source": "en",
            "target": "de",
            "alternatives": 2,
            "api_key": "",
        }
        expected = await translate(running, **fields)
        for content in (urlencode(fields), urlencode(fields, safe="“ä”")):
            for charset in ("", "; charset=utf-8", ";charset=UTF-8"):
                headers = {"content-type": FORM["content-type"] + charset}
                response = await running.client.post("/translate", content=content.encode(), headers=headers)
                assert (response.status_code, response.json()) == (200, expected)
        fields |= {"q": ["a dog", "Hund & ä", "a dog"], "on_empty": "pass"}
        response = await running.client.post("/translate", content=urlencode(fields, doseq=True), headers=FORM)
        assert (response.status_code, response.json()) == (200, await translate(running, **fields))


async def test_translate_accepts_no_other_content_types(start: Start, translating: Translating) -> None:
    async with start(translating(a="en-de")) as running:
        for other in ("", "text/plain", FORM["content-type"] + "; charset=latin-1"):
            response = await running.client.post("/translate", content=b"q=x", headers={"content-type": other})
            assert response.status_code == 415
            assert response.json()["error"].startswith(
                f"The Content-Type must be application/json or {FORM['content-type']} or multipart/form-data,"
            )


async def test_openapi_declares_both_bodies_and_forms_without_lists_or_nulls(start: Start) -> None:
    async with start() as running:
        paths = (await running.client.get("/openapi.json")).json()["paths"]
        content = paths["/translate"]["post"]["requestBody"]["content"]
        assert set(content) == {"application/json", FORM["content-type"], "multipart/form-data"}
        assert content["application/json"] == {"schema": {"$ref": "#/components/schemas/TranslateBody"}}
        form = content[FORM["content-type"]]["schema"]
        kinds = {name: field["type"] for name, field in form["properties"].items()}
        texts = dict.fromkeys(("on_empty", "q", "source", "target", "format", "api_key"), "string")
        assert kinds == texts | {"alternatives": "integer", "return_coverage": "boolean", "repair": "boolean"}
        assert form["properties"]["format"]["enum"] == ["text", "html"]
        assert (form["required"], form["additionalProperties"]) == (["source", "target", "q"], False)
        assert set(paths["/v1/generate"]["post"]["requestBody"]["content"]) == {"application/json"}


async def test_errors_of_overload_and_of_the_engine_have_their_status_and_the_shape_of_the_api(
    start: Start, translating: Translating
) -> None:
    loading = threading.Event()
    async with start(translating({"wait_for": loading}, a="en-de")) as running:
        for response in (
            await running.post("/translate", {"q": "x", "source": "en", "target": "de"}),
            await running.client.get("/languages"),
        ):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json() == {"error": "The models are being loaded. Retry later."}
        loading.set()
    async with start(translating({"faults": Faults(step_calls=frozenset({1}))}, a="en-de")) as running:
        assert (await error_message(running, 500)).startswith("Internal error; the log has the details")
    hang = threading.Event()
    hanging = translating({"faults": Faults(hang=hang)}, a="en-de")
    async with start(hanging, request_timeout_s=0.3, queue_timeout_s=0.2) as running:
        try:
            assert (
                await error_message(running, 504)
                == "The request did not finish before its deadline (X-Request-Timeout-Ms, SIGHTLINE_REQUEST_TIMEOUT_S)."
            )
        finally:
            hang.set()
    async with start(translating(a="en-de"), max_body_bytes=2000) as running:
        assert (await error_message(running, 413, q="x" * 3000)).startswith("The body must be at most")
        response = await running.client.get("/translate")
        assert (response.status_code, set(response.json())) == (405, {"error"})
