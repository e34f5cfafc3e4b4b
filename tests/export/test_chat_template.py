"""Conversion of Jinja chat templates to parts, for the formats of well-known models."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from export.sources.chat_template import ChatTemplateError, convert, read_chat_template
from export.sources.checkpoint import FolderFiles
from service.bundle import ChatTemplate
from service.text.chat import apply_chat_template
from service.text.tokenizer import TextTokenizer
from tests.service.text.kinds import byte_fallback, byte_level
from tests.support.dialogues import in_turn

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# Of Llama 2: the system message is in the first user message, and each user message starts with the
# start token.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Of Mistral: only the replies are trimmed.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
DIALOGUES: list[tuple[list[str], list[str]]] = [
    ([], ["A man in a blue shirt"]),
    ([], [" \nHi!  ", "\n\nThe dog.\t", "  "]),
    (["  Be brief. \n"], ["\n  a ladder\n", " ok \n", "<b>the cat's food</b>\n\n"]),
]


def test_a_format_becomes_one_text_for_each_role() -> None:
    start, end = "<|im_start|>", "<|im_end|>\n"
    parts: dict[str, Any] = {
        "user": f"{start}user\n{{}}{end}",
        "assistant": f"{start}assistant\n{{}}{end}",
        "reply": f"{start}assistant\n",
        "system": f"{start}system\n{{}}{end}",
        "add_special_tokens": False,
    }
    assert convert(CHATML, SPECIAL) == ChatTemplate(**parts)
    assert convert(WITH_DEFAULT, SPECIAL) == ChatTemplate(**parts, default_system="You are helpful.")


def test_the_first_text_and_trimmed_messages_are_supported() -> None:
    template = convert(LLAMA3, SPECIAL)
    assert template.begin == "<s>" and template.user == "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    assert template.system == "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"
    assert template.trim == ("system", "user", "assistant")
    assert convert(MISTRAL, SPECIAL).trim == ("assistant",)
    assert convert(CHATML, SPECIAL).trim == ()


def test_a_system_message_can_be_part_of_the_first_user_message() -> None:
    template = convert(LLAMA2, SPECIAL)
    assert (template.begin, template.system) == ("", None)
    assert template.user == "<s>[INST] {} [/INST]"
    assert template.system_in_user == "<<SYS>>\n{}\n<</SYS>>\n\n"
    assert template.trim == ("user", "assistant")


def metaspace_first() -> Tokenizer:
    """Return a tokenizer like that of Llama 2, which inserts a space at the start of a prompt."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


TOKENIZERS = {"metaspace first": metaspace_first, "byte fallback": byte_fallback, "byte level": byte_level}
TEMPLATES = {
    "ChatML": CHATML, "Llama 2": LLAMA2, "Llama 3": LLAMA3, "Mistral": MISTRAL, "no system": NO_SYSTEM, "plain": PLAIN,
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_served_prompts_are_those_of_transformers(kind: str, name: str) -> None:
    """The tokenizers add a start token to a text, which must not be there twice."""
    from transformers import PreTrainedTokenizerFast

    text, tokenizer = TEMPLATES[name], TextTokenizer(with_special_tokens(TOKENIZERS[kind]()))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=with_special_tokens(TOKENIZERS[kind]()), bos_token="<s>", eos_token="</s>", chat_template=text
    )
    template = convert(text, SPECIAL)
    for system, turns in DIALOGUES:
        if system and name in ("Mistral", "no system"):
            continue
        messages = [{"role": "system", "content": text} for text in system]
        messages += [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
        expected = fast.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert apply_chat_template(template, system, in_turn(*turns), tokenizer).encode(tokenizer) == expected


def test_a_format_without_system_messages_has_none() -> None:
    template = convert(NO_SYSTEM, SPECIAL)
    assert (template.begin, template.system) == ("<s>", None)
    assert template.reply == "<start_of_turn>model\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "omits, repeats or changes messages"),
        ("{{ messages[-1]['content'] }}", "omits, repeats or changes messages"),
        ("{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}", "."),
        ("{% for m in messages %}{{ '{' + m['content'] + '}' }}{% endfor %}", "braces"),
        ("{% for m in messages %}{{ strftime_now('%d') }}{{ m['content'] }}{% endfor %}", "cannot be rendered"),
        ("{% for m in messages %}{{ m['content'] | replace('<b>', '') }};{% endfor %}", "not a sequence of one text"),
        ("{% for m in messages", "not valid Jinja"),
        ("{% for m in messages %}{{ m['content'] | replace('\n', '') }};{% endfor %}", "whitespace .* role 'system'"),
        ("{% for m in messages %}{{ m['content'].lstrip() }};{% endfor %}", "changes the whitespace around a message"),
        ("{{ raise_exception('never') }}", "cannot be rendered: never"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
        (  # system messages inside of the last user message
            "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
            "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
            "[INST] {{ s + ' ' if loop.last and s else '' }}{{ m['content'] }} [/INST]{% endfor %}",
            ".",
        ),
    ],
)
def test_a_template_that_is_not_made_of_parts_is_an_error_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        convert(text, SPECIAL)


def test_the_template_is_found_in_either_file(tmp_path: Path) -> None:
    folder = FolderFiles(tmp_path)
    assert read_chat_template(folder) is None
    settings = {"chat_template": CHATML, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_chat_template(folder) == convert(CHATML, {})
    named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": LLAMA3}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert read_chat_template(folder) == convert(LLAMA3, SPECIAL)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert read_chat_template(folder) == convert(CHATML, {})
    assert "chat_template.jinja" in folder.files


def test_a_special_token_inside_of_the_first_user_message_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(LLAMA2)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL))
    folder = FolderFiles(tmp_path)
    assert read_chat_template(folder, ["<s>"]) is not None
    with pytest.raises(ChatTemplateError, match="the special token <<SYS>> follows the system message"):
        read_chat_template(folder, ["<s>", "<<SYS>>"])
