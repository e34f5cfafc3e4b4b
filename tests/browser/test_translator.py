"""The translator of the page in a real browser. It needs Chromium."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import pytest

from lab.bench.server import RunningServer

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]
SENTENCE = "Two girls are playing with a small brown dog on the beach."
MARKDOWN = "# A dog\n\nA dog runs to `x = 1`.\n\n```\ncode: A dog\n\nA dog\n```\n\n- {name} runs.\n"
HTML = """<!doctype html>
<html lang="en"><head><title>A dog</title><style>p { color: red }</style></head><body class="x">
<p style="color: red" title="A dog">A <b>dog</b> runs.</p><script>var dog = "A dog";</script><hr>
<ul><li>A man &amp; a <a href="x?a=1&amp;b">dog</a> run.</li></ul></body></html>"""


def start_translation(page: Any, text: str) -> Any:
    """Type a text, and return the translation, once it is there."""
    page.get_by_label("Text to translate").fill(text)
    page.get_by_text("Translated.").wait_for()
    return page.get_by_role("group", name="Translation")


def test_a_word_lights_up_its_partners_and_has_alternatives(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url, may_fail=True)
    readout = page.locator("#translator .readout")
    output = start_translation(page, f"🐕 A dog runs.  {SENTENCE}\n\nWrite to jane@example.com.")
    assert output.text_content().startswith("🐕 Ein Hund rennt.  Zwei Mädchen")
    assert "\n\n" in output.text_content() and "jane@example.com" in output.text_content()
    output.get_by_role("button", name="Strand").hover()
    page.locator(".mirror .partner", has_text="beach").wait_for(state="attached")
    assert page.locator(".mirror .near").all_text_contents() == SENTENCE.rstrip(".").split()
    page.mouse.move(0, 0)
    page.get_by_text("Point at a word").wait_for()
    place = page.locator(".mirror .word", has_text="girls").bounding_box()
    page.mouse.move(place["x"] + 5, place["y"] + 5)
    page.locator(".translation .partner", has_text="Mädchen").wait_for()
    page.get_by_label("Text to translate").press("Control+Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.locator(".translation .partner", has_text="Hund").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.locator(".mirror .partner", has_text="dog").first.wait_for(state="attached")
    assert readout.text_content().replace("\u2068", "").replace("\u2069", "").startswith("Hund ← dog ")
    page.keyboard.press("Enter")
    other = page.get_by_role("dialog", name="Alternatives for Hund").get_by_role("button").first
    other.wait_for()
    sentence, word = other.get_attribute("title"), other.text_content().split()[0]
    page.keyboard.press("Enter")
    page.locator(".translation .current", has_text=word).wait_for()
    assert output.text_content().startswith(f"🐕 {sentence}  Zwei Mädchen")
    output.get_by_role("button", name="Strand").hover()
    page.locator(".mirror .partner", has_text="beach").wait_for(state="attached")
    page.route("**/v1/translate", lambda route: route.abort())
    page.get_by_label("Text to translate").fill("A man sleeps.")
    page.get_by_role("button", name="Retry").wait_for()
    page.unroute("**/v1/translate")
    page.get_by_role("button", name="Retry").press("Enter")
    page.get_by_role("button", name="schläft").wait_for()
    page.get_by_role("button", name="Copy the translation").click()
    page.get_by_text("Copied.").or_(page.get_by_text("does not allow copying")).wait_for()


def test_words_are_marked_but_no_copies(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    start_translation(page, "Fifteen firemen rescued a cat.  Contact jane@example.com or visit https://x.org/a.")
    marked = page.locator("#translator .doubtful, #translator .omitted")
    marked.first.wait_for(state="attached")
    assert not {"jane", "example", "com", "https", "org"} & {*" ".join(marked.all_text_contents()).split()}


def test_languages_models_and_the_way_to_the_views_of_attention(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    assert page.get_by_role("button", name="Swap the languages").is_disabled()
    groups = page.get_by_label("Translation model").locator("optgroup")
    assert [one.get_attribute("label").split()[0] for one in groups.all()] == ["Translate", "Recurrent"]
    assert "multi30k-en-de – English to German" in groups.first.text_content()
    page.get_by_text("Trained on 29,000 captions").first.wait_for()
    page.get_by_label("Translation model").select_option("multi30k-en-de-fixed-context")
    start_translation(page, SENTENCE).get_by_role("button").first.hover()
    page.get_by_text("This model has no attention between its texts.").wait_for()
    page.get_by_role("link", name="Look inside").click()
    page.get_by_text("This model has no attention:").wait_for()
    assert page.get_by_label("Text", exact=True).input_value() == SENTENCE
    labels = page.get_by_label("Model", exact=True).locator("optgroup").evaluate_all("all => all.map(one => one.label)")
    assert [label.split()[0] for label in labels] == ["Translate", "Chat", "Classify", "Recurrent"]
    page.get_by_role("link", name="Translate").click()
    assert page.get_by_label("Text to translate").input_value() == SENTENCE


def test_languages_are_swapped_and_a_service_without_a_translator_shows_attention(
    open_page: OpenPage, server: RunningServer
) -> None:
    page = open_page(server.url)
    languages = {"source": "en", "target": "de", "sources": ["en", "de", "fr"], "targets": ["de", "en", "fr"]}

    def cards(route: Any) -> None:
        data = json.loads(route.fetch().text())["data"]
        found = [one for one in data if one["languages"] is None or (languages and one["id"] == "multi30k-en-de")]
        route.fulfill(
            json={"data": [{**one, "languages": one["languages"] and languages, "coverage": None} for one in found]}
        )

    def reverse(route: Any) -> None:
        parameters = route.request.post_data_json["parameters"]
        assert parameters["source_language"] in ("de", "auto") and parameters["target_language"] == "en"
        step = {"model": "multi30k-en-de", "source": "de", "target": "en"}
        route.fulfill(json={"outputs": [{"text": "A dog.", "sentences": [[0, 9, 0, 6]], "route": [step]}]})

    page.route("**/v1/models", cards)
    page.reload()
    page.get_by_label("To", exact=True).wait_for()
    assert page.get_by_label("To", exact=True).locator("option").all_text_contents() == ["French", "German"]
    page.route(
        "**/v1/translate", lambda route: route.fulfill(json={"outputs": [{"text": "Ein Hund.", "sentences": []}]})
    )
    start_translation(page, "A dog.")
    page.unroute("**/v1/translate")
    page.route("**/v1/translate", reverse)
    page.get_by_role("button", name="Swap the languages").press("Enter")
    page.get_by_role("button", name="dog").wait_for()
    assert page.get_by_label("Text to translate").input_value() == "Ein Hund."
    assert page.evaluate("document.activeElement.id") == "swap"
    page.get_by_label("From").select_option("auto")
    page.get_by_text("Detect language: German").wait_for(state="attached")
    languages.clear()
    page.reload()
    page.get_by_role("button", name="Send").wait_for()
    assert page.get_by_role("link", name="Translate").count() == 0


def test_documents_are_translated_with_a_progress_and_downloaded(
    open_page: OpenPage, server: RunningServer, tmp_path: Path
) -> None:
    page = open_page(server.url, may_fail=True)
    chooser = page.get_by_label("Translate a document")

    def translated(name: str, content: str) -> str:
        (tmp_path / name).write_text(content, encoding="utf-8")
        chooser.set_input_files(tmp_path / name)
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Download {name.replace('.', '.de.')}").click()
        return Path(download.value.path()).read_text(encoding="utf-8")

    written = translated("page.md", MARKDOWN + 300 * "\nA dog runs fast.\n")
    assert written.endswith(300 * "\nEin Hund rennt schnell.\n")
    for kept in ("# ", "`x = 1`", "```\ncode: A dog\n\nA dog\n```\n\n- ", "{name}"):
        assert kept in written
    written = translated("page.html", HTML.replace("<hr>", 100 * "<hr><p>A man sleeps.</p>"))
    for kept in ('<html lang="de">', '<body class="x">', "<style>p { color: red }</style>", 'var dog = "A dog";',
                 '<p style="color: red" title="Ein Hund', "<b>Hund</b>", '<a href="x?a=1&amp;b">'):  # fmt: skip
        assert kept in written
    assert "A man" not in written and written.count("<hr>") == 100
    subtitles = "1\n00:00:01,000 --> 00:00:02,000\nA dog runs fast.\n"
    assert translated("film.srt", subtitles) == subtitles.replace("A dog runs fast", "Ein Hund rennt schnell")
    document = docx.Document()
    document.add_paragraph("A dog runs fast.")
    document.save(str(tmp_path / "a.docx"))
    chooser.set_input_files(tmp_path / "a.docx")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download a.de.docx").click()
    assert docx.Document(str(download.value.path())).paragraphs[0].text == "Ein Hund rennt schnell."
    (tmp_path / "a.docx").write_bytes(b"PK")
    chooser.set_input_files(tmp_path / "a.docx")
    page.get_by_text("file is damaged, or no file of its format").wait_for()
    (tmp_path / "a.exe").write_bytes(b"")
    chooser.set_input_files(tmp_path / "a.exe")
    page.get_by_role("alert").get_by_text("files that end with .txt, .md, .html").wait_for()
    (tmp_path / "a.txt").write_bytes("Füße".encode("latin-1"))
    chooser.set_input_files(tmp_path / "a.txt")
    page.get_by_text("file is not UTF-8, at line 1").wait_for()
    page.route("**/v2/document", lambda route: route.abort())
    (tmp_path / "a.txt").write_text("A dog runs.")
    chooser.set_input_files(tmp_path / "a.txt")
    page.get_by_text("The service cannot be reached").wait_for()
    page.unroute("**/v2/document")
    states: list[dict[str, Any]] = [
        {"status": "translating", "seconds_remaining": 9999},
        {"status": "error", "error_message": "It failed."},
    ]
    page.route("**/v2/document/*", lambda route: route.fulfill(json={"seconds_remaining": None, **states.pop(0)}))
    page.get_by_role("button", name="Retry").click()
    page.locator("progress[value]").wait_for()
    page.get_by_text("It failed.").wait_for()
    page.unroute("**/v2/document/*")
    page.get_by_role("button", name="Retry").click()
    page.get_by_role("button", name="Download a.de.txt").wait_for()
    page.get_by_role("button", name="Close").click()
    assert page.get_by_role("progressbar").count() == 0
