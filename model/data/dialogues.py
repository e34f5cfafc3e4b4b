"""Dialogues from the fields of rows, in the forms that other tools write.

messages                    OpenAI and TRL: objects with `role` and `content`
conversations               ShareGPT: objects with `from` and `value`
instruction, output         Alpaca, with `input`
prompt, completion          texts or lists of messages; only the completion is part of the loss
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn

from sightline.model.data.files import kind_of
from sightline.model.data.records import DialogueMessage, DialogueRecord, Role

_FORMS = (
    *(("messages",), ("conversations",), ("conversation",)),
    *(("instruction", "output"), ("instruction", "response"), ("prompt", "completion"), ("prompt", "response")),
)
FORMS = "text, messages, conversations, instruction and output, or prompt and completion"
_FIELDS = {"system", "tools", "functions", "parallel_tool_calls"}  # of all forms
_INSTRUCTION = ("instruction", "input", "context")
_PREFERENCES = ("chosen", "rejected", "preferred_output", "non_preferred_output", "label")  # label: with prompt

_CALL_ROLES = ("function_call", "tool_call")  # a message of the assistant whose content is calls
_ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", *_CALL_ROLES), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
_ROLE_NAMES = "system, developer, user, assistant or tool (or human, gpt, function_call or observation of ShareGPT)"
_MESSAGE_FIELDS = {
    *("role", "from", "content", "value", "name", "weight", "refusal"),
    *("tool_calls", "function_call", "tool_call_id"),
}
_THOUGHTS = "is not read; put the thoughts into the content, as the chat template writes them, or remove the field"
_MEDIA = "is not read, because models are trained on texts; remove the message or the dialogue"
_REJECTED = {
    **dict.fromkeys(("thinking", "reasoning", "reasoning_content", "tool_plan"), _THOUGHTS),
    **dict.fromkeys(("image", "images", "audio", "video", "videos", "files"), _MEDIA),
}


class DialogueReader:
    """Reads rows as dialogues.

    `fail` raises the error of a row, and `text` checks that the value of a named field is a text.
    """

    def __init__(self, fail: Callable[[str], NoReturn], text: Callable[[Any, str], str]) -> None:
        self._fail, self._text = fail, text
        self._unread = set[str]()  # fields of the row that are not read
        self._ids = count()  # of calls of the row that have no id
        self._open_calls = list[str]()  # ids of calls of the row that have no result yet

    def form_of(self, fields: Mapping[str, Any]) -> str | None:
        """Return the names of the fields that have the dialogue of a row; None for plain text."""
        given = {name for name, value in fields.items() if value is not None}
        for name in [name for name in _PREFERENCES if name in given and (name != "label" or "prompt" in given)]:
            self._fail(
                f"{name} is a field of preferences, which are not trained; write the preferred replies as prompt and "
                "completion, or as messages"
            )
        names = [" and ".join(form) for form in _FORMS if given.issuperset(form)]
        if len(names) > 1:
            self._fail(f"{names[0]} are one form of a dialogue, and {names[1]} another; remove one of them")
        if not names and "text" not in fields:
            found = f"unknown field {next(iter(fields))[:40]!r}" if fields else "no field"
            self._fail(f"{found}; a text or dialogue has the fields {FORMS}")
        return names[0] if names else None

    def record(self, form: str, fields: Mapping[str, Any]) -> DialogueRecord:
        """Return the dialogue of a row whose form is known."""
        first, *rest = form.split(" and ")
        self._ids, self._open_calls = count(), []
        known = {first, *rest, *_FIELDS, *(_INSTRUCTION if first == "instruction" else ())}
        self._unread = {name for name, value in fields.items() if name not in known and not _is_empty(value)}
        system = self._turn(fields.get("system") or "", "system", "system")
        if not rest:
            messages = [*system, *self._messages(fields[first], first)]
        else:
            question = fields[first]
            if first == "instruction":
                parts = [self._text(fields[name], name) for name in _INSTRUCTION if fields.get(name)]
                question = "\n\n".join(part for part in parts if part.strip())
            before = [replace(message, has_loss=False) for message in (*system, *self._turn(question, first, "user"))]
            messages = before + self._turn(fields[rest[0]], rest[0], "assistant")
        messages = [one for one in messages if one.role != "system" or one.content.strip()]
        start = next((index for index, one in enumerate(messages) if one.role == "user"), len(messages))
        # The service begins no dialogue, so that greetings before messages of users are only read.
        messages[:start] = [replace(message, has_loss=False) for message in messages[:start]]
        name = "tools" if fields.get("tools") else "functions"
        if not isinstance(tools := self._parsed(fields.get(name) or [], name), list):
            self._fail(f"{name} must be a list of objects, or its JSON text, got {kind_of(tools)}")
        functions = [self._function(tool, f"{name}[{index}]") for index, tool in enumerate(tools)]
        defined = tuple({"type": "function", "function": function} for function in functions)
        return DialogueRecord(tuple(messages), defined, frozenset(self._unread))

    def _turn(self, value: Any, name: str, role: Role) -> list[DialogueMessage]:
        """Return the messages of a field that is one text, or a list of messages."""
        is_list = isinstance(value, list)
        return self._messages(value, name) if is_list else [DialogueMessage(role, self._text(value, name))]

    def _messages(self, value: Any, name: str) -> list[DialogueMessage]:
        if not isinstance(value, list):
            self._fail(f"{name} must be a list of objects with role and content, got {kind_of(value)}")
        return [self._message(message, f"{name}[{index}]", name) for index, message in enumerate(value)]

    def _message(self, fields: Any, name: str, field: str) -> DialogueMessage:
        if not isinstance(fields, dict):
            self._fail(f"{name} must be an object with role and content, got {kind_of(fields)}")
        for key, value in fields.items():
            if key not in _MESSAGE_FIELDS and not _is_empty(value):
                if key in _REJECTED:
                    self._fail(f"{name}.{key} {_REJECTED[key]}")
                self._unread.add(f"{field}[].{key}")
        role_key = "from" if "from" in fields and "role" not in fields else "role"
        content_key = "value" if "value" in fields and "content" not in fields else "content"
        given = fields.get(role_key)
        if not isinstance(given, str) or given not in _ROLES:
            got = repr(given[:40]) if isinstance(given, str) else kind_of(given)
            self._fail(f"{name}.{role_key} must be {_ROLE_NAMES}, got {got}")
        role, content, weight = _ROLES[given], fields.get(content_key), fields.get("weight")
        if weight not in (None, 0, 1):
            self._fail(f"{name}.weight must be 0 or 1")
        key = content_key if given in _CALL_ROLES else "tool_calls" if fields.get("tool_calls") else "function_call"
        calls = self._calls(fields[key], f"{name}.{key}") if fields.get(key) else ()
        content = "" if given in _CALL_ROLES else content
        if calls and role != "assistant":
            self._fail(f"{name} has calls of tools, which only messages of the assistant have; correct the role")
        if fields.get("refusal"):
            if content:
                self._fail(f"{name}.refusal is a text beside the content; keep one of them")
            content = self._text(fields["refusal"], f"{name}.refusal")
        if content is None and (calls or role == "tool"):
            content = ""
        author = self._text(fields.get("name") or "", f"{name}.name")
        id_ = ""
        if role == "tool":  # a result without an id belongs to the first call without result
            id_ = self._text(fields.get("tool_call_id") or next(iter(self._open_calls), ""), f"{name}.tool_call_id")
            self._open_calls = [call for call in self._open_calls if call != id_]
        has_loss = weight is None or bool(weight)
        return DialogueMessage(role, self._content(content, f"{name}.{content_key}"), has_loss, author, calls, id_)

    def _content(self, value: Any, name: str) -> str:
        """Return the content of a message, which may be a list of parts with texts."""
        if not isinstance(value, list):
            return self._text(value, name)
        texts = []
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "refusal"):
                self._fail(f'{name}[{index}] must be {{"type": "text", "text": "a text"}}; other parts cannot be read')
            texts.append(self._text(part.get(kind), f"{name}[{index}].{kind}"))
        return "".join(texts)

    def _calls(self, value: Any, name: str) -> tuple[Mapping[str, Any], ...]:
        """Return calls in the form of OpenAI, given one or a list, as objects or as JSON text."""
        value = self._parsed(value, name)
        calls = list[Mapping[str, Any]]()
        for index, call in enumerate(value if isinstance(value, list) else [value]):
            where = f"{name}[{index}]" if isinstance(value, list) else name
            function = self._function(call, where)
            place = f"{where}.function.arguments" if function is not call else f"{where}.arguments"
            arguments = self._parsed(function.get("arguments") or {}, place)
            if not isinstance(arguments, dict):
                self._fail(f"{place} must be a JSON object, or the text of one")
            id_ = call.get("id") or f"call{next(self._ids):05}"  # templates of Mistral read 9 characters
            self._open_calls.append(self._text(id_, f"{where}.id"))
            described = {"name": function["name"], "arguments": arguments}
            self._text(json.dumps(described, ensure_ascii=False), place)  # half a character is no text
            calls.append({"id": id_, "type": "function", "function": described})
        return tuple(calls)

    def _function(self, value: Any, name: str) -> dict[str, Any]:
        """Return the function of a call or a definition, which must have a name."""
        fields = value if isinstance(value, dict) else {}
        function = fields.get("function") or fields
        if fields.get("type", "function") not in ("function", None) or not isinstance(function, dict):
            self._fail(f'{name}.type must be "function"; other tools cannot be read')
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            place = "function.name" if function is not fields else "name"
            self._fail(f"{name} must be an object with {place}, the name of a function")
        self._text(json.dumps(function, ensure_ascii=False), name)
        return function

    def _parsed(self, value: Any, name: str) -> Any:
        """Return a value that may be given as its JSON text."""
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
            json.dumps(parsed, allow_nan=False)
        except (ValueError, RecursionError):
            self._fail(f"{name} must be JSON; correct the text, or write the value without quotes")
        return parsed


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})
