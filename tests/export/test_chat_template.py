"""Conversion of Jinja chat templates to parts, for the formats of well-known models."""

import json
from datetime import datetime, tzinfo
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from sightline.base.bundle import ChatTemplate, Thinking
from sightline.base.text import chat_prompt
from sightline.base.text.chat_prompt import apply_chat_template
from sightline.base.text.jinja import ChatTemplateError
from sightline.base.text.tokenizer import TextTokenizer
from sightline.export.sources.chat_parts import convert, read_chat_template
from sightline.export.sources.opened_checkpoint import FolderFiles
from tests.base.text.kinds import byte_fallback, byte_level
from tests.export.chat_templates import (
    CHANNELS,
    CHAT_MODELS,
    CHATML,
    ENDED,
    KEEPS_LAST_THINKING,
    LLAMA2,
    LLAMA3,
    MISTRAL,
    NO_SYSTEM,
    NO_THINKING,
    PREFIXED,
    SPECIAL,
    SWITCHED,
    SYSTEM_LAST,
    TEMPLATES,
    UNBROKEN_END,
    WITH_DATE,
    WITH_DEFAULT,
)
from tests.support.dialogues import in_turn

DIALOGUES: list[tuple[list[str], list[str]]] = [
    ([], ["A man in a blue shirt"]),
    ([], [" \nHi!  ", "\n\nThe dog.\t", "  "]),
    (["  Be brief. \n"], ["\n  a ladder\n", " ok \n", "<b>the cat's food</b>\n\n"]),
    ([], ["Why?", "<think>\nFirst\n</think>\n\nBecause.", "And?", "", "x"]),
    (["x"], ["a", "<think>b</think>c", "<tool_response>5</tool_response>", "d", "<tool_response>\n</tool_response>"]),
    (["one", "two"], ["a"]),
    ([], ["a", "b", "c", "ok"]),
    (["Be brief."], ["a", "", "c", " ok"]),
    (["x y\n" * 2000], ["long " * 5000, "<think>" + "t" * 5000 + "</think>r", "\n"]),
    ([], ["a", "<think>\nFirst\n</think>\n\nBecause."]),
]


@cache
def converted(text: str) -> ChatTemplate:
    return convert(text, SPECIAL)


def test_a_format_becomes_one_text_for_each_role() -> None:
    start, end = "<|im_start|>", "<|im_end|>\n"
    parts: dict[str, Any] = {
        "user": f"{start}user\n{{}}{end}",
        "assistant": f"{start}assistant\n{{}}{end}",
        "reply": f"{start}assistant\n",
        "system": f"{start}system\n{{}}{end}",
        "add_special_tokens": False,
    }
    assert converted(CHATML) == ChatTemplate(**parts)
    assert converted(WITH_DEFAULT) == ChatTemplate(**parts, default_system="You are helpful.")


def test_the_first_text_and_trimmed_messages_are_supported() -> None:
    template = converted(LLAMA3)
    assert template.begin == "<s>" and template.user == "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    assert template.system == "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"
    assert template.trim == ("system", "user", "assistant")
    assert converted(MISTRAL).trim == ("assistant",)
    assert converted(CHATML).trim == ()


def test_thinking_and_dates_are_fields_of_the_template() -> None:
    template = converted(KEEPS_LAST_THINKING)
    assert template.thinking == Thinking(
        strip="\n", is_kept=True, tool_response=("<tool_response>", "</tool_response>")
    )
    assert template.continued == "<|im_start|>assistant\n<think>\n\n</think>\n\n{}<|im_end|>\n"
    assert converted(NO_THINKING).thinking == Thinking()
    assert converted(NO_THINKING).later_system == "\n\n{}"
    dated = converted(WITH_DATE)
    assert dated.system is not None and "Today Date: {now:%d %b %Y}\n\n{}" in dated.system
    assert dated.later_system == "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"
    assert converted(CHANNELS).begin == "<|start|>system<|message|>Current date: {now:%Y-%m-%d}<|end|>"
    assert not converted(PREFIXED).trim_system_in_user


def test_a_template_that_drops_system_messages_supports_one() -> None:
    drops_first = "{% if messages[1:] and messages[1].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    text = drops_first + CHATML
    assert converted(text).one_system


def test_a_system_message_can_be_part_of_the_first_user_message() -> None:
    template = converted(LLAMA2)
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
    names = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    names += ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]"]
    # Those of Phi-3.5 absorb the line break after them.
    added = [AddedToken(name, special=True, normalized=False, rstrip=name == "<|end|>") for name in names]
    tokenizer.add_special_tokens(added)
    return tokenizer


TOKENIZERS = {"metaspace first": metaspace_first, "byte fallback": byte_fallback, "byte level": byte_level}


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
    for module in (chat_template_utils, chat_prompt):
        monkeypatch.setattr(module, "datetime", FixedClock)
    template, compared = converted(text), 0
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


def test_the_templates_of_well_known_repositories_are_compared_or_refused() -> None:
    """The table of repositories has these answers."""
    repositories = {path.stem.replace("--", "/") for path in Path("tests/data/configs").iterdir()}
    assert set(CHAT_MODELS) <= repositories
    refused = {name: text for name, text in CHAT_MODELS.items() if text not in TEMPLATES.values()}
    assert refused == {"HuggingFaceTB/SmolLM3-3B": SWITCHED}
    with pytest.raises(ChatTemplateError, match="changes the whitespace around a message of the role 'system'"):
        convert(SWITCHED, SPECIAL)


class FixedClock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "FixedClock":
        return cls(2026, 3, 5, 7, 8, 9, tzinfo=tz)


def test_a_dialogue_without_a_generation_prompt_may_end_differently() -> None:
    template = converted(ENDED)
    assert (template.begin, template.reply) == ("", "<|assistant|>\n")
    assert (template.user, template.assistant) == ("<|user|>\n{}<|end|>\n", "<|assistant|>\n{}<|end|>\n")
    template = converted(UNBROKEN_END)
    assert (template.begin, template.user) == ("<s>", "<|user|>\n{}\n")
    assert template.assistant == "<|assistant|>\n{}</s>\n"


def test_a_system_message_can_be_part_of_the_last_user_message() -> None:
    template = converted(SYSTEM_LAST)
    assert (template.system_in_user, template.system_in_last) == ("{}\n\n", True)
    assert (template.begin, template.user, template.trim) == ("<s>", "[INST] {}[/INST]", ("assistant",))
    assert not converted(LLAMA2).system_in_last


def test_a_format_without_system_messages_has_none() -> None:
    template = converted(NO_SYSTEM)
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
        # The dialogue that would tell both ends of a message apart is rejected.
        (
            MISTRAL.replace("trim + eos_token", "trim + (eos_token if loop.last else '\n')"),
            "text after a reply depends",
        ),
        (MISTRAL + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", "text after a user message depends"),
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


@pytest.mark.parametrize(
    "condition",
    [
        "'</think>' in messages[1].content",
        "not messages[1].content",
        "messages[0].role == 'system' and messages | length > 5",
        "messages[0].role == 'system' and messages[-1].role == 'assistant'",
        "'<tool_response>' in messages[-1].content",
        "messages[-1].content | length > 90000",
    ],
)
def test_a_difference_in_one_kind_of_dialogue_is_found(condition: str) -> None:
    text = f"{{% if messages[1:] and {condition} %}}{{{{ '!' }}}}{{% endif %}}{SYSTEM_LAST}"
    with pytest.raises(ChatTemplateError, match="not a sequence of one text"):
        convert(text, SPECIAL)


def test_the_template_is_found_in_either_file(tmp_path: Path) -> None:
    folder = FolderFiles(tmp_path)
    assert read_chat_template(folder) is None
    settings = {"chat_template": CHATML, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_chat_template(folder) == convert(CHATML, {})
    named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": LLAMA3}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert read_chat_template(folder) == converted(LLAMA3)
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
