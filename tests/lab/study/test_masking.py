from pathlib import Path

import numpy as np
import pytest

from lab.study import masking
from lab.study.masking import Explained, explain_translation, figures, kendall_tau
from lab.study.served import serve
from sightline.base.text.words import words_of
from sightline.service.discovery import find_bundles

TEXT = "A man sleeps."


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


def test_a_word_is_deleted_with_one_space() -> None:
    assert masking._without("A man sleeps.", 0, 1) == "man sleeps."
    assert masking._without("A man sleeps.", 2, 5) == "A sleeps."
    assert masking._without("A man sleeps.", 12, 13) == "A man sleeps"


def test_hidden_words_have_the_effect_that_the_service_computes(bundle: Path) -> None:
    with serve(bundle.parent) as served:
        (manifest,) = find_bundles(bundle.parent).values()
        found = explain_translation(served, manifest, TEXT)
        body = {"model": "toy", "inputs": TEXT}
        target = served.post("/v1/generate", body)[0]["outputs"][0]["text"]
        (output,) = served.post("/v1/attention", {**body, "targets": target})[0]["outputs"]
        words = words_of(TEXT, output["source_offsets"])
        assert found.units == [*(word.text for word in words), "</s>"]
        hidden = [list(word.tokens) for word in words]
        bodies = [{**body, "targets": target, "hidden_source_tokens": tokens} for tokens in ([], *hidden)]
        scored = [response["outputs"][0]["tokens"] for response in served.post("/v1/score", *bodies)]
    log_probs = np.array([[token["logprob"] for token in tokens] for tokens in scored])
    np.testing.assert_allclose(found.log_probs, log_probs[0], atol=1e-6)
    np.testing.assert_allclose(found.drops["hidden"][:, :-1], (log_probs[0] - log_probs[1:]).T, atol=1e-6)
    weights = {entry["kind"]: np.reshape(entry["data"], entry["shape"]) for entry in output["maps"]}["cross"]
    sums = [weights.mean(axis=(0, 1))[:, tokens].sum(axis=1) for tokens in hidden]
    np.testing.assert_allclose(found.weights["mean"][:, :-1], np.transpose(sums), atol=1e-5)
    assert np.isnan(found.drops["deleted"][:, -1]).all() and not np.isnan(found.drops["hidden"]).any()


def test_tau_counts_the_pairs_that_agree() -> None:
    left = np.array([[1.0, 2.0, 3.0, 4.0]] * 4)
    right = np.array([[1.0, 2, 3, 4], [4, 3, 2, 1], [1, 2, 4, 3], [5, 5, 5, 5]])
    # One of six pairs is reversed: (5 - 1) / 6.
    assert kendall_tau(left, right) == pytest.approx([1, -1, 4 / 6, 0])
    # The right side has one tie: 5 agreeing pairs, divided by the root of 6 times 5.
    assert kendall_tau(left[:1], np.array([[1.0, 2, 3, 3]])) == pytest.approx([5 / 30**0.5])
