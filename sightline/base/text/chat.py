"""Chat templates: programs in Jinja that format a dialogue as the text of a prompt.

A program belongs to its checkpoint, like the weights. It runs in Jinja's sandbox, with bounds of
its size, its steps, its time and its output. The service, the training and the import render it
here.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sightline.base.bundle import ChatTemplate
from sightline.base.text.prompt import ChatTemplateError, Dialogue, Prompt, TemplateLimitError, merge_parts
from sightline.base.text.tokenizer import TextTokenizer

TOOL_FILE = "additional_chat_templates/tool_use.jinja"  # template of dialogues with tools
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Published programs have up to 20,000 characters and take some thousand steps for a long dialogue.
MAX_CHARACTERS = 1 << 17
MAX_STEPS = 1_000_000  # iterations of loops and calls of macros
MAX_SECONDS = 5.0  # of the processor; a step may take long, such as one with a text of many megabytes
STEPS_PER_TIME = 16  # reading the time takes as long as some steps
MAX_OUTPUT_CHARACTERS = 1 << 24
MAX_BITS = 4096  # of an integer that is multiplied
# A tag of Transformers that marks the text of replies, and does not change it.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_END = "\u28ff"  # end of the text that the model continues
_RARE = list(map(chr, range(0x2801, 0x28FF)))  # Braille: printable characters without a case


def find_template(
    file: str | None, settings: Mapping[str, Any], special_tokens: Mapping[str, Any], tool_file: str | None = None
) -> ChatTemplate | None:
    """Return the chat template of a checkpoint; None if it has none.

    The arguments are the contents of chat_template.jinja, tokenizer_config.json,
    special_tokens_map.json and `TOOL_FILE`. Files of templates have precedence. Raises
    `ChatTemplateError` if there are several templates and none is the default.
    """
    value = file or settings.get("chat_template")
    named = {"default": value, "tool_use": tool_file}
    if isinstance(value, list):  # several templates by name
        named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        if named and "default" not in named:
            raise ChatTemplateError(f"it is one of {len(named)} templates, of which none has the name default")
    programs = {name: text for name, text in named.items() if isinstance(text, str)}
    if "default" not in programs:
        return None
    given = {**special_tokens, **settings}
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in given.items()}
    tokens = {key: name for key in SPECIAL_TOKENS if isinstance(name := names.get(key), str) and name}
    return ChatTemplate(program=programs["default"], tool_program=programs.get("tool_use"), tokens=tokens)


class JinjaTemplate:
    """A compiled chat template. Threads may share it."""

    def __init__(self, template: ChatTemplate, now: Callable[[], datetime] = datetime.now) -> None:
        """Compile a template; `now` returns the time.

        Raises `ChatTemplateError` if it is not valid.
        """
        self.literals = set[str]()  # texts that the programs write, or compare messages with
        self.fields = set[str]()  # names of fields that the programs read
        self._work = threading.local()  # steps of the rendering of this thread, and the end of its time
        self._now = now
        self._tokens = template.tokens
        environment = self._environment()
        self._program, self._tool_program = (
            text if text is None else self._compile(environment, text)
            for text in (template.program, template.tool_program)
        )

    def _environment(self) -> ImmutableSandboxedEnvironment:
        """Return the environment of Transformers, without functions whose work has no bound."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            # Constant expressions are computed when the program runs, within its limits.
            optimized=False,
            finalize=pass_context(lambda _, value: value),
        )
        environment.filters |= {"tojson": _to_json, "count_step": self._count_step}
        environment.globals |= {
            "raise_exception": self._reject,
            "strftime_now": lambda format_: self._now().strftime(format_),
            "namespace": _Namespace,
            "dict": lambda *args, **values: dict(*args, **values),
        }
        del environment.globals["lipsum"], environment.filters["random"]
        # One power or product of large numbers can take hours, in which no step ends.
        del environment.filters["round"]  # it computes powers
        environment.intercepted_binops = frozenset(["**", "*"])
        environment.binop_table |= {"**": _refuse_power, "*": _multiply}
        return environment

    def _compile(self, environment: ImmutableSandboxedEnvironment, text: str) -> Any:
        if len(text) > MAX_CHARACTERS:
            raise TemplateLimitError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are supported")
        try:
            text.encode()  # a text with half a character cannot be in a manifest
            program = environment.parse(_GENERATION.sub(r"\1\2with\3", text))
            self.literals |= {node.value for node in program.find_all(nodes.Const) if isinstance(node.value, str)}
            self.fields |= {node.attr for node in program.find_all(nodes.Getattr)}
            read = [node.arg for node in program.find_all(nodes.Getitem)]
            self.fields |= {arg.value for arg in read if isinstance(arg, nodes.Const) and isinstance(arg.value, str)}
            repeated: list[Any] = list(program.find_all((nodes.For, nodes.Macro, nodes.Block)))
            for node in repeated:
                step = nodes.Filter(nodes.Const(None), "count_step", [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
            return environment.from_string(program)
        except Exception as error:  # nesting that is too deep has errors of several classes
            raise ChatTemplateError("it is not valid Jinja", _detail(error)) from None

    def _count_step(self, _: None) -> None:
        self._work.steps += 1
        if self._work.steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        if self._work.steps % STEPS_PER_TIME == 0 and time.thread_time() > self._work.end:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def _reject(self, message: object) -> None:
        """Reject the dialogue, as a program can."""
        if message in self.literals:
            raise ChatTemplateError(f"it ends with the error {message!r}")
        raise ChatTemplateError("it ends with an error", str(message))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reply: bool = False,
        continues: bool = False,
    ) -> str:
        """Return a dialogue as text; it equals that of `apply_chat_template` of Transformers.

        With `reply`, the beginning of a reply follows. With `continues`, the text ends within the
        last message. Raises `ChatTemplateError` if the program rejects the dialogue, cannot render
        it, or exceeds a limit.
        """
        if continues:
            content = messages[-1]["content"]
            messages = [*messages[:-1], {**messages[-1], "content": f"{content}{_END} "}]
        text = self._run(
            self._program if tools is None or self._tool_program is None else self._tool_program,
            {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": reply},
        )
        if not continues:
            return text
        end = text.rfind(_END)
        if end < 0:
            raise ChatTemplateError("it omits the end of the last message, so that this cannot be continued")
        return text[:end] if text.startswith(f"{_END} ", end) else text[:end].rstrip()

    def _run(self, program: Any, variables: Mapping[str, Any]) -> str:
        pieces, size = list[str](), 0
        self._work.steps, self._work.end = 0, time.thread_time() + MAX_SECONDS
        try:
            for piece in program.generate({**self._tokens, **variables}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise TemplateLimitError(f"it writes more than {MAX_OUTPUT_CHARACTERS} characters")
            return "".join(pieces)
        except ChatTemplateError:
            raise
        except MemoryError:
            raise TemplateLimitError("it needs too much memory") from None
        except Exception as error:  # programs can raise anything
            raise ChatTemplateError("it cannot be rendered", _detail(error)) from None


class _Namespace(Namespace):
    """Namespace of a program, which cannot have names of Python's internals."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no value {name}")
        super().__setitem__(name, value)


def _refuse_power(*_: Any) -> None:
    raise TemplateLimitError("powers are not supported")


def _multiply(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimitError("products of large numbers are not supported")
        is_repeated = isinstance(times, int) and isinstance(value, str | list | tuple)
        if is_repeated and len(value) * times > MAX_OUTPUT_CHARACTERS:
            raise TemplateLimitError("it needs too much memory")
    return left * right


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # Characters of `_RARE` stay, because they may stand for others.
    return re.sub("[^\0-\x7f\u2801-\u28ff]", lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _detail(error: Exception) -> str:
    """Return the text of an error; that of a lack of memory or depth is empty or names Python."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError | SyntaxError):
        return "it is nested too deeply"
    return str(error)


class ChatFormatter:
    """Formats dialogues as the prompts of a model.

    Names of special tokens in messages are plain text, so that a user cannot end a message or
    insert one. A program may also join pieces of messages to such a name. While it runs, each
    character that a name begins with is therefore replaced in messages by one that occurs in none
    of them. Texts that the program looks for, such as `</think>`, stay unchanged, unless a name
    could begin in them.
    """

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer) -> None:
        """Compile a template. Raises `ChatTemplateError` if it is not valid."""
        self.template = JinjaTemplate(template)
        self._tokenizer = tokenizer
        self._names = tokenizer.special_names
        self._first = sorted({(name.lstrip() or name)[0] for name in self._names if name})
        kept = sorted(filter(None, map(self._kept, self.template.literals)), key=len, reverse=True)
        self._hidden = re.compile("|".join(map(re.escape, [*kept, *self._first])) or "(?!)")

    def _kept(self, literal: str) -> str:
        """Return a text of the program from the first character on that names begin with.

        Return "" if it has none, or if a name might begin in the text.
        """
        start = min((index for first in self._first if (index := literal.find(first)) >= 0), default=len(literal))
        ends = [literal[index:] for index in range(start, len(literal))]
        begins = any(name in literal or any(map(name.startswith, ends)) for name in self._names)
        return "" if begins else literal[start:]

    def prompt(self, dialogue: Dialogue) -> Prompt:
        """Format a dialogue.

        If the program rejects system messages, they are put at the start of the first user message,
        like the instruction in Llama 2's Ghost Attention (Touvron et al. 2023, section 3.3). Raises
        `ChatTemplateError` if the program rejects the dialogue or exceeds a limit.
        """
        used = json.dumps([*dialogue.messages, dialogue.tools], ensure_ascii=False)
        stand_ins = dict(zip(self._first, (rare for rare in _RARE if rare not in used), strict=False))
        if len(stand_ins) < len(self._first):
            raise ChatTemplateError("it cannot format messages with all characters of Braille")

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            ends = {"reply": not dialogue.continues, "continues": dialogue.continues}
            hidden = [{**self._hide(message, stand_ins), "role": message["role"]} for message in messages]
            return self.template.render(hidden, tools=self._hide(dialogue.tools, stand_ins), **ends)

        try:
            text = render(dialogue.messages)
        except TemplateLimitError:
            raise
        except ChatTemplateError as error:
            merged = without_system(dialogue.messages)
            if merged is None:
                raise
            try:
                text = render(merged)
            except ChatTemplateError:
                raise error from None
        shown = str.maketrans({stand_in: first for first, stand_in in stand_ins.items()})
        parts = self._tokenizer.split_special(text)
        parts = [part.translate(shown) if isinstance(part, str) else part for part in parts]
        return Prompt(tuple(merge_parts(parts, self._tokenizer)))

    def _hide(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        """Replace the characters that names begin with in all texts of a value."""
        if isinstance(value, str):
            return self._hidden.sub(lambda match: stand_ins.get(match[0], match[0]), value)
        if isinstance(value, Mapping):
            return {
                key if key in self.template.fields else self._hide(key, stand_ins): self._hide(item, stand_ins)
                for key, item in value.items()
            }
        return [self._hide(item, stand_ins) for item in value] if isinstance(value, list | tuple) else value


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Put system messages before the first text of the user; return None if there are none."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    if not system or not rest or rest[0]["role"] != "user":
        return None
    return [{**rest[0], "content": "\n\n".join([*system, rest[0]["content"]])}, *rest[1:]]
