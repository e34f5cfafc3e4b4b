"""Requests of the unmodified package `deepl`, and of other clients, to a real service."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import deepl
import docx
import pytest
from deepl.api_data import MultilingualGlossaryDictionaryEntries as Entries

from lab.bench.server import RunningServer, serving
from tests.e2e.asking import post

TEXT = "Two dogs play in the snow. Write to jane.doe@example.com!"
HTML = "<p>A man is riding a <b>bicycle</b>.</p>"
HTML_DE = "<p>Ein Mann fährt auf einem <b>Fahrrad</b>.</p>"


@pytest.fixture(scope="module")
def expected(shipped: RunningServer) -> str:
    (output,) = post(shipped, "/v1/translate", {"inputs": TEXT})["outputs"]
    return str(output["text"])


def test_the_package_of_deepl(shipped: RunningServer, expected: str) -> None:
    client = deepl.DeepLClient("key", server_url=shipped.url)
    one = client.translate_text(TEXT, target_lang="DE")
    assert isinstance(one, deepl.TextResult)
    assert (one.text, one.detected_source_lang, one.billed_characters) == (expected, "EN", len(TEXT))
    texts = client.translate_text([TEXT, "", TEXT], source_lang="EN", target_lang="DE", split_sentences="1")
    assert isinstance(texts, list)
    assert [text.text for text in texts] == [expected, "", expected]
    for kind in ("html", "xml"):
        result: Any = client.translate_text(HTML, target_lang="DE", tag_handling=kind)
        assert result.text == HTML_DE
    assert [language.code for language in client.get_source_languages()] == ["EN"]
    assert [(language.code, language.name) for language in client.get_target_languages()] == [("DE", "German")]
    assert not client.get_usage().any_limit_reached
    with pytest.raises(deepl.DeepLException, match=r"target_lang: No model translates between these languages"):
        client.translate_text(TEXT, target_lang="FR")
    source = "<r><x>A dog.</x><p>A man is riding a <b>bicycle</b>.</p></r>"
    for ignored in ("x, y", ["x"]):
        result = client.translate_text(source, target_lang="DE", tag_handling="xml", ignore_tags=ignored)
        assert result.text == f"<r><x>A dog.</x>{HTML_DE}</r>"


@pytest.mark.parametrize("name", ["page.html", "page.docx"])
def test_documents_of_the_package_of_deepl(
    shipped: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 50))
    source, target = tmp_path / name, tmp_path / f"de.{name}"
    if name.endswith("html"):
        source.write_text(HTML)
    else:
        document = docx.Document()
        document.add_paragraph("A man is riding a ").add_run("bicycle").bold = True
        document.save(str(source))
    client = deepl.DeepLClient("key", server_url=shipped.url)
    assert client.translate_document_from_filepath(source, target, target_lang="DE", formality="prefer_more").done
    if name.endswith("html"):
        assert target.read_text() == HTML_DE
    else:
        (paragraph,) = docx.Document(str(target)).paragraphs
        assert [run.text for run in paragraph.runs if run.bold] == ["Fahrrad"]
    source.write_bytes(b"PK damaged")
    with pytest.raises(deepl.DeepLException, match="file is damaged"):
        client.translate_document_from_filepath(
            source.rename(tmp_path / "x.docx"), tmp_path / "y.docx", target_lang="DE"
        )


def test_glossaries_of_the_package_of_deepl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 50))
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    (bundles / "multi30k-en-de").symlink_to(Path("bundles/multi30k-en-de").absolute())
    text, entries = "A dog and a cat run.", {"dog": "Rüde", "cat": "Katze"}
    with serving(bundles, glossaries=tmp_path / "glossaries", workers=2) as server:
        client = deepl.DeepLClient("key", server_url=server.url)
        assert [(pair.source_lang, pair.target_lang) for pair in client.get_glossary_languages()] == [("en", "de")]
        glossary = client.create_glossary("pets", "EN", "DE", entries)
        assert (glossary.name, glossary.source_lang, glossary.target_lang) == ("pets", "EN", "DE")
        assert (glossary.ready, glossary.entry_count, client.get_glossary_entries(glossary)) == (True, 2, entries)
        assert client.get_glossary(glossary.glossary_id).creation_time == glossary.creation_time
        table = client.create_glossary_from_csv("csv", "EN", "DE", 'dog,"Rüde, groß",en,de\n')
        assert client.get_glossary_entries(table) == {"dog": "Rüde, groß"}
        assert {each.name for each in client.list_glossaries()} == {"pets", "csv"}
        for chosen in (glossary, glossary.glossary_id):
            result: Any = client.translate_text(text, source_lang="EN", target_lang="DE", glossary=chosen)
            assert "Rüde" in result.text
        result = client.translate_text_with_glossary("A dog runs.", glossary)
        assert "Rüde" in result.text
        source, target = tmp_path / "en.txt", tmp_path / "de.txt"
        source.write_text("A dog runs.")
        languages: Any = {"source_lang": "EN", "target_lang": "DE"}
        client.translate_document_from_filepath(source, target, **languages, glossary=glossary)
        assert "Rüde" in target.read_text()
        client.delete_glossary(table)
        with pytest.raises(deepl.GlossaryNotFoundException, match=r"There is no glossary with this id"):
            client.get_glossary(table.glossary_id)

        pair = Entries("EN", "DE", entries)
        other = Entries("DE", "EN", {"Hund": "hound"})
        several = client.create_multilingual_glossary("several", [pair, other])
        assert [(each.source_lang, each.entry_count) for each in several.dictionaries] == [("EN", 2), ("DE", 1)]
        assert {each.name for each in client.list_multilingual_glossaries()} == {"pets", "several"}
        assert client.update_multilingual_glossary_name(several, "pets of all").name == "pets of all"
        pair = Entries("EN", "DE", {"dog": "Köter"})
        client.update_multilingual_glossary_dictionary(several, pair)
        (found,) = client.get_multilingual_glossary_entries(several, "EN", "DE").dictionaries
        assert str(found.entries) == "dog\tKöter\ncat\tKatze"
        result = client.translate_text(text, source_lang="EN", target_lang="DE", glossary=several)
        assert "Köter" in result.text
        assert client.replace_multilingual_glossary_dictionary(several, pair).entry_count == 1
        client.delete_multilingual_glossary_dictionary(several, source_lang="EN", target_lang="DE")
        assert len(client.get_multilingual_glossary(several.glossary_id).dictionaries) == 1
        with pytest.raises(deepl.DeepLException, match=r"no terms for en to de, only for de to en"):
            client.translate_text(text, source_lang="EN", target_lang="DE", glossary=several.glossary_id)
        with pytest.raises(deepl.DeepLException, match=r"entries must be a table of terms: line 1 must have a term"):
            client.create_glossary_from_csv("damaged", "EN", "DE", "dog")
        client.delete_multilingual_glossary(several)
        assert len(client.list_multilingual_glossaries()) == 1


def test_calls_of_weblate(shipped: RunningServer, expected: str) -> None:
    """The bodies are those of its machine translation by LibreTranslate and by DeepL."""
    body = {"api_key": "", "q": [TEXT, TEXT], "source": "en", "target": "de"}
    assert post(shipped, "/translate", body) == {"translatedText": [expected, expected]}
    languages = {"source_lang": "EN", "target_lang": "DE", "formality": "default"}
    body = {"text": ['A dog at <x id="9"></x>.'], **languages, "tag_handling": "xml", "ignore_tags": ["x"]}
    (translation,) = post(shipped, "/v2/translate", body)["translations"]
    assert translation["text"].count('<x id="9"/>') == 1


def test_calls_of_google(shipped: RunningServer, expected: str) -> None:
    """The bodies are those of the package `google-cloud-translate` 3."""
    path = "/language/translate/v2?prettyPrint=false"
    body = {"q": [HTML, TEXT], "target": "de", "source": None, "model": None, "format": None, "cid": []}
    translations = post(shipped, path, body)["data"]["translations"]
    assert [each["translatedText"] for each in translations] == [HTML_DE, expected]
    assert {each["detectedSourceLanguage"] for each in translations} == {"en"}
    body = {"q": TEXT, "target": "de", "source": "en", "format": "text"}
    assert post(shipped, path, body)["data"] == {"translations": [{"translatedText": expected}]}
    [[detection]] = post(shipped, "/language/translate/v2/detect", {"q": [TEXT]})["data"]["detections"]
    assert detection["language"] == "en"
    with urlopen(f"{shipped.url}/language/translate/v2/languages?target=en") as response:
        languages = json.load(response)["data"]["languages"]
    assert languages == [{"language": "de", "name": "German"}, {"language": "en", "name": "English"}]


def test_lists_of_mtranserver(shipped: RunningServer, expected: str) -> None:
    body = {"source_lang": "auto", "target_lang": "de", "text_list": [TEXT, "", TEXT]}
    translations = post(shipped, "/imme", body)["translations"]
    assert [each["text"] for each in translations] == [expected, "", expected]
    assert {each["detected_source_lang"] for each in translations} == {"en"}
    batch = {"from": "en", "to": "de", "texts": [HTML, TEXT], "html": True}
    assert post(shipped, "/translate/batch", batch) == {"results": [HTML_DE, expected]}
