"""Run the attention graph for the task in each line of standard input and write the result as a
line of JSON.

Usage: `python -m lab.study.attention_worker GRAPH`. A task and its result:

    {"rows": 1, "tokens": 512, "length": 512, "outputs": ["hidden"] or [] for all, "at_least_s": 1}
    {"seconds": median of the runs, "peak_mib": 12.3}

`length` is the number of tokens that are not padding. `peak_mib` is the peak of resident memory so
far, minus the resident memory before the graph was loaded; it needs Linux. The first output line is
`{"ready": true}`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from lab.bench.process import answer_lines, repeat
from sightline.service.runtime.provider import session_options

SEED = 4


def resident_mib(field: str) -> float:
    """Return VmRSS (resident memory) or VmHWM (its peak) of this process in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def run_task(session: Any, task: dict[str, Any], first_mib: float) -> dict[str, float]:
    """Run the graph repeatedly for at least `at_least_s`, and at least once."""
    rows, tokens, width = task["rows"], task["tokens"], session.get_inputs()[0].shape[-1]
    x = np.random.default_rng(SEED).standard_normal((rows, tokens, width), np.float32)
    feed = {"x": x, "lengths": np.full(rows, task["length"], np.int32)}
    seconds, _ = repeat(lambda: session.run(task["outputs"], feed), task["at_least_s"])
    return {"seconds": seconds, "peak_mib": resident_mib("VmHWM") - first_mib}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.study.attention_worker", description=__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    first_mib = resident_mib("VmRSS")
    options = session_options(arguments.threads)
    session = onnxruntime.InferenceSession(str(arguments.graph), options, ["CPUExecutionProvider"])
    answer_lines(lambda task: run_task(session, task, first_mib))


if __name__ == "__main__":
    main()
