import csv
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sightline.base.errors import UsageError
from sightline.model.data.files import MAX_LINE_BYTES, CorpusError, _unique
from sightline.model.data.formats import Reading, read_records
from sightline.model.data.records import (
    Entity,
    LabelledRecord,
    PairRecord,
    Record,
    TaggedRecord,
    TaskName,
    TextRecord,
)

# Texts that a line or a cell of a TSV file can hold. The first character of a file could be a byte
# order mark.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\t\r\ufeff"), max_size=8)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5)
ONE_PAIR = "each line must be one JSON object"
NOT_UTF_8 = "save the file as UTF-8 (Excel: CSV UTF-8); for training, --encoding can name another, such as cp1252"


def write_jsonl(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    lines = (json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def write_tsv(path: Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in (names, *rows)), encoding="utf-8")


def write_csv(path: Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def read(path: Path, task: TaskName, *, multi_label: bool = False) -> list[Record]:
    return [
        record
        for _, record in read_records((path,), Reading(task, multi_label=multi_label))
        if not isinstance(record, str)
    ]


def error_of(path: Path, content: str | bytes, task: TaskName, *, multi_label: bool = False) -> str:
    """Return the message of the error of a file, after its path."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CorpusError) as caught:
        read(path, task, multi_label=multi_label)
    assert isinstance(caught.value, UsageError)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path)).removeprefix(", ").removeprefix(": ")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(ROWS)
def test_all_formats_give_the_same_pairs(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    names = ("source", "target")
    write_jsonl(tmp_path / "a.jsonl", names, rows)
    write_tsv(tmp_path / "a.tsv", names, rows)
    write_csv(tmp_path / "a.csv", names, rows)
    sides = (tmp_path / "a.de-CH", tmp_path / "a.zh-Hans")
    for path, texts in zip(sides, zip(*rows, strict=True), strict=True):
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    expected = [PairRecord(*row) for row in rows if all(text.strip() for text in row)]
    for name in ("a.jsonl", "a.tsv", "a.csv"):
        assert read(tmp_path / name, "translation") == read(tmp_path / name, "encoder") == expected
    of_two = list(read_records(sides, Reading("translation")))
    assert [number for number, _ in of_two] == list(range(1, len(rows) + 1))
    assert [record for _, record in of_two if not isinstance(record, str)] == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.tuples(TEXTS, st.sampled_from(["good", "bad ", "Ö|x", "7"])), min_size=1, max_size=5))
def test_all_formats_give_the_same_labelled_texts(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    names = ("text", "label")
    write_jsonl(tmp_path / "a.jsonl", names, rows)
    write_tsv(tmp_path / "a.tsv", names, rows)
    write_csv(tmp_path / "a.csv", names[::-1], [row[::-1] for row in rows])
    expected = [LabelledRecord(text, (label.strip(),)) for text, label in rows if text.strip()]
    for name in ("a.jsonl", "a.tsv", "a.csv"):
        assert read(tmp_path / name, "classification") == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_all_formats_give_the_same_texts(tmp_path: Path, texts: list[str]) -> None:
    rows = [(text,) for text in texts]
    write_jsonl(tmp_path / "a.jsonl", ["text"], rows)
    write_tsv(tmp_path / "a.tsv", ["text"], rows)
    write_csv(tmp_path / "a.csv", ["text"], rows)
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    expected = [TextRecord(text) for text in texts if text.strip()]
    for name in ("a.jsonl", "a.tsv", "a.csv", "a.txt"):
        assert read(tmp_path / name, "language-model") == expected


def test_several_labels_are_a_list_or_separated_by_bars(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["text", "labels"], [("one", ["x", "y"]), ("two", []), ("three", ["y", "y"])])
    write_jsonl(tmp_path / "b.jsonl", ["text", "label"], [("one", ["x", "y"]), ("two", []), ("three", ["y"])])
    rows = [("one", "x|y"), ("two", ""), ("three", " y |")]
    write_tsv(tmp_path / "a.tsv", ["text", "labels"], rows)
    write_csv(tmp_path / "a.csv", ["text", "label"], rows)
    expected = [LabelledRecord("one", ("x", "y")), LabelledRecord("two", ()), LabelledRecord("three", ("y",))]
    for name in ("a.jsonl", "b.jsonl", "a.tsv", "a.csv"):
        assert read(tmp_path / name, "classification", multi_label=True) == expected


@pytest.mark.parametrize(("value", "label"), [(3, "3"), (3.0, "3"), (-1, "-1"), (True, "true"), (False, "false")])
def test_a_label_may_be_an_integer_or_a_boolean(tmp_path: Path, value: object, label: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["text", "label"], [("one", value)])
    assert read(tmp_path / "a.jsonl", "classification") == [LabelledRecord("one", (label,))]


@pytest.mark.parametrize(
    "content",
    [b"one\ntwo\n", b"one\r\ntwo\r\n", b"one\ntwo", b"\xef\xbb\xbfone\ntwo\n"],
    ids=["LF", "CRLF", "no end", "byte order mark"],
)
def test_line_endings_and_a_byte_order_mark_do_not_change_records(tmp_path: Path, content: bytes) -> None:
    for name, start in (("a.txt", b""), ("a.tsv", b"text\n"), ("a.csv", b"text\n")):
        mark = b"\xef\xbb\xbf" if content.startswith(b"\xef") else b""
        (tmp_path / name).write_bytes(mark + start + content.removeprefix(b"\xef\xbb\xbf"))
        assert read(tmp_path / name, "language-model") == [TextRecord("one"), TextRecord("two")]
    (tmp_path / "a.jsonl").write_bytes(content.replace(b"one", b'{"text": "one"}').replace(b"two", b'{"text": "two"}'))
    assert read(tmp_path / "a.jsonl", "language-model") == [TextRecord("one"), TextRecord("two")]


def test_a_lone_carriage_return_and_other_separators_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_bytes("one\rmore\ntwo\u2028\x0cstill\n".encode())
    (tmp_path / "a.en").write_bytes(b"eins\nzwei\n")
    records = [record for _, record in read_records((tmp_path / "a.de", tmp_path / "a.en"), Reading("translation"))]
    assert records == [PairRecord("one\rmore", "eins"), PairRecord("two\u2028\x0cstill", "zwei")]


def test_quotes_are_text_in_tsv_and_join_lines_in_csv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"Wait\tx\nhe said "no"\ty\n', encoding="utf-8")
    assert read(tmp_path / "a.tsv", "classification") == [
        LabelledRecord('"Wait', ("x",)),
        LabelledRecord('he said "no"', ("y",)),
    ]
    (tmp_path / "a.csv").write_text('text,label\n\n"two\nlines, ""quoted""",x\nlast,y\n', encoding="utf-8")
    assert list(read_records((tmp_path / "a.csv",), Reading("classification"))) == [
        (3, LabelledRecord('two\nlines, "quoted"', ("x",))),
        (5, LabelledRecord("last", ("y",))),
    ]


def test_blank_lines_of_json_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "one"}\n  \n', encoding="utf-8")
    assert list(read_records((tmp_path / "a.jsonl",), Reading("language-model"))) == [(2, TextRecord("one"))]


NO_PAIR = "line 1: missing field {!r}; the fields are source and target, but there are"
PAIR_ERRORS = [
    ('{"source": "a" "target": "b"}', f"line 1, column 16: JSON error: Expecting ',' delimiter; {ONE_PAIR}"),
    (
        '{"source": "a", "target": "b"}\n{"source": "a", "target": "b"',
        f"line 2, column 30: JSON error: Expecting ',' delimiter; {ONE_PAIR}",
    ),
    ('{"source": "a", "target": NaN}', f"line 1: JSON error: NaN is not a JSON value; {ONE_PAIR}"),
    ('{"source": "a", "source": "b"}', f"line 1: JSON error: the field 'source' occurs twice; {ONE_PAIR}"),
    (
        '["a", "b"]',
        f"line 1: expected a JSON object, got a list; {ONE_PAIR}; rename a file with one list of objects to .json",
    ),
    (
        '{"source": "a", "goal": "b"}',
        f"{NO_PAIR.format('target')} 'source', 'goal'; name the right ones with --target FIELD",
    ),
    ('{"source": "a"}', f"{NO_PAIR.format('target')} 'source'; name the right ones with --target FIELD"),
    ("{}", f"{NO_PAIR.format('source')} none; name the right ones with --source FIELD --target FIELD"),
    ('{"source": "a", "target": null}', "line 1: target must be a string, got null"),
    ('{"source": 1, "target": "b"}', "line 1: source must be a string, got an integer"),
    ('{"source": "a\\u0000", "target": "b"}', "line 1: source has a NUL character; remove it"),
    (
        '{"source": "a\\ud800", "target": "b"}',
        "line 1: source has the unpaired surrogate \\ud800; replace or remove it",
    ),
]


@pytest.mark.parametrize(("content", "message"), PAIR_ERRORS)
def test_errors_of_json_name_line_and_column(tmp_path: Path, content: str, message: str) -> None:
    assert error_of(tmp_path / "train.jsonl", content, "translation") == message


@pytest.mark.parametrize("brackets", ["[", '{"source": '], ids=["lists", "objects"])
def test_json_that_is_nested_too_deeply_is_an_error(tmp_path: Path, brackets: str) -> None:
    message = error_of(tmp_path / "train.jsonl", brackets * 100_000, "translation")
    assert message.startswith(f"line 1: JSON error: nested too deeply; {ONE_PAIR}")


SWAPPED = "check that text and label are not swapped"
LABELLED = "the fields are text and label"


def test_a_paired_surrogate_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}', encoding="utf-8")
    assert read(tmp_path / "a.jsonl", "language-model") == [TextRecord("😀")]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("1.5", "line 1: label must be a string, an integer or a boolean, got a number; correct or remove it"),
        ("null", "line 1: label must be a string, an integer or a boolean, got null; correct or remove it"),
        ("NaN", f"line 1: JSON error: NaN is not a JSON value; {ONE_PAIR}"),
        ('["a"]', "line 1: label is a list; add --multi-label to train with several labels a text"),
        ('" "', "line 1: label is blank; add a name in each row (merged cells have it only in their first row)"),
        ("9" * 300, f"line 1: label must have at most 200 characters, got 300; {SWAPPED}"),
    ],
)
def test_errors_of_labels(tmp_path: Path, label: str, message: str) -> None:
    content = f'{{"text": "a", "label": {label}}}'
    assert error_of(tmp_path / "train.jsonl", content, "classification") == message


def test_an_integer_of_thousands_of_digits_is_an_error_of_its_line(tmp_path: Path) -> None:
    message = error_of(tmp_path / "train.jsonl", f'{{"text": "a", "label": {"9" * 5000}}}', "classification")
    assert message.startswith("line 1: JSON error: Exceeds the limit")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a", "labels": 1}', "line 1: labels must be a list of strings, got an integer"),
        ('{"text": "a", "label": 1}', "line 1: label must be a list of strings, got an integer"),
        ('{"text": "a", "labels": ["x", 1]}', "line 1: labels must be a string, got an integer"),
        (
            '{"text": "a"}',
            f"line 1: missing field 'label'; {LABELLED}, but there are 'text'; name the right ones with --label FIELD",
        ),
        (
            '{"labels": []}',
            f"line 1: missing field 'text'; {LABELLED}, but there are 'labels'; name the right ones with --text FIELD",
        ),
    ],
)
def test_errors_of_several_labels(tmp_path: Path, content: str, message: str) -> None:
    assert error_of(tmp_path / "train.jsonl", content, "classification", multi_label=True) == message


def test_types_of_labels_that_differ_are_named_with_their_first_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    write_jsonl(path, ["text", "label"], [("a", "1"), ("b", "0"), ("c", 1)])
    with pytest.raises(CorpusError) as caught:
        read(path, "classification")
    assert str(caught.value) == (
        f"records differ: {path}, line 1 has a string as label, but {path}, line 3 has an integer as label; use only "
        "one of them"
    )


QUOTED = "texts with the separator or line breaks must be in double quotes"


@pytest.mark.parametrize("ending", ["tsv", "csv"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [["subject", "label"], ["a", "b"]],
            "line 2: missing field 'text'; the fields are text and label, but there are 'subject', 'label'; name the "
            "right ones with --text COLUMN; if the first line is data, number the columns, such as --text 1 --label 2",
        ),
        (
            [["text"], ["a"]],
            "line 2: missing field 'label'; the fields are text and label, but there are 'text'; name the right ones "
            "with --label COLUMN; if the first line is data, number the columns, such as --text 1 --label 2",
        ),
        ([["text", "label", "label"]], "the first line names the column 'label' twice; rename one"),
        ([["text", "label"], ["a", "b"], ["a"]], f"line 3: expected 2 columns as in the first line, got 1; {QUOTED}"),
        ([["text", "label"], ["a", "b", "c"]], f"line 2: expected 2 columns as in the first line, got 3; {QUOTED}"),
        (
            [["text", "label"], ["a", " "]],
            "line 2: label is blank; add a name in each row (merged cells have it only in their first row)",
        ),
    ],
)
def test_errors_of_tables(tmp_path: Path, ending: str, rows: list[list[str]], message: str) -> None:
    separator = {"tsv": "\t", "csv": ","}[ending]
    content = "".join(separator.join(row) + "\n" for row in rows)
    assert error_of(tmp_path / f"train.{ending}", content, "classification").removesuffix(", in a file .csv") == message


def test_a_quote_that_is_not_closed_is_an_error_of_the_line_where_it_opens(tmp_path: Path) -> None:
    advice = "texts with the separator ',', quotes or line breaks must be in double quotes"
    for content, message in (
        ('a,b\n"c,d\ne,f\n', f"line 3: CSV error: unexpected end of data; {advice}"),
        ('"a"b,c\n', f"line 2: CSV error: ',' expected after '\"'; {advice}"),
    ):
        assert error_of(tmp_path / "a.csv", f"text,label\n{content}", "classification") == message


@pytest.mark.parametrize("ending", ["jsonl", "tsv", "csv", "txt"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text\nfünf\n".encode("latin-1"), f"line 2, column 2 (in bytes): byte 0xfc is not UTF-8; {NOT_UTF_8}"),
        (
            "text\n".encode("utf-16-le"),
            f"line 1, column 2: NUL byte; the file is binary or not UTF-8; {NOT_UTF_8}",
        ),
        (
            b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
            f"line 1, column 1 (in bytes): byte 0x89 is not UTF-8; {NOT_UTF_8}",
        ),
        (b"a\xed\xa0\x80", f"line 1, column 2 (in bytes): byte 0xed is not UTF-8; {NOT_UTF_8}"),
        ("text\n".encode("utf-16")[:-1], "not utf-16"),
    ],
    ids=["Latin-1", "UTF-16", "PNG", "surrogate", "half a character"],
)
def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path, ending: str, content: bytes, message: str) -> None:
    if ending == "jsonl":
        content = content.replace(b"text\n", b'{"text": ""}\n', 1)
    assert error_of(tmp_path / f"train.{ending}", content, "language-model").startswith(message)


def test_a_line_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    message = error_of(tmp_path / "train.txt", b"a\n" + b"a" * (MAX_LINE_BYTES + 1), "language-model")
    assert message == "line 2: longer than 4 MiB; divide the text into several lines"


def test_a_cell_may_be_as_long_as_a_line(tmp_path: Path) -> None:
    line = "b" * (MAX_LINE_BYTES // 4 - 1) + "\n"
    texts = ["a" * 200_000, 4 * line]
    write_csv(tmp_path / "a.csv", ["text"], [[text] for text in texts])
    assert read(tmp_path / "a.csv", "language-model") == [TextRecord(text) for text in texts]
    message = error_of(tmp_path / "a.csv", f'text\n"{5 * line}"\n', "language-model")
    assert message.startswith(f"line 2: CSV error: field larger than field limit ({MAX_LINE_BYTES})")


def test_the_time_to_find_a_repeated_field_is_linear() -> None:
    class Name(str):
        comparisons = 0

        def __eq__(self, other: object) -> bool:
            Name.comparisons += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(number) for number in range(1_000)]
    with pytest.raises(ValueError, match="the field '999' occurs twice"):
        _unique([(name, 0) for name in (*names, Name(999))])
    assert Name.comparisons < 10_000


def test_sides_of_different_lengths_are_named_with_both_numbers(tmp_path: Path) -> None:
    first, second = tmp_path / "train.de", tmp_path / "train.en"
    for one, two in ((first, second), (second, first)):
        one.write_text("a\nb\nc\n", encoding="utf-8")
        two.write_text("a\n", encoding="utf-8")
        with pytest.raises(CorpusError) as caught:
            list(read_records((first, second), Reading("translation")))
        numbers = (3, 1) if one == first else (1, 3)
        assert str(caught.value) == (
            f"{first} has {numbers[0]} lines, but {second} has {numbers[1]}: line N of one must belong to line N of "
            "the other"
        )


@pytest.mark.parametrize(
    ("name", "reason"), [("folder.txt", "Is a directory"), ("no.txt", "No such file or directory")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(CorpusError) as caught:
        read(tmp_path / name, "language-model")
    assert str(caught.value) == f"cannot read {tmp_path / name}: {reason}; check the file and its permissions"


def test_the_documented_records_can_be_read(tmp_path: Path) -> None:
    page = Path("docs/reference/training-data.md").read_text(encoding="utf-8")
    block, dialogues, tagged = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    pair, labelled, with_labels, dialogue = block.splitlines()
    for line, task, multi_label in (
        (pair, "translation", False),
        (pair, "encoder", False),
        (labelled, "classification", False),
        (with_labels, "classification", True),
        *((line, "language-model", False) for line in (dialogue, *dialogues.splitlines())),
    ):
        (tmp_path / "a.jsonl").write_text(line, encoding="utf-8")
        assert len(read(tmp_path / "a.jsonl", cast(TaskName, task), multi_label=multi_label)) == 1
    (columns,) = re.findall(r"```text\n(-DOCSTART-.*?)```", page, flags=re.DOTALL)
    for name, content in (("a.jsonl", tagged), ("a.conll", columns)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        for record in read(tmp_path / name, "tagging"):
            assert isinstance(record, TaggedRecord) and record.entities[0] == Entity(0, 7, "PER")


def test_lines_are_read_one_after_another(tmp_path: Path) -> None:
    """An error in a later line must not prevent reading the lines before it."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\nno\n', encoding="utf-8")
    records = read_records((path,), Reading("language-model"))
    numbers = [number for number, _ in (next(records), next(records))]
    assert all(one < two for one, two in pairwise(numbers))
    with pytest.raises(CorpusError, match="line 3, column 1"):
        next(records)
