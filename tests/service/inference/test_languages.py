"""Languages select a model and its prefix tokens; forced tokens are not part of a result."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import Languages
from sightline.base.text.languages import find_language, language_name
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.engine.request import GenerateRequest
from tests.service.conftest import MakeBackend, Running, Start, changed, generate, multilingual_backend
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    async with start(multilingual_backend(make_backend), default_model="many") as running:
        yield running


@pytest.mark.parametrize(
    ("languages", "prefixes"),
    [
        ((None, None), ((10,), (30,))),
        (("de", None), ((11,), (30,))),
        (("de", "en"), ((20, 11), (31, 32))),
        (("EN", "zh_Hant"), ((21, 22, 10), (33,))),
        (("eng", "zho-Hant"), ((21, 22, 10), (33,))),
    ],
)
async def test_prefixes_come_before_the_source_and_the_target(
    running: Running,
    tokenizer: TextTokenizer,
    submitted: list[tuple[str, GenerateRequest]],
    languages: Any,
    prefixes: Any,
) -> None:
    names = dict(zip(("source_language", "target_language"), languages, strict=True))
    result = await generate(running, ["a dog"], **names, target_prefix="a", max_new_tokens=4)
    ((model, request),) = submitted
    assert model == result["model"] == "many"
    assert request.source_ids == (*prefixes[0], *tokenizer.encode("a dog"))
    assert request.target_prefix == (*prefixes[1], *tokenizer.encode("a", add_special_tokens=False))
    assert result["usage"]["input_tokens"] == len(request.source_ids)
    # The engine's tokens after the prefix are the result.
    runner = running.backend.runners[0]
    assert result["outputs"][0]["text"].startswith("a")
    assert result["usage"]["output_tokens"] == len(result["outputs"][0]["tokens"]) <= 4
    assert runner.num_encodes == 1


async def test_a_suffix_follows_the_source_and_counts_towards_its_limit(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer, submitted: list[tuple[str, GenerateRequest]]
) -> None:
    backend = make_backend("one")
    languages = Languages(sources=("en", "de"), targets=("fr",), source_suffix={"en": (10,), "de": (11,)})
    async with start(changed(backend, languages=languages)) as running:
        await generate(running, ["a dog", "x"], source_language="de", max_new_tokens=2)
        await running.result("/v1/score", {"inputs": "x", "targets": "a"})
        await running.result("/v1/attention", {"inputs": "x"})
        expected = [(*tokenizer.encode(text), id_) for text, id_ in (("a dog", 11), ("x", 11), ("x", 10), ("x", 10))]
        assert [request.source_ids for _, request in submitted] == expected
        limit = backend.manifests[0].limits.max_source_tokens
        longest = next(text for size in range(limit, 0, -1) if len(tokenizer.encode(text := "x" * size)) == limit)
        response = await running.post("/v1/generate", {"inputs": longest})
        assert response.json()["error"]["code"] == "input_too_long"
        assert f"must have at most {limit - 1} tokens for this model, got {limit}" in response.text


async def test_forced_tokens_are_in_no_result(running: Running, tokenizer: TextTokenizer) -> None:
    parameters = {"target_language": "en", "max_new_tokens": 5, "return_attention": True, "target_prefix": "a"}
    (whole,) = (await generate(running, "a dog", **parameters))["outputs"]
    prefix = tokenizer.encode("a", add_special_tokens=False)
    attention = whole["attention"]
    num_rows = len(prefix) + len(whole["tokens"])
    names = [tokenizer.name(id_) for id_ in (*prefix, *(token["id"] for token in whole["tokens"]))]
    assert attention["target_tokens"] == names
    assert attention["decoder_input_tokens"] == [*map(tokenizer.name, (1, 31, 32)), *names[:-1]]
    shapes = {one["kind"]: one["shape"] for one in attention["maps"]}
    assert shapes["cross"][2:] == [num_rows, len(attention["source_tokens"])]
    assert shapes["decoder"][2:] == [num_rows, len(attention["decoder_input_tokens"])]
    for one in attention["maps"]:
        np.testing.assert_allclose(np.reshape(one["data"], one["shape"]).sum(-1), 1, rtol=1e-5)
    assert whole["score"] == pytest.approx(sum(token["logprob"] for token in whole["tokens"]), rel=1e-6)


async def test_a_stream_is_the_same_text_without_forced_tokens(running: Running) -> None:
    parameters = {"target_language": "en", "max_new_tokens": 6}
    result = (await generate(running, "a dog", **parameters))["outputs"][0]
    body = {"inputs": "a dog", "parameters": parameters, "stream": True}
    events = await running.events("/v1/generate", body)
    assert [event["token"]["id"] for event in events[:-1]] == [token["id"] for token in result["tokens"]]
    assert events[-1]["text"] == result["text"]
    assert events[-1]["usage"]["output_tokens"] == len(result["tokens"])


async def test_scores_and_given_targets_leave_out_forced_tokens(running: Running, tokenizer: TextTokenizer) -> None:
    body = {"inputs": "a dog", "targets": "Hund", "target_language": "en"}
    result = await running.result("/v1/score", body)
    (output,) = result["outputs"]
    assert [token["id"] for token in output["tokens"]] == tokenizer.encode("Hund")
    assert output["score"] == pytest.approx(sum(token["logprob"] for token in output["tokens"]))
    assert result["usage"]["output_tokens"] == len(tokenizer.encode("Hund"))
    shown = await running.result("/v1/attention", {"inputs": "a dog", "targets": "Hund"})
    assert shown["outputs"][0]["target_tokens"] == [tokenizer.name(id_) for id_ in tokenizer.encode("Hund")]
    assert shown["usage"]["output_tokens"] == len(tokenizer.encode("Hund"))
    assert shown["outputs"][0]["text"] == "Hund"


async def test_languages_select_the_model(running: Running, submitted: list[tuple[str, GenerateRequest]]) -> None:
    for parameters in (
        {"target_language": "fr"},
        {"source_language": "en", "target_language": "de"},
        {"source_language": "de"},
    ):
        await generate(running, "x", **parameters)
    await running.result("/v1/generate", {"model": "b-en-de", "inputs": "x", "parameters": {"target_language": "de"}})
    await running.result("/generate", {"inputs": "x", "parameters": {"src_lang": "en_XX", "tgt_lang": "fr_XX"}})
    translation = await running.result(
        "/", {"inputs": "x", "parameters": {"src_lang": "deu_Latn", "tgt_lang": "eng_Latn"}}
    )
    assert "translation_text" in translation[0]
    await running.result("/translate", {"q": "x", "source": "en", "target": "fr"})
    await running.result("/translate", {"q": "x", "source": "auto", "target": "fr"})
    models = ["a-en-fr", "many", "many", "b-en-de", "a-en-fr", "many", "a-en-fr", "a-en-fr"]
    assert [model for model, _ in submitted] == models
    assert submitted[5][1].target_prefix == (31, 32)


async def test_the_languages_of_libretranslate_have_names(running: Running) -> None:
    languages = (await running.client.get("/languages")).json()
    assert languages == [
        {"code": "de", "name": "German", "targets": ["en", "fr", "zh-Hant"]},
        {"code": "en", "name": "English", "targets": ["de", "fr", "zh-Hant"]},
        {"code": "fr", "name": "French", "targets": []},
        {"code": "zh-Hant", "name": "Traditional Chinese", "targets": ["de", "en", "fr"]},
    ]


async def test_a_model_shows_its_languages(running: Running) -> None:
    cards = {card["id"]: card["languages"] for card in (await running.client.get("/v1/models")).json()["data"]}
    assert cards["many"] == {
        "source": "en",
        "target": "de",
        "sources": ["en", "de", "zh-Hant"],
        "targets": ["de", "en", "zh-Hant"],
    }
    assert cards["plain"] is None


async def test_sentences_are_split_by_the_rules_of_the_source_language(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sentencex

    seen: list[str] = []
    segment = sentencex.segment

    def note(language: str, text: str) -> Any:
        seen.append(language)
        return segment(language, text)

    monkeypatch.setattr(sentencex, "segment", note)
    await generate(running, "a dog. x.", source_language="zh-Hant", target_language="en", split_sentences=True)
    await generate(running, "a dog. x.", split_sentences=True)
    assert seen == ["zh", "en"]


async def test_an_input_may_be_as_long_as_fits_after_the_prefix(running: Running) -> None:
    for target, num_characters in (("de", 61), ("zh-Hant", 59)):  # with the space and the end token
        for extra in (0, 1):
            parameters = {"source_language": "en", "target_language": target}
            body = {"inputs": "x" * (num_characters + extra), "parameters": parameters}
            assert (await running.post("/v1/generate", body)).status_code == (422 if extra else 200)


@pytest.mark.parametrize(("tag", "name"), read_table(__file__, "names"))
def test_names_of_languages(tag: str, name: str) -> None:
    assert language_name(tag) == name


@pytest.mark.parametrize(("tag", "available", "expected"), read_table(__file__, "tags"))
def test_a_language_is_found_by_its_tag(tag: str, available: list[str], expected: str | None) -> None:
    assert find_language(tag, available) == expected
