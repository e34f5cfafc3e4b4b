from datetime import UTC, datetime
from pathlib import Path

from sightline.loadtest.load import Measurement
from sightline.loadtest.load_record import make_record, read_record, write_record
from sightline.loadtest.outcome import Failure, Outcome, Rejection, Success
from sightline.loadtest.profiles import Stage

SUCCESSES: list[Outcome] = [Success(round(0.1 + index / 1000, 3), 0.05, 7, 5, 0.03) for index in range(100)]
ERRORS: list[Outcome] = [Rejection("overloaded", 1), Failure("timeout"), Failure("timeout")]


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    outcomes = [*SUCCESSES, *ERRORS]
    due_s = [10 * index / len(outcomes) for index in range(len(outcomes))]
    arguments = {"url": "http://host", "endpoint": "generate", "objectives": {"latency": 0.15}, "max_lag": 0.025}
    stages = [Stage(None, 0.0, Measurement(outcomes, 10.0, due_s, [0.001]))]
    record = make_record(arguments, datetime(2026, 11, 25, 12, 0, tzinfo=UTC), 0.2, stages)
    write_record(record, tmp_path / "load.json")
    read = read_record(tmp_path / "load.json")
    assert read == record
    (stage,) = read.stages
    read_outcomes = stage.measurement().outcomes
    assert [type(outcome) for outcome in read_outcomes] == [type(outcome) for outcome in outcomes]
    assert read_outcomes[7] == SUCCESSES[7] and read_outcomes[-3:] == [Rejection("overloaded", None), *ERRORS[1:]]
