"""Record of a run as a JSON file: arguments, versions, figures, and every request.

The requests are kept because a comparison of two runs resamples them.
"""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sightline.loadtest.load import Measurement
from sightline.loadtest.load_report import Summary, summarize
from sightline.loadtest.outcome import OWN, Failure, Outcome, Rejection, Success
from sightline.loadtest.profiles import Stage

DIGITS = 6  # of seconds


class RecordError(Exception):
    """A file is no record of a run."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Requests(_Model):
    """Columns with one value for each request.

    `errors` has an empty string for a success, `rejected: CODE` or `failed: REASON`. Times are
    seconds. A request that did not succeed has no times and no tokens.
    """

    due_s: list[float]
    errors: list[str]
    latency_s: list[float | None]
    first_token_s: list[float | None]
    longest_gap_s: list[float | None]
    input_tokens: list[int]
    output_tokens: list[int]

    @classmethod
    def of(cls, measurement: Measurement) -> "Requests":
        successes = [outcome if isinstance(outcome, Success) else None for outcome in measurement.outcomes]

        def times(name: str) -> list[float | None]:
            values = [None if success is None else getattr(success, name) for success in successes]
            return [None if value is None else round(value, DIGITS) for value in values]

        return cls(
            due_s=[round(due_s, DIGITS) for due_s in measurement.due_s],
            errors=[_error(outcome) for outcome in measurement.outcomes],
            latency_s=times("latency_s"),
            first_token_s=times("first_token_s"),
            longest_gap_s=times("longest_gap_s"),
            input_tokens=[success.input_tokens if success else 0 for success in successes],
            output_tokens=[success.output_tokens if success else 0 for success in successes],
        )

    def outcomes(self) -> list[Outcome]:
        columns = zip(
            self.errors, self.latency_s, self.first_token_s, self.input_tokens, self.output_tokens,
            self.longest_gap_s, strict=True,
        )  # fmt: skip
        return [_outcome(error, values) for error, *values in columns]


def _error(outcome: Outcome) -> str:
    if isinstance(outcome, Rejection):
        return f"rejected: {outcome.code}"
    return f"failed: {outcome.reason}" if isinstance(outcome, Failure) else ""


def _outcome(error: str, values: Sequence[Any]) -> Outcome:
    kind, _, text = error.partition(": ")
    if kind == "rejected":
        return Rejection(text, None)
    return Failure(text) if kind else Success(*values)


class RecordedStage(_Model):
    """A stage of a profile."""

    rate: float | None
    start_s: float
    figures: Summary
    requests: Requests

    def measurement(self) -> Measurement:
        """Return the results of the stage without the lags of the client."""
        return Measurement(self.requests.outcomes(), self.figures.elapsed_s, self.requests.due_s)


class LoadRecord(_Model):
    """Record of a run.

    `is_valid` is False if the load test itself failed, or lagged behind: the 99th percentile of its
    lag in a stage exceeds the argument `max_lag`. `client_processor_share` is the processor time of
    the load test over the time of the run.
    """

    arguments: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    started_at: datetime
    client_processor_share: float
    is_valid: bool
    stages: list[RecordedStage]

    @property
    def objectives(self) -> Mapping[str, float]:
        """Largest times in seconds, see `is_good`."""
        objectives: dict[str, float] = self.arguments["objectives"]
        return objectives


def make_record(
    arguments: Mapping[str, Any],
    started_at: datetime,
    client_processor_share: float,
    stages: Sequence[Stage],
) -> LoadRecord:
    """Return the record of a run; `arguments` has the objectives and the largest lag in seconds."""
    summaries = [summarize(stage.measurement, arguments["objectives"]) for stage in stages]
    versions = {name: importlib.metadata.version(name) for name in ("httptools", "orjson", "uvloop")}
    return LoadRecord(
        arguments=dict(arguments),
        versions={"python": platform.python_version(), "platform": platform.platform()} | versions,
        commit=commit(),
        started_at=started_at.replace(microsecond=0),
        client_processor_share=client_processor_share,
        is_valid=all(
            (summary.lag_ms is None or summary.lag_ms.p99 <= 1000 * arguments["max_lag"])
            and not any(reason.startswith(OWN) for reason in summary.failed)
            for summary in summaries
        ),
        stages=[
            RecordedStage(
                rate=stage.rate,
                start_s=stage.start_s,
                figures=summary,
                requests=Requests.of(stage.measurement),
            )
            for stage, summary in zip(stages, summaries, strict=True)
        ],
    )


def write_record(record: LoadRecord, path: Path) -> None:
    path.write_text(record.model_dump_json() + "\n", encoding="utf-8")


def read_record(path: Path) -> LoadRecord:
    """Read a record. Raises `OSError`, or `RecordError` if the file is no record."""
    try:
        return LoadRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise RecordError(
            f"{path} is not a record of `sightline load --json` ({field}: {first['msg'].lower()}); record the run again"
        ) from None


def commit() -> str | None:
    """Return the commit, with `-dirty` if files are changed; None outside of a git repository."""
    git = shutil.which("git")
    if git is None:
        return None
    describe = [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    response = subprocess.run(describe, capture_output=True, text=True, check=False)  # noqa: S603 - constant arguments
    return response.stdout.strip() or None
