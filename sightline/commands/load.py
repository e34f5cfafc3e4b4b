"""`sightline load`: load a running service over HTTP, print the results and write them to files.

`sightline load compare` compares two of these files.
"""

import asyncio
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

import uvloop
from annotated_types import Ge, Gt
from pydantic import BeforeValidator, Field, model_validator

from sightline import loadtest
from sightline.base.errors import EXIT_LAGGED, EXIT_USAGE, EXIT_WORSE, UsageError, fail
from sightline.base.options import Options, Shown, parse
from sightline.base.parser import Parser
from sightline.loadtest.arguments import duration, objective, rates, read_prompts, share
from sightline.loadtest.client import Client
from sightline.loadtest.compare import Change, NotComparableError, compare_measurements, compare_records, format_changes
from sightline.loadtest.load import Load, run_load
from sightline.loadtest.load_record import LoadRecord, RecordError, make_record, read_record, write_record
from sightline.loadtest.load_report import DEFINITIONS, TIMES, Summary, format_rates, format_table
from sightline.loadtest.outcome import OWN
from sightline.loadtest.profiles import Stage, split, sweep, window
from sightline.loadtest.targets import TARGETS, RequestOptions, TargetName

DEFAULT_DURATION_S = 10.0
TIMEOUT_S = 60.0  # twice the default request timeout of the service, which should have responded by then
PROMPTS = Path(loadtest.__file__).with_name("sentences.txt")
Duration = Annotated[float, BeforeValidator(duration), Shown("TIME")]
Rates = Annotated[tuple[float, ...], BeforeValidator(rates), Shown("LIST")]
Objective = Annotated[tuple[str, float], BeforeValidator(objective)]
Threshold = Annotated[float, BeforeValidator(share), Shown("SHARE")]


class LoadOptions(Options):
    """Load a running service over HTTP and measure its latency, throughput and goodput.

    Rejections (503 and 429) are counted, but are no failures. `sightline load compare --help`
    describes the comparison of two runs. Exit status 4: the run is invalid; 5: a figure became
    worse during a --soak.
    """

    example = "--url http://127.0.0.1:8000 --clients 16 --duration 10s"
    exclusive = ("clients", "rate", "rates", "steps")
    groups = (("url", "requests"), ("clients", "profile of the load"), ("objective", "results"))

    url: str = "http://127.0.0.1:8000"
    """URL of the service"""
    endpoint: Annotated[TargetName, Shown("NAME")] = Field(
        "generate", description=f"endpoint to call: {', '.join(TARGETS)}"
    )
    model: Annotated[str | None, Shown("NAME")] = None
    """model to call (default: the service's; needed by OpenAI, OIP)"""
    stream: bool = False
    """request streamed responses, to measure tokens"""
    max_new_tokens: Annotated[int | None, Ge(1)] = None
    """largest number of generated tokens"""
    prompts: Annotated[Path, Shown("FILE")] = PROMPTS
    """file with one prompt per line; in a .jsonl file, each line is a JSON string or the list of
    messages of a chat (default: 300 sentences)"""
    key_file: Annotated[Path | None, Shown("FILE")] = None
    """file with the API key to send; never recorded"""
    clients: Annotated[int, Ge(1)] = 16
    """closed loop: clients that wait for each response"""
    rate: Annotated[float | None, Gt(0)] = None
    """open loop: requests per second, at random times"""
    rates: Rates | None = None
    """sweep: open loops with these rates (10,20,40 or FIRST:LAST:STEP), until the goodput falls"""
    steps: Rates | None = None
    """step profile: these rates without pauses, like 10,50,10"""
    soak: bool = False
    """compare the first and last tenth of a long run at --rate"""
    duration: Duration | None = None
    """duration of the measurement, or of each rate (default: 10s)"""
    requests: Annotated[int | None, Ge(1)] = None
    """end after N requests"""
    warm_up: Duration = 1.0
    """duration of the load before the measurement (default: 1s)"""
    retry: bool = False
    """after a 503 or 429, wait for Retry-After and repeat the request"""
    objective: Annotated[tuple[Objective, ...], Shown("NAME=TIME", is_repeated=True)] = Field(
        default=(),
        description="largest time of a good request, such as ttft=200ms; repeat for several. Names: "
        + ", ".join(f"{name} ({title})" for name, (title, _) in TIMES.items()),
    )
    max_lag: Duration = 0.05
    """largest 99th percentile of the load test's own delay; beyond it, the run is invalid (default:
    50ms)"""
    json_: Annotated[Path | None, Shown("FILE")] = None
    """write arguments, versions, figures and requests to FILE"""
    threshold: Threshold = 0.05
    """largest change for the worse of --soak (default: 5%)"""

    @property
    def open_rates(self) -> Sequence[float]:
        return [self.rate] if self.rate else self.rates or self.steps or []

    @property
    def duration_s(self) -> float | None:
        """Seconds of the measurement, or of each rate; None if only `requests` ends it."""
        is_timed = self.duration is None and (self.requests is None or self.rates or self.steps)
        return DEFAULT_DURATION_S if is_timed else self.duration

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        target = TARGETS[self.endpoint]
        if self.stream and not target.can_stream:
            able = ", ".join(name for name, other in TARGETS.items() if other.can_stream)
            raise ValueError(f"--stream needs --endpoint {able}")
        if self.max_new_tokens is not None and not target.generates:
            able = ", ".join(name for name, other in TARGETS.items() if other.generates)
            raise ValueError(f"--max-new-tokens needs --endpoint {able}")
        if self.model is None and target.needs_model:
            raise ValueError(f"--endpoint {self.endpoint} needs --model")
        if dict(self.objective).keys() - {"latency"} and not self.stream:
            raise ValueError("--objective: only latency can be measured without --stream")
        if self.open_rates and self.retry:
            raise ValueError("--retry needs a closed loop; remove --rate, --rates or --steps")
        if (self.rates or self.steps) and self.requests is not None:
            raise ValueError("--requests needs --clients or --rate; use --duration")
        if self.soak and (self.rate is None or self.requests is not None):
            raise ValueError("--soak needs --rate and --duration")
        if self.json_ is not None and not self.json_.parent.is_dir():
            raise ValueError(f"--json: the folder {self.json_.parent} does not exist; create it")
        return self


class CompareOptions(Options):
    """Compare two runs of the same load that `sightline load --json` has recorded.

    A figure is worse if the whole 99 % interval of its change exceeds the threshold (a block
    bootstrap over 20 parts of each run), and unclear if only the change itself does. Exit status 5:
    a figure is worse.
    """

    example = "before.json after.json --threshold 5%"

    before: Annotated[Path, Shown(is_positional=True)]
    """record of the first run"""
    after: Annotated[Path, Shown(is_positional=True)]
    """record of the second run"""
    threshold: Threshold = 0.05
    """largest change for the worse of a figure (default: 5%)"""


def run(parser: Parser, words: Sequence[str]) -> int:
    """Run `sightline load` or `sightline load compare`, and return the exit code."""
    if words and words[0] == "compare":
        parser.prog += " compare"
        return compare(parse(parser, words[1:], CompareOptions))
    options = parse(parser, words, LoadOptions)
    return load_and_report(options, client_of(options), load_of(options))


def client_of(options: LoadOptions) -> Client:
    """Return a client with the key of --key-file. Raises `UsageError`."""
    try:
        key = options.key_file.read_text(encoding="ascii").strip() if options.key_file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file: {error}") from None
    if len(key.split()) > 1:
        raise UsageError(f"--key-file: {options.key_file} must have one key and nothing else")
    try:
        return Client(options.url, TIMEOUT_S, key=key)
    except ValueError as error:
        raise UsageError(f"--url {error}") from None


def load_of(options: LoadOptions) -> Load:
    """Return the load with the requests of --prompts. Raises `UsageError`."""
    target = TARGETS[options.endpoint]
    try:
        prompts = read_prompts(options.prompts)
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts: {error}") from None
    if not prompts:
        raise UsageError(f"--prompts: {options.prompts} has no prompts; expected one prompt per line")
    if not target.reads_chats and not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError("--prompts: messages of a chat need --endpoint openai-chat")
    of_requests = RequestOptions(options.model, options.stream, options.max_new_tokens)
    return Load(
        path=target.path_for(of_requests),
        bodies=[target.body(prompt, of_requests) for prompt in prompts],
        is_streamed=options.stream,
        clients=options.clients,
        rates=options.open_rates,
        duration_s=math.inf if options.duration_s is None else options.duration_s,
        requests=options.requests,
        honors_retry_after=options.retry,
        has_usage=target.reports_usage,
    )


async def measure(options: LoadOptions, client: Client, load: Load) -> list[Stage]:
    """Run the warm-up load, then measure."""
    async with client:
        if options.warm_up:
            warm_up = replace(load, rates=load.rates[:1], duration_s=options.warm_up, requests=None)
            await run_load(client, warm_up)
        if options.rates:
            return await sweep(client, load, dict(options.objective), print_progress)
        measurement = await run_load(client, load)
    if options.steps:
        return split(measurement, load.rates, load.duration_s)
    return [Stage(options.rate, 0.0, measurement)]


def print_progress(rate: float, summary: Summary) -> None:
    """Print the goodput of a rate of a sweep, because the table comes at the end."""
    print(f"{rate:g} requests/s: {summary.good_per_s:.1f} good requests/s", file=sys.stderr)


def load_and_report(options: LoadOptions, client: Client, load: Load) -> int:
    """Run a load, print and write its results, and return the exit code."""
    started_at = datetime.now(UTC)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stages = runner.run(measure(options, client, load))
    processor_share = (time.process_time() - processor_s) / (time.perf_counter() - wall_s)
    arguments = options.model_dump(exclude={"objective", "json_", "key_file", "threshold"}) | {
        "duration": options.duration_s,
        "objectives": dict(options.objective),
        "prompts": str(options.prompts),
        "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
    }
    record = make_record(arguments, started_at, processor_share, stages)
    summaries = [stage.figures for stage in record.stages]
    print(f"{DEFINITIONS}\n")
    if options.rates or options.steps:
        print(format_rates([stage.rate for stage in stages], summaries))
        best = max(record.stages, key=lambda stage: stage.figures.good_per_s)
        print(f"\nhighest goodput: {best.figures.good_per_s:.1f} good requests/s at {best.rate:g}")
    else:
        print(format_table(summaries[0]))
    changes: list[Change] = []
    if options.soak:
        (stage,), tenth_s = stages, load.duration_s / 10
        first, last = (window(stage.measurement, start_s, start_s + tenth_s) for start_s in (0.0, 9 * tenth_s))
        changes = compare_measurements(first, last, dict(options.objective), stage.rate)
        print(f"\nlast tenth after the first tenth:\n{format_changes(changes, options.threshold)}")
    print(f"\nThe load test used {processor_share:.0%} of one processor.")
    if options.json_ is not None:
        write_record(record, options.json_)
    return _print_failure(record, changes, options)


def _print_failure(record: LoadRecord, changes: Sequence[Change], options: LoadOptions) -> int:
    """Print the first of the errors of a run and return the exit code."""
    summaries = [stage.figures for stage in record.stages]
    own = sorted({reason.removeprefix(OWN) for stage in summaries for reason in stage.failed if reason.startswith(OWN)})
    if own:
        return fail(
            f"the run is invalid: the load test itself could not send requests: {', '.join(own)}; raise its "
            "limits, such as that of open files with ulimit -n, or use fewer --clients or a lower --rate",
            EXIT_LAGGED,
        )
    if not record.is_valid:
        lag_ms = max(summary.lag_ms.p99 for summary in summaries if summary.lag_ms)
        return fail(
            f"the run is invalid: the load test itself lagged by {lag_ms:.0f} ms (99th percentile), more than "
            f"{1000 * options.max_lag:.0f} ms; lower the load, use a faster machine, or set --max-lag",
            EXIT_LAGGED,
        )
    failed = sum(sum(summary.failed.values()) for summary in summaries)
    if failed:
        reasons = sorted({reason for summary in summaries for reason in summary.failed})
        sent = sum(summary.sent for summary in summaries)
        return fail(f"{failed} of {sent} requests failed: {', '.join(reasons)}")
    if options.soak and not changes:
        return fail("the first tenth has too few good requests for a comparison; run longer")
    return _status_of(changes, options.threshold)


def _status_of(changes: Sequence[Change], threshold: float) -> int:
    worse = [change for change in changes if change.verdict(threshold) == "worse"]
    if worse:
        return fail(f"{len(worse)} of {len(changes)} figures became worse by more than {threshold:.0%}", EXIT_WORSE)
    return 0


def compare(options: CompareOptions) -> int:
    """Compare two records, print the changes and return the exit code."""
    try:
        before, after = read_record(options.before), read_record(options.after)
        bad = [str(path) for path, record in ((options.before, before), (options.after, after)) if not record.is_valid]
        if bad:
            return fail(f"invalid because of the load test itself: {', '.join(bad)}; run it again", EXIT_LAGGED)
        changes = compare_records(before, after)
    except (NotComparableError, RecordError) as error:
        return fail(error, EXIT_USAGE if isinstance(error, NotComparableError) else None)
    print(format_changes(changes, options.threshold))
    if len(before.stages) != len(after.stages):
        print("\nOnly the rates that both sweeps have reached are compared.")
    return _status_of(changes, options.threshold)
