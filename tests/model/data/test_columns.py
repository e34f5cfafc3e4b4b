import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from sightline.model.data.corpus import open_corpus
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Findings, Reading, read_records
from sightline.model.data.records import LabelledRecord, PairRecord, Record, TextRecord
from tests.support.tables import read_table

ROWS = [["text", "label"], ["fünf €", "ä"], ["sechs", "b"]]


def values(record: Record | str) -> list[str]:
    if isinstance(record, LabelledRecord):
        return [record.text, *record.labels]
    if isinstance(record, PairRecord):
        return [record.source, record.target]
    assert isinstance(record, TextRecord)
    return [record.text]


def read(path: Path, reading: Reading, findings: Findings | None = None) -> list[list[str]]:
    return [values(record) for _, record in read_records((path,), reading, findings)]


@pytest.mark.parametrize(("name", "content", "options", "records", "message"), read_table(__file__))
def test_columns_of_files_become_fields(
    tmp_path: Path, name: str, content: str, options: dict[str, Any], records: list[list[str]] | None, message: str
) -> None:
    path, reading, findings = tmp_path / name, Reading(**{"task": "classification", **options}), Findings()
    path.write_bytes(content.encode())
    if records is None:
        with pytest.raises(CorpusError) as caught:
            read(path, reading)
        assert str(caught.value).removeprefix(str(path)).lstrip(",: ") == message
        return
    assert read(path, reading, findings) == records
    assert list(findings.notes) == ([f"{name}: {message}"] if message else [])


@pytest.mark.parametrize(
    ("written", "named"), [("utf-16", None), ("utf-8-sig", None), ("cp1252", "cp1252"), ("utf-16-be", "utf-16-be")]
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_encodings(tmp_path: Path, written: str, named: str | None, line_end: str) -> None:
    content = "".join("\t".join(row) + line_end for row in ROWS)
    for name in ("a.csv", "a.tsv", "a.txt"):
        (tmp_path / name).write_bytes(content.encode(written))
        assert read(tmp_path / name, Reading("classification", encoding=named)) == ROWS[1:]


def _cell(value: object) -> str:
    kind = "b" if isinstance(value, bool) else "str" if isinstance(value, str) else "n"
    return f'<c t="{kind}"><v>{escape(str(int(value) if isinstance(value, bool) else value))}</v></c>'


def write_workbook(path: Path, *sheets: list[list[object]]) -> None:
    """Write the smallest workbook: each cell is a number, a truth value or an inline string."""
    kind, files = "http://schemas.openxmlformats.org", {}
    for number, rows in enumerate(sheets, start=1):
        cells = ""
        for row in rows:
            row_cells = (_cell(value) for value in row)
            cells += f"<row>{''.join(row_cells)}</row>"
        files[f"xl/worksheets/sheet{number}.xml"] = (
            f'<worksheet xmlns="{kind}/spreadsheetml/2006/main"><sheetData>{cells}</sheetData></worksheet>'
        )
    parts = [(f"rId{number}", f"worksheets/sheet{number}.xml") for number in range(1, len(sheets) + 1)]
    files["xl/workbook.xml"] = (
        f'<workbook xmlns="{kind}/spreadsheetml/2006/main" xmlns:r="{kind}/officeDocument/2006/relationships"><sheets>'
        + "".join(f'<sheet name="{key}" sheetId="{n}" r:id="{key}"/>' for n, (key, _) in enumerate(parts, start=1))
        + "</sheets></workbook>"
    )
    for path_of_parts, targets in (
        ("_rels/.rels", [("rId1", "officeDocument", "xl/workbook.xml")]),
        ("xl/_rels/workbook.xml.rels", [(key, "worksheet", target) for key, target in parts]),
    ):
        files[path_of_parts] = (
            f'<Relationships xmlns="{kind}/package/2006/relationships">'
            + "".join(
                f'<Relationship Id="{key}" Type="{kind}/officeDocument/2006/relationships/{name}" Target="{target}"/>'
                for key, name, target in targets
            )
            + "</Relationships>"
        )
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>{content}')


def test_the_first_sheet_with_cells_of_a_workbook_is_a_table(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.xlsx", Findings()
    write_workbook(path, [], [["Text", "label", "id"], ["Hi & <you>", 1, 0.5], ["Ho", 2, True]], [["other"]])
    assert read(path, Reading("classification"), findings) == [["Hi & <you>", "1"], ["Ho", "2"]]
    assert list(findings.notes) == ["a.xlsx: ignored: 'id'"]
    write_workbook(path, [["How to use this file"]], [["text", "label"], ["Hi", " "]])
    with pytest.raises(CorpusError, match=r"a\.xlsx, line 2: label is blank"):
        read(path, Reading("classification"))
    path.write_bytes(b"text,label")
    with pytest.raises(CorpusError, match=r"a\.xlsx is no workbook .*; save it again as \.xlsx or as CSV UTF-8"):
        read(path, Reading("classification"))


def test_a_missing_reader_of_workbooks_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    with pytest.raises(CorpusError, match=r"pip install 'sightline-serving\[train\]', or save the sheet as CSV"):
        read(tmp_path / "a.xlsx", Reading("classification"))


@pytest.mark.parametrize(
    ("header", "sides", "languages"),
    [
        ("de,en", ("de", "en"), ("de", "en")),
        ("de,en-GB", ("de", None), ("de", "en-GB")),
        ("de,en,id", (None, "en"), ("de", "en")),
        ("question_1,question_2", ("question_1", None), None),
        ("Deutsch,English", ("Deutsch", "English"), None),
        ("src,tgt", ("src", "tgt"), None),
    ],
)
def test_columns_that_are_tags_are_the_languages(
    tmp_path: Path, header: str, sides: tuple[str | None, str | None], languages: tuple[str, str] | None
) -> None:
    path = tmp_path / "a.csv"
    more = ",x" * (header.count(",") - 1)
    path.write_text(f"{header}\na,b{more}\nc,d{more}\n", encoding="utf-8")
    corpus = open_corpus(path, Reading("translation", source=sides[0], target=sides[1]))
    assert corpus.languages == languages
    assert sorted(map(values, [*corpus.train, *corpus.dev])) == [["a", "b"], ["c", "d"]]
