"""Run a guidellm sweep of /v1/completions for docs/performance.md.

Usage: `python -m bench.guidellm EXECUTABLE`. guidellm is not a dependency: install it in its own
environment as docs/performance.md describes. It runs unmodified against a service started for it:
one request at a time, then many at once, then at rates in between. The results are guidellm's own
figures. The default model is large enough to saturate the service; with the shipped model, the
service answers faster than guidellm sends.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench import machine
from bench.__main__ import DOCUMENTS, write_report
from bench.models import Models
from bench.record import RESULTS, Recorded, Result, write_result
from bench.server import serving
from service.machine import usable_threads

SECTION = "guidellm"
# Below the service's queue limit: rejected requests are repeated at once and use the processor that
# both share.
MAX_OPEN = 128
PROMPTS = 30_000  # more than any rate needs: guidellm stops when its prompts run out


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    parsed = parse_arguments(words)
    command = shlex.join(["python", "-m", "bench.guidellm", *words])
    facts = machine.describe_or_exit(parsed.allow_dirty)
    sentences = parsed.sentences.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        report = run_guidellm(parsed, sentences, Path(scratch))
    facts["packages"] |= {"guidellm": report["metadata"]["guidellm_version"]}
    write_result(parsed.results, SECTION, Recorded(facts, command, Result(rows=rows_of(report))))
    write_report(parsed.results, parsed.documents)


def run_guidellm(parsed: argparse.Namespace, sentences: Sequence[str], scratch: Path) -> Any:
    """Run the sweep and return guidellm's own report."""
    models = Models(scratch / "models", parsed.bundle, sentences)
    served = models.shipped_alone / parsed.bundle.name if parsed.shipped else models.grown_base.bundles["int8"]
    prompts, found = scratch / "prompts.txt", scratch / "report.json"
    prompts.write_text("".join(f"{one}\n" for one in islice(cycle(sentences), PROMPTS)), encoding="utf-8")
    with serving(served.parent, threads=usable_threads()) as server:
        sweep = sweep_arguments(server.url, served.name, prompts, found, parsed.rates, parsed.seconds)
        print(shlex.join(["guidellm", *sweep]), flush=True)
        subprocess.run([parsed.executable, *sweep], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return json.loads(found.read_bytes())


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.guidellm", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("executable", help="guidellm's")
    parser.add_argument("--bundle", type=Path, default=Path("bundles/multi30k-en-de"), help="bundle to measure")
    parser.add_argument("--shipped", action="store_true", help="serve the bundle itself, not enlarged to 6 + 6 layers")
    parser.add_argument("--sentences", type=Path, default=Path("tests/data/sentences.txt"), help="the prompts")
    parser.add_argument("--rates", type=int, default=8, help="number of steps of the sweep")
    parser.add_argument("--seconds", type=int, default=20, help="duration of each step, in seconds")
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="*", default=DOCUMENTS, help="files whose tables are updated")
    return parser.parse_args(arguments)


def sweep_arguments(url: str, model: str, prompts: Path, report: Path, rates: int, seconds: int) -> list[str]:
    """Return the command-line arguments of `guidellm`."""
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": model,
        "request_format": "/v1/completions",
    }
    return [
        "run",
        *("--backend", ",".join(f"{name}={value}" for name, value in backend.items())),
        *("--profile", f"kind=sweep,sweep_size={rates},max_concurrency={MAX_OPEN}"),
        *("--constraint", f"kind=max_duration,seconds={seconds}"),
        *("--data", f"kind=text_file,path={prompts}"),
        *("--output", f"kind=json,path={report}"),
        *("--output", "kind=console"),
        "--disable-progress",
    ]


def rows_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each step, in order of the target rate.

    Rates count finished responses; times and tokens are those of complete responses.
    """
    rows = []
    for benchmark in report["benchmarks"]:
        strategy, metrics = benchmark["config"]["strategy"], benchmark["metrics"]
        counts = metrics["request_totals"]
        rows.append(
            {
                "step": strategy["type_"],
                "rate": strategy.get("rate"),
                "requests_per_s": metrics["requests_per_second"]["successful"]["mean"],
                "concurrency": metrics["request_concurrency"]["total"]["mean"],
                "first_token_ms": _percentiles(metrics["time_to_first_token_ms"]),
                "gap_ms": _percentiles(metrics["inter_token_latency_ms"]),
                "tokens_per_s": metrics["output_tokens_per_second"]["total"]["mean"],
                "whole": counts["successful"],
                "cut_off": counts["incomplete"],  # still running when the step ended
                "failed": counts["errored"],
            }
        )
    return rows


def _percentiles(metric: Mapping[str, Any]) -> dict[str, float]:
    of_whole = metric["successful"]["percentiles"]
    return {name: of_whole[name] for name in ("p50", "p95")}


if __name__ == "__main__":
    main()
