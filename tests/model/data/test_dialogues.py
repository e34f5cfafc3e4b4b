import json
import re
from pathlib import Path
from random import Random

from model.data.dialogues import CHAT, Dialogue, draw_dialogue, draw_examples, draw_exchanges, sample_answers
from model.data.instructions import KINDS, NOBODY, SENTENCES, WHO_ARE_YOU, draw_instruction
from model.data.smalltalk import Exchange
from model.systems import bundle_name


def drawn(has_ghost_attention: bool, count: int = 600) -> list[Dialogue]:
    rng = Random(5)
    return [draw_dialogue(rng, has_ghost_attention) for _ in range(count)]


def bare(dialogue: Dialogue, index: int) -> str:
    """Return a message without the instruction."""
    message = dialogue.turns[index].message
    return message if index or dialogue.instruction is None else message.removeprefix(f"{dialogue.instruction.text} ")


def test_a_dialogue_is_written_as_lines_and_ends_before_the_response() -> None:
    text = CHAT.render([Exchange("Hello!", "Nice to meet you.")], "Who are you?")
    assert text == "User: Hello!\nBot: Nice to meet you.\nUser: Who are you?\nBot:"


def test_an_example_is_the_text_before_the_last_response_and_the_response() -> None:
    for dialogue in drawn(True):
        read, answer = dialogue.example()
        *earlier, last = dialogue.turns
        assert read == CHAT.render(earlier, last.message)
        assert answer == last.answer
        assert read.count("User: ") == read.count("Bot:") == len(dialogue.turns)


def test_only_the_first_message_contains_the_instruction() -> None:
    for dialogue in drawn(True):
        if dialogue.instruction is not None:
            text = dialogue.instruction.text
            assert dialogue.turns[0].message.startswith(f"{text} ")
            assert all(text not in turn.message for turn in dialogue.turns[1:])


def test_with_ghost_attention_every_response_follows_the_instruction() -> None:
    for dialogue in drawn(True):
        if dialogue.instruction is not None:
            for index, turn in enumerate(dialogue.turns):
                assert dialogue.instruction.is_kept(bare(dialogue, index), turn.answer)


def test_responses_are_sampled_with_the_instruction_before_every_message() -> None:
    """Touvron et al. 2023, section 3.3."""
    rng = Random(3)
    for kind in KINDS:
        instruction = draw_instruction(rng, kind)
        said = draw_exchanges(rng, 4, instruction)
        sampled = sample_answers(instruction, said)
        assert [one.message for one in sampled] == [f"{instruction.text} {one.message}" for one in said]
        assert all(instruction.is_kept(one.message, now.answer) for one, now in zip(said, sampled, strict=True))


def test_without_it_only_dialogues_of_one_turn_have_an_instruction() -> None:
    for dialogue in drawn(False):
        if dialogue.instruction is not None:
            (turn,) = dialogue.turns
            assert dialogue.instruction.is_kept(bare(dialogue, 0), turn.answer)
        for turn in dialogue.turns:
            if len(dialogue.turns) > 1 and turn.message in WHO_ARE_YOU:
                assert turn.answer == NOBODY


def test_both_have_the_same_messages_and_the_same_dialogues_of_one_turn() -> None:
    for one, other in zip(drawn(True), drawn(False), strict=True):
        if len(one.turns) == 1:
            assert one == other
        indices = range(len(one.turns))
        assert [bare(one, index) for index in indices] == [bare(other, index) for index in indices]


def test_there_are_all_kinds_and_all_lengths_and_some_without_instruction() -> None:
    dialogues = drawn(True, 3000)
    assert {one.instruction.kind for one in dialogues if one.instruction} == set(KINDS)
    assert {len(one.turns) for one in dialogues} == set(range(1, 21))
    assert 0.12 < sum(one.instruction is None for one in dialogues) / len(dialogues) < 0.18


def test_the_same_seed_gives_the_same_examples() -> None:
    assert draw_examples(1, 50, True) == draw_examples(1, 50, True)
    assert draw_examples(1, 50, True) != draw_examples(2, 50, True)


def test_the_documented_prompt_is_what_the_template_writes() -> None:
    text = Path("docs/research/training.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"/v1/generate .*?-d '(.*?)'", text, flags=re.DOTALL)
    exchange = Exchange("Act as Rosa. Hello!", "Nice to meet you.")
    assert json.loads(body)["model"] == bundle_name("chat-gatt")
    assert json.loads(body)["inputs"] == CHAT.render([exchange], "Who are you?")
    assert "Act as Rosa." in {phrasing.format("Rosa") for phrasing in SENTENCES["person"]}
