from lab.bench.record import Result
from lab.study.speed import ratios, tables, training_minutes


def test_training_takes_as_long_as_its_updates() -> None:
    times = {"float32": [400.0, 100.0, 300.0], "bfloat16": [200.0]}
    assert training_minutes({"update_ms": times, "updates": 3000, "precision": "float32"}) == 15
    assert training_minutes({"update_ms": times, "updates": 3000, "precision": "bfloat16"}) == 10


def test_speeds_are_compared_round_by_round() -> None:
    assert ratios([10.0, 20.0, 90.0], [10.0, 10.0, 90.0]) == [1, 2, 1]
    rows = (
        {"threads": 2, "updates_a_round": 3},
        {"system": "transformer", "parameters": 1, "tokens_per_s": {"1": [10.0, 10.0, 90.0]}},
        {"system": "bahdanau", "parameters": 2, "tokens_per_s": {"1": [10.0, 20.0, 90.0]}},
    )
    assert "| 1.00 (1.00 to 2.00) |" in tables(Result(rows=rows))["speed"]  # 2 is the ratio of the medians
