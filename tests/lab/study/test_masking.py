from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.bench.record import Result
from lab.study import masking
from lab.study.masking import Explained, explain_translation, figures
from lab.study.served import Served, serve
from sightline.model.architectures.factory import TranslationModel
from sightline.model.checkpoint import load_checkpoint
from sightline.model.data.tokenizer_training import encode_lines
from sightline.service.discovery import find_bundles
from tests.support.leave_one_out import explain

TEXT = "A man sleeps."
TARGET = "Two girls sleep."


class Forced(Served):
    """A service that generates the same text for each input."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[Any]:
        if path == "/v1/generate":
            return [{"outputs": [{"text": TARGET}]} for _ in bodies]
        return self._served.post(path, *bodies)


@pytest.fixture
def explained() -> Explained:
    """Return the result for two tokens and a source of two words and an end token, which cannot be
    deleted and has the largest weight for the second token.
    """
    weights = {"mean": np.array([[0.7, 0.2, 0.1], [0.3, 0.1, 0.6]])}
    drops = np.array([[2.0, 0.5, 0.1], [1.0, -0.5, 0.0]])
    changes = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    without = np.array([[1.0, 1.0, np.nan]] * 2)
    return Explained(
        units=["a", "b", "</s>"],
        target=["x", "y"],
        log_probs=np.array([-0.1, -0.2]),
        weights=weights,
        drops={"deleted": drops * without, "hidden": drops},
        changes={"deleted": changes * without, "hidden": changes},
    )


def test_each_figure_is_a_mean_over_target_tokens(explained: Explained) -> None:
    found = {(row["removal"], row["figure"]): row["value"] for row in figures([explained] * 4)}
    assert found["hidden", "changed, most"] == 0.5
    assert found["hidden", "changed, other"] == 0.25
    assert found["hidden", "changed, least"] == 0.5
    assert found["hidden", "drop, most"] == 1.0
    assert found["hidden", "drop, other"] == pytest.approx((0.3 + 0.25) / 2)
    assert found["hidden", "drop, least"] == pytest.approx(-0.2)
    assert found["hidden", "top"] == 0.5
    assert found["hidden", "chance"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["hidden", "tau"] == pytest.approx((1 + 1 / 3) / 2, abs=1e-4)
    # The end token cannot be deleted, so that the second token attends most to the first word.
    assert found["deleted", "drop, most"] == 1.5
    assert found["deleted", "top"] == 1


def test_the_effects_of_the_ends_are_over_the_tokens_that_attend_to_them(explained: Explained) -> None:
    explained.weights = {"mean": np.array([[0.1, 0.5, 0.4], [0.6, 0.2, 0.2]])}
    for part in ("mark", "end", "both", "words"):
        explained.ends[part] = np.array([[0.5, 7.0], [1.0, 0.0]])
    found = {row["figure"]: row for row in figures([explained] * 2) if row["removal"] == "ends"}
    assert found["weight, mark"]["value"] == 0.35 and found["weight, end"]["value"] == 0.3
    assert (found["drop, both"]["value"], found["drop, both"]["count"]) == (0.5, 2)
    assert found["changed, both"]["value"] == 1 and found["changed, all tokens, both"]["value"] == 0.5


def test_hidden_tokens_have_the_effect_that_pytorch_computes(bundle: Path, checkpoint: Path) -> None:
    """Words of one token and the end token are hidden as in the slow reference."""
    model, tokenizer = load_checkpoint(checkpoint)
    assert isinstance(model, TranslationModel)
    with serve(bundle.parent) as served:
        (manifest,) = find_bundles(bundle.parent).values()
        found = explain_translation(Forced(served), manifest, TEXT)
        output = served.post("/v1/attention", {"model": "toy", "inputs": TEXT, "targets": TARGET})[0]["outputs"][0]
    source, target = encode_lines(tokenizer, [TEXT, TARGET])
    with torch.inference_mode():
        expected = explain(model, source, target)
    assert len(found.target) == len(expected.target)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
    tokens = [token.strip() for token in output["source_tokens"]]
    single = [(unit, tokens.index(name)) for unit, name in enumerate(found.units) if tokens.count(name) == 1]
    assert single
    for unit, token in single:
        np.testing.assert_allclose(
            found.drops["hidden"][:, unit], expected.effects["hidden"].drops[:, token], atol=1e-3
        )
        np.testing.assert_allclose(found.weights["mean"][:, unit], expected.weights[:, token], atol=1e-4)
    assert np.isnan(found.drops["deleted"][:, -1]).all() and not np.isnan(found.drops["hidden"]).any()


def test_bundles_are_measured_and_written_up(
    tmp_path: Path, bundle: Path, classifier_bundle: Path, toy_sentences: list[str]
) -> None:
    for folder in (bundle, classifier_bundle):
        (tmp_path / "bundles").mkdir(exist_ok=True)
        (tmp_path / "bundles" / folder.name).symlink_to(folder)
    text = "".join(f"{line}\n" for line in toy_sentences[:2])
    for name, content in (("multi30k/test_2016_flickr.en", text), ("sst2/dev.tsv", f"1\t{TEXT}\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content, encoding="utf-8")
    result = masking.measure(Namespace(bundles=tmp_path / "bundles", data=tmp_path, sentences=2))
    tables = masking.tables(result)
    assert "| `toy` | hidden | " in tables["masking"] and "| `toy` | deleted, rollout | " in tables["masking"]
    assert "| `toy-classifier` | deleted | " in tables["masking"]
    assert "| `toy` | " in tables["masking-ends"]


def test_the_example_shows_tokens_for_which_another_word_costs_more(explained: Explained) -> None:
    """The first token attends most to its most costly word, the second one does not."""
    explained.weights = {"mean": np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1]])}
    text = masking.tables(Result(rows=[masking.example("a b", explained)]))["masking-example"]
    assert text.startswith("For 1 of the 2 tokens, another word is more costly")
    assert text.splitlines()[-1] == "| `y` | 0.82 | `b` | 1.35 | `a` | 0.30 |"  # exp(-0.2), exp(-0.2 + 0.5), exp(-1.2)


def test_a_word_is_deleted_with_one_space() -> None:
    assert masking._without("A man sleeps.", 0, 1) == "man sleeps."
    assert masking._without("A man sleeps.", 2, 5) == "A sleeps."
    assert masking._without("A man sleeps.", 12, 13) == "A man sleeps"
