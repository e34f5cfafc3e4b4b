from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from lab.study.sentence_picture import colours_of, picture, picture_of, remarks, token_labels
from lab.zoo.systems import SYSTEMS, bundle_name
from tests.support.tables import read_table

ROW: dict[str, Any] = {
    "model": bundle_name("bahdanau"),
    "description": "GRU <with> attention",
    "sentence": "A man.",
    "text": "Ein & Mann",
    "source_tokens": [" A", " man", ".", "</s>"],
    "target_tokens": [" Ein", " M", "ann", "</s>"],
    "kind": "cross",
    "layers": 1,
    "heads": 1,
    "normalized": True,
    "map": [[0.9, 0.1, 0.0, 0.0], [0.2, 0.4, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.7]],
}


def texts_in(path: Path, *rows: dict[str, Any]) -> list[str]:
    """Return the texts of a picture of the rows."""
    picture("Maps", rows, path)
    return [element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith(("text", "tspan"))]


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [([" skate", "board", "."], ["skate", "·board", "."]), ([" 2", "5", "</s>"], ["2", "·5", "</s>"])],
)
def test_pieces_that_continue_a_word_get_a_dot(tokens: list[str], labels: list[str]) -> None:
    assert token_labels(tokens) == labels


def test_the_picture_has_tokens_output_and_large_weights_as_text(tmp_path: Path) -> None:
    texts = texts_in(tmp_path / "picture.svg", ROW)
    names = ["A", "man", "Ein", "M", "·ann", "</s>", "“Ein & Mann”", SYSTEMS["bahdanau"].description, ROW["model"]]
    assert {*names} <= {*texts}
    assert "GRU <with> attention" in texts_in(tmp_path / "picture.svg", {**ROW, "model": "other"})
    assert [text for text in texts if text in ("90", "10", "20", "40", "100", "70")][:4] == ["90", "10", "20", "40"]


def test_only_weights_of_exactly_zero_are_grey() -> None:
    assert colours_of(np.array([[1.0, -1e-9, 0.0]])).mask.tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    ("changes", "remark"),
    read_table(__file__),
)
def test_remarks_describe_the_map(changes: dict[str, Any], remark: str) -> None:
    assert remarks({**ROW, **changes}) == remark


@pytest.mark.parametrize(
    ("system", "kind", "name"),
    [
        ("fixed-context", None, "one-sentence-recurrent.svg"),
        ("bahdanau", "cross", "one-sentence-recurrent.svg"),
        ("luong-local-p", "cross", "one-sentence-local-and-hard.svg"),
        ("hard-marginal", "cross", "one-sentence-local-and-hard.svg"),
        ("linformer", "cross", "one-sentence-transformers.svg"),
        ("linformer", "encoder_slots", "one-sentence-encoders.svg"),
    ],
)
def test_pictures_group_models_by_their_attention(system: str, kind: str | None, name: str) -> None:
    assert picture_of({**ROW, "model": bundle_name(system), "kind": kind}) == name
