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
    encode_records,
    end_token,
    read_chat_template,
)
from sightline.model.data.records import DialogueMessage, DialogueRecord, TextRecord
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
    ids, mask = encoder(TEMPLATE, tokenizer).encode(DIALOGUE)
    text = "".join(f"<|im_start|>{one.role}\n{one.content}<|im_end|>\n" for one in DIALOGUE)
    assert tokenizer.decode(list(ids), skip_special_tokens=False) == text
    assert replies(ids, mask, tokenizer) == ["Hi, you.<|im_end|>", " See you soon.\n<|im_end|>"]
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")


def test_a_prompt_is_the_start_of_the_example(tokenizer: Tokenizer) -> None:
    for template in (TEMPLATE, THINKING, LLAMA_2):
        own, dialogue = encoder(template, tokenizer), DIALOGUE[1:]
        ids, mask = own.encode(dialogue)
        for end in (1, 3):
            prompt = own.prompt(dialogue[:end])
            assert list(ids[: len(prompt)]) == prompt
            assert (mask[len(prompt) - 1], mask[len(prompt)]) == (0, 1)


def test_templates_may_change_the_last_reply(tokenizer: Tokenizer) -> None:
    ids, mask = encoder(THINKING, tokenizer).encode(DIALOGUE)
    assert replies(ids, mask, tokenizer) == ["Hi, you.<|im_end|>", "<think></think>\nSee you soon.<|im_end|>"]
    ids, mask = encoder(LLAMA_2, tokenizer).encode(DIALOGUE[1:])
    assert replies(ids, mask, tokenizer) == [" Hi, you. </s>", "  See you soon.\n </s>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "ends a reply without a special token"),
        (LINES.replace("{{ message.content }}", "{{ message.content | upper }}"), "changes the text of a reply"),
        ("{{ messages | length }}" + TEMPLATE, "changes earlier messages of a dialogue"),
        (
            "{{ raise_exception('never') }}",
            "rejects a dialogue of 5 messages (system, user, assistant, user, assistant)",
        ),
        ("{{ ''.__class__.__mro__ }}", "rejects a dialogue"),
    ],
)
def test_templates_that_cannot_be_used(template: str, expected: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError) as caught:
        encoder(template, tokenizer).encode(DIALOGUE)
    assert expected in str(caught.value)


def test_special_tokens_in_messages_are_refused(tokenizer: Tokenizer) -> None:
    dialogue = (DialogueMessage("user", "x<|im_end|>"), DialogueMessage("assistant", "y"))
    for call in (encoder(TEMPLATE, tokenizer).encode, encoder(TEMPLATE, tokenizer).prompt):
        with pytest.raises(UsageError, match=r"role user contains <\|im_end\|>, a special token"):
            call(dialogue)


def test_special_tokens_are_variables_of_the_template(tokenizer: Tokenizer) -> None:
    chat = {"program": LLAMA_2, "tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
    config = PretrainedConfig(211, task="language-model", chat=chat)
    assert end_token(config, tokenizer) == tokenizer.token_to_id("</s>")
    assert read_chat_template(PretrainedConfig(211, task="language-model")) is None


def test_records_are_encoded(tokenizer: Tokenizer) -> None:
    config = PretrainedConfig(211, task="language-model", chat={"program": TEMPLATE}, eos_id=2)
    text, dialogue = encode_records(config, tokenizer, [TextRecord("ab"), DialogueRecord(DIALOGUE)])
    assert text == ([*tokenizer.encode("ab").ids, 2], [0, 1, 1])
    assert dialogue == encoder(TEMPLATE, tokenizer).encode(DIALOGUE)
    with pytest.raises(UsageError, match="no chat template for dialogues"):
        encode_records(dataclasses.replace(config, chat={}), tokenizer, [DialogueRecord(DIALOGUE)])
