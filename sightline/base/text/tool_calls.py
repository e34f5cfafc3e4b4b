"""Calls of tools in replies: their form, which a chat template shows, and their parser."""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from sightline.base.text.prompt import ChatTemplateError
from sightline.base.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from sightline.base.text.chat import JinjaTemplate

PYTHON_TAG = "<|python_tag|>"  # of Llama 3: may precede calls that have no opening
ID = "call_0123456789abcdef01234567"  # in the form of OpenAI
SHORT_ID = "callid012"  # in the only form that templates of Mistral accept
NAME, ARGUMENTS, REPLY = "find_way", {"spot": "lake"}, "¤"
_PARAMETERS = {"type": "object", "properties": {"spot": {"type": "string"}}, "required": ["spot"]}
_TOOLS = [{"type": "function", "function": {"name": NAME, "description": "Find it.", "parameters": _PARAMETERS}}]
MAX_ATOM = 6  # characters of an escape or a word of JSON, which is invalid without its last one
_NAMED = re.compile(r"\s*([\w.-]+)([^{]{0,200})")


@dataclass(frozen=True)
class ToolFormat:
    """Form in which a model writes calls of tools.

    A call is a JSON object with a name and arguments, or with a `separator` the name and after that
    the arguments. JSON objects may be in a list. Whitespace does not matter in the other texts.
    """

    opening: str = ""  # text before the first call; "": a reply consists of calls or of text
    between: str = "; "  # text between two calls
    closing: str = ""  # text after the last call
    separator: str = ""
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    has_text_arguments: bool = False  # the template reads arguments of earlier calls as texts
    has_short_ids: bool = False  # the template accepts only ids of 9 characters

    @property
    def markers(self) -> str:
        """All texts beside calls. Special tokens with a name in it must not be removed."""
        return "\n".join([self.opening, self.between, self.closing, self.separator, PYTHON_TAG])

    @cached_property
    def beginning(self) -> re.Pattern[str]:
        """The text of a call of the grammar before its arguments, with its name."""
        if self.separator:
            return re.compile(rf"([\w.-]+){re.escape(self.separator)}(?={{)")
        name, arguments = map(re.escape, (json.dumps(self.name_key), json.dumps(self.arguments_key)))
        return re.compile(rf'{{{name}: "([\w.-]+)", {arguments}: (?={{)')

    def arguments_of(self, arguments: dict[str, Any]) -> dict[str, Any] | str:
        """Return the arguments of an earlier call as the template reads them."""
        return json.dumps(arguments, ensure_ascii=False) if self.has_text_arguments else arguments

    def id_of(self, id_: str) -> str:
        """Return an id of a call as the template reads it."""
        return id_[-len(SHORT_ID) :] if self.has_short_ids else id_

    def grammar(self, tools: Mapping[str, Any], max_calls: int | None, tokenizer: TextTokenizer) -> str:
        """Return the grammar of a reply with calls, in llguidance's variant of Lark.

        `tools` are the JSON Schemas of arguments by name.
        """

        def text(value: str) -> str:
            parts = tokenizer.split_special(value)
            return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

        start, middle, end = "", text(self.separator), ""
        if not self.separator:
            keys = json.dumps(self.name_key), json.dumps(self.arguments_key)
            start, middle, end = map(json.dumps, (f'{{{keys[0]}: "', f'", {keys[1]}: ', "}"))
        calls = [f'{start} "{name}" {middle} %json {json.dumps(schema)} {end}' for name, schema in tools.items()]
        opening, between, closing = self.opening, self.between, self.closing
        if self.is_list:
            opening, between, closing = f"{opening}[", ", ", f"]{closing}"
        more = f"({text(between)} call)*" if max_calls is None else ""
        return f"start: {text(opening)} call {more} {text(closing)}\ncall: " + "\n    | ".join(calls)


@dataclass(frozen=True)
class CallPart:
    """A part of a call: the first one has its name, and all have text of its arguments in JSON."""

    index: int  # of the call in its reply
    name: str | None
    arguments: str


# The format of a template


def find_tool_format(template: "JinjaTemplate") -> ToolFormat:
    """Return the format of calls that a chat template writes for earlier replies.

    If it writes none that can be read, calls are JSON objects without other text.
    """
    found = ToolFormat()
    for has_text, id_ in product((False, True), (ID, SHORT_ID)):
        has_short_ids = id_ == SHORT_ID
        function = {"name": NAME, "arguments": json.dumps(ARGUMENTS) if has_text else ARGUMENTS}
        call = {"id": id_, "type": "function", "function": function}
        with suppress(ChatTemplateError):
            reply = _reply(template, [call])
            read = _read_format(reply, id_)
            if read is None:
                opening, brace, _ = reply.partition("{")
                if brace and not found.opening:  # such as JSON that the template changes
                    is_list = opening.endswith("[")
                    found = ToolFormat(opening.removesuffix("["), is_list=is_list, has_short_ids=has_short_ids)
                continue
            format_, raw = read
            with suppress(ChatTemplateError):
                if len(parts := _reply(template, [call, call]).split(raw)) == 3:
                    format_ = replace(format_, between=parts[1])
            return replace(format_, has_text_arguments=has_text, has_short_ids=has_short_ids)
    return found


def _reply(template: "JinjaTemplate", calls: list[dict[str, Any]]) -> str:
    """Return the text of a reply that consists of calls, without the texts around all replies."""
    question, reply = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": ""}
    text = template.render([question, reply | {"tool_calls": calls}], tools=_TOOLS)
    plain = template.render([question, reply | {"content": REPLY}], tools=_TOOLS)
    common = commonprefix([text, plain])  # noqa: RUF071 - characters are compared
    # Names of special tokens may begin alike, such as <|START_ACTION|> and <|START_RESPONSE|>.
    start = re.sub(r"[<\[][^<>\[\]]*\Z", "", common)
    return text[len(start) :].removesuffix(plain.rpartition(REPLY)[2])


def _read_format(reply: str, id_: str) -> tuple[ToolFormat, str] | None:
    """Return the format of the only call in a reply, and the text of the call; None without one."""
    name, first = reply.find(NAME), reply.rfind("{", 0, max(0, reply.find(next(iter(ARGUMENTS)))))
    arguments, last = _value_at(reply, first)
    if name < 0 or arguments != ARGUMENTS:
        return None
    for start in (match.start() for match in re.finditer(r"[\[{]", reply[:first])):
        value, end = _value_at(reply, start)
        call = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(call, dict) and NAME in call.values() and ARGUMENTS in call.values():
            keys = [key for wanted in (NAME, ARGUMENTS) for key, item in call.items() if item == wanted]
            opening, closing = reply[:start].lstrip(), reply[end:].rstrip()
            between, is_list = closing + opening or "; ", isinstance(value, list)
            return ToolFormat(opening, between, closing, "", is_list, *keys), reply[start:end]
    if name > first:
        return None
    separator = reply[name + len(NAME) : first].rpartition(id_)[2]  # an id may precede it
    opening, closing = reply[:name].lstrip(), reply[last:].rstrip()
    return ToolFormat(opening, closing + opening, closing, separator), reply[name:last]


# The parser of replies


class _IncompleteError(Exception):
    """The meaning of a text depends on what follows it."""


@dataclass
class CallParser:
    """Separates the calls in one reply from its text, in pieces of any length.

    Calls are returned when they are complete. Texts that only begin like a call, or are none by the
    format, remain text. Whitespace before calls, and at the end of a reply with calls, is removed.
    Without an opening, a call must have a known name, and nothing but calls may be in the reply: it
    could be any JSON.

    A reply that is constrained by the grammar of the format has only calls. Their arguments are
    returned in pieces, because they are valid, unless the reply is cut.
    """

    format: ToolFormat
    names: Collection[str]
    max_calls: int | None = None  # further calls are removed
    is_constrained: bool = field(default=False, kw_only=True)
    num_calls: int = field(default=0, init=False)  # that were returned
    _held: str = field(default="", init=False)  # text that may belong to calls
    _num_sent: int = field(default=0, init=False)  # characters of the current arguments, if constrained
    _is_text: bool = field(default=False, init=False)  # no call can follow

    def read(self, text: str, *, is_end: bool = False) -> tuple[str, list[CallPart]]:
        """Add a piece of the reply, and return the text and the calls that are known now.

        With `is_end`, it is the last piece.
        """
        self._held += text
        if self.is_constrained:
            return "", self._new_parts()
        texts, calls = list[str](), list[tuple[str, str]]()
        with suppress(_IncompleteError):
            while self._held:
                start, end = self._find_opening(is_end)
                is_last = is_end and end is None and not (calls or self.num_calls)
                text = self._held[:start] if is_last else self._held[:start].rstrip()
                texts.append(text)
                self._held = self._held[len(text) :]
                if end is None:
                    break
                try:
                    found, after = self._calls_at(end - len(text), is_end)
                    calls += found
                    self._held = self._held[after:]
                except ValueError:
                    texts.append(self._held[: end - len(text)])
                    self._held, self._is_text = self._held[end - len(text) :], not self.format.opening
        count = len(calls) if self.max_calls is None else self.max_calls - self.num_calls
        parts = [CallPart(self.num_calls + index, *call) for index, call in enumerate(calls[: max(0, count)])]
        self.num_calls += len(parts)
        return "".join(texts), parts

    def _find_opening(self, is_end: bool) -> tuple[int, int | None]:
        """Return the range of the next opening; the end is None if it is incomplete."""
        held, opening = self._held, self.format.opening
        if not opening and not self._is_text:
            return 0, _match(held, 0, PYTHON_TAG, is_end) or 0
        for start, character in enumerate(held):
            if opening.startswith(character):
                try:
                    if (end := _match(held, start, opening, is_end)) is not None:
                        return start, end
                except _IncompleteError:
                    return start, None
        return len(held), None

    def _calls_at(self, start: int, is_end: bool) -> tuple[list[tuple[str, str]], int]:
        """Return the names and the arguments of calls in the held text, and the end of the calls.

        Raises `ValueError` if there are none.
        """
        held, format_, calls = self._held, self.format, list[tuple[str, str]]()
        end: int | None = start
        while end is not None:
            try:
                found, start = _calls_in(format_, held, end, is_end)
            except ValueError:
                if not calls or not format_.opening:
                    raise
                break
            calls += found
            if not format_.opening and not held[start:].strip():
                end = None
                if not is_end:
                    raise _IncompleteError
            else:
                end = _match(held, start, format_.between, is_end)
                if end is None and not format_.opening:
                    raise ValueError("text follows the calls")
        if not format_.opening and not {name for name, _ in calls} <= set(self.names):
            raise ValueError("there is no such tool")
        return calls, _match(held, start, format_.closing, is_end) or start

    def _new_parts(self) -> list[CallPart]:
        """Return what follows in the arguments of the calls of a constrained reply."""
        parts = []
        while begun := self.format.beginning.search(self._held):
            end = _value_at(self._held, begun.end())[1]
            piece = self._held[begun.end() + self._num_sent : end or len(self._held)]
            if piece:
                self.num_calls += not self._num_sent
                parts.append(CallPart(self.num_calls - 1, None if self._num_sent else begun[1], piece))
            self._num_sent += len(piece)
            if not end:
                break
            self._held, self._num_sent = self._held[end:], 0
        return parts


def _match(text: str, start: int, marker: str, is_end: bool) -> int | None:
    """Return the end of a marker in a text, whatever the whitespace; None if it is not there."""
    for character in _joined(marker):
        start = _skip_space(text, start)
        if start == len(text) and not is_end:
            raise _IncompleteError
        if text[start : start + 1] != character:
            return None
        start += 1
    return start


def _calls_in(format_: ToolFormat, text: str, start: int, is_end: bool) -> tuple[list[tuple[str, str]], int]:
    """Return the names and the arguments of a call or a list of them in a text, and their end."""
    named = _NAMED.match(text, start) if format_.separator else None
    start = named.end() if named else _skip_space(text, start)
    if start == len(text) and not is_end:
        raise _IncompleteError
    if format_.separator and not (named and _joined(named[2]).endswith(_joined(format_.separator))):
        raise ValueError("it has no name")
    value, end = _decode(text, start, is_end)
    values = value if isinstance(value, list) else [value]
    if named:
        values = [{format_.name_key: named[1], format_.arguments_key: value}]
    calls = []
    for call in values:
        fields = call if isinstance(call, dict) else {}
        name, keys = fields.get(format_.name_key), (format_.arguments_key, "arguments", "parameters")
        arguments = next((fields[key] for key in keys if isinstance(fields.get(key), dict)), None)
        if not name or not isinstance(name, str) or arguments is None:
            raise ValueError("it has no name or no arguments")
        calls.append((name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        "".join(calls[-1]).encode()  # half a character is no text
    if not calls:
        raise ValueError("the list is empty")
    return calls, end


def _decode(text: str, start: int, is_end: bool) -> tuple[Any, int]:
    """Return a JSON object or list in a text, and its end. Raises `ValueError` if there is none."""
    if text[start : start + 1] not in ("{", "["):
        raise ValueError("it is no object")
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        may_follow = error.msg.startswith("Unterminated string") or error.pos > len(text) - MAX_ATOM
        if may_follow and not is_end:
            raise _IncompleteError from None
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _value_at(text: str, start: int) -> tuple[Any, int]:
    """Return a JSON value in a text, and its end; None and 0 if there is none."""
    with suppress(ValueError, _IncompleteError):
        return _decode(text, start, is_end=True)
    return None, 0


def _joined(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())


def _skip_space(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip())
