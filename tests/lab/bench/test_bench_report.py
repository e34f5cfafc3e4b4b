import re
from pathlib import Path

from lab.bench.__main__ import SECTIONS
from lab.bench.record import Figure, Recorded, Result, Row, read_results, write_result
from lab.bench.report import (
    DOCUMENTS,
    END,
    HEADLINE,
    cell,
    headline,
    machines,
    mark,
    section_table,
    targets_table,
    text_of,
    wrap_prose,
    write_documents,
    write_into,
)
from lab.bench.targets import RELIABILITY, TARGETS

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


def test_the_documents_have_a_mark_for_every_section() -> None:
    texts = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    figures_only = {"maps", "memory", "start"}  # the documents show none of their rows
    assert {section for section in SECTIONS if mark(section) not in texts} == figures_only


def test_every_marked_part_of_a_document_is_written(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    marks = (mark("targets"), mark("maps"), mark("other", "make others"))
    document.write_text("\n".join(f"{one}\nold\n{END}" for one in marks), encoding="utf-8")
    write_documents({"maps": recorded(maps__1=1.2)}, [document])
    text = document.read_text(encoding="utf-8")
    assert "1.2 x | <= 1.1 x | **no** |" in text
    assert text.count("old") == 1


def test_every_target_is_that_of_a_section() -> None:
    assert {target.section for target in (*TARGETS, *RELIABILITY)} <= SECTIONS.keys()


def test_a_machine_is_named_with_the_sections_that_it_measured() -> None:
    results = {"maps": recorded(), "memory": recorded()}
    line = "- `maps`, `memory`: `python -m lab.bench`, a chip, 2 cores, Python 3.11, numpy 2, commit abc."
    assert machines(results, with_commands=True) == line
    results["maps"] = Recorded(MACHINE, "python -m lab.bench", Result({}, [{"commit": "0123456789abcdef"}]))
    facts = "a chip, 2 cores, Python 3.11, numpy 2."
    assert machines(results) == f"- `maps` (abc, some rows 0123456789ab), `memory` (abc): {facts}"


def test_unmeasured_parts_say_so() -> None:
    assert text_of("mixed", {}) == text_of("readme", {}) == "Not measured."


def row(load: str, clients: int, server: str, **metrics: object) -> Row:
    return {"load": load, "clients": clients, "server": server, "settings": "default", **metrics}


def test_loads_that_differ_in_their_clients_share_a_line() -> None:
    rows = [
        row("greedy", 1, "ours", **{"requests/s": [100.0, 300.0, 200.0], "p99 ms": [1.25]}),
        row("greedy", 1, "theirs", **{"requests/s": [1.5], "p99 ms": [20.0]}),
        row("greedy", 16, "ours", **{"requests/s": [1234.5], "p99 ms": [3.0]}),
        row("greedy", 16, "theirs", **{"requests/s": [2.5], "p99 ms": [30.0]}),
        row("beam", 1, "ours", **{"requests/s": [7.0], "p99 ms": [4.0]}),
    ]
    table = section_table(Recorded(MACHINE, "python -m lab.bench x", Result({}, rows, {"theirs": "theirs 1.0, AVX2"})))
    assert "| load | server | requests/s | p99 ms |" in table
    assert "| greedy, 1 / 16 clients | ours (default) | 200 / 1,234 | 1.25 / 3 |" in table
    assert "| greedy, 1 / 16 clients | theirs (default) | 1.5 / 2.5 | 20 / 30 |" in table
    assert "| beam, 1 client | ours (default) | 7 | 4 |" in table
    assert table.endswith("theirs: theirs 1.0, AVX2.")


def test_short_runs_are_marked_and_rejections_shown_if_there_are_any() -> None:
    rows = [row("a", 1, "ours", rejected=[0, 0]), row("a", 16, "ours", rejected=[3, 5])]
    short = MACHINE | {"options": {"rounds": 2, "seconds": 1.5}}
    text = section_table(Recorded(short, "python -m lab.bench a", Result({}, rows)))
    assert text.startswith("Preliminary, from 2 rounds of 1.5 s (`python -m lab.bench a`).")
    assert "| 0 / 4 |" in text
    assert "rejected" not in section_table(Recorded(MACHINE, "x", Result({}, rows[:1])))


def test_other_rows_are_a_table_with_all_their_columns() -> None:
    rows = [{"load": "a", "goodput": 1.25}, {"load": "b", "sent": 1234, "gap ms": {"p50": 1.0, "p99": 2.5}}]
    table = section_table(Recorded(MACHINE, "x", Result({}, rows)))
    assert "| load | goodput | sent | gap ms |" in table
    assert "| b |  | 1,234 | p50 1, p99 2.5 |" in table


def test_samples_over_time_are_thinned_out_and_the_last_is_kept() -> None:
    rows = [{"minutes": float(number), "threads": 1} for number in range(1, 31)]
    lines = section_table(Recorded(MACHINE, "x", Result({}, rows))).splitlines()
    minutes = [float(line.split("|")[1]) for line in lines if re.match(r"\| \d", line)]
    assert minutes == [float(number) for number in range(3, 31, 3)]


def test_values_are_short() -> None:
    assert [cell(value) for value in (0.123456, 12.3456, 123.456, 12345.6, 12345, "a", [1.0, 3.0, 2.0])] == [
        "0.123", "12.3", "123", "12,346", "12,345", "a", "2",
    ]  # fmt: skip


def test_the_headline_has_the_measured_ratios() -> None:
    (name, text), *_ = HEADLINE
    assert headline({"shipped": Recorded(MACHINE, "x", Result({name: Figure.of([1.739])}))}) == f"- **1.74 ×** {text}"
    short = MACHINE | {"options": {"rounds": 2, "seconds": 1.5}}
    assert "preliminary" in headline({"shipped": Recorded(short, "x", Result({name: Figure.of([1.739])}))})
    assert {name for name, _ in HEADLINE} <= {target.figure for target in TARGETS}


def test_prose_is_wrapped_at_100_columns_and_other_lines_are_kept() -> None:
    words, code = "word " * 30 + "end.", "`" + "a b " * 30 + "`"
    kept = ["| " + "cell " * 30 + "|", "```sh", "python " + "x " * 60, "```"]
    lines = wrap_prose("\n".join([words, f"- {words}", *kept, f"See {code}."])).split("\n")
    assert lines[:2] == [("word " * 20).strip(), "word " * 10 + "end."]
    assert lines[2:4] == ["- " + ("word " * 19).strip(), "  " + "word " * 11 + "end."]
    assert lines[4:8] == kept
    assert lines[8:] == ["See", f"{code}."]


def test_a_machine_line_shows_uncommitted_changes() -> None:
    dirty = {**MACHINE, "changed": ["lab/bench/edge.py", "service/app.py"]}
    line = machines({"maps": Recorded(dirty, "python -m lab.bench", Result())}, with_commands=True)
    assert line.endswith("numpy 2, commit abc with uncommitted changes in 2 files.")
