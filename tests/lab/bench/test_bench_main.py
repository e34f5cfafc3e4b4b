import json
from pathlib import Path

import pytest

from lab.bench import __main__ as command
from lab.bench import commit
from lab.bench.__main__ import main
from lab.bench.options import Options
from lab.bench.record import Figure, Result


@pytest.fixture
def run(bundle: Path, tmp_path: Path, toy_sentences: list[str]) -> list[str]:
    """Return the arguments of a run that is as short as possible, without its sections."""
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(toy_sentences), encoding="utf-8")
    options = {
        "bundle": bundle,
        "bundles": bundle.parent,
        "sentences": sentences,
        "results": tmp_path / "r",
        "models": tmp_path / "m",
        "rounds": 1,
        "clients": 1,
        "seconds": 0.2,
        "requests": 20,
    }
    return [*(word for name, value in options.items() for word in (f"--{name}", str(value))), "--documents"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Replace the section `maps` by one that measures nothing, in a checkout without changes."""
    calls: list[Options] = []

    def section(options: Options) -> Result:
        calls.append(options)
        return Result({"maps.1": Figure.of([1.0])}, failures=["it grew"] if len(calls) > 1 else [])

    monkeypatch.setitem(command.SECTIONS, "maps", section)
    monkeypatch.setattr(commit, "uncommitted_changes", lambda *_: [])
    return calls


def test_an_interrupted_run_is_resumed(run: list[str], calls: list[Options]) -> None:
    for _ in range(2):
        assert main(["maps", "--resume", *run]) == 0
    assert len(calls) == 1
    main(["maps", "--resume", *run, "--rounds", "2"])  # other options
    main(["maps", *run, "--rounds", "2"])  # not resumed
    assert [options.rounds for options in calls] == [1, 2, 2]


def test_a_section_that_failed_is_recorded_and_fails_the_command(
    run: list[str], calls: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["maps", *run]) == 0
    assert main(["maps", *run]) == 1
    assert "error: it grew" in capsys.readouterr().err
    assert json.loads((tmp_path / "r" / "maps.json").read_text(encoding="utf-8"))["failures"] == ["it grew"]


def test_a_quick_run_prints_its_ratios_and_writes_no_document(
    run: list[str], calls: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["maps", "--quick", *run]) == 0
    assert calls[0].is_quick
    table = capsys.readouterr().out.partition("| figure |")[2]
    assert "| a step with all maps over one without, 1 row | 1 x | <= 1.1 x | yes |" in table
    assert "not measured" not in table
