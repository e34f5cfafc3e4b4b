"""Encoding of texts and dialogues for a language model that others trained first.

Dialogues have the chat template of the checkpoint. The loss is on the tokens of each reply from the
end of its prompt up to the special token that ends the reply.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from sightline.base.bundle import ChatTemplate
from sightline.base.errors import UsageError
from sightline.base.text.chat import JinjaTemplate, without_system
from sightline.base.text.prompt import ChatTemplateError
from sightline.base.text.tool_calls import REPLY, find_tool_format
from sightline.model.config import PretrainedConfig
from sightline.model.data.chat_format import exchanges, system_messages
from sightline.model.data.encoding import windows
from sightline.model.data.examples import Example
from sightline.model.data.records import DialogueMessage, DialogueRecord, TextRecord

# Templates may ask for the time. It must not change, so that a resumed run has the same examples.
_NOW = datetime(2024, 7, 26)


def read_chat_template(config: PretrainedConfig) -> JinjaTemplate | None:
    """Compile the chat template of a checkpoint; return None if it has none."""
    return JinjaTemplate(ChatTemplate(**config.chat), lambda: _NOW) if config.chat else None


class DialogueEncoder:
    """Encodes dialogues as token ids, and marks the tokens of the replies."""

    def __init__(self, template: JinjaTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tool_format = find_tool_format(template)
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # the template names special tokens
        added = tokenizer.get_added_tokens_decoder()
        self._special = {id_: token.content for id_, token in added.items() if token.special}

    def encode(self, record: DialogueRecord, max_length_tokens: int = 2**30) -> list[Example]:
        """Return the token ids of a dialogue, and 1 for each token of a reply, otherwise 0.

        A dialogue that is too long is split between exchanges; each part begins with the system
        messages. Raises `UsageError` if the template does not allow the dialogue, or a message
        contains a special token.
        """
        self._check(record)
        system, tools = list(system_messages(record.messages)), record.tools
        examples = self._encode(record.messages, tools)
        parts = list(exchanges(record.messages[len(system) :]))
        if len(parts) < 2 or all(len(ids) <= max_length_tokens for ids, _ in examples):
            return examples
        examples, window = [], list[DialogueMessage]()
        for part in parts:
            longer = self._encode([*system, *window, *part], tools)
            if window and any(len(ids) > max_length_tokens for ids, _ in longer):
                examples += self._encode([*system, *window], tools)
                window = []
            window += part
        return examples + self._encode([*system, *window], tools)

    def prompt(self, record: DialogueRecord) -> list[int]:
        """Return the token ids of a dialogue that ends with the beginning of a reply."""
        self._check(record)
        text = self._render(record.messages, record.tools, reply=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _encode(self, messages: Sequence[DialogueMessage], tools: Sequence[Mapping[str, Any]]) -> list[Example]:
        """Return one example up to the last reply with loss, or several if the template changes
        earlier messages when others follow, such as one that moves system messages to the last
        message of the user: a reply that differs in the text of a later one has its own example.
        """
        examples = list[Example]()
        text, spans = "", list[tuple[int, int]]()
        for index in [index for index, message in enumerate(messages) if message.is_trained][::-1]:
            until = self._render(messages[: index + 1], tools)
            start = self._render(messages[:index], tools, reply=True)
            if not text and tools and until == self._render(messages[: index + 1], ()):
                raise UsageError(
                    "the dialogue has tools, but the chat template of the checkpoint takes none; use another "
                    "checkpoint, or remove tools"
                )
            until = _joined(start, until, messages[index - 1].content.strip())
            body = self._body(messages[: index + 1], tools, start, until) if messages[index].tool_calls else None
            content = messages[index].content.strip()
            span = _find(text, start, body, content) if text else None
            if span is None:
                examples = self._example(text, spans) + examples
                text, spans = until, []
                span = _find(text, start, body, content)
            if span is None:
                raise UsageError(
                    "the chat template of the checkpoint changes the text of a reply, or of its prompt when the reply "
                    "follows, so that it cannot be trained on; use another checkpoint"
                )
            spans.append(span)
        return self._example(text, spans) + examples

    def _body(
        self, messages: Sequence[DialogueMessage], tools: Sequence[Mapping[str, Any]], start: str, until: str
    ) -> str:
        """Return the text of the last message, which has calls, between the prompt and the end of
        the reply. The end is that of a reply without calls, or else the last special token.
        """
        reply, end = until.removeprefix(start), ""
        with suppress(UsageError):
            plain = replace(messages[-1], content=REPLY, tool_calls=())
            end = self._render([*messages[:-1], plain], tools).rpartition(REPLY)[2]
        length = max((reply.rfind(name) for name in self._special.values() if name), default=-1)
        if end and reply.endswith(end):
            length = len(reply) - len(end)
        names = [call["function"]["name"] for call in messages[-1].tool_calls]
        if any(reply.count(name) < names.count(name) for name in names):
            raise UsageError(
                "the chat template of the checkpoint leaves out calls of tools; use another checkpoint, or remove them"
            )
        return reply if length < 0 else reply[:length]

    def _example(self, text: str, spans: Sequence[tuple[int, int]]) -> list[Example]:
        """Return the example of a text with replies, whose spans end before their end tokens."""
        if not spans:
            return []
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        mask = [0] * len(encoding.ids)
        for start, end in spans:
            for index, (first, _) in enumerate(encoding.offsets):
                if first < start:
                    continue
                mask[index] = 1
                if first >= end and encoding.ids[index] in self._special:
                    break
            else:
                raise UsageError(
                    "the chat template of the checkpoint ends a reply without a special token, so that the model would "
                    "not learn to stop; use another checkpoint"
                )
        return [(encoding.ids, mask)]

    def _render(
        self, messages: Sequence[DialogueMessage], tools: Sequence[Mapping[str, Any]], *, reply: bool = False
    ) -> str:
        listed = [self._fields(message) for message in messages]
        try:
            return self._template.render(listed, tools=list(tools) or None, reply=reply)
        except ChatTemplateError as error:
            merged = without_system(listed)  # as the service does
            with suppress(ChatTemplateError):
                if merged is not None:
                    return self._template.render(merged, tools=list(tools) or None, reply=reply)
            roles = ", ".join(message.role for message in messages[:8])
            raise UsageError(
                f"the chat template of the checkpoint rejects a dialogue of {len(messages)} messages ({roles}): "
                f"{error}; correct the dialogue, or use another checkpoint"
            ) from None

    def _fields(self, message: DialogueMessage) -> Mapping[str, Any]:
        """Return a message as the template reads it."""
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        fields |= {"name": message.name} if message.name else {}
        fields |= {"tool_call_id": self._tool_format.id_of(message.tool_call_id)} if message.tool_call_id else {}
        if message.tool_calls:
            fields["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return fields

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        function = {**function, "arguments": self._tool_format.arguments_of(function["arguments"])}
        return {**call, "id": self._tool_format.id_of(call["id"]), "function": function}

    def _check(self, record: DialogueRecord) -> None:
        texts = [
            (f"a message of the role {one.role}", f"{one.name}\n{one.content}\n{_json(one.tool_calls)}")
            for one in record.messages
        ]
        for place, text in [*texts, ("a definition of a tool", _json(record.tools))]:
            token = next((name for name in self._special.values() if name and name in text), None)
            if token is not None:
                raise UsageError(f"{place} contains {token}, a special token of the tokenizer; remove it")


_json = partial(json.dumps, ensure_ascii=False)


def _joined(prompt: str, until: str, message: str) -> str:
    """Return a prompt, which ends with a message and the start of a reply, with the reply in the
    text `until`. Templates may change the prompt when the reply follows.
    """
    end = prompt[prompt.rfind(message) :] if message else ""
    start = until.rfind(end)
    if until.startswith(prompt) or not end or start < 0:
        return until
    return prompt + until[start + len(end) :]


def _find(text: str, start: str, body: str | None, content: str) -> tuple[int, int] | None:
    """Return the start and the end of a reply after its prompt, given all its text or, if that is
    None, its content; None if the text has another prompt or reply.
    """
    if not text.startswith(start):
        return None
    if body is not None:
        return (len(start), len(start) + len(body)) if text.startswith(body, len(start)) else None
    first = text.find(content, len(start))
    return None if first < 0 else (len(start), first + len(content))


def end_token(config: PretrainedConfig, tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a reply in the chat template of a checkpoint."""
    template = read_chat_template(config)
    assert template is not None, "the caller checks it"
    dialogue = DialogueRecord((DialogueMessage("user", "x"), DialogueMessage("assistant", "y")))
    ((ids, mask),) = DialogueEncoder(template, tokenizer).encode(dialogue)
    return [id_ for id_, is_trained in zip(ids, mask, strict=True) if is_trained][-1]


def encode_records(
    config: PretrainedConfig,
    tokenizer: Tokenizer,
    records: Sequence[TextRecord | DialogueRecord],
    max_length_tokens: int = 2**30,
) -> list[list[Example]]:
    """Encode each record of a language model that others trained first.

    A text ends with the end token, and all its tokens but the first are part of the loss. A record
    longer than `max_length_tokens` gives several examples, as in `sightline.model.data.encoding`.
    """
    template = read_chat_template(config)
    dialogues = None if template is None else DialogueEncoder(template, tokenizer)
    encoded = list[list[Example]]()
    for record in records:
        if isinstance(record, TextRecord):
            ids = tokenizer.encode(record.text).ids
            ids = ids if ids[-1:] == [config.eos_id] else [*ids, config.eos_id]
            encoded.append(list(windows(ids, max_length_tokens)))
        elif dialogues is None:
            raise UsageError("the checkpoint has no chat template for dialogues; use one that has, or plain texts")
        else:
            encoded.append(dialogues.encode(record, max_length_tokens))
    return encoded
