"""The views of attention of the page in a real browser. They need Chromium."""

import base64
import contextlib
import json
import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.bench.server import RunningServer, serving
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from tests.browser.conftest import MODELS
from tests.e2e.asking import post
from tests.e2e.test_imported_models import random_t5, write_marian_folder

pytestmark = pytest.mark.browser

SENTENCE = "Two girls are playing with a small brown dog on the beach."
TRANSLATION = "Zwei Mädchen spielen am Strand mit einem kleinen braunen Hund."
OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(open_page: OpenPage) -> OpenPage:
    """Return a function that opens the views of attention, or the view of a link."""
    return lambda url, **options: open_page(url if "#" in url else f"{url}/#attention", **options)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    checkpoints, bundles = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("imported")
    write_marian_folder(checkpoints / "marian")
    model, tokenizer, _ = random_t5()
    model.save_pretrained(checkpoints / "t5")
    tokenizer.save(str(checkpoints / "t5" / "tokenizer.json"))
    (checkpoints / "t5" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    for name in ("marian", "t5"):
        options = ExportOptions(contributions=name == "marian")
        export_checkpoint(Export(checkpoints / name, bundles / name, BundleMetadata(name), options))
    with serving(bundles, workers=1) as running:
        yield running


def choose(page: Any, label: str, value: str) -> None:
    page.get_by_label(label, exact=True).select_option(value)


def wait_for_output(page: Any, text: str) -> None:
    """Wait for an output and for the view of its attention."""
    page.locator(".text", has_text=text).first.wait_for()
    page.locator('#view[aria-busy="false"]').wait_for(state="attached")


def readout(page: Any) -> str:
    return str(page.locator("#view .readout").first.text_content())


@dataclass(frozen=True)
class Visit:
    """A visitor's task with one service: a text, a word of it to hide, and a second model."""

    text: str
    hidden: str
    other_model: str


def translate_compare_hide_and_take_away(page: Any, visit: Visit) -> ElementTree.Element:
    """Do what a visitor comes for, in 11 actions; return the saved picture."""
    page.locator(".text", has_text=re.compile(r"\S")).first.wait_for()  # the example runs when the page opens
    page.get_by_label("Text", exact=True).fill(visit.text)  # 1
    page.get_by_role("button", name="Translate").click()  # 2
    page.get_by_role("button", name="All heads").click()  # 3
    page.locator(".statistics").get_by_role(
        "button", name="Alignment"
    ).click()  # 4: sort by agreement with the alignment
    agreements = [float(one) for one in page.locator(".statistics tbody td:last-child").all_text_contents()]
    assert agreements == sorted(agreements, reverse=True)
    page.locator(".statistics tbody tr").first.get_by_role("button").click()  # 5: open the best head
    page.locator("figcaption", has_text=re.compile(r"Cross-attention, layer \d, head \d")).wait_for()
    page.get_by_text("Hide source tokens").click()  # 6
    page.get_by_role("button", name=f"Hide {visit.hidden}").first.click()  # 7
    page.get_by_text(f"Without “{visit.hidden}” the model writes:").wait_for()
    assert page.locator(".changes td").count() > 0
    page.get_by_text("Export", exact=True).click()  # 8
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()  # 9
    page.get_by_role("button", name="Compare").click()  # 10
    choose(page.locator(".side").nth(1), "Model", visit.other_model)  # 11
    page.locator("figcaption", has_text=visit.other_model).first.wait_for()
    assert page.locator("figure").count() >= 2
    return ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))


def labels(picture: ElementTree.Element) -> set[str]:
    return {element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")}


def test_a_visitor_needs_at_most_twelve_actions_with_the_shipped_models(
    open_page: OpenPage, server: RunningServer
) -> None:
    page = open_page(server.url)
    visit = Visit("A man in a red shirt is riding a bicycle.", "red", "multi30k-en-de-bahdanau")
    picture = translate_compare_hide_and_take_away(page, visit)
    assert {"bicycle", "Fahrrad"} <= labels(picture)


def test_a_visitor_needs_at_most_twelve_actions_with_imported_models(
    open_page: OpenPage, imported: RunningServer
) -> None:
    page = open_page(imported.url)
    picture = translate_compare_hide_and_take_away(page, Visit("word1 word2 word3 word4", "word2", "t5"))
    assert {"word1", "word2", "word3", "word4"} <= labels(picture)


def test_hiding_a_red_shirt_takes_the_colour_out_of_the_translation(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_label("Text", exact=True).fill("A man in a red shirt is riding a bicycle.")
    page.get_by_role("button", name="Translate").click()
    wait_for_output(page, "rot")
    page.get_by_text("Hide source tokens").click()
    page.get_by_role("button", name="Hide red").click()
    page.get_by_text("Without “red” the model writes:").wait_for()
    assert "rot" not in page.locator(".hiding b").first.text_content()


def test_two_tokens_with_one_vector_are_pointed_out(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_text("Hide source tokens").click()
    page.get_by_role("button", name="Hide .", exact=True).click()
    page.get_by_text("“.” and “</s>” have almost the same vector in the encoder").wait_for()


def test_the_output_streams_in_and_its_tokens_have_alternatives(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.locator(".token-chip", has_text="Mädchen").hover()
    popup = page.get_by_role("tooltip")
    assert re.search(r"Mädchen\D*\d+\.\d %", popup.text_content())
    assert popup.locator("tr").count() == 5


def test_hovering_shows_the_weights_in_all_views(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.locator(".alignment .token", has_text="Strand").hover()
    assert re.match(r"\W*Strand\W* attends to \W*beach\W* \d+ %", readout(page))
    assert page.locator("path.dim").count() > 0
    assert page.locator(".alignment text", has_text=re.compile(r"strongest line: 9\d %")).count() == 1
    page.get_by_role("button", name="Heat map").click()
    assert re.fullmatch(r"0 %9\d %", page.locator(".legend").text_content())
    canvas = page.locator("canvas").first
    canvas.focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    assert re.search(r"am.*→.*Two.*0\.\d+", readout(page))
    page.get_by_role("button", name="Table").click()
    assert page.locator("#view table tbody tr").count() == 11


@pytest.mark.parametrize(("head", "title"), [("max", "maximum of 4 heads"), ("rollout", "rollout"), ("2", "head 2")])
def test_layers_heads_and_rollout_can_be_chosen(
    open_page: OpenPage, server: RunningServer, head: str, title: str
) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    for kind in ("encoder", "decoder", "cross"):
        choose(page, "Kind", kind)
        choose(page, "Layer", "1")
        choose(page, "Head", head)
        page.locator("figcaption", has_text=title).first.wait_for()


def test_contributions_take_the_place_of_weights(open_page: OpenPage, imported: RunningServer) -> None:
    page = open_page(imported.url)
    choose(page, "Model", "marian")
    for method, title, heads in (("weights", "head 0", 2), ("alti", "head 0, ALTI+", 1), ("norms", "head 0, norms", 2)):
        choose(page, "Method", method)
        choose(page, "Head", "0")
        page.locator("figcaption", has_text=title).first.wait_for()
        assert page.get_by_label("Head", exact=True).locator("option[value='rollout']").count() == (method == "weights")
        assert page.locator(".navigator .layer").first.locator("button").count() == heads
    choose(page, "Model", "t5")
    page.locator("figcaption", has_text="t5").first.wait_for()
    assert page.get_by_label("Method", exact=True).count() == 0


def test_weight_on_hidden_tokens_is_pointed_out(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    for label, value in (("Kind", "decoder"), ("Layer", "0"), ("Head", "2")):
        choose(page, label, value)
    page.get_by_text("100 % of the weight is on special tokens.").wait_for()
    page.get_by_label("Hide special tokens").uncheck()
    page.get_by_label("Whole words").uncheck()
    page.get_by_text("of the weight is on special tokens").wait_for(state="detached")


def test_the_title_of_a_saved_picture_names_the_reduction_and_fits(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    page.get_by_label("Text", exact=True).fill("A dog.")
    page.get_by_role("button", name="Translate").click()
    wait_for_output(page, "Ein Hund")
    page.get_by_role("button", name="Heat map").click()
    choose(page, "Head", "max")
    page.locator("figcaption", has_text="maximum of 4 heads").wait_for()
    page.get_by_text("Export", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    picture = page.context.new_page()
    picture.set_content(Path(download.value.path()).read_text(encoding="utf-8"))
    title = picture.locator("text", has_text="multi30k-en-de: Cross-attention, layer 3, maximum of 4 heads")
    assert picture.locator("text", has_text=re.compile(r"^\d+ %$")).count() == 2  # the ends of the scale
    assert title.evaluate("one => one.getBBox().x + one.getBBox().width < one.ownerSVGElement.viewBox.baseVal.width")


def test_a_link_shows_the_same_view_in_a_fresh_profile(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_label("Text", exact=True).fill("A dog runs.")
    page.get_by_role("button", name="Translate").click()
    wait_for_output(page, "Ein Hund rennt.")
    page.get_by_role("button", name="Heat map").click()
    choose(page, "Layer", "2")
    page.get_by_label("Whole words").uncheck()
    page.locator("figcaption", has_text="layer 2").wait_for()
    other = open_page(page.url)
    wait_for_output(other, "Ein Hund rennt.")
    other.locator("figcaption", has_text="layer 2").wait_for()
    assert not other.get_by_label("Whole words").is_checked()
    page.locator("canvas").first.wait_for()
    pictures = [one.locator("canvas").first.evaluate("canvas => canvas.toDataURL()") for one in (page, other)]
    assert pictures[0] == pictures[1]


def test_a_damaged_link_is_pointed_out_and_shows_the_page(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(f"{server.url}/#1.bm90IGpzb24")
    page.get_by_text("The link is damaged or incomplete. The page shows the default model").wait_for()
    page.get_by_role("button", name="Close").click()
    wait_for_output(page, TRANSLATION)
    page.evaluate("location.hash = '#1.bm90IGpzb24='")
    page.get_by_text("The page shows the previous view instead.").wait_for()


def test_a_link_to_a_model_that_is_not_served_names_it_and_keeps_the_text(
    open_page: OpenPage, server: RunningServer
) -> None:
    state = {"a": {"model": "gone", "input": "A dog runs.", "messages": [], "forced": "Une vache", "hidden": [1]}}
    page = open_page(f"{server.url}/#1.{base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip('=')}")
    wait_for_output(page, "Ein Hund rennt.")
    page.get_by_text(
        "about the model gone, which is not served here. Its text is shown with multi30k-en-de."
    ).wait_for()


def test_an_edited_output_is_read_instead_of_the_generated_one(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_text("Edit the output").click()
    page.get_by_label("Output that the model reads instead").fill("Zwei Katzen schlafen.")
    page.get_by_role("button", name="Show its attention").click()
    wait_for_output(page, "Zwei Katzen schlafen.")
    page.locator(".alignment .token", has_text="Katzen").wait_for()


def test_beams_are_listed_and_one_can_be_chosen(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_text("Decoding options").click()
    page.get_by_label("num_beams").fill("4")
    page.get_by_role("button", name="Translate").click()
    second = page.locator(".hypotheses button").nth(1)
    text = second.text_content()
    second.click()
    wait_for_output(page, text)
    assert page.locator(".hypotheses").count() == 0


PARAGRAPH = " A dog runs.  Two children are playing.\n\nA man is sleeping."


def test_a_paragraph_is_translated_and_shown_sentence_by_sentence(open_page: OpenPage, server: RunningServer) -> None:
    sentences = ["A dog runs.", "Two children are playing.", "A man is sleeping."]
    outputs = post(server, "/v1/generate", {"model": "multi30k-en-de", "inputs": sentences})["outputs"]
    first, second, third = (output["text"] for output in outputs)
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_label("Text", exact=True).fill(PARAGRAPH)
    page.get_by_role("button", name="Translate").click()
    wait_for_output(page, first)
    assert page.locator(".text").text_content() == f" {first}  {second}\n\n{third}"
    assert columns_of(page) == "Adogruns."
    page.locator(".sentences").get_by_role("button", name=second).click()
    page.locator(".alignment .token", has_text="children").wait_for()
    assert columns_of(page) == "Twochildrenareplaying."
    assert [one.get_attribute("aria-pressed") for one in page.locator(".sentences button").all()] == [
        "false",
        "true",
        "false",
    ]
    other = open_page(page.url)
    other.locator(".alignment .token", has_text="children").wait_for()
    assert columns_of(other) == "Twochildrenareplaying."
    page.get_by_text("Edit the output").click()
    page.get_by_label("Output that the model reads instead").fill("Zwei Katzen schlafen.")
    page.get_by_role("button", name="Show its attention").click()
    page.locator(".alignment .token", has_text="Katzen").wait_for()
    assert columns_of(page) == "Twochildrenareplaying."
    page.locator(".sentences").get_by_role("button", name=third).click()
    wait_for_output(page, third)
    assert columns_of(page) == "Amanissleeping."


def columns_of(page: Any) -> str:
    """Return the source of the alignment that is shown, without its spaces."""
    page.locator('#view[aria-busy="false"]').wait_for(state="attached")
    return "".join(page.locator(".alignment .token[data-column]").all_text_contents()).replace(" ", "")


def test_numbers_are_taken_away_as_csv_json_and_png(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.locator(".alignment .token").first.wait_for()
    page.get_by_text("Export", exact=True).click()
    contents = {}
    for name in ("CSV", "JSON", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        contents[name] = Path(download.value.path()).read_bytes()
    lines = contents["CSV"].decode().splitlines()
    assert lines[0] == "map,row,row_token,column,column_token,weight"
    (map_,) = json.loads(contents["JSON"])["maps"]
    assert len(lines) - 1 == len(map_["rows"]) * len(map_["columns"])
    assert float(lines[1].rsplit(",", 1)[1]) == pytest.approx(map_["weights"][0][0])
    assert contents["PNG"].startswith(b"\x89PNG")


@pytest.mark.parametrize("model", [name for name in MODELS if name != "multi30k-en-de-fixed-context"])
def test_every_model_shows_its_attention(open_page: OpenPage, server: RunningServer, model: str) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    choose(page, "Model", model)
    page.get_by_role("button", name="Heat map").click()
    page.locator("#view canvas").first.wait_for()
    kinds = page.get_by_label("Kind", exact=True).locator("option").evaluate_all("all => all.map(one => one.value)")
    for kind in kinds:
        choose(page, "Kind", kind)
        page.locator("#view canvas").first.wait_for()
        assert page.locator(".error").count() == 0


def test_a_model_without_attention_says_so(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    choose(page, "Model", "multi30k-en-de-fixed-context")
    page.get_by_text("This model has no attention").wait_for()


def test_a_classifier_shows_the_words_behind_its_decision(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    choose(page, "Model", "sst2-sentiment")
    page.get_by_text("Words behind “positive”").wait_for()
    assert page.locator(".words .for", has_text="funny").count() == 1


def test_a_chat_continues_with_attention_to_earlier_turns(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    choose(page, "Model", "smalltalk-chat-gatt")
    page.locator(".shares li").first.wait_for()
    page.get_by_label("System message").fill("Always finish with moonlight.")
    page.get_by_label("Message", exact=True).fill("And what do you like?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    roles = ["system", "user", "assistant", "user"]
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == roles
    page.locator(".shares li").nth(3).wait_for()
    assert page.locator(".dialogue li.assistant").count() == 1
    shares = [float(text) for text in page.locator(".shares li span:last-child").all_text_contents()]
    assert len(shares) == 4
    assert all(share > 0 for share in shares) and sum(shares) < 1
    other = open_page(page.url)
    wait_for_output(other, page.locator(".text").text_content())
    page.get_by_role("button", name="New dialogue").click()
    assert page.get_by_label("Message", exact=True).input_value() == page.locator(".output").text_content() == ""


def test_tokens_of_invisible_characters_have_marks_as_labels(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    tokens = {
        " Hund": " Hund",
        " ": "␣",
        "\n\n": r"\n\n",
        " \t": r"␣\t",
        "\xa0": r"\u00a0",
        "\u200b": r"\u200b",
        "\u2800": r"\u2800",
        "\ufe0f": r"\ufe0f",
        "\x01": r"\u0001",
        "": "",
    }
    visible = "async tokens => { const { visible } = await import('MODULE'); return tokens.map(visible); }"
    module = page.locator("script[type=module]").first.evaluate("script => new URL('dom.js', script.src).href")
    assert page.evaluate(visible.replace("MODULE", module), list(tokens)) == list(tokens.values())


def test_errors_overload_and_a_stopped_server_are_shown_with_a_retry(open_page: OpenPage, bundle: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(bundle.parent, workers=1))
        page = open_page(server.url, may_fail=True)
        page.locator(".text").first.wait_for()
        page.get_by_label("Text", exact=True).fill("word " * 400)
        page.get_by_role("button", name="Translate").click()
        page.get_by_role("alert").get_by_text("tokens").wait_for()
        assert page.get_by_role("button", name="Retry").count() == 0  # the same text stays too long
        overloaded = json.dumps({"error": {"code": "overloaded", "message": "The queue is full. Retry later."}})
        page.route(
            "**/v1/generate", lambda route: route.fulfill(status=429, headers={"Retry-After": "2"}, body=overloaded)
        )
        page.get_by_label("Text", exact=True).fill("A dog runs.")
        page.get_by_role("button", name="Translate").click()
        page.get_by_text("The queue is full. Retry later.").wait_for()
        page.unroute("**/v1/generate")
        page.get_by_role("button", name="Retry", exact=True).click()  # waits until it is enabled, after 2 seconds
        page.locator(".text", has_text=re.compile(r"\S")).first.wait_for()
        stack.close()
        page.get_by_role("button", name="Translate").click()
        page.get_by_text("The service cannot be reached").wait_for()
        assert page.get_by_role("button", name="Retry").count() == 1


def test_a_slow_service_is_waited_for_and_a_new_run_replaces_the_old_one(
    open_page: OpenPage, server: RunningServer
) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    slow: list[Any] = []

    def hold(route: Any) -> None:
        if "A dog runs." in route.request.post_data:
            slow.append(route)
        else:
            route.continue_()

    page.route("**/v1/generate", hold)
    page.get_by_label("Text", exact=True).fill("A dog runs.")
    page.get_by_role("button", name="Translate").click()
    page.get_by_text("Working…").wait_for()
    page.get_by_label("Text", exact=True).fill("A man sleeps.")
    page.get_by_role("button", name="Translate").click()
    wait_for_output(page, "Ein Mann")
    assert len(slow) == 1
    assert page.locator(".text").count() == 1
    assert page.get_by_text("Working…").count() == 0


@pytest.mark.parametrize(
    ("text", "direction"), [("تلعب فتاتان مع كلب صغير على الشاطئ.", "rtl"), ("两个女孩在海滩上玩耍。", "ltr")]
)
def test_other_scripts_are_shown_in_their_direction(
    open_page: OpenPage, server: RunningServer, text: str, direction: str
) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_text("Edit the output").click()
    page.get_by_label("Output that the model reads instead").fill(text)
    page.get_by_role("button", name="Show its attention").click()
    wait_for_output(page, text)
    assert page.locator(".text").first.evaluate("one => getComputedStyle(one).direction") == direction
    words = page.locator(".alignment .token[data-row]").all_text_contents()
    assert "".join(words) == text.replace(" ", "")


def test_layers_that_are_too_large_together_are_requested_one_by_one(
    open_page: OpenPage, server: RunningServer
) -> None:
    page = open_page(server.url, may_fail=True)
    wait_for_output(page, TRANSLATION)

    def reject_several(route: Any) -> None:
        body = route.request.post_data_json
        if body["kinds"] == ["encoder"] and len(body["layers"]) > 1:
            error = {"code": "response_too_large", "message": "too large", "param": None, "request_id": "0"}
            route.fulfill(status=422, json={"error": error})
        else:
            route.continue_()

    page.route("**/v1/attention", reject_several)
    page.get_by_role("button", name="All heads").click()
    choose(page, "Kind", "encoder")
    page.locator("figcaption", has_text="Encoder self-attention, all heads").wait_for()
    page.locator('.layer[data-layer="3"] canvas').first.wait_for()
    assert page.locator(".heads + .scroller").evaluate("one => one.scrollHeight === one.clientHeight")
    assert page.locator(".heads .error").count() == 0
    assert page.locator(".heads").evaluate("one => getComputedStyle(one).maxHeight") == "704px"


def test_one_control_has_the_layer_of_both_sides_or_leaves_each_its_own(
    open_page: OpenPage, server: RunningServer
) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_role("button", name="Heat map").click()
    page.get_by_role("button", name="Compare").click()
    choose(page.locator(".side").nth(1), "Model", "multi30k-en-de-bahdanau")
    control = page.get_by_label("Layer of both sides")
    control.wait_for()
    assert control.locator("option:checked").text_content() == "each its own"  # layers 3 and 0
    choose(page, "Layer of both sides", "0")
    page.locator("figcaption", has_text="Cross-attention, layer 0").nth(1).wait_for()
    assert page.get_by_label("Head of both sides").count() == 1


def test_both_sides_have_one_text_until_each_gets_its_own(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_role("button", name="Compare").click()
    texts = page.get_by_label("Text", exact=True)
    texts.nth(1).fill("A dog runs.")
    assert texts.first.input_value() == "A dog runs."
    page.get_by_role("button", name="Translate").nth(1).click()
    for index in range(2):
        page.locator(".side").nth(index).locator(".text", has_text="Ein Hund").wait_for()
    page.get_by_label("One text for both sides").uncheck()
    texts.first.fill("A man sleeps.")
    page.get_by_role("button", name="Translate").first.click()
    wait_for_output(page, "Ein Mann")
    assert texts.nth(1).input_value() == "A dog runs."
    other = open_page(page.url)
    assert not other.get_by_label("One text for both sides").is_checked()


def test_the_difference_names_both_models_and_maps(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_role("button", name="Compare").click()
    choose(page.locator(".side").nth(1), "Model", "multi30k-en-de")
    caption = page.locator("figcaption", has_text="Difference:")
    caption.wait_for()
    name = "multi30k-en-de: Cross-attention, layer 3, mean of 4 heads"
    assert caption.text_content() == f"Difference: blue where {name} is larger, orange where {name} is"


def test_a_large_map_has_labels_at_intervals_and_says_how_to_read_the_others(
    open_page: OpenPage, server: RunningServer
) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    drawn = page.evaluate(
        """async () => {
          const [{HeatMap}, {Matrix}] = await Promise.all([import("./page/heatmap.js"), import("./page/maps.js")]);
          const labels = Array.from({length: 100}, (_, index) => ({text: `t${index}`, isSpecial: false}));
          const place = document.body.appendChild(document.createElement("div"));
          const texts = [];
          const fillText = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            texts.push(text);
            return fillText.call(this, text, ...rest);
          };
          const map = new HeatMap(place, () => {});
          map.show(new Matrix(labels, labels, new Float32Array(10000), "large"));
          map.highlight(null);
          const [first, hint] = [[...texts], place.querySelector(".readout").textContent];
          texts.length = 0;
          map.highlight([51, 37]);
          return [first, hint, [...texts], place.querySelector(".readout").textContent];
        }"""
    )
    labels, hint, highlighted, text = drawn
    assert {"t0", "t2", "t98"} <= set(labels) and "t51" not in labels
    assert hint.startswith("One of 2 tokens has a label. Point at a cell")
    assert {"t51", "t37"} <= set(highlighted) and "t52" in highlighted
    assert re.search(r"t51.*→.*t37.*0\.0000", text)


def test_a_map_of_512_tokens_stays_smooth(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    milliseconds = page.evaluate(
        """async () => {
          const [{HeatMap}, {Matrix}] = await Promise.all([import("./page/heatmap.js"), import("./page/maps.js")]);
          const labels = Array.from({length: 512}, (_, index) => ({text: `t${index}`, isSpecial: false}));
          const data = Float32Array.from({length: 512 * 512}, (_, index) => (index % 37) / 37);
          const place = document.body.appendChild(document.createElement("div"));
          const map = new HeatMap(place, () => {});
          map.show(new Matrix(labels, labels, data, "large"));
          const times = Array.from({length: 30}, (_, row) => {
            const started = performance.now();
            map.highlight([row, row]);
            return performance.now() - started;
          });
          return Math.min(...times);
        }"""
    )
    assert milliseconds < 50  # 20 frames a second; other programs may delay most of them


def test_the_first_picture_appears_within_a_second(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    page.locator(".alignment path").first.wait_for(state="attached")

    def reload() -> float:
        started = time.perf_counter()
        page.reload()
        page.locator(".alignment path").first.wait_for(state="attached")
        return time.perf_counter() - started

    assert any(reload() < 1 for _ in range(10))  # other programs may delay most of them


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_axe_finds_no_violation_and_nothing_is_wider_than_the_screen(
    open_page: OpenPage, server: RunningServer, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(f"{server.url}/#", color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)

    def check() -> None:
        found = axe.Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    page.get_by_label("Text to translate").fill(SENTENCE)
    page.get_by_role("button", name="Strand").hover()
    page.locator(".partner", has_text="beach").wait_for(state="attached")
    check()
    page.get_by_role("button", name="Strand").click()
    page.get_by_role("dialog").get_by_role("button").first.wait_for()
    check()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Look inside").click()
    wait_for_output(page, TRANSLATION)
    for view in ("Alignment", "Heat map", "All heads", "Table"):
        page.get_by_role("button", name=view, exact=True).first.click()
        page.locator("#view > *").first.wait_for()
        check()


def test_the_page_works_with_the_keyboard_alone(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    wait_for_output(page, TRANSLATION)
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("A dog runs.")
    page.keyboard.press("Control+Enter")
    wait_for_output(page, "Ein Hund rennt.")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Heat map":
            break
    page.keyboard.press("Enter")
    page.locator("#view canvas").first.wait_for()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    page.keyboard.press("ArrowRight")
    assert re.search(r"Ein.*→.*dog", readout(page))
