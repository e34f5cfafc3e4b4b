"""POST /v1/attention with pictures as responses, and with pairs of texts."""

import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sightline.base.bundle import AlignmentStep
from sightline.service.drawing import View
from sightline.service.inference.maps import TargetAttention
from sightline.service.inference.picture import draw
from sightline.service.parameters import AttentionSelection
from tests.service.conftest import MakeBackend, Start, classifying, with_alignment
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio

PATH = "/v1/attention"
SVG = {"accept": "image/svg+xml"}


def titles(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("fields", "title"), read_table(__file__))
async def test_clients_that_accept_svg_get_a_picture(start: Start, fields: dict[str, Any], title: str) -> None:
    async with start() as running:
        response = await running.client.post(PATH, json={"inputs": "a dog", **fields}, headers=SVG)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "image/svg+xml; charset=utf-8"
        assert titles(response.text)[0] == title
        has_source = fields.get("draw") != "heads" and fields.get("kinds") != ["decoder"]
        assert ("dog" in titles(response.text)) == has_source


@pytest.mark.parametrize(
    ("step", "title"),
    [
        ("writes", "fake: Cross-attention, layer 0, head 1"),
        ("reads", "fake: Cross-attention, layer 1, mean of 2 heads"),  # rows of a picture are steps that write
    ],
)
async def test_heads_that_align_words_at_the_step_of_the_rows_are_the_default(
    start: Start, make_backend: MakeBackend, step: AlignmentStep, title: str
) -> None:
    async with start(with_alignment(make_backend(), step)) as running:
        response = await running.post(PATH, {"inputs": "a dog", "draw": "alignment"})
        assert titles(response.text)[0] == title


@pytest.mark.parametrize("view", ["heatmap", "alignment"])
def test_tokens_of_invisible_characters_have_marks_as_labels(view: View) -> None:
    tokens = {
        " Hund": "Hund",
        " ": "␣",
        "\n\n": r"\n\n",
        " \t": r"␣\t",
        "\r\n": r"\r\n",
        "\xa0": r"\u00a0",
        "\u200b": r"\u200b",
        "\u2800": r"\u2800",
        "\ufe0f": r"\ufe0f",
        "\x01": r"\u0001",
    }
    maps = SimpleNamespace(kind="cross", layers=[0], heads=[0], data=np.ones(len(tokens)), shape=(1, 1, 1, len(tokens)))
    output = SimpleNamespace(maps=[maps], source_tokens=list(tokens), target_tokens=["\n"])
    shown = titles(draw("fake", cast(TargetAttention, output), AttentionSelection(), view))
    assert {r"\n", *tokens.values()} <= set(shown) and all(shown)


async def test_the_field_draw_asks_for_a_picture_too(start: Start) -> None:
    async with start() as running:
        response = await running.post(PATH, {"inputs": "a dog", "draw": "heatmap"})
        assert response.headers["content-type"] == "image/svg+xml; charset=utf-8"
        response = await running.client.post(PATH, json={"inputs": "a dog"}, headers={"accept": "*/*"})
        assert response.headers["content-type"] == "application/json"
        response = await running.client.post(PATH, json={"inputs": ["a", "dog"]}, headers=SVG)
        assert response.json()["error"]["message"] == "inputs: A picture shows one input; send one text."


async def test_an_encoder_reads_pairs_of_texts_and_draws_them(start: Start, make_backend: MakeBackend) -> None:
    async with start(classifying(make_backend())) as running:
        body = {"model": "judge", "inputs": [["a dog", "Hund"]]}
        (output,) = (await running.post(PATH, body)).json()["outputs"]
        assert len(output["source_tokens"]) > len((await running.post(PATH, {**body, "inputs": "a dog"})).json())
        assert set(output["source_offsets"]) == {None}
        picture = await running.post(PATH, {**body, "draw": "heatmap"})
        assert re.match("judge: Encoder self-attention", titles(picture.text)[0])
