"""Dialogues with open values: what is held out, what the loss includes, and the check."""

import re
from random import Random

import pytest

from model.data.open_dialogues import (
    CONDITIONS,
    HELD_OUT_MESSAGES,
    NUM_WORDS,
    OPEN_KINDS,
    PHRASINGS,
    QUESTIONS,
    OpenInstruction,
    draw_dialogue,
    draw_dialogues,
    draw_instruction,
    draw_parts,
    words_of,
)
from model.data.tokenizer import prompt_tokenizer, train_tokenizer
from model.training.tasks import counted_tokens


def test_no_word_of_the_evaluation_is_trained() -> None:
    trained, held_out = words_of("trained"), words_of("held-out")
    assert len(set(trained)) == NUM_WORDS and len(set(held_out)) == NUM_WORDS // 10
    assert not set(trained) & set(held_out)
    text = " ".join(one.text(all_answers=True)[0] for one in draw_dialogues(1, 300, True)).lower()
    assert not set(held_out) & set(text.replace(".", " ").replace("!", " ").split())
    assert not any(message in text for message in HELD_OUT_MESSAGES)


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_answers_that_follow_an_instruction_are_kept_and_others_are_not(kind: str) -> None:
    rng = Random(2)
    for condition in CONDITIONS.values():
        instruction, said = draw_parts(rng, kind, 3, condition)  # type: ignore[arg-type]
        last = said[-1]
        assert instruction.is_kept(last.message, instruction.apply(last.message, last.answer))
        assert not instruction.is_kept(last.message, last.answer)
        assert not instruction.is_kept(last.message, "")


def test_the_whole_value_must_be_repeated_in_its_place() -> None:
    ending = OpenInstruction("ending", "pewmux", "")
    assert ending.is_kept("", "Yes, pewmux.") and not ending.is_kept("", "Pewmux, yes.")
    assert not ending.is_kept("", "Yes, pewmu.")
    figure = OpenInstruction("figure", "Ada Pewmux", "")
    assert figure.is_kept("Who are you?", "I am Ada Pewmux.")
    assert not figure.is_kept("Who are you?", "I am Pewmux Ada.") and not figure.is_kept("Who are you?", "I am Ada.")


def test_held_out_phrasings_differ_and_have_known_words() -> None:
    trained = {text for phrasings in PHRASINGS.values() for text in phrasings["trained"]}
    known = {word for text in trained for word in re.findall(r"\w+", text.lower())}
    for phrasings in PHRASINGS.values():
        assert all(text.count("{}") == 1 for texts in phrasings.values() for text in texts)
        assert not trained & {*phrasings["held-out"], *phrasings["new words"]}
        assert known.issuperset(re.findall(r"\w+", " ".join(phrasings["held-out"]).lower()))
        assert all(not known.issuperset(re.findall(r"\w+", text.lower())) for text in phrasings["new words"])
    assert draw_instruction(Random(1), "hobby", ["pewmux"], "held-out").text.count("pewmux") == 1


def test_only_dialogues_of_one_turn_have_an_instruction_without_ghost_attention() -> None:
    texts = [text for phrasings in PHRASINGS.values() for text in phrasings["trained"]]
    instruction = re.compile("|".join(re.escape(text).replace(r"\{\}", r"\w+( \w+)?") for text in texts))
    rng = Random(4)
    for has_ghost_attention in (False, True):
        drawn = [draw_dialogue(rng, words_of("trained"), has_ghost_attention) for _ in range(200)]
        longer = [one for one in drawn if len(one.turns) > 1]
        assert any(instruction.search(one.turns[0].message) for one in longer) == has_ghost_attention
        assert not any(instruction.search(turn.message) for one in longer for turn in one.turns[1:])


def test_the_loss_includes_the_tokens_of_answers() -> None:
    drawn = draw_dialogues(1, 100, True)
    tokenizer = train_tokenizer([one.text(all_answers=False)[0] for one in drawn], 600)
    for one in drawn[:20]:
        text, spans = one.text(all_answers=True)
        encoding = tokenizer.encode(text)
        counted = counted_tokens(encoding.offsets, spans)
        answers = "".join(f" {turn.answer}" for turn in one.turns)
        ids = [id_ for id_, is_counted in zip(encoding.ids, counted, strict=True) if is_counted]
        assert tokenizer.decode(ids) == answers
        text, spans = one.text(all_answers=False)
        # A chat reads the prompt and writes the answer; their tokens are those of the whole text.
        start = spans[0][0]
        prompt, answer = prompt_tokenizer(tokenizer).encode(text[:start]), tokenizer.encode(text[start + 1 :])
        assert [1, *tokenizer.encode(text).ids] == [*prompt.ids, *answer.ids]
        assert sum(counted_tokens(tokenizer.encode(text).offsets, spans)) == len(answer.ids)
    assert all(question.default for question in QUESTIONS.values())
