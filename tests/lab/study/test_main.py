import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from lab.bench import report
from lab.bench.report import END, mark
from lab.study.__main__ import DOCUMENTS, PICTURES, RESULTS, WRITER, main, write_report

# An example of the notation, and the error rate of an earlier choice of heads.
UNRECORDED = {"33.1 ± 0.9", "32.6 % [30.2, 34.7]"}


def test_the_same_results_give_the_bytes_of_the_documents_and_their_pictures(tmp_path: Path) -> None:
    """The documents have one mark for each part."""
    documents = [Path(shutil.copy(document, tmp_path)) for document in DOCUMENTS]
    with patch.object(report, "write_into", wraps=report.write_into) as writing:
        write_report(RESULTS, documents, tmp_path / "pictures")
    written = [*documents, *sorted((tmp_path / "pictures").iterdir())]
    expected = [*DOCUMENTS, *sorted(PICTURES.iterdir())]
    assert [path.name for path in written] == [path.name for path in expected]
    assert [
        path.name for path, one in zip(written, expected, strict=True) if path.read_bytes() != one.read_bytes()
    ] == []
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    parts = {call.args[1] for call in writing.call_args_list}
    assert [part for part in parts if text.count(mark(part, WRITER)) != 1] == []
    assert text.count(END) == text.count(WRITER + "` -->")


def test_intervals_in_the_text_of_the_study_are_those_of_its_tables() -> None:
    """A new result changes the tables, and so shows which sentences are no longer right."""
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS if document.stem.startswith("attention")]
    generated = re.compile(rf"<!-- figures: .*?{END}", re.DOTALL)
    tables = " ".join(" ".join(part for text in texts for part in generated.findall(text)).split())
    prose = " ".join(" ".join(generated.sub("", text) for text in texts).split())
    stated = re.findall(r"-?\d[\d.]* ± [\d.]*\d|\d[\d.]* (?:% )?\[\d[\d.]*, [\d.]*\d\]", prose)
    assert len(stated) > 40
    assert {one for one in stated if one.replace(" %", "") not in tables} == UNRECORDED


def test_figures_of_the_claims_are_in_the_sections_that_they_link() -> None:
    page = Path("docs/research/claims.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    missing, count = [], 0
    for statement, where, result, _ in rows:
        linked = re.findall(r"\]\(([\w./-]+)#([\w-]+)\)", where)
        text = " ".join(_section(page.parent / document, anchor) for document, anchor in linked)
        figures = _figures(result)
        count += len(figures)
        missing += [(statement, one) for one in figures if not re.search(rf"(?<![\d.]){re.escape(one)}(?!\.?\d)", text)]
    assert count > 30
    assert missing == []


def _figures(result: str) -> list[str]:
    """Return intervals, then all other numbers with a decimal point and percentages."""
    interval = re.compile(r"\d[\d.]* ± [\d.]*\d|\d[\d.]* \[\d[\d.]*, [\d.]*\d\]")
    rest = interval.sub("", result)
    shares = [number for found in re.findall(r"\d[\d.]*(?: to \d[\d.]*)? %", rest) for number in found.split()]
    numbers = [*re.findall(r"\d+\.\d+", rest), *(one for one in shares if one[0].isdigit())]
    return [*interval.findall(result), *dict.fromkeys(numbers)]


def _section(document: Path, anchor: str) -> str:
    """Return the text under a heading and its subheadings in one line."""
    text = document.read_text(encoding="utf-8")
    for heading in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE):
        if re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-") == anchor:
            following = re.compile(rf"^#{{1,{len(heading[1])}}} ", re.MULTILINE).search(text, heading.end())
            return " ".join(text[heading.end() : following.start() if following else None].split())
    raise ValueError(f"{document} has no heading with the anchor {anchor}")


def test_the_documents_show_every_picture() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert [path.name for path in PICTURES.iterdir() if f"]({PICTURES.name}/{path.name})" not in text] == []


def test_the_part_of_a_step_without_a_result_is_kept(tmp_path: Path) -> None:
    document = tmp_path / "attention.md"
    text = f"{mark('headline', WRITER)}\n\nas it was\n\n{END}\n"
    document.write_text(text, encoding="utf-8")
    folders = ["--pictures", str(tmp_path / "pictures"), "--bundles", str(tmp_path / "bundles")]
    assert main(["--results", str(tmp_path), "report", "--documents", str(document), *folders]) == 0
    assert document.read_text(encoding="utf-8") == text


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(tmp_path), "collect", str(tmp_path), str(tmp_path), "--allow-dirty"]) == 2
    assert re.fullmatch(r"error: missing file .*test_2016_flickr\.en.*\n", capsys.readouterr().err)
