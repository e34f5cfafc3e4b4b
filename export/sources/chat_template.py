"""Conversion of the Jinja chat template of a checkpoint to the parts of a manifest.

The template is rendered in a sandbox with placeholder messages, and cut at the placeholders.
Messages with whitespace around them show whether the template removes it. Then several dialogues
are rendered with both the template and the parts. A template whose output depends on more than
these parts, such as one that changes messages in another way, cannot be converted.
"""

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, get_args

from pydantic import ValidationError

from export.errors import ImportFailedError
from export.limits import bounded_memory
from export.sources.checkpoint import FolderFiles
from service.bundle import ChatRole, ChatTemplate, PairTemplate

Message = dict[str, str]
SYSTEM, REPLY_ROLE = "system", "assistant"
# Placeholders without spaces at their ends, because many templates strip messages.
PLACEHOLDERS = ("[[first message]]", "[[second message]]", "[[third message]]", "[[system message]]")
COMPARED = (
    ("Hello!", "Good morning. How are you?", "Tell me about 3 cities.", "Well: <b>one</b>", "No.\n\nTwo lines."),
    ("x", "y", "x", "y", "x"),
    ("  Hello!\n", "\n\nGood morning. ", " \tTell me more.  ", "Well,\n\n", "\nNo. "),
)
# Limits of templates, which are programs. Those of published models have up to 20,000 characters
# and take some thousand steps for a dialogue.
MAX_CHARACTERS = 1 << 17
MAX_STEPS = 1_000_000
MAX_BYTES = 256 << 20
PADDED = " \n{} \n"  # a message with whitespace around it


class ChatTemplateError(ValueError):
    """A chat template cannot be converted; the message states the reason."""


def read_chat_template(folder: FolderFiles, special_tokens: Collection[str] = ()) -> ChatTemplate | None:
    """Convert the chat template of a checkpoint; return None if it has none.

    Args:
        folder: the checkpoint.
        special_tokens: names of the special tokens of its tokenizer.

    Raises:
        ChatTemplateError: the template cannot be converted.
        ImportFailedError: a file of the checkpoint cannot be read.
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
    settings = settings if isinstance(settings, dict) else {}
    text = folder.text("chat_template.jinja") or _default_template(settings.get("chat_template"))
    if text is None:
        return None
    special = folder.json("special_tokens_map.json")
    tokens = (special if isinstance(special, dict) else {}) | settings
    named = {key: _token(tokens[key]) for key in ("bos_token", "eos_token", "pad_token") if key in tokens}
    return _Renderer(text, named)


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


class _Renderer:
    """A compiled template."""

    def __init__(self, text: str, special: Mapping[str, str]) -> None:
        try:
            from jinja2 import pass_context
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise ImportFailedError("converting the chat template needs Jinja: pip install '.[import]'") from None
        self._error: type[Exception] = TemplateError
        if len(text) > MAX_CHARACTERS:
            raise ChatTemplateError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are supported")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            # Constant expressions are computed when the template is rendered, within its limits.
            optimized=False,
            finalize=pass_context(lambda _, value: value),
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = self._raise
        del environment.globals["lipsum"]  # random text
        # One power can take hours, in which no line ends.
        environment.intercepted_binops = frozenset(["**"])
        environment.binop_table["**"] = lambda *_: self._raise("powers are not supported")
        self._special = dict(special)
        try:
            with bounded_memory(MAX_BYTES):
                self._template = environment.from_string(text)
        except Exception as error:  # nesting that is too deep has errors of several classes
            raise ChatTemplateError(f"it is not valid Jinja: {_reason(error)}") from None

    def _raise(self, message: str) -> None:
        raise self._error(message)

    def render(self, messages: Sequence[Message], reply: bool = False) -> str:
        """Render a dialogue; with `reply`, followed by the beginning of a reply.

        Raises:
            ChatTemplateError: the template rejects the dialogue, or uses something unsupported.
        """
        try:
            with bounded_memory(MAX_BYTES), _bounded_steps():
                return self._template.render(messages=list(messages), add_generation_prompt=reply, **self._special)
        except Exception as error:  # templates can raise anything
            raise ChatTemplateError(f"it cannot be rendered: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the text of an error; that of a lack of memory or depth is empty or names Python."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MAX_BYTES >> 20} MiB of memory"
    if isinstance(error, RecursionError | SyntaxError):
        return "it is nested too deeply"
    return str(error)


@contextmanager
def _bounded_steps() -> Iterator[None]:
    """Raise `ChatTemplateError` in a template that executes too many lines, also in filters."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise ChatTemplateError(f"it takes more than {MAX_STEPS} steps")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def convert(text: str, special: Mapping[str, str]) -> ChatTemplate:
    """Convert a template.

    Args:
        text: the template in Jinja.
        special: special tokens by their names in templates, such as "eos_token".

    Raises:
        ChatTemplateError: it cannot be converted.
    """
    return _convert(_Renderer(text, special))


def _convert(renderer: _Renderer) -> ChatTemplate:
    template = _with_trim(renderer, _parts(renderer))
    for messages in _dialogues():
        try:
            expected = renderer.render(messages, reply=True)
        except ChatTemplateError:
            if messages[0]["role"] == SYSTEM and not _has_system(template):
                continue  # the service puts system messages before the first user message
            raise
        if apply_parts(template, messages) != expected:
            raise ChatTemplateError("its output is not a sequence of one text for each message")
    return template


def _parts(renderer: _Renderer) -> ChatTemplate:
    first, second, third, system = PLACEHOLDERS
    start, user_end = _split(renderer.render([_user(first)]), first)
    reply = renderer.render([_user(first)], reply=True)[len(start) + len(first) + len(user_end) :]
    _, between_first, between_second, _ = _split(
        renderer.render([_user(first), _assistant(second), _user(third)]), first, second, third
    )
    if not between_first.startswith(user_end):
        raise ChatTemplateError("the text after a user message depends on the next message")
    assistant_start = between_first[len(user_end) :]
    _, _, assistant_end = _split(renderer.render([_user(first), _assistant(second)]), first, second)
    if not between_second.startswith(assistant_end):
        raise ChatTemplateError("the text after a reply depends on the next message")
    user_start = between_second[len(assistant_end) :]
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
    try:
        return ChatTemplate(
            user=f"{user_start}{{}}{user_end}",
            assistant=f"{assistant_start}{{}}{assistant_end}",
            reply=reply,
            **parts,
        )
    except ValidationError:
        raise ChatTemplateError("it has braces outside of messages") from None


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

    Raises:
        ChatTemplateError: a message with whitespace around it is changed in another way.
    """
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
        trimming = template.model_copy(update={"trim": (*template.trim, role)})
        if expected == apply_parts(trimming, messages):
            template = trimming
        elif expected != apply_parts(template, messages):
            raise ChatTemplateError(f"it changes the whitespace around a message of the role {role!r}")
    return template


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": REPLY_ROLE, "content": content}


def _split(text: str, *messages: str) -> list[str]:
    """Split a rendered dialogue at its messages.

    Raises:
        ChatTemplateError: a message is missing or occurs twice.
    """
    parts = []
    for message in messages:
        before, found, text = text.partition(message)
        if not found or message in text:
            raise ChatTemplateError("it omits, repeats or changes messages")
        parts.append(before)
    return [*parts, text]


def _dialogues() -> list[list[Message]]:
    """Return dialogues with and without a system message, and with one to three user messages."""
    dialogues = []
    for texts in COMPARED:
        for turns in (1, 3, 5):
            turn = [_assistant(text) if index % 2 else _user(text) for index, text in enumerate(texts[:turns])]
            dialogues += [turn, [{"role": SYSTEM, "content": "Answer briefly,\nplease."}, *turn]]
    return dialogues


def apply_parts(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """Format a dialogue with the parts. This is the slow twin of the service's formatting."""
    if messages[0]["role"] != SYSTEM and template.default_system is not None:
        messages = [{"role": SYSTEM, "content": template.default_system}, *messages]
    patterns = {SYSTEM: template.system, "user": template.user, REPLY_ROLE: template.assistant}
    text, start_of_user = template.begin, ""
    for message in messages:
        role, content = message["role"], start_of_user + message["content"]
        if role in template.trim:
            content = content.strip()
        pattern, start_of_user = patterns[role], ""
        if pattern is not None:
            text += pattern.replace("{}", content)
        elif template.system_in_user is not None:
            start_of_user = template.system_in_user.replace("{}", content)
        else:
            raise ChatTemplateError("it has no system messages")
    return text + template.reply


# Templates of rerankers, whose messages have the roles query and document

_PAIRS = (
    ("Find passages.", "How many?", "Three of 4."),
    ("Answer:\n\nbriefly", " x\n", "\n\n y "),
    ("x", "Two\nlines", "<b>one</b>\n"),
)


def read_pair_template(folder: FolderFiles, instruction: str, special_tokens: Collection[str]) -> PairTemplate:
    """Convert the chat template of a reranker that sentence-transformers saved.

    Args:
        folder: the checkpoint.
        instruction: content of the system message; "" if there is none.
        special_tokens: names of the special tokens of its tokenizer.

    Raises:
        ChatTemplateError: the template cannot be converted.
        ImportFailedError: a file of the checkpoint cannot be read.
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
    """Return the text of a template with slots for the contents of its messages.

    Raises:
        ChatTemplateError: the text has more or other parts than the contents.
    """
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
