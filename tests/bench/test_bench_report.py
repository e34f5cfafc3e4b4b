from pathlib import Path

import pytest

from bench.bars import BARS
from bench.record import Figure, Recorded, Result, read_results, write_result
from bench.report import END, bars_table, mark, parts, write_into

MACHINE = {"processor": "a chip", "cores": 2, "python": "3.11", "packages": {"numpy": "2"}, "commit": "abc"}


def recorded(**figures: float) -> Recorded:
    named = {name.replace("__", "."): Figure.of([value]) for name, value in figures.items()}
    return Recorded(MACHINE, "python -m bench", Result(named))


def test_no_figure_has_two_bars() -> None:
    names = [bar.figure for bar in BARS]
    assert len(set(names)) == len(names)


def test_the_table_says_what_was_met_what_not_and_what_was_not_measured() -> None:
    lines = bars_table({"maps": recorded(maps__1=1.2, maps__8=1.05)}).splitlines()
    assert "| a step with all maps over one without, 1 row | 1.2 x | <= 1.1 x | **no** |" in lines
    assert "| a step with all maps over one without, 8 rows | 1.05 x | <= 1.1 x | yes |" in lines
    assert "| a step with all maps over one without, 32 rows | not measured | <= 1.1 | - |" in lines
    assert len(lines) == 2 + len(BARS)


def test_a_figure_is_the_median_of_its_rounds() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(2.0, "x", [3.0, 1.0, 2.0])


def test_a_section_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    write_result(tmp_path, "maps", recorded(maps__1=1.0))
    write_result(tmp_path, "memory", recorded(memory__growth=1.0))
    write_result(tmp_path, "maps", recorded(maps__1=2.0))
    assert read_results(tmp_path) == {"maps": recorded(maps__1=2.0), "memory": recorded(memory__growth=1.0)}


def test_the_document_keeps_what_stands_around_its_parts(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"a\n{mark('bars')}\nold\n{END}\nb\n{mark('mixed')}\nold\n{END}\nc\n", encoding="utf-8")
    for text in ("new", "newer"):
        write_into(document, "bars", text)
        write_into(document, "servers", "no place for it")
    assert document.read_text(encoding="utf-8") == (
        f"a\n{mark('bars')}\n\nnewer\n\n{END}\nb\n{mark('mixed')}\nold\n{END}\nc\n"
    )


def test_the_documents_have_a_place_for_every_part() -> None:
    text = Path("docs/performance.md").read_text(encoding="utf-8")
    assert [part for part in parts({}) if mark(part) not in text] == []
    assert mark("bars") in Path("README.md").read_text(encoding="utf-8")


def test_a_machine_is_named_with_the_sections_that_it_measured() -> None:
    results = {"maps": recorded(), "memory": recorded()}
    assert parts(results)["machines"] == ("- `maps`, `memory`: a chip, 2 cores, Python 3.11, numpy 2, commit abc.")


@pytest.mark.parametrize("part", ["library", "servers", "mixed"])
def test_what_was_not_measured_is_said(part: str) -> None:
    assert "ot measured" in parts({})[part]
