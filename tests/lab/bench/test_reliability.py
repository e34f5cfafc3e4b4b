import dataclasses

import pytest

from lab.bench.options import Options
from lab.bench.record import Recorded
from lab.bench.reliability import overload
from lab.bench.report import section_table
from lab.bench.targets import RELIABILITY


def test_overload_is_measured(short: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "PEAK_CLIENTS", {"large": (1,), "single": (4, 16)})
    monkeypatch.setattr(overload, "OVERLOADS", {3: 0.3, 10: 0.3})
    monkeypatch.setattr(overload, "HEAD_START_S", 0.2)
    result = overload.run(dataclasses.replace(short, seconds=0.15))
    measured = {target.figure for target in RELIABILITY if target.section == "overload"}
    assert result.figures.keys() == measured
    assert all(result.figures[f"overload.{name}"].value > 0 for name in ("single.10", "small.p99", "health.at once"))
    assert "one client with single inputs, beside large" in section_table(Recorded({}, "", result))
