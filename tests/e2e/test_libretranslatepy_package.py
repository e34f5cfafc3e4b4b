"""Requests of the unmodified `libretranslatepy` package and of a plain client to a real service."""

import json
import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from libretranslatepy import LibreTranslateAPI

from lab.bench.server import RunningServer
from sightline.base.text.sentences import split_sentences
from tests.e2e.asking import post

TEXT = "A man is riding a bicycle – & a horse."  # one sentence
SENTENCES = Path("loadtest/sentences.txt")
PAIR = {"source": "en", "target": "de"}
PAGE = """## Main

Hello {name}, write to jane.doe@example.com: it costs $1,234,567.89 😀

- `x` is a dog.

```python
def total(x, y):
```

    def total(x, y):

A man sleeps.
"""


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
    lines = [line for line in lines if line.isascii() and not any(map(str.isdigit, line))]  # nothing that is kept
    lines = (lines * 3)[:500]
    translated = post(shipped, "/translate", {"q": "\n".join(lines), **PAIR})["translatedText"].split("\n")
    assert len(translated) == 500
    own = post(shipped, "/v1/generate", {"inputs": lines[-32:]})["outputs"]
    assert translated[-32:] == [output["text"] for output in own]


def test_a_page_of_text_comes_back_with_all_that_must_not_change(shipped: RunningServer) -> None:
    translated = post(shipped, "/translate", {"q": PAGE, **PAIR})["translatedText"]
    for kept in (
        "{name}",
        "jane.doe@example.com",
        "$1,234,567.89",
        "😀",
        "```python\ndef total(x, y):\n```",
        "\n- `x`",
    ):
        assert translated.count(kept) == 1
    assert re.match(r"## \w", translated)
    assert "\n\n    def total(x, y):\n\n" in translated
    assert translated.count("\n") == PAGE.count("\n")


def test_html_is_translated_as_whole_sentences(shipped: RunningServer) -> None:
    html = '<p>A man is <a href="x">riding</a> a <b>bicycle</b>.<br>A dog runs.</p>'
    translated = post(shipped, "/translate", {"q": html, "format": "html", **PAIR})["translatedText"]
    plain = own_text(shipped, "A man is riding a bicycle."), own_text(shipped, "A dog runs.")
    assert re.sub(r"</?[abp]\b[^>]*>", "", translated) == "<br>".join(plain)
    assert "<b>Fahrrad</b>" in translated
    assert translated.count('<a href="x">') == translated.count("</a>") == 1
    listed = {"q": [html, "<b>A dog"], "format": "html", "alternatives": 1, **PAIR}
    result = post(shipped, "/translate", listed)
    assert result["translatedText"][1].startswith("<b>Ein Hund")
    assert result["alternatives"][0][0].count("<b>") == 1


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
