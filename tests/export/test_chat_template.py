"""Conversion of Jinja chat templates to parts, for the formats of well-known models."""

import json
from pathlib import Path
from typing import Any

import pytest

from export.chat_template import ChatTemplateError, convert, read_chat_template
from export.checkpoint import FolderFiles
from service.bundle import ChatTemplate

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


def test_a_format_becomes_one_text_for_each_role() -> None:
    start, end = "<|im_start|>", "<|im_end|>\n"
    parts: dict[str, Any] = {
        "user": f"{start}user\n{{}}{end}",
        "assistant": f"{start}assistant\n{{}}{end}",
        "reply": f"{start}assistant\n",
        "system": f"{start}system\n{{}}{end}",
    }
    assert convert(CHATML, SPECIAL) == ChatTemplate(**parts)
    assert convert(WITH_DEFAULT, SPECIAL) == ChatTemplate(**parts, default_system="You are helpful.")


def test_the_first_text_and_trimmed_messages_are_supported() -> None:
    template = convert(LLAMA3, SPECIAL)
    assert template.begin == "<s>" and template.user == "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    assert template.system == "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"


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
