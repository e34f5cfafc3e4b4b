import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from study import masking
from study.leave_one_out import Effect, Explained
from study.masking import figures


@pytest.fixture
def explained() -> list[Explained]:
    """Return the results for two tokens of three sources each; the end token has the largest weight
    for the second.
    """
    effect = Effect(drops=np.array([[2.0, 0.5, 0.1], [1.0, -0.5, 0.0]]), predictions=np.array([[9, 5, 5], [6, 9, 6]]))
    weights = np.array([[0.7, 0.2, 0.1], [0.3, 0.1, 0.6]])
    one = Explained([5, 6], np.array([-0.1, -0.2]), weights, {"deleted": effect, "hidden": effect})
    return [one] * 4


def test_each_figure_is_a_mean_over_its_tokens(explained: list[Explained]) -> None:
    found = {(row["removal"], row["figure"]): (row["value"], row["tokens"]) for row in figures(explained)}
    assert found[None, "largest on end"] == (0.5, 8)
    assert found[None, "weight of end"] == (0.35, 8)
    assert found[None, "end unlike the token before"] == (0.3, 8)
    assert found[None, "largest weight"] == (0.65, 8)
    assert found["deleted", "changed, most attended"] == (0.5, 8)
    assert found["deleted", "changed, most attended, a word"] == (1.0, 4)
    assert found["deleted", "changed, most attended, end"] == (0.0, 4)
    assert found["deleted", "changed, random other"] == (0.25, 8)
    assert found["deleted", "changed, least attended"] == (0.5, 8)
    assert found["deleted", "drop, most attended"] == (1.0, 8)
    assert found["deleted", "drop, random other"] == (pytest.approx((0.3 + 0.25) / 2), 8)
    assert found["deleted", "drop, least attended"] == (pytest.approx(-0.2), 8)
    assert found["deleted", "tau"] == (pytest.approx((1 + 1 / 3) / 2, abs=1e-4), 8)
    assert found["deleted", "most attended is most important"] == (0.5, 8)


def test_cases_that_never_occur_have_no_figure(explained: list[Explained]) -> None:
    turned = [Explained(one.target, one.log_probs, one.weights[:, [2, 1, 0]], one.effects) for one in explained]
    never = [Explained(one.target[:1], one.log_probs[:1], one.weights[:1], first_rows(one)) for one in explained]
    assert "changed, most attended, end" in {row["figure"] for row in figures(turned)}
    assert "changed, most attended, end" not in {row["figure"] for row in figures(never)}


def first_rows(one: Explained) -> dict[str, Effect]:
    return {name: Effect(effect.drops[:1], effect.predictions[:1]) for name, effect in one.effects.items()}


def test_the_interval_contains_the_figure(explained: list[Explained]) -> None:
    other = Explained([5], np.array([-0.1]), np.array([[0.9, 0.1, 0.0]]), first_rows(explained[0]))
    for row in figures([*explained, *[other] * 6]):
        low, high = row["interval"]
        assert low <= row["value"] <= high


def test_a_run_is_measured_and_written_up_without_a_sentence_of_the_test_set(
    tmp_path: Path, checkpoint: Path, toy_sentences: list[str]
) -> None:
    run, text = tmp_path / "toy-1", "".join(f"{line}\n" for line in toy_sentences)
    run.mkdir()
    (run / "averaged").symlink_to(checkpoint)
    (tmp_path / "test_2016_flickr.en").write_text(text, encoding="utf-8")
    result = masking.measure(Namespace(data=tmp_path, runs=[run], sentences=2, example="A dog sleeps."))
    stored = json.dumps(result.rows)
    assert not any(sentence in stored for sentence in toy_sentences)
    tables = masking.tables(result)
    assert tables["masking"].startswith("**toy-1**, ")
    assert "| the most attended token |" in tables["masking"]
    assert "“A dog sleeps.” becomes “" in tables["masking-example"]
