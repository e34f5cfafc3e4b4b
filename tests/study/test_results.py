"""Tests that the committed results reach their targets, so that a worse model cannot replace a
better one unnoticed.
"""

import statistics

import pytest

from bench.record import read_results
from model.systems import COMPARED, PLAN, bundle_name
from study import claims, collect, quality
from study.__main__ import RESULTS
from study.headline import ADDITIVE, TARGET
from study.runs import TRANSLATING, runs_by_system

RECORDED = read_results(RESULTS)
RUNS = runs_by_system(RECORDED[collect.NAME].result)


def test_additive_attention_reaches_its_target() -> None:
    assert statistics.mean(run["tokenised_bleu"]["value"] for run in RUNS[ADDITIVE]) >= TARGET == 37


def test_every_system_that_translates_has_been_trained() -> None:
    assert set(RUNS) == set(TRANSLATING)


@pytest.mark.parametrize("name", RUNS)
def test_every_system_has_its_planned_seeds_and_epochs(name: str) -> None:
    assert [run["seed"] for run in RUNS[name]] == list(range(1, 1 + PLAN[name].seeds))
    assert all(run["epochs"] <= PLAN[name].max_epochs for run in RUNS[name])


def test_compared_systems_differ_by_at_most_a_fifth_in_their_parameters() -> None:
    parameters = [run["parameters"] for name in COMPARED for run in RUNS[name]]
    assert max(parameters) <= 1.2 * min(parameters)


def test_the_classifier_is_correct_on_four_of_five_sentences() -> None:
    dev, test = (row for row in RECORDED[quality.NAME].result.rows if "accuracy" in row)
    assert (dev["split"], test["split"]) == ("dev", "test")
    assert all(100 * one["correct"] / one["sentences"] >= 81 for one in (dev, test))


def test_served_models_of_the_small_setting_score_like_their_runs() -> None:
    runs = {
        bundle_name(row["system"]): row["tokenised_bleu"]["value"]
        for row in RECORDED[claims.NAME].result.rows
        if row["kind"] == "system"
    }
    found = {row["model"]: row["tok_lc"] for row in RECORDED[quality.NAME].result.rows if row["model"] in runs}
    assert len(found) > 20
    assert {model: value for model, value in found.items() if abs(value - runs[model]) > 0.3} == {}
