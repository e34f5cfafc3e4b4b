"""Tests that failed and then passed are named and counted, and fail the build from the third on."""

import json
from pathlib import Path

import pytest

from tests.unstable import main


def write(path: Path, **outcomes: str) -> str:
    """Write the outcomes of tests as pytest does: "failure", "error" or "" for each."""
    cases = [
        f'<testcase classname="tests.test_a" name="{name}" time="0.1">{outcome and f"<{outcome}/>"}</testcase>'
        for name, outcome in outcomes.items()
    ]
    path.write_text(f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>')
    return str(path)


def test_the_third_unstable_test_or_time_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, again = tmp_path / "unstable.json", write(tmp_path / "again.xml", a="", b="", c="", broken="failure")
    few = write(tmp_path / "few.xml", a="failure", b="error", c="", broken="failure", skipped="skipped")
    assert main([few, again], record) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"unstable: tests.test_a::{name} failed and then passed, 1 times so far; repair it" for name in "ab"
    ]
    assert main([write(tmp_path / "many.xml", a="failure", b="failure", c="failure"), again], record) == 1
    assert main([few, again], record) == 1  # a and b for the third time
    assert main([write(tmp_path / "one.xml", c="failure"), again], record) == 0
    assert json.loads(record.read_text()) == {"tests.test_a::a": 3, "tests.test_a::b": 3, "tests.test_a::c": 2}


def test_the_build_counts_what_it_repeats() -> None:
    script = Path(".ci/run").read_text(encoding="utf-8")
    assert script.count("--last-failed ") == script.count("-m tests.unstable ") == 1
    assert script.count("again ") >= 2
