"""Training dialogues with and without Ghost Attention."""

import hashlib
import json
import re
from pathlib import Path
from random import Random

from lab.zoo.dialogues import CHAT, HELD_OUT_MESSAGES, Dialogue, draw_dialogue, draw_dialogues
from lab.zoo.instructions import KINDS, PHRASINGS, QUESTIONS, words_of
from lab.zoo.smalltalk import INTENTS, SmalltalkPair
from lab.zoo.systems import bundle_name

DEFAULTS = {message: question.default for question in QUESTIONS.values() for message in question.messages}


def drawn(has_ghost_attention: bool, count: int = 600) -> list[Dialogue]:
    rng = Random(5)
    return [draw_dialogue(rng, words_of("trained"), has_ghost_attention) for _ in range(count)]


def bare_messages(dialogue: Dialogue) -> list[str]:
    """Return the messages without the instruction."""
    first, *later = (one.message for one in dialogue.turns)
    return [first if dialogue.instruction is None else first.removeprefix(f"{dialogue.instruction.text} "), *later]


def test_a_dialogue_is_written_as_lines_and_ends_before_the_response() -> None:
    text = CHAT.render([SmalltalkPair("Hello!", "Nice to meet you.")], "Who are you?")
    assert text == "User: Hello!\nBot: Nice to meet you.\nUser: Who are you?\nBot:"


def test_the_text_of_a_dialogue_is_its_last_prompt_and_response_and_spans_select_all_responses() -> None:
    for dialogue in drawn(True):
        text, spans = dialogue.text_and_answers()
        assert text == f"{dialogue.prompt} {dialogue.turns[-1].answer}"
        assert [text[start:end] for start, end in spans] == [f" {one.answer}" for one in dialogue.turns]
        assert dialogue.prompt.count("User: ") == dialogue.prompt.count("Bot:") == len(dialogue.turns)


def test_with_ghost_attention_only_the_first_message_has_the_instruction_and_every_response_follows_it() -> None:
    for dialogue, plain in zip(drawn(True), drawn(False), strict=True):
        instruction = dialogue.instruction
        if instruction is None or len(dialogue.turns) == 1:
            assert dialogue == plain
            continue
        assert dialogue.turns[0].message.startswith(f"{instruction.text} ")
        assert all(instruction.text not in turn.message for turn in dialogue.turns[1:])
        for turn, message, expected in zip(dialogue.turns, bare_messages(dialogue), plain.turns, strict=True):
            assert turn.answer == instruction.apply(message, expected.answer)
            if instruction.kind not in QUESTIONS or message in QUESTIONS[instruction.kind].messages:
                assert instruction.is_kept(message, turn.answer)


def test_without_it_only_dialogues_of_one_turn_have_an_instruction() -> None:
    texts = [text for phrasings in PHRASINGS.values() for text in phrasings["trained"]]
    instruction = re.compile("|".join(re.escape(text).replace(r"\{\}", r"\w+( \w+)?") for text in texts))
    for dialogue in drawn(False):
        if dialogue.instruction is not None:
            (turn,) = dialogue.turns
            assert instruction.search(turn.message)
        if len(dialogue.turns) > 1:
            assert not any(instruction.search(turn.message) for turn in dialogue.turns)
            assert all(turn.answer == DEFAULTS.get(turn.message, turn.answer) for turn in dialogue.turns)


def test_both_have_the_same_messages() -> None:
    for one, other in zip(drawn(True), drawn(False), strict=True):
        assert bare_messages(one) == bare_messages(other)


def test_there_are_all_kinds_and_all_lengths_and_some_without_instruction() -> None:
    dialogues = drawn(True, 3000)
    assert {one.instruction.kind for one in dialogues if one.instruction} == set(KINDS)
    assert {len(one.turns) for one in dialogues} == set(range(1, 21))
    assert 0.12 < sum(one.instruction is None for one in dialogues) / len(dialogues) < 0.18


def test_no_word_and_no_message_of_the_evaluation_is_trained() -> None:
    text = "\n".join(one.text_and_answers()[0] for one in draw_dialogues(1, 300, True))
    assert not set(words_of("held-out")) & set(re.findall(r"\w+", text.lower()))
    assert not any(message in text for message in HELD_OUT_MESSAGES)


def test_a_seed_always_gives_the_dialogues_that_models_were_trained_on() -> None:
    texts = ["\n\n".join(one.text_and_answers()[0] for one in draw_dialogues(1, 50, has)) for has in (True, False)]
    words = [" ".join(words_of("trained")), " ".join(words_of("held-out"))]
    found = [hashlib.sha256(text.encode()).hexdigest() for text in (*texts, *words)]
    assert found == [
        "f250de40cecb9058c6ab252a563d293d823b79f7d5929e88f3d4a25e56d4736a",
        "df58f8a291d571cd9168c06017a4e79227f18d30fd23836dd8460c20b22435cd",
        "220e6018ac69c4f4e3aae2f6f312389a6785e681e05d26684c7f6f89e3506e83",
        "eb0d388ab439020158eb89a82277f204ee33981e3085a9fca7e6a0378414ffa4",
    ]
    assert draw_dialogues(1, 50, True) != draw_dialogues(2, 50, True)


def test_a_message_has_one_response_in_all_intents() -> None:
    answers: dict[str, str] = {}
    for intent in INTENTS:
        for value, of in intent.values.items():
            for message in intent.messages:
                answer = intent.answer.format(value, of=of)
                assert answers.setdefault(message.format(value), answer) == answer
    assert len(answers) > 300


def test_the_documented_prompt_is_what_the_template_writes() -> None:
    text = Path("docs/research/training.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"/v1/generate .*?-d '(.*?)'", text, flags=re.DOTALL)
    exchange = SmalltalkPair("Act as Rosa. Hello!", "Nice to meet you.")
    assert json.loads(body)["model"] == bundle_name("chat-gatt")
    assert json.loads(body)["inputs"] == CHAT.render([exchange], "Who are you?")
    assert "Act as Rosa." in {phrasing.format("Rosa") for phrasing in PHRASINGS["figure"]["trained"]}
