import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from lab.bench.record import Recorded, Result, Row, write_result
from lab.study import sentence
from lab.study.sentence_picture import draw_sentence, picture, picture_of, remarks, token_labels
from lab.zoo.systems import SYSTEMS, bundle_name

SENTENCE = "A man sleeps."
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


def texts_in(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def measured(*bundles: Path, sentence_: str = SENTENCE, results: Path | None = None) -> Sequence[Row]:
    arguments = Namespace(bundles=bundles, sentence=sentence_, keep=results is not None, results=results)
    return sentence.measure(arguments).rows


def test_every_translation_model_and_classifier_is_queried_once(
    bundle: Path, classifier_bundle: Path, tmp_path: Path
) -> None:
    for folder in (bundle, classifier_bundle):
        shutil.copytree(folder, tmp_path / folder.name)
    rows = measured(tmp_path, bundle.parent)
    row, judged = sorted(rows, key=lambda row: row["kind"])
    assert judged["kind"] == "encoder"
    assert re.fullmatch(r"\w+, \d+%", judged["text"])
    assert np.shape(judged["map"]) == (len(judged["source_tokens"]),) * 2
    assert (row["model"], row["kind"], row["layers"], row["heads"]) == ("toy", "cross", 2, 4)
    weights = np.array(row["map"])
    assert weights.shape == (len(row["target_tokens"]), len(row["source_tokens"]))
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-3)
    assert texts_in(picture("Maps", rows))[:2] == ["Maps", f"“{SENTENCE}”"]


def test_earlier_rows_of_other_models_are_kept_with_their_commit(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no result of sentence"):
        measured(bundle.parent, results=tmp_path)
    rows = [{**ROW, "model": "toy", "sentence": SENTENCE}, {**ROW, "model": "elsewhere", "sentence": SENTENCE}]
    write_result(tmp_path, sentence.NAME, Recorded({"commit": "c0ffee"}, "", Result(rows=rows)))
    kept, new = measured(bundle.parent, results=tmp_path)
    assert kept == {**rows[1], "commit": "c0ffee"}
    assert new["model"] == "toy" and "commit" not in new
    with pytest.raises(ValueError, match="is for another sentence"):
        measured(bundle.parent, results=tmp_path, sentence_="A dog sleeps.")


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [([" skate", "board", "."], ["skate", "·board", "."]), ([" 2", "5", "</s>"], ["2", "·5", "</s>"])],
)
def test_pieces_that_continue_a_word_get_a_dot(tokens: list[str], labels: list[str]) -> None:
    assert token_labels(tokens) == labels


def test_the_picture_has_tokens_output_and_large_weights_as_text() -> None:
    texts = texts_in(picture("Maps", [ROW]))
    assert {
        "A",
        "man",
        "Ein",
        "M",
        "·ann",
        "</s>",
        "“Ein & Mann”",
        SYSTEMS["bahdanau"].description,
        ROW["model"],
    } <= set(texts)
    assert "GRU <with> attention" in texts_in(picture("Maps", [{**ROW, "model": "other"}]))
    assert [text for text in texts if text in ("90", "10", "20", "40", "100", "70")][:4] == ["90", "10", "20", "40"]


def test_only_weights_of_exactly_zero_are_grey() -> None:
    def greys(weights: list[list[float]]) -> int:
        legend = 1
        return picture("Maps", [{**ROW, "map": weights}]).count("#dedede") - legend

    assert greys([[1.0, 1e-9, 1e-9, 1e-9]]) == 0
    assert greys([[1.0, 0.0, 1e-9, 1e-9]]) == 1


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({}, "cross-attention"),
        ({"layers": 4, "heads": 4}, "cross-attention; mean of 4 layers × 4 heads"),
        ({"layers": 4, "kind": "encoder"}, "encoder's self-attention; mean of 4 layers"),
        ({"map": [[0.0, 1.0], [1.0, 0.0]]}, "cross-attention; one-hot"),
        (
            {"normalized": False, "map": [[0.5, 0.2], [0.5, 0.4]]},
            "cross-attention; rows sum to less than 1 (0.70 to 0.90)",
        ),
        (
            {"normalized": False, "kind": "encoder", "map": [[-0.5, 0.2], [0.9, 0.4]]},
            "encoder's attention to projected keys, mapped back to tokens; rows do not sum to 1 (-0.30 to 1.30)",
        ),
        (
            {"layers": 4, "normalized": False, "largest": 0.91, "map": [[-0.5, 0.2], [0.9, 0.4]]},
            "cross-attention; mean of 4 layers; rows do not sum to 1 (-0.30 to 1.30); "
            "signs cancel: single heads reach 0.91",
        ),
        ({"kind": None}, "no attention"),
    ],
)
def test_remarks_describe_the_map(changes: dict[str, Any], remark: str) -> None:
    assert remarks({**ROW, **changes}) == remark


def test_models_without_attention_and_projected_keys_are_drawn() -> None:
    nothing = {name: ROW[name] for name in ("description", "sentence", "text")}
    fixed = {**nothing, "model": bundle_name("fixed-context"), "kind": None}
    slots = {
        **ROW,
        "model": bundle_name("linformer"),
        "kind": "encoder_slots",
        "map": np.full((4, 32), 1 / 32).tolist(),
    }
    texts = texts_in(picture("Maps", [slots, {**ROW, "model": "other"}, ROW, fixed]))
    names = [*map(bundle_name, ("fixed-context", "bahdanau", "linformer")), "other"]
    assert [text for text in texts if text in names] == names
    assert {"the whole source, in one vector", "28"} <= set(texts)


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


def test_only_pictures_with_maps_are_written(tmp_path: Path) -> None:
    draw_sentence(Result(rows=[ROW, {**ROW, "model": "other"}]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"one-sentence-recurrent.svg", "one-sentence-transformers.svg"}


def test_only_pictures_with_negative_weights_have_them_in_the_legend() -> None:
    assert "-100" not in texts_in(picture("Maps", [ROW]))
    assert "-100" in texts_in(picture("Maps", [{**ROW, "map": [[-0.5, 0.5, 0.5, 0.5]] * 4}]))
