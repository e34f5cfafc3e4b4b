from pathlib import Path

import pytest

from bench.__main__ import END, START, caption, table, write_into
from bench.figures import Figure
from bench.machine import describe
from bench.server import serving

SLOW = Figure("a step", 1.2, "x", 1.15, "lower", [1.1, 1.2, 1.3])
FAST = Figure("at once", 6.0, "x", 5.0, "higher", [5.5, 6.0, 6.5])


def test_a_figure_is_met_on_the_right_side_of_its_bar() -> None:
    assert not SLOW.is_met
    assert FAST.is_met


def test_the_table_says_what_was_not_met() -> None:
    lines = table([SLOW, FAST]).splitlines()
    assert lines[2] == "| a step | 1.20 x | <= 1.15 x | **no** |"
    assert lines[3] == "| at once | 6.00 x | >= 5 x | yes |"


def test_the_document_keeps_what_stands_around_its_figures(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{START}\nold\n{END}\nafter\n", encoding="utf-8")
    for text in ("new", "newer"):
        write_into(document, text)
    assert document.read_text(encoding="utf-8") == f"before\n{START}\nnewer\n{END}\nafter\n"


def test_a_result_names_its_machine_and_versions() -> None:
    facts = describe()
    assert facts["cores"] >= 1
    assert "onnxruntime" in facts["packages"]
    assert facts["processor"] in caption(facts)


def test_a_service_that_cannot_start_is_an_error_and_not_a_figure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before it was ready"), serving(tmp_path / "nothing here"):
        pass
