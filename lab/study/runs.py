"""Read the rows of the result `collect`, grouped by system."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.bench.record import Result, Row
from lab.study.bleu import Counts, Statistics
from lab.zoo.systems import MULTI30K, PLAN, SYSTEMS, bundle_name
from sightline.base.bundle import Manifest
from sightline.model.evaluation.bleu import read_test_set
from sightline.model.evaluation.defaults import TEST_SPLIT

assert MULTI30K.languages is not None
SOURCE, TARGET = MULTI30K.languages  # of all systems that translate
# Systems on the whole corpus; `lab.study.claims` has those of the small setting.
TRANSLATING = tuple(name for name in PLAN if SYSTEMS[name].task == "translation" and SYSTEMS[name].corpus == MULTI30K)

SHIPPED = "transformer"  # served under the name of its corpus


def sources_and_references(folder: Path, limit: int | None = None) -> tuple[list[str], list[str]]:
    """Read the first `limit` or all sources of the test set and their tokenized references."""
    test_set = read_test_set(folder, TEST_SPLIT, SOURCE, TARGET, limit)
    if test_set.tokenised_references is None:
        raise FileNotFoundError(f"{folder} has no tokenized {TEST_SPLIT}")
    return test_set.sources, test_set.tokenised_references


def translates(manifest: Manifest) -> bool:
    """Return True for encoder-decoder models, which turn a source into another text."""
    return "generate" in manifest.tasks and not manifest.is_decoder_only


def system_of(model: str) -> str:
    """Return the system of a served model, or the name itself for models outside the zoo."""
    return {MULTI30K.name: SHIPPED, **{bundle_name(name): name for name in SYSTEMS}}.get(model, model)


@dataclass(frozen=True)
class TestSet:
    """The test set of the statistics of all runs."""

    source_words: Counts  # (N,), number of words separated by spaces
    reference_lengths: Counts  # (N,)


def test_set_of(result: Result) -> TestSet:
    (row,) = (row for row in result.rows if row["kind"] == "test set")
    return TestSet(np.array(row["source_words"]), np.array(row["reference_lengths"]))


def runs_by_system(result: Result) -> dict[str, list[Row]]:
    """Return the runs of each system, ordered by seed, with systems in the order of the plan."""
    runs: dict[str, list[Row]] = {name: [] for name in TRANSLATING}
    for row in sorted(result.rows, key=lambda row: row.get("seed", 0)):
        if row["kind"] == "system":
            runs[row["system"]].append(row)
    return {name: rows for name, rows in runs.items() if rows}


def rows_of_statistics(runs: Sequence[Row], test_set: TestSet) -> list[Counts]:
    """Return the statistics of each run, (N, 10); see `Statistics.rows`."""
    return [
        Statistics(np.array(run["matches"]).T, np.array(run["output_lengths"]), test_set.reference_lengths).rows
        for run in runs
    ]
