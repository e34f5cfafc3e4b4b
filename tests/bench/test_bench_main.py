import json
from pathlib import Path

import pytest

from bench.__main__ import main


@pytest.fixture
def run(bundle: Path, tmp_path: Path, toy_sentences: list[str]) -> list[str]:
    """Return the arguments of a run that is as short as possible, without its sections."""
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(toy_sentences), encoding="utf-8")
    paths = {"bundle": bundle, "sentences": sentences, "results": tmp_path / "r"}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    return [
        *words,
        "--allow-dirty",
        "--rounds",
        "1",
        "--rows",
        "1",
        "--seconds",
        "0.2",
        "--requests",
        "20",
        "--documents",
    ]


def test_sections_are_measured_and_recorded(run: list[str], tmp_path: Path) -> None:
    main(["maps", "mixed", "memory", *run])
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "r").glob("*.json")}
    assert results.keys() == {"maps", "mixed", "memory"}
    assert results["maps"]["figures"]["maps.1"]["value"] > 0
    assert results["maps"]["command"].startswith("python -m bench maps mixed memory")
    assert [row["requests"] for row in results["memory"]["rows"]] == list(range(0, 22, 2))
    assert results["mixed"]["figures"]["mixed.gap"]["value"] > 0


def test_unknown_sections_are_rejected(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["librery", *run])
    assert "unknown section librery; sections are library-base" in capsys.readouterr().err
