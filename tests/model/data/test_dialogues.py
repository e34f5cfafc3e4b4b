"""Dialogues in the forms of other tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from sightline.model.data.corpus import open_corpus
from sightline.model.data.facts import check_corpus, summary
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading, read_records
from sightline.model.data.records import DialogueMessage, DialogueRecord, Record
from tests.support.tables import read_table


def read(path: Path, *rows: Any) -> list[Record | str]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return [record for _, record in read_records((path,), Reading("language-model"))]


@pytest.mark.parametrize(("row", "expected"), read_table(__file__, "dialogues"))
def test_rows_are_dialogues(row: Any, expected: list[Any], tmp_path: Path) -> None:
    messages = [DialogueMessage(role, content, **(more[0] if more else {})) for role, content, *more in expected]
    (record,) = read(tmp_path / "a.jsonl", row)
    assert isinstance(record, DialogueRecord)
    trained = [message.is_trained for message in record.messages]
    assert trained == [message.is_trained for message in messages]
    assert [(one.role, one.content, one.name) for one in record.messages] == [
        (one.role, one.content, one.name) for one in messages
    ]


@pytest.mark.parametrize("row", read_table(__file__, "calls"))
def test_calls_have_one_form(row: Any, tmp_path: Path) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    expected = (
        DialogueMessage("user", "a"),
        DialogueMessage("assistant", "", tool_calls=(call,)),
        DialogueMessage("tool", "2", tool_call_id="call00000"),
        DialogueMessage("assistant", "b"),
    )
    tools = ({"type": "function", "function": {"name": "f"}},)
    assert read(tmp_path / "a.jsonl", row) == [DialogueRecord(expected, tools)]


@pytest.mark.parametrize(("row", "message"), read_table(__file__, "errors"))
def test_errors_name_line_and_field(row: Any, message: str, tmp_path: Path) -> None:
    good = {"text": "a"}
    path = tmp_path / "a.jsonl"
    with pytest.raises(CorpusError) as caught:
        read(path, *([row] if "body" in row or not row else [row, good]))
    assert str(caught.value) == f"{path}, line 1: {message}"


def test_forms_of_a_file_cannot_be_mixed(tmp_path: Path) -> None:
    path, messages = tmp_path / "a.jsonl", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for first, second in (({"text": "a"}, "text"), ({"instruction": "a", "output": "b"}, "instruction and output")):
        with pytest.raises(CorpusError) as caught:
            read(path, first, {"messages": messages})
        assert str(caught.value) == (
            f"records differ: {path}, line 1 has {second}, but {path}, line 2 has messages; use only one of them"
        )


def test_blank_messages_are_dropped_but_results_of_tools_may_be_blank(tmp_path: Path) -> None:
    blank = {"prompt": " ", "completion": "b"}
    row = read_table(__file__, "calls")[1]
    unanswered = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    rows = [blank, {"conversations": []}, {"messages": unanswered["messages"][:1]}, unanswered]
    found = [read(tmp_path / "a.jsonl", one)[0] for one in rows]
    assert found == ["empty", *["without a reply to learn"] * 3]
    row = {**row, "messages": [{**one, "content": ""} if one["role"] == "tool" else one for one in row["messages"]]}
    assert isinstance(read(tmp_path / "a.jsonl", row)[0], DialogueRecord)


def test_the_summary_names_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"id": n, "conversations": [{"from": "human", "value": f"{n}", "time": 3}, {"from": "gpt", "value": "b"}]}
        for n in range(8)
    ]
    rows[0]["conversations"].append({"from": "human", "value": "more"})  # type: ignore[attr-defined]
    read(path, *rows)
    lines = summary(check_corpus(open_corpus(path, Reading("language-model"))))
    assert (
        "note: dialogues whose last messages have no reply, which are left out: 1 in train, first in a.jsonl, line 1"
        in lines
    )
    assert "note: fields that are not read: conversations[].time, id" in lines
    assert not any("ignored" in line for line in lines)
