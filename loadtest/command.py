"""`sightline load`: load a running service over HTTP, print the results and write them to files.

`sightline load compare` compares two of these files.
"""

import argparse
import asyncio
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from sightline.loadtest.arguments import add_threshold, parse_arguments
from sightline.loadtest.compare import Change, NotComparableError, compare_measurements, compare_records, format_changes
from sightline.loadtest.load import Load, run_load
from sightline.loadtest.page import write_page
from sightline.loadtest.profiles import Stage, split, sweep, window
from sightline.loadtest.record import Record, RecordError, make_record, read_record, write_record
from sightline.loadtest.report import DEFINITIONS, Summary, format_rates, format_table

EXIT_FAILED, EXIT_USAGE, EXIT_LAGGED, EXIT_WORSE = 1, 2, 4, 5


def run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Run `sightline load` or `sightline load compare`, and return the exit code."""
    if arguments and arguments[0] == "compare":
        parser.prog += " compare"
        return compare(parser, arguments[1:])
    return load(parser, arguments)


async def measure(options: argparse.Namespace) -> list[Stage]:
    """Run the warm-up load, then measure."""
    load: Load = options.load
    async with options.client as client:
        if options.warm_up:
            warm_up = replace(load, rates=load.rates[:1], duration_s=options.warm_up, requests=None)
            await run_load(client, warm_up)
        if options.rates:
            return await sweep(client, load, options.objectives, print_progress)
        measurement = await run_load(client, load)
    if options.steps:
        return split(measurement, load.rates, load.duration_s)
    return [Stage(options.rate, 0.0, measurement)]


def print_progress(rate: float, summary: Summary) -> None:
    """Print the goodput of a rate of a sweep, because the table comes at the end."""
    print(f"{rate:g} requests/s: {summary.good_per_s:.1f} good requests/s", file=sys.stderr)


def load(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Run a load, print and write its results, and return the exit code."""
    options = parse_arguments(parser, arguments)
    started_at = datetime.now(UTC)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stages = runner.run(measure(options))
    processor_share = (time.process_time() - processor_s) / (time.perf_counter() - wall_s)
    record = make_record(_recorded_arguments(options), started_at, processor_share, stages)
    summaries = [stage.figures for stage in record.stages]
    print(f"{DEFINITIONS}\n")
    if options.rates or options.steps:
        print(format_rates([stage.rate for stage in stages], summaries))
        best = max(summaries, key=lambda summary: summary.good_per_s)
        print(
            f"\nhighest goodput: {best.good_per_s:.1f} good requests/s at {record.stages[summaries.index(best)].rate:g}"
        )
    else:
        print(format_table(summaries[0]))
    changes: list[Change] = []
    if options.soak:
        changes = soak_changes(stages[0], options)
        print(f"\nlast tenth after the first tenth:\n{format_changes(changes, options.threshold)}")
    print(f"\nThe load test used {processor_share:.0%} of one processor.")
    if options.json is not None:
        write_record(record, options.json)
    if options.report is not None:
        write_page(record, changes, options.threshold, options.report)
    return exit_status(record, changes, options)


def soak_changes(stage: Stage, options: argparse.Namespace) -> list[Change]:
    """Compare the first and the last tenth of a soak."""
    tenth_s = options.load.duration_s / 10
    first, last = (window(stage.measurement, start_s, start_s + tenth_s) for start_s in (0.0, 9 * tenth_s))
    return compare_measurements(first, last, options.objectives, stage.rate)


def exit_status(record: Record, changes: Sequence[Change], options: argparse.Namespace) -> int:
    """Print the first of the errors of a run and return the exit code."""
    summaries = [stage.figures for stage in record.stages]
    if not record.is_valid:
        lag_ms = max(summary.lag_ms.p99 for summary in summaries if summary.lag_ms)
        print(
            f"error: the run is invalid: the load test itself lagged by {lag_ms:.0f} ms (99th percentile), more than "
            f"{1000 * options.max_lag:.0f} ms; lower the load, use a faster machine, or set --max-lag",
            file=sys.stderr,
        )
        return EXIT_LAGGED
    failed = sum(sum(summary.failed.values()) for summary in summaries)
    if failed:
        reasons = sorted({reason for summary in summaries for reason in summary.failed})
        sent = sum(summary.sent for summary in summaries)
        print(f"error: {failed} of {sent} requests failed: {', '.join(reasons)}", file=sys.stderr)
        return EXIT_FAILED
    if options.soak and not changes:
        print("error: the first tenth has too few good requests for a comparison; run longer", file=sys.stderr)
        return EXIT_FAILED
    return _status_of(changes, options.threshold)


def _status_of(changes: Sequence[Change], threshold: float) -> int:
    worse = [change for change in changes if change.verdict(threshold) == "worse"]
    if worse:
        print(
            f"error: {len(worse)} of {len(changes)} figures became worse by more than {threshold:.0%}", file=sys.stderr
        )
        return EXIT_WORSE
    return 0


def _recorded_arguments(options: argparse.Namespace) -> dict[str, Any]:
    hidden = ("client", "load", "objective", "json", "report", "key_file", "threshold")
    arguments = {name: value for name, value in vars(options).items() if name not in hidden}
    digest = hashlib.sha256(options.prompts.read_bytes()).hexdigest()
    return arguments | {"prompts": str(options.prompts), "prompts_sha256": digest}


def compare(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Compare two records, print the changes and return the exit code."""
    parser.description = "Compare two runs of the same load that `sightline load --json` has recorded."
    parser.epilog = (
        "A figure is worse if the whole 99 %% interval of its change exceeds the threshold (a block bootstrap\n"
        "over 20 parts of each run), and unclear if only the change itself does. Exit status 5: a figure is\n"
        "worse.\n\nexample: %(prog)s before.json after.json --threshold 5%%"
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="record of the first run")
    parser.add_argument("after", type=Path, metavar="AFTER", help="record of the second run")
    add_threshold(parser, "of a figure")
    options = parser.parse_args(arguments)
    try:
        before, after = read_record(options.before), read_record(options.after)
        invalid = [str(path) for path, one in ((options.before, before), (options.after, after)) if not one.is_valid]
        if invalid:
            print(f"error: invalid because the load test lagged: {', '.join(invalid)}; run it again", file=sys.stderr)
            return EXIT_LAGGED
        changes = compare_records(before, after)
    except (FileNotFoundError, NotComparableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(format_changes(changes, options.threshold))
    if len(before.stages) != len(after.stages):
        print("\nOnly the rates that both sweeps have reached are compared.")
    return _status_of(changes, options.threshold)
