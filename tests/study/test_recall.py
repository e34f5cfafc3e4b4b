import argparse
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.record import Result
from model.architectures.causal import CausalModel
from model.checkpoint import load_model
from model.data.instructions import KINDS
from model.evaluation.recall import draw_script, greedy_answers
from model.systems import bundle_name
from study.recall import add_arguments, draw, measure, served_responses, tables
from study.served import serve

CASES = [(model, earlier) for model in ("chat-gatt", "chat-baseline") for earlier in ("own", "plain")]
ROWS: list[dict[str, Any]] = [
    {"model": model, "earlier_answers": earlier, "turn": turn, "instruction": kind}
    | {"kept": 9 + index, "total": 40 + turn, "interval_95": [0.1181, 0.3662]}
    for turn in (1, 20)
    for index, (model, earlier) in enumerate(CASES)
    for kind in (*KINDS, "all")
]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_served_responses_equal_pytorchs(chats: Path) -> None:
    """Use more dialogues than fit one call, of different lengths."""
    model, tokenizer = load_model(chats / "checkpoint")
    assert isinstance(model, CausalModel)
    rng = Random(1)
    scripts = [draw_script(rng, kind, 4) for kind in KINDS for _ in range(9)]
    for index, script in enumerate(scripts):
        for one in script.plain[: index % 4]:
            script.add_answer(one.answer)
    prompts = [script.prompt for script in scripts]
    expected = greedy_answers(model, tokenizer)(prompts)
    assert len(set(expected)) > len(prompts) / 2
    with serve(chats / "bundles") as served:
        assert served_responses(served, bundle_name("chat-gatt"))(prompts) == expected


def test_both_models_are_measured_after_their_own_responses_and_after_plain_ones(chats: Path) -> None:
    result = measure(parsed(str(chats / "bundles"), "--turns", "1", "3", "--dialogues", "2"))
    found = [(row["model"], row["earlier_answers"], row["turn"], row["instruction"]) for row in result.rows]
    assert found == [(*case, turn, kind) for case in CASES for turn in (1, 3) for kind in (*KINDS, "all")]
    assert all(row["total"] == (8 if row["instruction"] == "all" else 2) for row in result.rows)


def test_missing_models_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be served"):
        measure(parsed(str(tmp_path)))


def test_the_table_has_a_column_for_each_turn_and_every_interval() -> None:
    lines = tables(Result(rows=ROWS))["recall"].splitlines()
    assert lines[0] == "| model | earlier responses | instruction | turn 1 | turn 20 |"
    assert lines[2] == ("| with Ghost Attention | its own | capitals | 9 of 41 (12 to 37 %) | 9 of 60 (12 to 37 %) |")
    assert len(lines) == 2 + len(CASES) * (len(KINDS) + 1)


def test_the_picture_shows_every_kind_and_is_the_same_for_the_same_result(tmp_path: Path) -> None:
    pictures = []
    for _ in range(2):
        draw(Result(rows=ROWS), tmp_path)
        pictures.append((tmp_path / "recall.svg").read_bytes())
    assert pictures[0] == pictures[1]
    texts = {(element.text or "").strip() for element in ElementTree.parse(tmp_path / "recall.svg").iter()}
    assert {*KINDS, "20", "without Ghost Attention, plain earlier responses"} <= texts
