from random import Random

import pytest

from model.data.instructions import (
    KINDS,
    NOBODY,
    SENTENCES,
    TERSE,
    VALUES,
    WHO_ARE_YOU,
    Instruction,
    Kind,
    draw_instruction,
)
from model.data.smalltalk import INTENTS, draw_exchange

VALUE: dict[Kind, str] = {"capitals": "", "ending": "river", "person": "Amara", "greeting": "Ahoy"}


def instruction(kind: Kind) -> Instruction:
    return Instruction(kind, VALUE[kind], "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_changed_by_an_instruction_follows_it(kind: Kind) -> None:
    rng = Random(1)
    for _ in range(500):
        drawn, said = draw_instruction(rng, kind), draw_exchange(rng)
        message, answer = said.message, said.answer
        if rng.random() < 0.3:
            message, answer = rng.choice(WHO_ARE_YOU), NOBODY
        assert drawn.is_kept(message, drawn.apply(message, answer))


@pytest.mark.parametrize(
    ("kind", "message", "answer"),
    [
        ("capitals", "Hello!", "Nice to meet you."),
        ("capitals", "Hello!", "NICE TO MEET yOU."),
        ("capitals", "Hello!", "25."),
        ("ending", "Hello!", "Nice to meet you."),
        ("ending", "Hello!", "The river is nice."),
        ("ending", "Hello!", "Nice to meet you, rivers."),
        ("ending", "Hello!", "Nice to meet you, candle."),
        ("person", "Who are you?", NOBODY),
        ("person", "Who are you?", "I am Boris."),
        ("person", "Who are you?", "I am Amara or Boris."),
        ("person", "Hello!", "I am Boris."),
        ("greeting", "Hello!", "Nice to meet you."),
        ("greeting", "Hello!", "Nice to meet you. Ahoy!"),
        ("greeting", "Hello!", "Aloha! Nice to meet you."),
    ],
)
def test_a_violation_is_caught(kind: Kind, message: str, answer: str) -> None:
    assert not instruction(kind).is_kept(message, answer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ["", " ", "...", "!"])
def test_an_empty_response_follows_no_instruction(kind: Kind, answer: str) -> None:
    assert not instruction(kind).is_kept("Hello!", answer)


@pytest.mark.parametrize("kind", KINDS)
def test_no_small_talk_follows_an_instruction_by_chance(kind: Kind) -> None:
    rng = Random(2)
    for _ in range(500):
        drawn, said = draw_instruction(rng, kind), draw_exchange(rng)
        message, answer = (rng.choice(WHO_ARE_YOU), NOBODY) if kind == "person" else (said.message, said.answer)
        assert not drawn.is_kept(message, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_instructions_are_terse_and_all_of_them_name_their_value(kind: Kind) -> None:
    rng = Random(3)
    drawn = [draw_instruction(rng, kind) for _ in range(1000)]
    terse = {phrasing.format(value) for phrasing in TERSE[kind] for value in VALUES[kind]}
    whole = {phrasing.format(value) for phrasing in SENTENCES[kind] for value in VALUES[kind]}
    assert 450 < sum(one.text in terse for one in drawn) < 550
    assert {one.text for one in drawn} <= terse | whole
    assert all(one.value in one.text for one in drawn)


def test_a_message_has_one_response_in_all_intents() -> None:
    answers: dict[str, str] = {}
    for intent in INTENTS:
        for index, value in enumerate(intent.values):
            of = intent.counterparts[index] if intent.counterparts else ""
            for message in intent.messages:
                answer = intent.answer.format(value, of=of)
                assert answers.setdefault(message.format(value), answer) == answer
    assert len(answers) > 300
