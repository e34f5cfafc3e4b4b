from typing import Any

from bench.record import Result
from model.systems import JOINED, SMALL, SMALL_GROUPS, SYSTEMS
from study.claims import BUCKETS, statistics_by_system, tables

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


def test_systems_of_a_group_are_compared_with_the_first() -> None:
    given = tables(result())
    assert set(given) == {f"claims-{group}" for group in SMALL_GROUPS}
    first, second = given["claims-scale"].splitlines()[-2:]
    assert "| 2 |" in first and "0.75 | 2 |" in first  # mean spread of both seeds; ratio of gradients
    assert first.count("[") == 1 and second.count("[") == 2


def test_joined_captions_are_compared_by_length() -> None:
    (row,) = statistics_by_system(result(), ["joined-bahdanau"]).values()
    assert len(row) == 2
    text = tables(result())["claims-long"]
    counts = [sum(first <= length <= last for length in LENGTHS) for first, last in BUCKETS]
    assert all(f"({count})" in text for count in counts)
    assert "100.0" in text  # all words are right
