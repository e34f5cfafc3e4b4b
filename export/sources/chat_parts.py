"""Conversion of the Jinja chat template of a checkpoint to the parts of a manifest.

The template is rendered in a sandbox with placeholder messages, and cut at the placeholders.
Messages with whitespace around them show whether the template removes it. Then many dialogues are
rendered with both the template and, by the code of the service, the parts. A template whose output
depends on more, such as one that changes messages in another way, cannot be converted.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, get_args

from pydantic import ValidationError

from sightline.base.bundle import NOW, ChatRole, ChatTemplate, PairTemplate, Thinking
from sightline.base.text.chat_prompt import Turn, format_dialogue
from sightline.base.text.jinja import ChatTemplateError, JinjaTemplate, find_template
from sightline.export.sources.opened_checkpoint import FolderFiles

Message = dict[str, str]
SYSTEM, REPLY_ROLE = "system", "assistant"
# Placeholders without spaces at their ends, because many templates strip messages.
PLACEHOLDERS = ("[[first message]]", "[[second message]]", "[[third message]]", "[[system message]]")
COMPARED: tuple[tuple[str, ...], ...] = (
    ("Hello!", "Good morning. How are you?", "Tell me about 3 cities.", "Well: <b>one</b>", "No.\n\nTwo lines."),
    ("x", "y", "x", "y", "x"),
    ("  Hello!\n", "\n\nGood morning. ", " \tTell me more.  ", "Well,\n\n", "\nNo. "),
    ("x", "", "y", " \n", "z"),
    ("Why?", "<think>\nFirst.\n</think>\n\nBecause.", "And?", "<think>\n\n</think>\n\n\nSo.", "x"),
    ("x", "<think>a</think>b</think>\nc", "<think>y</think>", " </think> z", "<think>"),
    ("<tool_response>\n5\n</tool_response>", "<think>t</think>ok", "<tool_response>6</tool_response>", "<think>", "x"),
    ("x", "<think>\nt\n</think>\n\nok", "<tool_response>6</tool_response>", "t</think>ok", "<tool_response>"),
    ("x", '<tool_call>\n{"name": "f"}\n</tool_call>', "<tool_response>\n{}\n</tool_response>", "t</think>ok",
     "<tool_response>\n\n</tool_response>"),
    ("{{ 7 * 7 }}{% if x %} {}", "\\n\u2028\x00'\"", "Größe 🙂 e\u0301", "[INST] <<SYS>> [/INST]", "/no_think /think"),
    ("long " * 20_000, "<think>" + "t" * 50_000 + "</think>" + "r" * 50_000, "x", "y\n" * 20_000, "z" * 100_000),
)  # fmt: skip
SYSTEM_MESSAGES = ("Answer briefly,\nplease.", "/no_think", "  <think>x</think>\n{} \n")
# Dialogues that many templates reject: messages of one role in a row.
IRREGULAR: tuple[tuple[str, ...], ...] = (
    ("user", "user", "assistant", "assistant", "user"),
    ("system", "system", "user"),
    ("system", "system", "system", "user", "assistant", "user"),
)
# Dialogues whose last message the model continues.
CONTINUED: tuple[tuple[str, ...], ...] = (
    ("user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant", "assistant"),
    ("system", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
)
REPLIES = ("ok", "  y\n", "\n\nz", "<think>\nt\n</think>\n\nok", "<think>t</think>ok", "", "<think>t")
# Treatments of thinking: of Qwen 3, of QwQ, and of DeepSeek R1.
TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
THINKING = (
    Thinking(strip="\n", is_kept=True, tool_response=TOOL_RESPONSE),
    Thinking(strip="\n", is_kept=True),
    Thinking(strip="\n"),
    Thinking(),
)
# Times that differ in each field; in one, no number has a leading zero.
TIMES = (datetime(2024, 7, 26, 9, 5, 3), datetime(2031, 12, 13, 23, 45, 59), datetime(2027, 3, 1))
TAG = "[[end of the last message]]"
AFTER_USER = "the text after a user message depends on the next message"
AFTER_REPLY = "the text after a reply depends on the next message"
PADDED = " \n{} \n"  # a message with whitespace around it


def read_chat_template(folder: FolderFiles, special_tokens: Collection[str] = ()) -> ChatTemplate | None:
    """Convert the chat template of a checkpoint; return None if it has none.

    Raises `ChatTemplateError` if it cannot be converted.
    """
    renderer = _renderer(folder)
    if renderer is None:
        return None
    template = _convert(renderer)
    for token in special_tokens:  # the service tokenizes messages as plain text
        if token in (template.system_in_user or ""):
            raise ChatTemplateError(f"the special token {token} follows the system message in the first user message")
    return template


def _renderer(folder: FolderFiles) -> "_Renderer | None":
    """Compile the chat template of a checkpoint; return None if it has none."""
    settings = folder.json("tokenizer_config.json")
    special = folder.json("special_tokens_map.json")
    template = find_template(
        folder.text("chat_template.jinja"),
        settings if isinstance(settings, dict) else {},
        special if isinstance(special, dict) else {},
    )
    return None if template is None else _Renderer(*template)


class _SplitError(ChatTemplateError):
    """A rendered dialogue cannot be split at its messages."""


class _Renderer(JinjaTemplate):
    """A compiled template."""

    def __init__(self, text: str, special: Mapping[str, str]) -> None:
        super().__init__(text, special, self._now)
        self.now: datetime | None = None  # None: texts have the format in place of the time

    def _now(self, format_: str) -> str:
        marker = f"{{now:{format_}}}"
        if not re.fullmatch(NOW, marker):
            self.fail(f"the format of the time {format_[:100]!r} is not supported")
        return marker if self.now is None else self.now.strftime(format_)


def convert(text: str, special: Mapping[str, str]) -> ChatTemplate:
    """Convert a template in Jinja, or raise `ChatTemplateError`.

    `special` has special tokens by their names in templates, such as "eos_token".
    """
    return _convert(_Renderer(text, special))


def _convert(renderer: _Renderer) -> ChatTemplate:
    template = _with_continued(renderer, _parts(renderer))
    template = template.model_copy(update=_several_systems(renderer, template))
    template = _with_trim(renderer, template)
    reasons = []
    for thinking in (None, *THINKING):
        candidate = template.model_copy(update={"thinking": thinking})
        try:
            _compare(renderer, candidate)
        except _DifferenceError as error:
            reasons.append(error)
        else:
            return candidate
    raise ChatTemplateError(str(reasons[0]))


class _DifferenceError(ValueError):
    """The template and its parts format a dialogue differently; the message describes it."""


def _compare(renderer: _Renderer, template: ChatTemplate) -> None:
    """Raise `_DifferenceError` if a template differs from its parts."""
    for number, messages in enumerate(_dialogues()):
        renderer.now = TIMES[number % len(TIMES)]
        has_system, is_regular = messages[0]["role"] == SYSTEM, _is_regular(messages)
        try:
            expected = _continued(renderer, messages) if messages[-1]["role"] == REPLY_ROLE else None
            expected = renderer.render(messages, reply=True) if expected is None else expected
        except ChatTemplateError:
            # The service puts system messages before the first user message, and accepts messages
            # in an order that the template rejects.
            if not is_regular or (has_system and not _has_system(template)):
                continue
            raise
        is_refused = template.one_system and [message["role"] for message in messages[:2]] == [SYSTEM, SYSTEM]
        if not is_refused and _formatted(template, messages, renderer.now) != expected:
            raise _DifferenceError(f"its output is not a sequence of one text for each message: {_outline(messages)}")


def _is_regular(messages: Sequence[Message]) -> bool:
    turns = messages[messages[0]["role"] == SYSTEM :]
    return all(turn["role"] == ("user", REPLY_ROLE)[index % 2] for index, turn in enumerate(turns)) and (
        turns[-1]["role"] == "user"
    )


def _outline(messages: Sequence[Message]) -> str:
    return ", ".join(f"{message['role']} {message['content'][:40]!r}" for message in messages)


def _continued(renderer: _Renderer, messages: Sequence[Message]) -> str:
    """Render a dialogue that ends within its last message, as Transformers does."""
    *before, last = messages
    text = renderer.render([*before, last | {"content": f"{last['content']}{TAG} "}])
    end = text.rfind(TAG)
    if end < 0 or last["content"].strip() not in text:
        raise ChatTemplateError("it changes or omits the last message")
    return text[:end] if text.startswith(f"{TAG} ", end) else text[:end].rstrip()


def _with_continued(renderer: _Renderer, template: ChatTemplate) -> ChatTemplate:
    """Add the text before a last reply, which the model continues, if it differs from the usual."""
    first, second, _, _ = PLACEHOLDERS
    _, text, _ = _split(renderer.render([_user(first), _assistant(second)]), first, second)
    head, tail = template.assistant.split("{}")
    start = text.removeprefix(template.user.split("{}")[1])
    return template if start == head else template.model_copy(update={"continued": f"{start}{{}}{tail}"})


def _several_systems(renderer: _Renderer, template: ChatTemplate) -> dict[str, Any]:
    """Return the fields of a template for dialogues with several system messages."""
    if template.system is None:
        return {}
    first, second, _, system = PLACEHOLDERS
    messages = [{"role": SYSTEM, "content": system}, {"role": SYSTEM, "content": second}, _user(first)]
    try:
        before, between, after, _ = _split(renderer.render(messages), system, second, first)
    except _SplitError:
        return {"one_system": True}
    except ChatTemplateError:
        return {}
    head, tail = template.system.split("{}")
    user_start = template.user.split("{}")[0]
    if f"{template.begin}{head}" != before or not after.endswith(user_start):
        return {"one_system": True}
    after = after[: len(after) - len(user_start)]
    if not between.startswith(tail):
        return {"one_system": True}
    later = f"{between[len(tail) :]}{{}}{after}"
    return {} if later == template.system else {"later_system": later}


def _parts(renderer: _Renderer) -> ChatTemplate:
    first, second, third, system = PLACEHOLDERS
    start, user_end = _split(renderer.render([_user(first)]), first)
    _, before_reply = _split(renderer.render([_user(first)], reply=True), first)
    _, between_first, between_second, _ = _split(
        renderer.render([_user(first), _assistant(second), _user(third)]), first, second, third
    )
    if not between_first.startswith(user_end):  # a dialogue without a generation prompt ends differently
        user_end = _between_users(renderer, AFTER_USER).removesuffix(start)
    if not between_first.startswith(user_end) or not before_reply.startswith(user_end):
        raise ChatTemplateError(AFTER_USER)
    assistant_start, reply = between_first[len(user_end) :], before_reply[len(user_end) :]
    _, _, assistant_end = _split(renderer.render([_user(first), _assistant(second)]), first, second)
    user_start = between_second.removeprefix(assistant_end)
    if not between_second.startswith(assistant_end) or not start.endswith(user_start):
        # The last reply of a dialogue ends differently.
        user_start = _between_users(renderer, AFTER_REPLY).removeprefix(user_end)
        if not user_start or not between_second.endswith(user_start):
            raise ChatTemplateError(AFTER_REPLY)
        assistant_end = between_second.removesuffix(user_start)
    if not start.endswith(user_start):
        raise ChatTemplateError("the text before the first user message differs from that before the others")
    begin = start[: len(start) - len(user_start)]
    # `apply_chat_template` of Transformers adds no special tokens to the text.
    parts: dict[str, Any] = {"begin": begin, "add_special_tokens": False}
    try:
        rendered = renderer.render([{"role": SYSTEM, "content": system}, _user(first)])
    except ChatTemplateError:
        pass
    else:
        before, after, _ = _split(rendered, system, first)
        parts |= _system_parts(before, after, begin, user_start)
        if "system_in_user" in parts:
            messages = [{"role": SYSTEM, "content": system}, _user(first), _assistant(second), _user(third)]
            parts["system_in_last"] = second in renderer.render(messages).partition(system)[0]
    try:
        return ChatTemplate(
            user=f"{user_start}{{}}{user_end}",
            assistant=f"{assistant_start}{{}}{assistant_end}",
            reply=reply,
            **parts,
        )
    except ValidationError:
        raise ChatTemplateError("it has braces outside of messages") from None


def _between_users(renderer: _Renderer, reason: str) -> str:
    """Return the text between two messages of the user in a row.

    A template that rejects or changes them raises `ChatTemplateError` with this reason.
    """
    first, second, _, _ = PLACEHOLDERS
    try:
        _, between, _ = _split(renderer.render([_user(first), _user(second)]), first, second)
    except ChatTemplateError:
        raise ChatTemplateError(reason) from None
    return between


def _system_parts(before: str, after: str, begin: str, user_start: str) -> dict[str, Any]:
    """Return the fields of a template for system messages.

    Args:
        before: text before a system message.
        after: text between a system message and the user message.
        begin: text before the first user message of a dialogue without a system message.
        user_start: text before each user message.
    """
    if not after.endswith(user_start):
        if not before.startswith(begin + user_start):
            raise ChatTemplateError("a system message changes the user message")
        return {"system_in_user": f"{before[len(begin) + len(user_start) :]}{{}}{after}"}
    after = after[: len(after) - len(user_start)]
    if before.startswith(begin):  # no default system message
        return {"system": f"{before[len(begin) :]}{{}}{after}"}
    if begin.startswith(before) and begin.endswith(after) and len(begin) >= len(before) + len(after):
        default = begin[len(before) : len(begin) - len(after)]
        return {"begin": "", "system": f"{before}{{}}{after}", "default_system": default}
    raise ChatTemplateError("a system message changes the text around it")


def _has_system(template: ChatTemplate) -> bool:
    return template.system is not None or template.system_in_user is not None


def _with_trim(renderer: _Renderer, template: ChatTemplate) -> ChatTemplate:
    """Add the roles whose messages the template strips of whitespace, as that of Llama 3 does.

    A template that changes a message with whitespace around it in another way is refused.
    """
    renderer.now = TIMES[0]
    for role in get_args(ChatRole):
        if role == SYSTEM and not _has_system(template):
            continue
        messages = [_user("one"), _assistant("two"), _user("three")]
        if _has_system(template):
            messages.insert(0, {"role": SYSTEM, "content": "zero"})
        for message in messages:
            if message["role"] == role:
                message["content"] = PADDED.format(message["content"])
        expected = renderer.render(messages, reply=True)
        trims = [template, template.model_copy(update={"trim": (*template.trim, role)})]
        if template.system_in_user is not None and role == "user":
            trims.append(trims[1].model_copy(update={"trim_system_in_user": False}))
        for candidate in reversed(trims):
            if _formatted(candidate, messages, renderer.now) == expected:
                template = candidate
                break
        else:
            raise ChatTemplateError(f"it changes the whitespace around a message of the role {role!r}")
    return template


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": REPLY_ROLE, "content": content}


def _split(text: str, *messages: str) -> list[str]:
    """Split a rendered dialogue at its messages, each of which must occur once."""
    parts = []
    for message in messages:
        before, separator, text = text.partition(message)
        if not separator or message in text:
            raise _SplitError("it omits, repeats or changes messages")
        parts.append(before)
    return [*parts, text]


def _dialogues() -> list[list[Message]]:
    """Return dialogues with and without system messages, of one to three questions, and others."""
    dialogues, systems = [], [[], *([{"role": SYSTEM, "content": text}] for text in SYSTEM_MESSAGES)]
    for texts in COMPARED:
        for count in (1, 3, 5):
            turns = [_assistant(text) if index % 2 else _user(text) for index, text in enumerate(texts[:count])]
            dialogues += [[*system, *turns] for system in systems]
    for roles in IRREGULAR:
        for texts in COMPARED:
            dialogues.append([{"role": role, "content": text} for role, text in zip(roles, texts * 2, strict=False)])
    for roles in CONTINUED:
        for reply in REPLIES:
            for other in REPLIES if roles.count(REPLY_ROLE) > 1 else ("",):
                contents = {SYSTEM: "s", "user": "x", REPLY_ROLE: other}
                dialogue = [{"role": role, "content": contents[role]} for role in roles]
                dialogue[-1]["content"] = reply
                dialogues.append(dialogue)
    # The service refuses empty messages of other roles, which some templates leave out.
    return [
        dialogue
        for dialogue in dialogues
        if all(message["content"] or message["role"] == REPLY_ROLE for message in dialogue)
    ]


def _formatted(template: ChatTemplate, messages: Sequence[Message], now: datetime) -> str:
    """Format a dialogue as the service does."""
    system = [message["content"] for message in messages if message["role"] == SYSTEM]
    turns: list[Turn] = [
        ("user" if message["role"] == "user" else "assistant", message["content"])
        for message in messages
        if message["role"] != SYSTEM
    ]
    return "".join(text for text, _ in format_dialogue(template, system, turns, now))


# Templates of rerankers, whose messages have the roles query and document

_PAIRS = (
    ("Find passages.", "How many?", "Three of 4."),
    ("Answer:\n\nbriefly", " x\n", "\n\n y "),
    ("x", "Two\nlines", "<b>one</b>\n"),
)


def read_pair_template(folder: FolderFiles, instruction: str, special_tokens: Collection[str]) -> PairTemplate:
    """Convert the chat template of a reranker that sentence-transformers saved.

    `instruction` is the content of the system message, "" if there is none. Raises
    `ChatTemplateError` if the template cannot be converted.
    """
    renderer = _renderer(folder)
    if renderer is None:
        raise ChatTemplateError("there is no chat template")
    text = _pair_text(renderer, has_instruction=bool(instruction))
    if not instruction:
        with suppress(ChatTemplateError):
            with_slot = _pair_text(renderer, has_instruction=True)
            before, _, after = with_slot.partition("{instruction}")
            if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
                text, instruction = with_slot, text[len(before) : len(text) - len(after)]
    after_document = text.partition("{document}")[2]
    if after_document and not after_document.startswith(tuple(special_tokens)):
        raise ChatTemplateError("no special token follows the document")
    return PairTemplate(text=text, instruction=instruction)


def _pair_text(renderer: _Renderer, *, has_instruction: bool) -> str:
    """Return the text of a template with slots for the contents of its messages."""
    roles = {"instruction": SYSTEM, "query": "query", "document": "document"}
    slots = [slot for slot in roles if slot != "instruction" or has_instruction]

    def render(contents: Sequence[str]) -> str:
        return renderer.render(
            [{"role": roles[slot], "content": content} for slot, content in zip(slots, contents, strict=True)]
        )

    text = render([f"[[{slot}]]" for slot in slots])
    for slot in slots:
        if text.count(f"[[{slot}]]") != 1 or f"{{{slot}}}" in text:
            raise ChatTemplateError(f"it omits or repeats the message of the role {roles[slot]!r}")
        text = text.replace(f"[[{slot}]]", f"{{{slot}}}")
    for pair in _PAIRS:
        contents = dict(zip(slots, pair[-len(slots) :], strict=True))
        parts = re.split(r"\{(instruction|query|document)\}", text)
        filled = "".join(contents[part] if index % 2 else part for index, part in enumerate(parts))
        if filled != render(list(contents.values())):
            raise ChatTemplateError("it changes the query, the document or the instruction")
    return text
