"""Conversion of Jinja chat templates to parts, for the formats of well-known models."""

import json
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from export.sources.chat_template import ChatTemplateError, convert, read_chat_template
from export.sources.checkpoint import FolderFiles
from service.bundle import ChatTemplate, Thinking
from service.text import chat
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
# In the form of Qwen 3: replies before the last question lose their thinking, and later ones get it
# in a fixed form.
KEEPS_LAST_THINKING = """{%- set at = namespace(question=messages|length - 1, found=false) %}
{%- for m in messages|reverse %}
    {%- set is_response = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') %}
    {%- if m.role == 'user' and not at.found and not is_response %}
        {%- set at.found = true %}{%- set at.question = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content %}{%- set thought = '' %}
    {%- if m.role == 'assistant' and '</think>' in m.content %}
        {%- set text = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > at.question and (loop.last or thought) %}
        {{- '<think>\n' + thought + '\n</think>\n\n' + text.lstrip('\n') }}
    {%- else %}{{- text }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# In the form of DeepSeek R1: no reply has its thinking, and system messages are joined.
NO_THINKING = """{{ bos_token }}{% for m in messages if m.role == 'system' %}
{{- ('' if loop.first else '\n\n') + m.content }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
# In the form of Llama 3.2: the first message has the date, later system messages have none.
WITH_DATE = """{{- bos_token }}
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- set has_system = messages[0].role == 'system' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + today + '\n\n' }}
{{- messages[0].content | trim if has_system else '' }}{{- '<|eot_id|>' }}
{%- if tools is not none %}{{ raise_exception('no tools') }}{%- endif %}
{%- for m in messages[1 if has_system else 0:] %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
# In the form of gpt-oss: a date in the first message, and another end of the last reply.
CHANNELS = """{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- '<|start|>developer<|message|># Instructions\n\n' + m.content + '<|end|>' }}
    {%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
# In the form of Gemma 3: the system message precedes the first user message, and only that is
# trimmed.
PREFIXED = """{{ bos_token }}
{%- set has_system = messages[0].role == 'system' %}
{%- for m in (messages[1:] if has_system else messages) %}
    {%- if (m.role == 'user') == (loop.index0 % 2 == 1) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('user' if m.role == 'user' else 'model') + '\n' }}
    {{- messages[0].content + '\n\n' if has_system and loop.first else '' }}
    {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
DIALOGUES: list[tuple[list[str], list[str]]] = [
    ([], ["A man in a blue shirt"]),
    ([], [" \nHi!  ", "\n\nThe dog.\t", "  "]),
    (["  Be brief. \n"], ["\n  a ladder\n", " ok \n", "<b>the cat's food</b>\n\n"]),
    ([], ["Why?", "<think>\nFirst\n</think>\n\nBecause.", "And?", "", "x"]),
    (["x"], ["a", "<think>b</think>c", "<tool_response>5</tool_response>", "d", "<tool_response>\n</tool_response>"]),
    (["one", "two"], ["a"]),
    ([], ["a", "b", "c", "ok"]),
    ([], ["a", "<think>\nFirst\n</think>\n\nBecause."]),
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


def test_thinking_and_dates_are_fields_of_the_template() -> None:
    template = convert(KEEPS_LAST_THINKING, SPECIAL)
    assert template.thinking == Thinking(
        strip="\n", is_kept=True, tool_response=("<tool_response>", "</tool_response>")
    )
    assert template.continued == "<|im_start|>assistant\n<think>\n\n</think>\n\n{}<|im_end|>\n"
    assert convert(NO_THINKING, SPECIAL).thinking == Thinking()
    assert convert(NO_THINKING, SPECIAL).later_system == "\n\n{}"
    dated = convert(WITH_DATE, SPECIAL)
    assert dated.system is not None and "Today Date: {now:%d %b %Y}\n\n{}" in dated.system
    assert dated.later_system == "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"
    assert convert(CHANNELS, SPECIAL).begin == "<|start|>system<|message|>Current date: {now:%Y-%m-%d}<|end|>"
    assert not convert(PREFIXED, SPECIAL).trim_system_in_user


def test_a_template_that_drops_system_messages_supports_one() -> None:
    drops_first = "{% if messages[1:] and messages[1].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    text = drops_first + CHATML
    assert convert(text, SPECIAL).one_system


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
    "keeps last thinking": KEEPS_LAST_THINKING, "no thinking": NO_THINKING, "date": WITH_DATE, "channels": CHANNELS,
    "prefixed": PREFIXED,
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_served_prompts_are_those_of_transformers(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers add a start token to a text, which must not be there twice."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    text, tokenizer = TEMPLATES[name], TextTokenizer(with_special_tokens(TOKENIZERS[kind]()))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=with_special_tokens(TOKENIZERS[kind]()), bos_token="<s>", eos_token="</s>", chat_template=text
    )
    for module in (chat_template_utils, chat):
        monkeypatch.setattr(module, "datetime", FixedClock)
    template, compared = convert(text, SPECIAL), 0
    for system, turns in DIALOGUES:
        if system and name in ("Mistral", "no system"):
            continue
        messages = [{"role": "system", "content": text} for text in system]
        messages += [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
        continues = len(turns) % 2 == 0
        try:
            expected = fast.apply_chat_template(
                messages,
                tokenize=True,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                return_dict=False,
            )
        except (TemplateError, ValueError):  # two system messages, or a reply to continue that has been changed
            continue
        compared += 1
        assert apply_chat_template(template, system, in_turn(*turns), tokenizer).encode(tokenizer) == expected
    assert compared >= 4


class FixedClock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "FixedClock":
        return cls(2026, 3, 5, 7, 8, 9, tzinfo=tz)


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
        ("{{ strftime_now('%099999d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "format of the time"),
        (  # another text in each month
            "{% for m in messages %}{{ 'x' if strftime_now('%m') == '07' else 'y' }}{{ m['content'] }};{% endfor %}",
            "changes the whitespace|not a sequence",
        ),
        ("{% for m in messages %}{{ m['content'].split('</think>')[-1] ~ ';' }}{% endfor %}", "not a sequence of one"),
        ("{% for m in messages %}{{ m['content'].split('/no_think')[0] ~ ';' }}{% endfor %}", "not a sequence of one"),
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
