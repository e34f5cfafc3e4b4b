import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.study import alignment
from lab.study.alignment import Candidate, links_of
from lab.study.served import serve
from lab.study.word_links import (
    PAIRS,
    AnnotatedPair,
    Links,
    Reference,
    agreement,
    best_links,
    diagonal,
    error_counts,
    error_rate,
    random_counts,
    read_pairs,
)
from sightline.base.bundle import ALIGNMENT_STEPS
from sightline.base.text.words import Word, words_of
from tests.support.tables import read_table

HEADER = "English\tGerman\tfirst pass\tsecond pass\tlinks"
REFERENCE = Reference(frozenset({(0, 0), (2, 1)}), frozenset({(0, 0), (1, 0), (2, 1), (1, 2)}))
LINES = ("A man sleeps.\tA dog sleeps.\t0-0 2-2 3-3\t0-0 1p1 2-2 3-3\t0-0 1p1 2-2 3-3",) * 3


def rate(links: Links, reference: Reference) -> float:
    return float(error_rate(np.array(error_counts(links, reference))))


def every_choice(num_sources: int, num_targets: int) -> Iterator[Links]:
    for sources in itertools.product(range(num_sources), repeat=num_targets):
        yield frozenset(zip(sources, range(num_targets), strict=True))


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ({(0, 0), (2, 1)}, 0),
        ({(0, 0), (2, 1), (1, 2)}, 0),  # a possible link is no error
        ({(0, 0), (2, 1), (0, 2)}, 1 - (2 + 2) / (3 + 2)),
        ({(0, 0), (0, 1), (1, 2)}, 1 - (1 + 2) / (3 + 2)),
        ({(1, 0), (1, 1), (1, 2)}, 1 - (0 + 2) / (3 + 2)),
        (set(), 1),
    ],
)
def test_the_error_rate_is_that_of_och_and_ney(links: set[tuple[int, int]], expected: float) -> None:
    assert rate(frozenset(links), REFERENCE) == pytest.approx(expected)


def test_the_random_baseline_is_the_mean_over_all_choices() -> None:
    expected = np.mean([error_counts(links, REFERENCE) for links in every_choice(3, 3)], axis=0)
    assert random_counts(REFERENCE, 3, 3) == pytest.approx(tuple(expected))


def test_no_choice_has_a_lower_rate_than_the_best_links() -> None:
    assert rate(best_links(REFERENCE, 3), REFERENCE) == min(rate(links, REFERENCE) for links in every_choice(3, 3))
    unlinked = Reference(frozenset(), frozenset())
    assert error_counts(best_links(unlinked, 2), unlinked) == (0, 2)


def test_the_diagonal_follows_the_relative_position() -> None:
    assert diagonal(3, 3) == {(0, 0), (1, 1), (2, 2)}
    assert diagonal(6, 3) == {(1, 0), (3, 1), (5, 2)}
    assert diagonal(2, 4) == {(0, 0), (0, 1), (1, 2), (1, 3)}


def test_agreement_of_two_passes() -> None:
    passes = tuple(
        Reference(frozenset(sure | {(2, 2)}), frozenset(possible | {(2, 2)}))
        for sure, possible in (({(0, 0), (1, 1)}, {(0, 0), (1, 1)}), ({(0, 0)}, {(0, 0), (1, 1)}))
    )
    found = agreement([AnnotatedPair("A man.", "Ein Mann.", (passes[0], passes[1]), passes[0])])
    # Labels of the four pairs of words without the period: sure, none, none, sure; and sure, none,
    # none, possible. Observed agreement 3/4, expected 2/4 * 2/4 + 0 * 1/4 + 2/4 * 1/4 = 3/8.
    # Sure links of the second pass {0-0} against S = P = {0-0, 1-1}: 1 - (1 + 1) / (1 + 2).
    expected = {"sure_f1": 2 / 3, "all_f1": 1, "kappa": (3 / 4 - 3 / 8) / (1 - 3 / 8), "aer": 1 / 3}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("line", "message"), read_table(__file__))
def test_a_malformed_table_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(f"{HEADER}\n{line}\n" if line else f"{HEADER}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_pairs(path)


def test_the_committed_pairs_follow_the_rules_of_adjudication() -> None:
    pairs = read_pairs(PAIRS)
    assert len(pairs) == len({pair.source for pair in pairs}) == 100
    for pair in pairs:
        first, second = pair.passes
        assert first.sure & second.sure <= pair.links.sure <= first.sure | second.sure
        assert first.possible & second.possible <= pair.links.possible <= first.possible | second.possible
        for source, target in pair.links.possible:
            marks = {pair.source_words[source], pair.target_words[target]} & {",", "."}
            assert not marks or pair.source_words[source] == pair.target_words[target]


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("\n".join([HEADER, *LINES]) + "\n", encoding="utf-8")
    return path


def test_links_of_each_head_are_those_of_the_service(bundle: Path, pairs_file: Path) -> None:
    pair = read_pairs(pairs_file)[0]
    body = {"model": "toy", "inputs": [pair.source], "targets": [pair.target]}
    with serve(bundle.parent) as served:
        found = links_of(served, "toy", pair)
        (output,) = served.post("/v1/attention", {**body, "kinds": ["cross"]})[0]["outputs"]
        selections = [{"layer": layer, "head": head} for layer in range(2) for head in range(4)]
        selections += [{"layer": layer} for layer in range(2)]
        for step, selection in itertools.product(ALIGNMENT_STEPS, selections):
            (aligned,) = served.post("/v1/align", {**body, **selection, "step": step})[0]["outputs"]
            candidate = selection["layer"], selection.get("head"), step
            assert found[candidate] == {(source, word) for source, word, _ in aligned["links"]}
    (entry,) = output["maps"]
    maps = np.reshape(entry["data"], entry["shape"])
    sources, targets = (_words(output, side, text) for side, text in (("source", pair.source), ("target", pair.target)))
    for layer, head in itertools.product(range(2), range(4)):
        assert found[layer, head, "reads"] == _next_rows(maps[layer, head], sources, targets)


def _words(output: Mapping[str, Any], side: str, text: str) -> list[Word]:
    return words_of(text, output[f"{side}_offsets"])


def _next_rows(weights: Any, sources: list[Word], targets: list[Word]) -> set[tuple[int, int]]:
    """Sum the weights of the rows after the tokens of each target word, one by one."""
    found = set()
    for index, word in enumerate(targets):
        sums = [sum(weights[row + 1][column] for row in word.tokens for column in one.tokens) for one in sources]
        found.add((sums.index(max(sums)), index))
    return found


def test_a_map_is_chosen_on_one_half_and_tested_on_the_other() -> None:
    counts: dict[Candidate, Any] = {
        (0, 0, "writes"): np.array([[3.0, 4], [1, 4]] * 2),  # best on the first half
        (0, 1, "writes"): np.array([[2.0, 4], [3, 4]] * 2),  # best on the second half
        (0, 0, "reads"): np.array([[4.0, 4], [4, 4]] * 2),
    }
    aligned = counts[0, 1, "writes"]
    found = alignment._choose(counts, ["writes"], aligned)
    assert found["chosen"] == [[0, 0, "writes"], [0, 1, "writes"]]
    assert found["aer"] == pytest.approx(1 - (1 + 2) / 8)
    assert found["difference"][0] == pytest.approx(5 / 8 - 3 / 8)
    assert alignment._choose(counts, ["writes", "reads"], aligned)["aer"] == 0
