import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lab.bench.record import Result
from lab.study.chats import LINES
from lab.study.recall import CASES, UNSEEN, add_arguments, draw, measure, served_responses, tables
from lab.study.served import serve
from lab.zoo.dialogues import CONDITIONS, draw_parts
from lab.zoo.instructions import KINDS
from lab.zoo.recall import Script, greedy_answers
from lab.zoo.systems import bundle_name
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model
from tests.support.steps import drawn_texts, parse

ROWS: list[dict[str, Any]] = [
    {"system": name, "condition": condition, "turn": turn}
    | {"kept": 9 + index, "total": 40 + turn, "interval_95": [0.1181, 0.3662], "kept_by_kind": [1, 0, 3, 4, 1 + index]}
    for turn in (1, 20)
    for index, name in enumerate(LINES)
    for condition in CASES
]
TOGETHER = "figure, hobby and language, of 36: %"


def test_served_responses_equal_pytorchs(chats: Path) -> None:
    """Use more dialogues than fit one call, of different lengths."""
    model, tokenizer = load_model(chats / "checkpoint")
    assert isinstance(model, CausalModel)
    rng = Random(1)
    scripts = [Script(*draw_parts(rng, kind, 4, CONDITIONS["trained"])) for kind in KINDS for _ in range(9)]
    for index, script in enumerate(scripts):
        for one in script.plain[: index % 4]:
            script.add_answer(one.answer)
    prompts = [script.prompt for script in scripts]
    expected = greedy_answers(model, tokenizer)(prompts)
    assert len(set(expected)) > len(prompts) / 2
    with serve(chats / "bundles") as served:
        assert served_responses(served, bundle_name("chat-gatt"))(prompts) == expected


def test_all_models_are_measured_in_all_conditions_and_runs_are_read(chats: Path, tmp_path: Path) -> None:
    scores = {"unseen values": {"20": {"all": {"kept": 9, "total": 50, "interval_95": [0.0977, 0.308]}}}}
    for run in ("chat-gatt-2", "chat-gatt-1", "bahdanau-1"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "scores.json").write_text(json.dumps({"turns": scores}), encoding="utf-8")
    options = ("--turns", "1", "3", "--dialogues", "2", "--runs", str(tmp_path))
    result = measure(parse(add_arguments, str(chats / "bundles"), *options))
    *rows, first, second = result.rows
    found = [(row["system"], row["condition"], row["turn"]) for row in rows]
    assert found == [(name, condition, turn) for name in LINES for condition in CASES for turn in (1, 3)]
    assert all(row["total"] == 10 and sum(row["kept_by_kind"]) == row["kept"] for row in rows)
    assert [(row["system"], row["run_seed"], row["kept"]) for row in (first, second)] == [
        ("chat-gatt", 1, 9),
        ("chat-gatt", 2, 9),
    ]
    assert tables(result)["recall-seeds"].splitlines()[-1] == "| with Ghost Attention | 2 | 18 [10, 31] |"


def test_a_folder_without_any_chat_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has none of smalltalk-chat-gatt, smalltalk-chat-baseline, "):
        measure(parse(add_arguments, str(tmp_path)))


def test_the_table_has_a_column_for_each_turn_and_every_interval() -> None:
    lines = tables(Result(rows=ROWS))["recall-all"].splitlines()
    assert lines[0] == "| model | dialogues | turn 1 | turn 20 |"
    assert lines[2] == "| with Ghost Attention | trained | 22 [12, 37] | 15 [12, 37] |"
    assert len(lines) == 2 + len(LINES) * len(CASES)
    one = tables(Result(rows=[row for row in ROWS if row["system"] == "chat-baseline"]))
    assert one.keys() == {"recall", "recall-all", "recall-kinds"} and len(one["recall"].splitlines()) == 2 + len(CASES)


def test_the_short_table_has_all_conditions_of_one_model_and_unseen_values_of_the_others() -> None:
    parts = tables(Result(rows=ROWS))
    lines, every = parts["recall"].splitlines(), parts["recall-all"].replace(" Ghost Attention", "").splitlines()
    assert lines[0] == "| Ghost Attention | dialogues | turn 1 | turn 20 |"
    assert lines[2:] == every[2 : 2 + len(CASES)] + [
        line for line in every[2 + len(CASES) :] if f"| {UNSEEN} |" in line
    ]
    assert len(lines) == 2 + len(CASES) + len(LINES) - 1


def test_the_kinds_of_one_model_are_counted_at_the_last_turn_of_the_training() -> None:
    lines = tables(Result(rows=ROWS))["recall-kinds"].splitlines()
    assert lines[0].split(" | ")[3:] == ["figure, of 12", "hobby, of 12", "language, of 12", f"{TOGETHER} |"]
    assert lines[2] == "| trained | 1 | 0 | 3 | 4 | 1 | 8: 22 [12, 38] |"
    assert len(lines) == 2 + len(CASES)


def test_the_picture_shows_every_condition_and_is_the_same_for_the_same_result(tmp_path: Path) -> None:
    texts = drawn_texts(draw, Result(rows=ROWS), tmp_path / "recall.svg")
    assert {*CONDITIONS, "plain earlier responses", "20", "without Ghost Attention"} <= texts
