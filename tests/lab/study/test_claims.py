from typing import Any

import pytest

from lab.bench.record import Result
from lab.study.claims import TABLES, tables
from lab.zoo.systems import JOINED, SMALL, SMALL_GROUPS, SYSTEMS

LENGTHS = [20, 30, 40, 50, 60, 22] * 4


def run(system: str, seed: int, matched: int) -> dict[str, Any]:
    """Run whose outputs have 10 words, of which `matched` are right."""
    scores = {"encoder.0.self_attention": {"spread": 0.5 * seed, "largest": 2.0}}
    return {
        "kind": "system",
        "corpus": SYSTEMS[system].corpus.data_name,
        "system": system,
        "seed": seed,
        "output_lengths": [10] * len(LENGTHS),
        "matches": [[max(matched - order, 0)] * len(LENGTHS) for order in range(4)],
        "diagnostics": [
            {"epoch": epoch, "gradients": {"encoder.0": 3.0, "encoder.1": 1.5, "embedding": 9.0}, "scores": scores}
            for epoch in (0, 12)
        ],
    }


def result() -> Result:
    sets = [
        {"kind": "test set", "corpus": one.data_name, "source_words": LENGTHS, "reference_lengths": [10] * len(LENGTHS)}
        for one in (SMALL, JOINED)
    ]
    pairs = (("small-dot", 8), ("small-dot-scaled", 9), ("joined-bahdanau", 10))
    return Result(rows=(*sets, *(run(name, seed, matched) for name, matched in pairs for seed in (1, 2))))


def cells(text: str) -> list[list[str]]:
    """Return the rows of a table with its head."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [lines[0], *lines[2:]]


def test_every_system_of_a_group_is_in_its_table_after_its_baseline() -> None:
    assert TABLES.keys() == SMALL_GROUPS.keys()
    for group, lines in TABLES.items():
        systems = [line.system for line in lines]
        assert SMALL_GROUPS[group].keys() <= set(systems) and len(systems) == len(set(systems))
        for place, line in enumerate(lines):
            assert line.system in SYSTEMS and line.baseline in (None, *systems[:place])


def test_systems_of_a_group_are_compared_with_their_baselines() -> None:
    given = tables(result())
    assert set(given) == {"claims-long", "claims-scale"}  # groups with trained systems
    head, first, second = cells(given["claims-scale"])
    assert head[2:4] == ["compared with", "difference"]
    assert given["claims-scale"].endswith("\n\nMeans of 2 seeds.")
    # Mean spread of both seeds, and the norm of 3, 1.5 and 9.
    assert (first[0], first[2:]) == ("`dot`", ["", "", "0.75", "0.75", "9.6", "9.6"])
    assert second[2] == "`dot`" and " ± " in second[3]
    assert float(second[1].split()[0]) - float(first[1].split()[0]) == pytest.approx(
        float(second[3].split()[0]), abs=0.11
    )
