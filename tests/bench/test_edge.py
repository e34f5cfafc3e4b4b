"""Tests of the call cost comparison: CPU time of a process, and the table with its targets."""

import os
import time

from bench.edge import SECTION, TARGETS, cpu_seconds, report
from bench.record import Figure, Result


def test_cpu_time_grows_with_work_and_not_with_waiting() -> None:
    before = cpu_seconds(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    worked = cpu_seconds(os.getpid())
    time.sleep(0.2)
    assert 0.1 < worked - before < 0.5
    assert cpu_seconds(os.getpid()) - worked < 0.1


def test_the_table_says_which_targets_are_met() -> None:
    figures = {
        f"{SECTION}.{case}.now.{name}": Figure.of([target if sign == ">=" else 2 * target])
        for case, name, sign, target in TARGETS
    }
    row = {"case": "fake", "setup": "now", "requests_per_s": 1000.0, "cpu_ms": 0.5, "p50_ms": 20.0}
    table, values = report(Result(figures, [row])).split("\n\n")
    assert table.count("| yes |") == sum(sign == ">=" for _, _, sign, _ in TARGETS)
    assert table.count("| **no** |") == sum(sign == "<=" for _, _, sign, _ in TARGETS)
    assert "| fake | now | 1000 | 0.5 | 20 |" in values
