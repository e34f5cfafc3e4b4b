"""Requests of the unmodified `libretranslatepy` package and of a plain client to a real service."""

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from libretranslatepy import LibreTranslateAPI

from lab.bench.server import RunningServer
from sightline.base.text.sentences import split_sentences
from tests.e2e.asking import post

TEXT = "A man is riding a bicycle & “1 + 1”."  # one sentence
SENTENCES = Path("loadtest/sentences.txt")
PAIR = {"source": "en", "target": "de"}


def own_text(server: RunningServer, text: str) -> str:
    (output,) = post(server, "/v1/generate", {"model": "multi30k-en-de", "inputs": text})["outputs"]
    return str(output["text"])


def test_a_paragraph_is_the_translation_of_its_sentences(shipped: RunningServer) -> None:
    sentences = ["A man is riding a bicycle.", "Two dogs play in the snow.", "A woman is reading a book."]
    paragraph = "{} {}\n  {}\n"
    expected = paragraph.format(*(own_text(shipped, sentence) for sentence in sentences))
    text = paragraph.format(*sentences)
    assert LibreTranslateAPI(shipped.url).translate(text, "en", "de") == expected
    assert own_text(shipped, text) == expected
    body = {"model": "multi30k-en-de", "inputs": text, "parameters": {"split_sentences": False}}
    (output,) = post(shipped, "/v1/generate", body)["outputs"]
    assert output["text"] != expected


def test_a_text_of_500_sentences_is_translated_in_one_call(shipped: RunningServer) -> None:
    """Regression: texts with more sentences than the maximum number of inputs were rejected."""
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if len(split_sentences(line, "en", 9).sentences) == 1]  # type: ignore[union-attr]
    lines = (lines * 3)[:500]
    translated = post(shipped, "/translate", {"q": "\n".join(lines), **PAIR})["translatedText"].split("\n")
    assert len(translated) == 500
    own = post(shipped, "/v1/generate", {"inputs": lines[-32:]})["outputs"]
    assert translated[-32:] == [output["text"] for output in own]


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_the_package_translates_and_lists_languages(shipped: RunningServer, api_key: str | None) -> None:
    api = LibreTranslateAPI(shipped.url, api_key=api_key)
    for source in ("en", "auto"):
        assert api.translate(TEXT, source, "de") == own_text(shipped, TEXT)
    assert api.languages() == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de"]},
    ]


def test_the_package_raises_an_http_error_with_the_reason(shipped: RunningServer) -> None:
    api = LibreTranslateAPI(shipped.url)
    with pytest.raises(HTTPError) as caught:
        api.translate(TEXT, "de", "en")
    with caught.value as response:
        assert response.status == 422
        assert json.load(response)["error"] == (
            "source: No model translates between these languages. Supported: en to de."
        )


def test_json_gives_the_result_of_a_form_and_accepts_lists(shipped: RunningServer) -> None:
    body = {**PAIR, "q": TEXT, "format": "text", "alternatives": 2, "api_key": ""}
    whole = post(shipped, "/translate", body)
    with urlopen(Request(f"{shipped.url}/translate", urlencode(body).encode()), timeout=30) as response:
        assert json.load(response) == whole
    listed = post(shipped, "/translate", {**body, "q": [TEXT, "A dog runs."]})
    assert (listed["translatedText"][0], listed["alternatives"][0]) == (whole["translatedText"], whole["alternatives"])
    parameters = {"num_beams": 3, "num_return_sequences": 3}
    own = post(shipped, "/v1/generate", {"inputs": TEXT, "parameters": parameters})["outputs"]
    texts = list(dict.fromkeys(output["text"] for output in own))
    assert [whole["translatedText"], *whole["alternatives"]] == texts
    assert len(texts) > 1
