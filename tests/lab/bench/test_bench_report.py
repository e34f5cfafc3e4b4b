from pathlib import Path

from lab.bench.__main__ import SECTIONS
from lab.bench.record import Figure, Recorded, Result
from lab.bench.report import (
    DOCUMENTS,
    END,
    cell,
    comparisons_table,
    machines,
    mark,
    targets_table,
    wrap_prose,
    write_into,
)
from lab.bench.targets import COMPARISONS, HEADLINE, RELIABILITY, TARGETS

MACHINE = {"processor": "a chip", "cores": 2, "python": "3.11", "packages": {"numpy": "2"}, "commit": "abc"}


def recorded(**figures: float) -> Recorded:
    named = {name.replace("__", "."): Figure.of([value]) for name, value in figures.items()}
    return Recorded(MACHINE, "python -m lab.bench", Result(named))


def test_no_figure_has_two_targets() -> None:
    names = [target.figure for target in (*TARGETS, *RELIABILITY)]
    assert len(set(names)) == len(names)


def test_the_table_shows_met_missed_and_unmeasured_targets() -> None:
    lines = targets_table({"maps": recorded(maps__1=1.2, maps__8=1.05)}).splitlines()
    assert "| a step with all maps over one without, 1 row | 1.2 x | <= 1.1 x | **no** |" in lines
    assert "| a step with all maps over one without, 8 rows | 1.05 x | <= 1.1 x | yes |" in lines
    assert "| a step with all maps over one without, 32 rows | not measured | <= 1.1 | - |" in lines
    assert len(lines) == 2 + len(TARGETS)


def test_a_comparison_shows_every_number_of_clients_and_losses_in_bold() -> None:
    ratios = {"1.requests/s": 0.7, "1.p50 ms": 1.3, "16.requests/s": 1.5, "16.p50 ms": 0.999}
    figures = {f"shipped.greedy.{name}.best": Figure.of([value]) for name, value in ratios.items()}
    results = {"shipped": Recorded(MACHINE, "python -m lab.bench", Result(figures))}
    lines = comparisons_table(results, HEADLINE).splitlines()
    assert lines[2].endswith("| CTranslate2 | 1/16 | **0.70**/1.50 | **1.30**/1.00 |  | `shipped` |")
    assert lines[3].count("not measured") == 1 and len(lines) == 2 + len(HEADLINE)


def test_every_comparison_and_target_is_that_of_a_section() -> None:
    assert {each.section for each in COMPARISONS} <= SECTIONS.keys()
    assert {target.section for target in (*TARGETS, *RELIABILITY)} <= SECTIONS.keys()


def test_a_figure_is_the_median_of_its_rounds() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(2.0, "x", [3.0, 1.0, 2.0])


def test_text_around_the_parts_of_a_document_is_kept(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"a\n{mark('targets')}\nold\n{END}\nb\n{mark('mixed')}\nold\n{END}\nc\n", encoding="utf-8")
    for text in ("new", "newer"):
        write_into(document, "targets", text)
        write_into(document, "servers", "the document has no such part")
    assert document.read_text(encoding="utf-8") == (
        f"a\n{mark('targets')}\n\nnewer\n\n{END}\nb\n{mark('mixed')}\nold\n{END}\nc\n"
    )


def test_the_documents_have_a_mark_for_every_section() -> None:
    texts = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    figures_only = {"maps", "memory", "start"}  # the documents show none of their rows
    assert {section for section in SECTIONS if mark(section) not in texts} == figures_only


def test_a_machine_is_named_with_the_sections_that_it_measured() -> None:
    results = {"maps": recorded(), "memory": recorded()}
    facts = "a chip, 2 cores, Python 3.11, numpy 2."
    assert machines(results) == f"- `maps` (abc), `memory` (abc): {facts}"
    results["maps"] = Recorded(MACHINE, "python -m lab.bench", Result({}, [{"commit": "0123456789abcdef"}]))
    assert machines(results) == f"- `maps` (abc, some rows 0123456789ab), `memory` (abc): {facts}"


def test_values_are_short() -> None:
    assert [cell(value) for value in (0.123456, 12.3456, 123.456, 12345.6, 12345, "a", [1.0, 3.0, 2.0])] == [
        "0.123", "12.3", "123", "12,346", "12,345", "a", "2",
    ]  # fmt: skip


def test_prose_is_wrapped_at_100_columns_and_other_lines_are_kept() -> None:
    words, code = "word " * 30 + "end.", "`" + "a b " * 30 + "`"
    kept = ["| " + "cell " * 30 + "|", "```sh", "python " + "x " * 60, "```"]
    lines = wrap_prose("\n".join([words, f"- {words}", *kept, f"See {code}."])).split("\n")
    assert lines[:2] == [("word " * 20).strip(), "word " * 10 + "end."]
    assert lines[2:4] == ["- " + ("word " * 19).strip(), "  " + "word " * 11 + "end."]
    assert lines[4:8] == kept
    assert lines[8:] == ["See", f"{code}."]
