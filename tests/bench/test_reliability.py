import json
from pathlib import Path

import pytest

from bench.reliability.__main__ import DOCUMENT, main
from bench.reliability.report import TARGETS, WRITER
from bench.report import END, mark


def document_with(parts: list[str], folder: Path) -> Path:
    document = folder / "reliability.md"
    document.write_text("\n".join(f"{mark(part, WRITER)}\nold\n{END}" for part in parts), encoding="utf-8")
    return document


def test_overload_is_measured_recorded_and_written(bundle: Path, tmp_path: Path, toy_sentences: list[str]) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(toy_sentences), encoding="utf-8")
    document = document_with(["targets", "overload"], tmp_path)
    paths = {"bundles": bundle.parent, "sentences": sentences, "results": tmp_path / "r", "document": document}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    main(["overload", *words, "--allow-dirty", "--rounds", "1", "--seconds", "0.3", "--clients", "20"])
    result = json.loads((tmp_path / "r" / "overload.json").read_text(encoding="utf-8"))
    measured = {target.figure for target in TARGETS if target.figure.startswith("overload.")}
    assert result["figures"].keys() == measured
    assert all(
        result["figures"][f"overload.{name}"]["value"] > 0 for name in ("single.10", "small.p99", "health.at once")
    )
    text = document.read_text(encoding="utf-8")
    assert "old" not in text
    assert "one client with single inputs, beside large" in text


def test_unknown_sections_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["overlode"])
    assert "unknown section overlode; sections are overload, responses" in capsys.readouterr().err


def test_the_page_has_a_mark_for_every_table(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(mark(part, WRITER) in text for part in ("targets", "overload", "responses", "machines"))
