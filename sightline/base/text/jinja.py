"""Rendering of the Jinja chat templates of checkpoints, which are third-party programs.

A template runs in Jinja's sandbox, with limits of its size, its memory, its steps and its time.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from sightline.base.errors import UsageError
from sightline.base.memory import bounded_memory

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Published templates have up to 20,000 characters and take some thousand steps for a dialogue.
MAX_CHARACTERS = 1 << 17
MAX_STEPS = 1_000_000
MAX_SECONDS = 30.0  # of the processor; a step may take long, such as one with a text of many megabytes
STEPS_PER_TIME = 64  # reading the time takes as long as some steps
MAX_BYTES = 256 << 20
MAX_BITS = 4096  # of an integer that is multiplied
# A tag of Transformers that marks the text of replies, and does not change it.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


class ChatTemplateError(ValueError):
    """A chat template cannot be used; the message states the reason about "it", the template."""


def find_template(
    file: str | None, settings: Mapping[str, Any], special_tokens: Mapping[str, Any]
) -> tuple[str, dict[str, str]] | None:
    """Return the text of the chat template of a checkpoint and its variables; None if it has none.

    The arguments are the contents of chat_template.jinja, tokenizer_config.json and
    special_tokens_map.json. The first of them has precedence.
    """
    text = file or _default_template(settings.get("chat_template"))
    if text is None:
        return None
    tokens = {**special_tokens, **settings}
    return text, {name: token for name in SPECIAL_TOKENS if (token := _token(tokens.get(name)))}


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):  # several templates by name
        named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


class JinjaTemplate:
    def __init__(self, text: str, special_tokens: Mapping[str, str], now: Callable[[str], str]) -> None:
        """Compile a template with variables such as `bos_token`.

        `now` returns the time in a format of `strftime`. Raises `ChatTemplateError` if the template
        is not valid, `UsageError` if Jinja is not installed.
        """
        try:
            from jinja2 import pass_context
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise UsageError("chat templates need Jinja: pip install '.[train]' or '.[import]'") from None
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
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self.fail
        environment.globals["strftime_now"] = now
        del environment.globals["lipsum"]  # random text
        # One power or product of large numbers can take hours, in which no line ends.
        del environment.filters["round"]  # it computes powers
        environment.intercepted_binops = frozenset(["**", "*"])
        environment.binop_table["**"] = lambda *_: self.fail("powers are not supported")
        environment.binop_table["*"] = self._multiply
        self._special = dict(special_tokens)
        try:
            with bounded_memory(MAX_BYTES):
                self._template = environment.from_string(_GENERATION.sub(r"\1\2with\3", text))
        except Exception as error:  # nesting that is too deep has errors of several classes
            raise ChatTemplateError(f"it is not valid Jinja: {_reason(error)}") from None

    def fail(self, message: str) -> None:
        """Raise an error of Jinja, which ends the rendering."""
        raise self._error(message)

    def _multiply(self, left: Any, right: Any) -> Any:
        if any(isinstance(value, int) and value.bit_length() > MAX_BITS for value in (left, right)):
            self.fail("products of large numbers are not supported")
        return left * right

    def render(self, messages: Sequence[Mapping[str, str]], reply: bool = False) -> str:
        """Render a dialogue; with `reply`, followed by the beginning of a reply.

        Raises `ChatTemplateError` if the template rejects it, or uses something unsupported.
        """
        try:
            with bounded_memory(MAX_BYTES), _bounded_steps():
                return self._template.render(
                    messages=list(messages), tools=None, documents=None, add_generation_prompt=reply, **self._special
                )
        except Exception as error:  # templates can raise anything
            raise ChatTemplateError(f"it cannot be rendered: {_reason(error)}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _reason(error: Exception) -> str:
    """Return the text of an error; that of a lack of memory or depth is empty or names Python."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MAX_BYTES >> 20} MiB of memory"
    if isinstance(error, RecursionError | SyntaxError):
        return "it is nested too deeply"
    return str(error)


@contextmanager
def _bounded_steps() -> Iterator[None]:
    """Raise `ChatTemplateError` in a template that works too long, also in its filters."""
    steps, end = 0, time.thread_time() + MAX_SECONDS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise ChatTemplateError(f"it takes more than {MAX_STEPS} steps")
        if steps % STEPS_PER_TIME == 0 and time.thread_time() > end:
            raise ChatTemplateError(f"it takes more than {MAX_SECONDS:.0f} seconds")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
