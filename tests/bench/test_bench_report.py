from pathlib import Path

import pytest

from bench.record import Figure, Recorded, Result, read_results, write_result
from bench.report import END, mark, parts, targets_table, wrap_prose, write_into
from bench.targets import TARGETS

MACHINE = {"processor": "a chip", "cores": 2, "python": "3.11", "packages": {"numpy": "2"}, "commit": "abc"}


def recorded(**figures: float) -> Recorded:
    named = {name.replace("__", "."): Figure.of([value]) for name, value in figures.items()}
    return Recorded(MACHINE, "python -m bench", Result(named))


def test_no_figure_has_two_targets() -> None:
    names = [target.figure for target in TARGETS]
    assert len(set(names)) == len(names)


def test_the_table_shows_met_missed_and_unmeasured_targets() -> None:
    lines = targets_table({"maps": recorded(maps__1=1.2, maps__8=1.05)}).splitlines()
    assert "| a step with all maps over one without, 1 row | 1.2 x | <= 1.1 x | **no** |" in lines
    assert "| a step with all maps over one without, 8 rows | 1.05 x | <= 1.1 x | yes |" in lines
    assert "| a step with all maps over one without, 32 rows | not measured | <= 1.1 | - |" in lines
    assert len(lines) == 2 + len(TARGETS)


def test_a_figure_is_the_median_of_its_rounds() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(2.0, "x", [3.0, 1.0, 2.0])


def test_measuring_a_section_again_keeps_the_other_results(tmp_path: Path) -> None:
    write_result(tmp_path, "maps", recorded(maps__1=1.0))
    write_result(tmp_path, "memory", recorded(memory__growth=1.0))
    write_result(tmp_path, "maps", recorded(maps__1=2.0))
    assert read_results(tmp_path) == {"maps": recorded(maps__1=2.0), "memory": recorded(memory__growth=1.0)}


def test_text_around_the_parts_of_a_document_is_kept(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"a\n{mark('targets')}\nold\n{END}\nb\n{mark('mixed')}\nold\n{END}\nc\n", encoding="utf-8")
    for text in ("new", "newer"):
        write_into(document, "targets", text)
        write_into(document, "servers", "the document has no such part")
    assert document.read_text(encoding="utf-8") == (
        f"a\n{mark('targets')}\n\nnewer\n\n{END}\nb\n{mark('mixed')}\nold\n{END}\nc\n"
    )


def test_the_documents_have_a_mark_for_every_part() -> None:
    text = Path("docs/performance.md").read_text(encoding="utf-8")
    assert [part for part in parts({}) if mark(part) not in text] == []


def test_a_machine_is_named_with_the_sections_that_it_measured() -> None:
    results = {"maps": recorded(), "memory": recorded()}
    assert parts(results)["machines"] == ("- `maps`, `memory`: a chip, 2 cores, Python 3.11, numpy 2, commit abc.")


@pytest.mark.parametrize("part", ["library", "servers", "mixed"])
def test_unmeasured_parts_say_so(part: str) -> None:
    assert "ot measured" in parts({})[part]


def test_prose_is_wrapped_at_100_columns_and_other_lines_are_kept() -> None:
    words, code = "word " * 30 + "end.", "`" + "a b " * 30 + "`"
    kept = ["| " + "cell " * 30 + "|", "```sh", "python " + "x " * 60, "```"]
    lines = wrap_prose("\n".join([words, f"- {words}", *kept, f"See {code}."])).split("\n")
    assert lines[:2] == [("word " * 20).strip(), "word " * 10 + "end."]
    assert lines[2:4] == ["- " + ("word " * 19).strip(), "  " + "word " * 11 + "end."]
    assert lines[4:8] == kept
    assert lines[8:] == ["See", f"{code}."]


def test_a_machine_line_shows_uncommitted_changes() -> None:
    dirty = {**MACHINE, "changed": ["bench/edge.py", "service/app.py"]}
    line = parts({"maps": Recorded(dirty, "python -m bench", Result())})["machines"]
    assert line.endswith("numpy 2, commit abc with uncommitted changes in 2 files.")
