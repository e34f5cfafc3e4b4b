"""The workflows run targets of the Makefile only, and every marker of tests; files that the
maintainers' page names exist.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

WORKFLOWS = sorted(Path(".github/workflows").glob("*.yml"))
SET_UP = "sudo apt-get update && sudo apt-get install --yes ${{ matrix.packages }}"
MAKE = re.compile(r'(?:sudo env "PATH=\$PATH" )?make ([a-z-]+)')
MATRIX = "${{ matrix.target }}"
TARGETS = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(encoding="utf-8"), re.M))


def steps_of(workflow: Path) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Yield each step with the targets of its job's matrix."""
    for job in yaml.safe_load(workflow.read_bytes())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        targets = {*matrix.get("target", ()), *(case["target"] for case in matrix.get("include", ()))}
        for step in job["steps"]:
            yield step, targets


def targets_of(workflow: Path) -> set[str]:
    """Return the targets that a workflow runs."""
    targets: set[str] = set()
    for step, in_matrix in steps_of(workflow):
        if (command := step.get("run", SET_UP)) != SET_UP:
            match = MAKE.fullmatch(command.replace(MATRIX, "in-matrix"))
            assert match, command
            targets |= in_matrix if match[1] == "in-matrix" else {match[1]}
    return targets


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.stem)
def test_workflows_run_targets_of_the_makefile_and_actions_by_commit(workflow: Path) -> None:
    assert targets_of(workflow)
    assert targets_of(workflow) <= TARGETS
    actions = [step["uses"] for step, _ in steps_of(workflow) if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action)] == []


def test_every_marker_of_tests_runs_each_night() -> None:
    markers = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    assert {re.search(r"\(make ([a-z-]+)\)$", marker)[1] for marker in markers} <= targets_of(WORKFLOWS[1])  # type: ignore[index]


def test_the_workflows_are_those_of_checks_nights_and_releases() -> None:
    assert [workflow.stem for workflow in WORKFLOWS] == ["check", "nightly", "release"]
    assert {"check", "test", "test-pythons", "test-browser", "image"} <= targets_of(WORKFLOWS[0])
    assert {"check", "test-all", "release", "publish"} <= targets_of(WORKFLOWS[2])


def test_files_that_the_page_of_maintainers_names_exist() -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:txt|toml|md))`", Path("docs/maintain.md").read_text("utf-8"))
    assert len(named) > 40
    assert [name for name in named if not Path(name).exists()] == ["build/release"]
