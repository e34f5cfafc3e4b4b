"""Dialogues from the fields of rows, in the forms that other tools write.

messages                    OpenAI and TRL: objects with `role` and `content`
conversations               ShareGPT: objects with `from` and `value`
instruction, output         Alpaca, with `input`
prompt, completion          texts or messages; the loss is on the completion; also question, answer
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

from sightline.model.data.files import check_text, kind_of
from sightline.model.data.records import DialogueMessage, DialogueRecord, Role

Form: TypeAlias = tuple[str, ...]  # fields that have the messages
_FORMS: tuple[Form, ...] = (
    *(("messages",), ("conversations",), ("conversation",)),
    *(("instruction", "output"), ("instruction", "response"), ("prompt", "completion"), ("prompt", "response")),
    ("question", "answer"),
)
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
_PARTS = ("text", "refusal")  # types of the parts of a content
_MESSAGE_FIELDS = {
    *("role", "from", "content", "value", "name", "weight", "refusal"),
    *("tool_calls", "function_call", "tool_call_id"),
}
_REJECTED = {
    *("thinking", "reasoning", "reasoning_content", "tool_plan"),
    *("image", "images", "audio", "video", "videos", "files"),
}


def form_of(fields: Mapping[str, Any]) -> Form | None:
    """Return the form of the dialogue of a row; None for plain text. Raises `ValueError` for
    preferences, and for two forms.
    """
    given = {name for name, value in fields.items() if value is not None}
    for name in _PREFERENCES:
        if name in given and (name != "label" or "prompt" in given):
            raise ValueError(
                f"{name} is a field of preferences, which are not trained; write the preferred replies as prompt and "
                "completion, or as messages"
            )
    forms = [form for form in _FORMS if given.issuperset(form)]
    if len(forms) > 1:
        first, second = (" and ".join(form) for form in forms[:2])
        raise ValueError(f"{first} are one form of a dialogue, and {second} another; remove one of them")
    return forms[0] if forms else None


def read_dialogue(fields: Mapping[str, Any], form: Form) -> DialogueRecord:
    """Return the dialogue of a row in a form. Raises `ValueError`, with the name of the field."""
    reader, first = _Reader(), form[0]
    before = reader.turn(fields.get("system") or "", "system", "system")
    if len(form) == 1:
        messages = before + reader.messages(fields[first], first)
    else:
        question = fields[first]
        if first == "instruction":
            parts = [check_text(fields[name], name) for name in _INSTRUCTION if fields.get(name)]
            question = "\n\n".join(part for part in parts if part.strip())
        before = [replace(message, has_loss=False) for message in before + reader.turn(question, first, "user")]
        messages = before + reader.turn(fields[form[1]], form[1], "assistant")
    messages = [one for one in messages if one.role != "system" or one.content.strip()]
    start = next((index for index, one in enumerate(messages) if one.role == "user"), len(messages))
    # The service begins no dialogue, so that greetings before messages of users are only read.
    messages[:start] = [replace(message, has_loss=False) for message in messages[:start]]
    name = "tools" if fields.get("tools") else "functions"
    if not isinstance(tools := _parsed(fields.get(name) or [], name), list):
        raise ValueError(f"{name} must be a list of objects, or its JSON text, got {kind_of(tools)}")
    functions = [_function(tool, f"{name}[{index}]") for index, tool in enumerate(tools)]
    known = {*form, *_FIELDS, *(_INSTRUCTION if first == "instruction" else ())}
    unread = {name for name, value in fields.items() if name not in known and not _is_empty(value)}
    defined = tuple({"type": "function", "function": function} for function in functions)
    return DialogueRecord(tuple(messages), defined, frozenset(unread | reader.unread))


class _Reader:
    """Reads the messages of one dialogue, in which results of tools belong to earlier calls."""

    def __init__(self) -> None:
        self.unread = set[str]()  # fields of messages that are not read
        self._new_ids = (f"call{number:05}" for number in count())  # templates of Mistral read 9 characters
        self._open_calls = list[str]()  # ids of calls without a result

    def turn(self, value: Any, name: str, role: Role) -> list[DialogueMessage]:
        """Return the messages of a field that is one text, or a list of messages."""
        is_list = isinstance(value, list)
        return self.messages(value, name) if is_list else [DialogueMessage(role, check_text(value, name))]

    def messages(self, value: Any, name: str) -> list[DialogueMessage]:
        """Return the messages of a list."""
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list of objects with role and content, got {kind_of(value)}")
        return [self._message(message, f"{name}[{index}]", name) for index, message in enumerate(value)]

    def _message(self, fields: Any, name: str, list_name: str) -> DialogueMessage:
        if not isinstance(fields, dict):
            raise ValueError(f"{name} must be an object with role and content, got {kind_of(fields)}")
        others = {key for key, value in fields.items() if key not in _MESSAGE_FIELDS and not _is_empty(value)}
        if rejected := sorted(others & _REJECTED):
            raise ValueError(
                f"{name}.{rejected[0]} is not read; put thoughts into the content, as the chat template writes them, "
                "or remove the field, or a dialogue with images, audio or files"
            )
        self.unread |= {f"{list_name}[].{key}" for key in others}
        role_key = "from" if "from" in fields and "role" not in fields else "role"
        content_key = "value" if "value" in fields and "content" not in fields else "content"
        given = fields.get(role_key)
        if not isinstance(given, str) or given not in _ROLES:
            got = repr(given[:40]) if isinstance(given, str) else kind_of(given)
            raise ValueError(f"{name}.{role_key} must be {_ROLE_NAMES}, got {got}")
        if given in _CALL_ROLES:
            fields = {**fields, "tool_calls": fields.get(content_key), content_key: ""}
        role, weight, refusal = _ROLES[given], fields.get("weight"), fields.get("refusal")
        if weight not in (None, 0, 1):
            raise ValueError(f"{name}.weight must be 0 or 1")
        key = "tool_calls" if fields.get("tool_calls") else "function_call"
        calls = self._calls(fields[key], f"{name}.{key}") if fields.get(key) else ()
        if calls and role != "assistant":
            raise ValueError(f"{name} has calls of tools, which only messages of the assistant have; correct the role")
        if refusal and fields.get(content_key):
            raise ValueError(f"{name}.refusal is a text beside the content; keep one of them")
        content = refusal or fields.get(content_key)
        if content is None and (calls or role == "tool"):
            content = ""
        id_ = ""
        if role == "tool":  # a result without an id belongs to the first call without result
            id_ = check_text(fields.get("tool_call_id") or next(iter(self._open_calls), ""), f"{name}.tool_call_id")
            self._open_calls = [call for call in self._open_calls if call != id_]
        text, author = _content(content, f"{name}.{content_key}"), check_text(fields.get("name") or "", f"{name}.name")
        return DialogueMessage(role, text, weight is None or bool(weight), author, calls, id_)

    def _calls(self, value: Any, name: str) -> tuple[Mapping[str, Any], ...]:
        """Return calls in the form of OpenAI, given one or a list, as objects or as JSON text."""
        value, calls = _parsed(value, name), list[Mapping[str, Any]]()
        for index, call in enumerate(value if isinstance(value, list) else [value]):
            where = f"{name}[{index}]" if isinstance(value, list) else name
            function = _function(call, where)
            arguments = _parsed(function.get("arguments") or {}, f"{where}.arguments")
            if not isinstance(arguments, dict):
                raise ValueError(f"{where}.arguments must be a JSON object, or the text of one")
            check_text(json.dumps(arguments, ensure_ascii=False), f"{where}.arguments")  # half a character is no text
            id_ = check_text(call.get("id") or next(self._new_ids), f"{where}.id")
            self._open_calls.append(id_)
            described = {"name": function["name"], "arguments": arguments}
            calls.append({"id": id_, "type": "function", "function": described})
        return tuple(calls)


def _content(value: Any, name: str) -> str:
    """Return the content of a message, which may be a list of parts with texts."""
    if not isinstance(value, list):
        return check_text(value, name)
    texts = [part.get(str(part.get("type"))) if isinstance(part, dict) else None for part in value]
    if not all(isinstance(text, str) for text in texts) or any(part["type"] not in _PARTS for part in value):
        raise ValueError(f'each of {name} must be {{"type": "text", "text": "a text"}}; other parts cannot be read')
    return check_text("".join(map(str, texts)), name)


def _function(value: Any, name: str) -> dict[str, Any]:
    """Return the function of a call or a definition, which must have a name."""
    fields = value if isinstance(value, dict) else {}
    function = fields.get("function") or fields
    is_function = fields.get("type") in ("function", None) and isinstance(function, dict)
    if not is_function or not str(function.get("name") or "").strip():
        raise ValueError(f"{name} must be an object with the name of a function; tools of other types cannot be read")
    check_text(json.dumps(function, ensure_ascii=False), name)
    return function


def _parsed(value: Any, name: str) -> Any:
    """Return a value that may be given as its JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} must be JSON; correct the text, or write the value without quotes") from None
    return parsed


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})
