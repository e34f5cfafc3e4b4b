"""Dialogues in the chat template of a checkpoint: token ids, and marked replies."""

import dataclasses
from typing import Any

import pytest
from tokenizers import Tokenizer

from sightline.base.bundle import ChatTemplate
from sightline.base.errors import UsageError
from sightline.base.text.chat import JinjaTemplate
from sightline.model.config import PretrainedConfig
from sightline.model.data.chat_template import (
    DialogueEncoder,
    dialogue_encoder,
)
from sightline.model.data.encoding import encode_language
from sightline.model.data.records import DialogueMessage, DialogueRecord, TextRecord
from tests.export.chat_templates import (
    CHATML,
    KEEPS_LAST_THINKING,
    MARKED,
    NO_SYSTEM,
    NO_THINKING,
    SYSTEM_LAST,
    TOOLS_AS_JSON,
    TOOLS_BEFORE_LAST,
    TOOLS_IN_USER,
)
from tests.model.pretrained_folders import LINES, TEMPLATE, byte_tokenizer

DIALOGUE = (
    DialogueMessage("system", "Be brief."),
    DialogueMessage("user", "Hello!"),
    DialogueMessage("assistant", "Hi, you."),
    DialogueMessage("user", "Bye"),
    DialogueMessage("assistant", " See you soon.\n"),
)
# As Qwen 3: earlier replies lose their thoughts, the last one has an empty thought.
THINKING = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" and loop.last %}<think></think>
{% endif %}{{ message.content.strip() }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% else %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    return tokenizer


RECORD = DialogueRecord(DIALOGUE)
CALL = {"id": "call_abc123456789", "type": "function", "function": {"name": "find", "arguments": {"spot": "lake"}}}
TOOL_RECORD = DialogueRecord(
    (
        DialogueMessage("user", "Where?"),
        DialogueMessage("assistant", "", tool_calls=(CALL,)),
        DialogueMessage("tool", "here", tool_call_id="call_abc123456789"),
        DialogueMessage("assistant", "There."),
        DialogueMessage("user", "Thanks."),
        DialogueMessage("assistant", "Yes."),
    ),
    ({"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}},),
)
ONLY_LAST_CALL = TEMPLATE.replace(
    "{{ message.content }}", "{{ message.tool_calls[-1] if message.tool_calls else message.content }}"
)
TURNS = ("<start_of_turn>", "<end_of_turn>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "[TOOL_CALLS]")


def encoder(text: str, tokenizer: Tokenizer) -> DialogueEncoder:
    template = ChatTemplate(program=text, tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return DialogueEncoder(JinjaTemplate(template), tokenizer)


def replies(ids: Any, mask: Any, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the marked runs of tokens."""
    found, last = list[list[int]](), 0
    for id_, marked in zip(ids, mask, strict=True):
        if marked and not last:
            found.append([])
        if marked:
            found[-1].append(id_)
        last = marked
    return [tokenizer.decode(one, skip_special_tokens=False) for one in found]


def test_replies_and_their_ends_are_marked(tokenizer: Tokenizer) -> None:
    ((ids, mask),) = encoder(TEMPLATE, tokenizer).encode(RECORD)
    text = "".join(f"<|im_start|>{one.role}\n{one.content}<|im_end|>\n" for one in DIALOGUE)
    assert tokenizer.decode(list(ids), skip_special_tokens=False) == text.rstrip("\n")
    assert replies(ids, mask, tokenizer) == ["Hi, you.<|im_end|>", " See you soon.\n<|im_end|>"]
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")


def test_a_prompt_is_the_start_of_the_example(tokenizer: Tokenizer) -> None:
    for template in (TEMPLATE, LLAMA_2):
        own, dialogue = encoder(template, tokenizer), DIALOGUE[1:]
        ((ids, mask),) = own.encode(DialogueRecord(dialogue))
        for end in (1, 3):
            prompt = own.prompt(DialogueRecord(dialogue[:end]))
            assert list(ids[: len(prompt)]) == prompt
            assert (mask[len(prompt) - 1], mask[len(prompt)]) == (0, 1)


def test_templates_may_change_the_last_reply(tokenizer: Tokenizer) -> None:
    texts = [replies(ids, mask, tokenizer) for ids, mask in encoder(THINKING, tokenizer).encode(RECORD)]
    assert texts == [["<think></think>\nHi, you.<|im_end|>"], ["<think></think>\nSee you soon.<|im_end|>"]]
    ((ids, mask),) = encoder(LLAMA_2, tokenizer).encode(RECORD)
    assert replies(ids, mask, tokenizer) == [" Hi, you. </s>", "  See you soon.\n </s>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "ends a reply without a special token"),
        (LINES.replace("{{ message.content }}", "{{ message.content | upper }}"), "changes the text of a reply"),
        (NO_THINKING, "changes the text of a reply, or of its prompt"),
        (
            "{{ raise_exception('never') }}",
            "rejects a dialogue of 2 messages (system, user)",
        ),
        ("{{ ''.__class__.__mro__ }}", "rejects a dialogue"),
    ],
)
def test_templates_that_cannot_be_used(template: str, expected: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError) as caught:
        encoder(template, tokenizer).encode(RECORD)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("template", "record", "num_examples", "expected"),
    [
        (NO_SYSTEM, RECORD, 1, ["Hi, you.<end_of_turn>", "See you soon.<end_of_turn>"]),
        (MARKED, RECORD, 1, ["Hi, you.<|im_end|>", " See you soon.\n<|im_end|>"]),
        ("{{ messages | length }}" + TEMPLATE, RECORD, 2, ["Hi, you.<|im_end|>", " See you soon.\n<|im_end|>"]),
        (SYSTEM_LAST, RECORD, 2, [" Hi, you.</s>", " See you soon.</s>"]),
        (
            TOOLS_AS_JSON,
            TOOL_RECORD,
            1,
            [
                '<tool_call>\n{"name": "find", "arguments": {"spot": "lake"}}\n</tool_call><|im_end|>',
                *("There.<|im_end|>", "Yes.<|im_end|>"),
            ],
        ),
        (
            TOOLS_IN_USER,
            TOOL_RECORD,
            1,
            ['{"name": "find", "parameters": {"spot": "lake"}}<|eot_id|>', "There.<|eot_id|>", "Yes.<|eot_id|>"],
        ),
        (
            TOOLS_BEFORE_LAST,
            TOOL_RECORD,
            2,
            [
                '[TOOL_CALLS] [{"name": "find", "arguments": {"spot": "lake", "id": "123456789"}]</s>',
                *(" There.</s>", " Yes.</s>"),
            ],
        ),
    ],
)
def test_replies_follow_the_prompts_of_the_service(
    template: str, record: DialogueRecord, num_examples: int, expected: list[str], tokenizer: Tokenizer
) -> None:
    tokenizer.add_special_tokens(list(TURNS))
    own = encoder(template, tokenizer)
    examples = own.encode(record)
    assert len(examples) == num_examples
    assert [reply for ids, mask in examples for reply in replies(ids, mask, tokenizer)] == expected
    for index, message in enumerate(record.messages):
        if message.role == "assistant":
            prompt = own.prompt(dataclasses.replace(record, messages=record.messages[:index]))
            starts = [mask[len(prompt) - 1 : len(prompt) + 1] for ids, mask in examples if ids[: len(prompt)] == prompt]
            assert [0, 1] in starts


def test_a_reply_whose_thoughts_are_dropped_later_has_its_own_example(tokenizer: Tokenizer) -> None:
    thought = dataclasses.replace(DIALOGUE[2], content="<think>\nGreet.\n</think>\n\nHi.")
    examples = encoder(KEEPS_LAST_THINKING, tokenizer).encode(DialogueRecord((*DIALOGUE[:2], thought, *DIALOGUE[3:])))
    assert [replies(ids, mask, tokenizer) for ids, mask in examples] == [
        ["<think>\nGreet.\n</think>\n\nHi.<|im_end|>"],
        ["<think>\n\n</think>\n\n See you soon.\n<|im_end|>"],
    ]


def test_replies_without_loss_are_not_marked(tokenizer: Tokenizer) -> None:
    first = dataclasses.replace(DIALOGUE[2], has_loss=False)
    ((ids, mask),) = encoder(TEMPLATE, tokenizer).encode(DialogueRecord((*DIALOGUE[:2], first, *DIALOGUE[3:])))
    assert replies(ids, mask, tokenizer) == [" See you soon.\n<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "the chat template of the model takes none"),
        ("{{ tools | tojson if tools }}" + TEMPLATE, "leaves out calls of tools"),
        ("{{ tools | tojson if tools }}" + ONLY_LAST_CALL, "leaves out calls of tools"),
    ],
)
def test_templates_without_tools_are_an_error(template: str, expected: str, tokenizer: Tokenizer) -> None:
    first, reply, *more = TOOL_RECORD.messages
    twice = (first, dataclasses.replace(reply, tool_calls=(CALL, CALL)), *more)
    with pytest.raises(UsageError, match=expected):
        encoder(template, tokenizer).encode(dataclasses.replace(TOOL_RECORD, messages=twice))


def test_long_dialogues_are_split_between_exchanges(tokenizer: Tokenizer) -> None:
    own, record = encoder(TOOLS_AS_JSON, tokenizer), TOOL_RECORD
    (whole,) = own.encode(record)
    parts = [DialogueRecord(record.messages[start:end], record.tools) for start, end in ((0, 4), (4, 6))]
    expected = [example for part in parts for example in own.encode(part)]
    assert own.encode(record, len(whole[0])) == [whole]
    assert own.encode(record, len(whole[0]) - 1) == expected
    assert own.encode(record, 2) == expected
    system = DIALOGUE[0]
    with_system = own.encode(DialogueRecord((system, *record.messages), record.tools), 2)
    assert with_system == [own.encode(DialogueRecord((system, *one.messages), one.tools))[0] for one in parts]


def test_special_tokens_in_messages_are_refused(tokenizer: Tokenizer) -> None:
    dialogue = DialogueRecord((DialogueMessage("user", "x<|im_end|>"), DialogueMessage("assistant", "y")))
    for call in (encoder(TEMPLATE, tokenizer).encode, encoder(TEMPLATE, tokenizer).prompt):
        with pytest.raises(UsageError, match=r"role user contains <\|im_end\|>, a special token"):
            call(dialogue)


def test_special_tokens_are_variables_of_the_template(tokenizer: Tokenizer) -> None:
    chat = {"program": LLAMA_2, "tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
    config = PretrainedConfig(211, task="language-model", chat=chat)
    assert dialogue_encoder(config, tokenizer).end_token() == tokenizer.token_to_id("</s>")


def test_records_are_encoded(tokenizer: Tokenizer) -> None:
    config = PretrainedConfig(211, task="language-model", chat={"program": TEMPLATE}, eos_id=2)
    text, dialogue = encode_language(tokenizer, [TextRecord("ab"), RECORD], config, 100)
    assert text == [([*tokenizer.encode("ab").ids, 2], [0, 1, 1])]
    assert encode_language(tokenizer, [TextRecord("abc")], config, 3) == [
        [([*text[0][0][:2], *tokenizer.encode("c").ids], [0, 1, 1]), ([*tokenizer.encode("c").ids, 2], [0, 1])]
    ]
    assert dialogue == encoder(TEMPLATE, tokenizer).encode(RECORD)
    with pytest.raises(UsageError, match="no chat template for dialogues"):
        encode_language(tokenizer, [RECORD], dataclasses.replace(config, chat={}), 100)
