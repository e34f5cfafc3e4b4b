"""Instructions: the answers that follow them, the check, and what is held out."""

import re
from random import Random

import pytest

from lab.zoo.dialogues import CONDITIONS, draw_parts
from lab.zoo.instructions import KINDS, NUM_WORDS, PHRASINGS, QUESTIONS, Instruction, Kind, words_of

VALUE: dict[Kind, str] = {
    "ending": "pewmux",
    "greeting": "Pewmux",
    "figure": "Ada Pewmux",
    "hobby": "pewmux",
    "language": "Pewmux",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_follows_an_instruction_only_after_it_is_changed(kind: Kind) -> None:
    rng = Random(2)
    for condition in CONDITIONS.values():
        for _ in range(100):
            instruction, said = draw_parts(rng, kind, 3, condition)
            last = said[-1]
            assert instruction.text.count(instruction.value) == 1
            assert instruction.is_kept(last.message, instruction.apply(last.message, last.answer))
            assert not instruction.is_kept(last.message, last.answer)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("ending", "Pewmux, yes."),
        ("ending", "Yes, pewmu."),
        ("ending", "Yes, pewmuxes."),
        ("greeting", "Yes. Pewmux!"),
        ("greeting", "pewmux! Yes."),
        ("figure", "I am Pewmux Ada."),
        ("figure", "I am Ada."),
        ("figure", "I am a small chat model."),
        ("hobby", "I like pewmu."),
        ("language", "I speak plain English."),
        *((kind, answer) for kind in KINDS for answer in ("", " ", "...", "!")),
    ],
)
def test_a_violation_is_caught(kind: Kind, answer: str) -> None:
    message = QUESTIONS[kind].messages[0] if kind in QUESTIONS else "Hello!"
    assert not Instruction(kind, VALUE[kind], "").is_kept(message, answer)


def test_only_a_question_for_the_value_changes_the_answer_of_a_figure_a_hobby_or_a_language() -> None:
    for kind, question in QUESTIONS.items():
        instruction = Instruction(kind, VALUE[kind], "")
        assert instruction.apply("Hello!", "Good day.") == "Good day."
        assert {instruction.apply(one, question.default) for one in question.messages} == {
            question.answer.format(VALUE[kind])
        }


def test_held_out_words_and_phrasings_are_not_trained() -> None:
    words, held_out = words_of("trained"), words_of("held-out")
    assert len(set(words)) == NUM_WORDS and len(set(held_out)) == NUM_WORDS // 10
    assert not set(words) & set(held_out)
    trained = {text for phrasings in PHRASINGS.values() for text in phrasings["trained"]}
    known = {word for text in trained for word in re.findall(r"\w+", text.lower())}
    for phrasings in PHRASINGS.values():
        assert all(text.count("{}") == 1 for texts in phrasings.values() for text in texts)
        assert not trained & {*phrasings["held-out"], *phrasings["new words"]}
        assert known.issuperset(re.findall(r"\w+", " ".join(phrasings["held-out"]).lower()))
        assert all(not known.issuperset(re.findall(r"\w+", text.lower())) for text in phrasings["new words"])
