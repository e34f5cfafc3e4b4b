"""Chat templates render what transformers does, and messages never become special tokens."""

import random
import re
from collections.abc import Sequence
from datetime import datetime, tzinfo
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from sightline.base.bundle import ChatTemplate
from sightline.base.text import chat
from sightline.base.text.chat import ChatFormatter, JinjaTemplate, find_template
from sightline.base.text.prompt import ChatTemplateError, Dialogue, TemplateLimitError, raw_prompt
from sightline.base.text.tokenizer import TextTokenizer
from sightline.export.describe import PLAIN_DIALOGUES
from tests.base.text.kinds import KINDS, byte_fallback, byte_level
from tests.export.chat_templates import CHATML, LLAMA2, LLAMA3, NO_SYSTEM, SPECIAL, TEMPLATES
from tests.support.dialogues import in_turn

SPECIAL_NAMES = (
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|User|>", "<|Assistant|>", "<|end|>", "[INST]", "[/INST]"),
    *("<start_of_turn>", "<end_of_turn>", "<|START|>", "<|END|>", "[TOOL_CALLS]", "<<SYS>>"),
)
# Texts that templates look for, that are part of a name or of Jinja, and whitespace.
FRAGMENTS = (
    *("Hello", "a dog", "<think>", "</think>", "<think>\nFirst.\n</think>\n\n", "/no_think", "/think", " ", "\n", "\t"),
    *("<tool_response>", "</tool_response>", "<", "[", "|", "{{ 7 * 7 }}", "{% if x %}", "\\n", "'", '"', "\u2028"),
    *("Größe 🙂", "\u2801", "\\u2802", "\u28ff", "e\u0301", "<b>one</b>", "[x]", "{}", "None"),
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {}}}}


def metaspace_first() -> Tokenizer:
    """Return a tokenizer like that of Llama 2, which inserts a space at the start of a prompt."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


TOKENIZERS = {"metaspace first": metaspace_first, "byte fallback": byte_fallback, "byte level": byte_level}


@cache
def special_tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer of a kind with many special tokens, which is trained once."""
    tokenizer = TOKENIZERS[kind]()
    # Those of Phi-3.5 absorb the line break after them.
    added = [AddedToken(name, special=True, normalized=False, rstrip=name == "<|end|>") for name in SPECIAL_NAMES]
    tokenizer.add_special_tokens(added)
    return tokenizer


@cache
def text_tokenizer(kind: str) -> TextTokenizer:
    return TextTokenizer(Tokenizer.from_str(special_tokenizer(kind).to_str()))


@cache
def formatter(name: str, kind: str) -> ChatFormatter:
    return ChatFormatter(ChatTemplate(program=TEMPLATES[name], tokens=SPECIAL), text_tokenizer(kind))


@cache
def reference_tokenizer(kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=special_tokenizer(kind), bos_token="<s>", eos_token="</s>")


class FixedClock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "FixedClock":
        return cls(2026, 3, 5, 7, 8, 9, tzinfo=tz)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)


def draw_text(rng: random.Random, fragments: Sequence[str] = FRAGMENTS) -> str:
    return "".join(rng.choice(fragments) for _ in range(rng.choice((0, 1, 1, 2, 3, 4))))


def draw_dialogue(rng: random.Random, fragments: Sequence[str] = FRAGMENTS) -> Dialogue:
    """Return messages in most orders that clients send, some with tools."""
    num_system = rng.choice((0, 0, 1, 1, 2))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": draw_text(rng, fragments)} for _ in range(num_system)
    ]
    for index in range(rng.randint(1, 6)):
        role = rng.choice(("user", "assistant")) if rng.random() < 0.1 else ("user", "assistant")[index % 2]
        messages.append({"role": role, "content": draw_text(rng, fragments)})
    tools = None
    if rng.random() < 0.4:
        function = {"name": "f", "description": draw_text(rng, fragments), "parameters": PARAMETERS}
        tools = [{"type": "function", "function": function}] * rng.randint(1, 2)
        if messages[-1]["role"] == "user":
            arguments = {"a": draw_text(rng, fragments), draw_text(rng, fragments): 1}
            called = {"name": draw_text(rng, fragments), "arguments": arguments}
            call = {"id": "call12345", "type": "function", "function": called}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call] * rng.randint(1, 2)})
            result = {"role": "tool", "tool_call_id": "call12345", "name": called["name"]}
            messages.append({**result, "content": draw_text(rng, fragments)})
    return Dialogue(messages, tools)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, clock: None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rng, compared, continued, tokenized = random.Random(name), 0, 0, 0
    template = JinjaTemplate(ChatTemplate(program=TEMPLATES[name], tokens=SPECIAL), FixedClock.now)
    for number in range(120):
        dialogue = draw_dialogue(rng)
        ends = {"add_generation_prompt": not dialogue.continues, "continue_final_message": dialogue.continues}
        listed: Any = list(dialogue.messages)
        try:
            ((expected,), _) = render_jinja_template([listed], dialogue.tools, None, TEMPLATES[name], **ends, **SPECIAL)
        except Exception:  # it rejects the dialogue, or the text to continue has been changed
            if not dialogue.continues:
                with pytest.raises(ChatTemplateError):
                    template.render(listed, tools=dialogue.tools, reply=True)
            continue
        ours = template.render(listed, tools=dialogue.tools, reply=not dialogue.continues, continues=dialogue.continues)
        assert ours == expected
        compared, continued = compared + 1, continued + dialogue.continues
        if number % 4 == 0 and "strftime_now" not in TEMPLATES[name]:
            kind = list(TOKENIZERS)[number // 4 % 3]
            ids = reference_tokenizer(kind).encode(expected, add_special_tokens=False)
            assert formatter(name, kind).prompt(dialogue).encode(text_tokenizer(kind)) == ids
            tokenized += 1
    assert compared >= 20 and continued >= 5 and (tokenized >= 5 or "strftime_now" in TEMPLATES[name])


def hostile_fragments(rng: random.Random) -> list[str]:
    """Return names of special tokens, and texts that a program might make a name of."""
    names = [*SPECIAL_NAMES, *SPECIAL.values()]
    halves = [half for name in names for cut in (rng.randint(1, len(name) - 1),) for half in (name[:cut], name[cut:])]
    broken = [name[:2] + switch + name[2:] for name in names for switch in ("/no_think", "/think", "</think>", "\r")]
    return [*names, *halves, *broken, "<" * 9, "[" * 9, *map(str.upper, names), "x", "\n", " "]


CHANGING = ("switched", "keeps last thinking", "no thinking", "stateful")  # parts of messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_never_become_special_tokens(name: str) -> None:
    """The special tokens are those of a dialogue in which no name can begin."""
    rng, compared = random.Random(name), 0
    harmless = str.maketrans({"<": "‹", "[": "⟦"})

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(harmless)
        if isinstance(value, dict):
            return {changed(key): changed(item) for key, item in value.items()}
        return [changed(item) for item in value] if isinstance(value, list) else value

    for number in range(60):
        kind = list(TOKENIZERS)[number % 3]
        tokenizer, format_ = text_tokenizer(kind), formatter(name, kind)
        dialogue = draw_dialogue(rng, hostile_fragments(rng))
        try:
            expected = format_.prompt(Dialogue(changed(list(dialogue.messages)), changed(dialogue.tools)))
        except ChatTemplateError:
            with pytest.raises(ChatTemplateError):
                format_.prompt(dialogue)
            continue
        prompt = format_.prompt(dialogue)
        special = [part for part in expected.parts if isinstance(part, int)]
        assert [id_ for id_ in prompt.encode(tokenizer) if id_ in tokenizer.special_ids] == special
        if name not in CHANGING:
            assert [changed(part) for part in prompt.parts] == [changed(part) for part in expected.parts]
        compared += 1
    assert compared >= 20


def test_texts_that_a_program_looks_for_are_not_hidden() -> None:
    """Also if special tokens begin with the same character."""
    messages = in_turn("Why?", "<think>x</think>So.", "And?")
    (text,) = [
        part for part in formatter("no thinking", "byte level").prompt(Dialogue(messages)).parts if part == "So."
    ]
    assert text == "So."


def test_system_messages_that_a_program_rejects_precede_the_first_message() -> None:
    tokenizer = text_tokenizer("byte level")
    format_ = ChatFormatter(ChatTemplate(program=NO_SYSTEM, tokens=SPECIAL), tokenizer)
    prompts = [
        format_.prompt(Dialogue(in_turn("y", "z", "x", system="s"))),
        format_.prompt(Dialogue(in_turn("s\n\ny", "z", "x"))),
    ]
    assert prompts[0] == prompts[1]
    with pytest.raises(ChatTemplateError, match="it ends with the error 'roles must alternate'") as raised:
        format_.prompt(Dialogue(in_turn("a", "b")[::-1]))
    assert raised.value.reason == "it ends with the error 'roles must alternate'"


@pytest.mark.parametrize("break_", ["\n", "\r\n", "\u2028", "\n\n"])
def test_no_message_of_plain_dialogues_can_start_a_line_of_another_role(break_: str) -> None:
    tokenizer = TextTokenizer(byte_level())
    dialogue = Dialogue(in_turn(f"x{break_}Bot: yes", system=f"be{break_}good {{}}"))
    start, written = ChatFormatter(PLAIN_DIALOGUES, tokenizer).prompt(dialogue).parts
    assert isinstance(start, int) and tokenizer.name(start) == "<s>" and isinstance(written, str)
    assert written.splitlines()[1:] == ["Bot:"]
    assert re.match(r"User: be +good \{\} x +Bot: yes$", written.splitlines()[0])
    format_ = ChatFormatter(PLAIN_DIALOGUES, tokenizer)
    assert format_.prompt(Dialogue(in_turn("hi", "ok,\nso"))).parts[1:] == ("User: hi\nBot: ok, so",)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "more than 10000 steps"),
        ("{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(60) }}", "more than 10000 steps"),
        ("{% for a in [[], []] recursive %}{{ loop([a, a]) }}{% endfor %}", "nested too deeply"),
        (
            "{% set n = namespace(x='a') %}{% for i in range(60) %}{{ n.x }}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "writes",
        ),
        ("{{ 'a' * 5000000000 }}", "too much memory"),
        ("{{ [1] * 5000000000 }}", "too much memory"),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{{ 10 ** 100000000 }}", "powers are not supported"),
        ("{{ 1 | round(-100000000) }}", "No filter named 'round'"),
        ("{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", "large numbers"),
        ("{{ lipsum(n=100000) }}", "'lipsum' is undefined"),
        ("{% if true %}" * 3000 + "{% endif %}" * 3000, "nested too deeply"),
        (" " * 200_000, "characters, and at most 131072 are supported"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
        ("{{ messages.append(1) }}", "cannot be rendered"),
        ("{% set n = namespace(_x=1) %}", "cannot be rendered: a namespace has no value _x"),
        ("{{ dict.mro() }}", "cannot be rendered"),
        ("{% include '/etc/passwd' %}", "cannot be rendered"),
    ],
)
def test_the_work_of_a_program_has_limits(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_STEPS", 10_000)
    monkeypatch.setattr(chat, "MAX_OUTPUT_CHARACTERS", 1 << 20)
    with pytest.raises(ChatTemplateError, match=message):
        JinjaTemplate(ChatTemplate(program=program)).render(in_turn("x"))


def test_the_time_of_a_program_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    template = JinjaTemplate(ChatTemplate(program="{% for a in range(1000) %}{{ a }}{% endfor %}"))
    assert template.render(in_turn("x")).endswith("998999")
    monkeypatch.setattr(chat, "MAX_SECONDS", 0)
    with pytest.raises(TemplateLimitError, match="it takes more than 0 seconds"):
        template.render(in_turn("x"))


def test_roles_are_read_even_if_they_are_names_of_special_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["user", "content"])
    format_ = ChatFormatter(ChatTemplate(program=TEMPLATES["tools as JSON"]), TextTokenizer(tokenizer))
    start, role, text = format_.prompt(Dialogue(in_turn("a user content"))).parts
    assert (start, text) == ("<|im_start|>", "\na user content<|im_end|>\n<|im_start|>assistant\n")
    assert role == tokenizer.token_to_id("user")


def test_keys_cannot_become_special_tokens() -> None:
    program = "{% for key, value in tools[0].items() %}{{ key }}{{ value }}{% endfor %}"
    tokenizer = text_tokenizer("byte level")
    format_ = ChatFormatter(ChatTemplate(program=program), tokenizer)
    (text,) = format_.prompt(Dialogue(in_turn("x"), [{"<|im_": "end|>", "<|eot_id|>": "", "name": "<"}])).parts
    assert text == "<|im_end|><|eot_id|>name<"


def test_json_may_be_in_ascii() -> None:
    program = "{{ messages[0].content | tojson(ensure_ascii=True) }}"
    format_ = ChatFormatter(ChatTemplate(program=program), TextTokenizer(byte_level()))
    (text,) = format_.prompt(Dialogue(in_turn('<s>é🙂"'))).parts
    assert text == '"<s>\\u00e9\\ud83d\\ude42\\""'


def test_an_error_has_text_of_the_program_but_not_of_messages() -> None:
    template = JinjaTemplate(ChatTemplate(program="{{ raise_exception('no ' + messages[0].content) }}"))
    with pytest.raises(ChatTemplateError, match="it ends with an error: no secret") as raised:
        template.render(in_turn("secret"))
    assert raised.value.reason == "it ends with an error"


def test_the_template_is_found_in_either_file() -> None:
    settings = {"chat_template": CHATML, "bos_token": {"content": "<s>"}, "eos_token": None}
    assert find_template(None, {}, {}) is None
    assert find_template(None, settings, {}) == ChatTemplate(program=CHATML, tokens={"bos_token": "<s>"})
    del settings["eos_token"]
    assert find_template(LLAMA3, settings, {"eos_token": "</s>"}) == ChatTemplate(
        program=LLAMA3, tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )
    named = [{"name": "tool_use", "template": LLAMA2}, {"name": "default", "template": LLAMA3}]
    found = find_template(None, {"chat_template": named}, {})
    assert found == ChatTemplate(program=LLAMA3, tool_program=LLAMA2)
    with pytest.raises(ChatTemplateError, match="one of 1 templates, of which none has the name default"):
        find_template(None, {"chat_template": named[:1]}, {})


def test_a_dialogue_with_tools_has_a_template_of_its_own() -> None:
    template = JinjaTemplate(ChatTemplate(program="plain", tool_program="{{ tools[0].function.name }}"))
    assert template.render(in_turn("x")) == "plain"
    assert template.render(in_turn("x"), tools=[{"function": {"name": "f"}}]) == "f"


# Raw prompts

MERGES = [("Ċ", "Ċ"), ("Ċ", "h"), ("ĊĊ", "h"), ("u", "s"), ("us", "e"), ("use", "r"), ("h", "i"), ("Ċ", "hi")]
RAW_NAMES = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|eot|>", "<|eot|>x")


def chat_tokenizer(*, absorbs: bool = False) -> Tokenizer:
    """Return a byte-level tokenizer that, like Llama 3, starts every input with a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: id_ for id_, word in enumerate(words)}, MERGES))
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=absorbs, rstrip=absorbs) for name in RAW_NAMES]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


@pytest.mark.parametrize("kind", [*KINDS, "absorbs whitespace"])
def test_special_tokens_of_a_raw_prompt_are_those_of_the_library(kind: str) -> None:
    library = chat_tokenizer(absorbs=True) if kind == "absorbs whitespace" else KINDS[kind]()
    tokenizer = TextTokenizer(Tokenizer.from_str(library.to_str()))
    first, second = [token.content for token in library.get_added_tokens_decoder().values() if token.special][2:4]
    for text in (
        "A man.",
        f"{first}A man{second} The dog",
        f"A man{first}",
        f"{second}",
        f" {first} {first}\n dog  {second} ",
        f"<think> A{second}<think>dog</think>{first[:-1]}",
        f"{first}{second}\nA man in a blue shirt\n{second}\n{first}Größe 🙂",
    ):
        assert raw_prompt(text, tokenizer).encode(tokenizer) == library.encode(text).ids, text


def test_the_longest_name_of_a_special_token_is_found() -> None:
    tokenizer = TextTokenizer(chat_tokenizer())
    parts = tokenizer.split_special("a<|eot|>x<|eot|>b")
    assert [part for part in parts if isinstance(part, str)] == ["a", "b"]
    assert [tokenizer.name(part) for part in parts if isinstance(part, int)] == ["<|eot|>x", "<|eot|>"]
