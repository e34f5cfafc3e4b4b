import json
import sys
from pathlib import Path
from typing import Any

from bench.guidellm import main, rows_of
from bench.record import read_results
from bench.report import END, mark

# Replaces guidellm: completes one of the prompts, checks its arguments, and writes the report.
STAND_IN = """#!{python}
import json, os, shutil, sys
from urllib.request import Request, urlopen

options_of =  [dict(pair.split("=", 1) for pair in word.split(",")) for word in sys.argv if word.startswith("kind=")]
backend, profile, _, data, output, _ = options_of
assert profile["sweep_size"] == "2" and backend["request_format"] == "/v1/completions"
prompts = open(data["path"], encoding="utf-8").read().splitlines()
assert len(prompts) == 30_000
body = json.dumps({{"model": backend["model"], "prompt": prompts[1]}}).encode()
urlopen(Request(backend["target"] + "/v1/completions", body, {{"Content-Type": "application/json"}})).close()
shutil.copyfile({report!r}, output["path"])
"""


def metric(mean: float) -> dict[str, Any]:
    whole = {"mean": mean, "percentiles": {"p50": mean - 1, "p95": mean + 1}}
    return {"successful": whole, "total": whole | {"mean": mean + 0.5}}


def benchmark(kind: str, **rate: float) -> dict[str, Any]:
    """Return one step of a report with the fields that are read."""
    metrics = {
        "requests_per_second": metric(10),
        "request_concurrency": metric(20),
        "time_to_first_token_ms": metric(30),
        "inter_token_latency_ms": metric(40),
        "output_tokens_per_second": metric(5000),
        "request_totals": {"successful": 7, "incomplete": 2, "errored": 1, "total": 10},
    }
    return {"config": {"strategy": {"type_": kind, **rate}}, "metrics": metrics}


REPORT = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [benchmark("synchronous"), benchmark("constant", rate=12.25)],
}


def test_a_row_has_the_figures_of_its_step() -> None:
    first, second = rows_of(REPORT)
    assert (first["step"], first["rate"], second["step"], second["rate"]) == ("synchronous", None, "constant", 12.25)
    assert (first["requests_per_s"], first["concurrency"], first["tokens_per_s"]) == (10, 20.5, 5000.5)
    assert (first["first_token_ms"], first["gap_ms"]) == ({"p50": 29, "p95": 31}, {"p50": 39, "p95": 41})
    assert (first["whole"], first["cut_off"], first["failed"]) == (7, 2, 1)


def test_a_sweep_runs_against_its_own_service_and_is_recorded(bundle: Path, tmp_path: Path) -> None:
    report, executable, document = tmp_path / "report", tmp_path / "guidellm", tmp_path / "performance.md"
    report.write_text(json.dumps(REPORT), encoding="utf-8")
    executable.write_text(STAND_IN.format(python=sys.executable, report=str(report)), encoding="utf-8")
    executable.chmod(0o755)
    document.write_text(f"{mark('guidellm')}\n{END}\n", encoding="utf-8")
    served = ["--bundle", str(bundle), "--shipped", "--allow-dirty", "--rates", "2"]
    main([str(executable), *served, "--results", str(tmp_path / "results"), "--documents", str(document)])
    recorded = read_results(tmp_path / "results")["guidellm"]
    assert recorded.machine["packages"]["guidellm"] == "0.8.1"
    text = document.read_text(encoding="utf-8")
    assert f"python -m bench.guidellm {executable}" in text
    assert "| synchronous | 10.0 | 20.5 | 29.0 | 31.0 | 39.0 | 41.0 | 5,000 | 7 | 2 | 1 |" in text
    assert "| constant, 12.2 a second | 10.0 |" in text
