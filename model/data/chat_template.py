"""Encoding of dialogues by a chat template: that of a checkpoint, or that of this project.

The loss is on the tokens of each reply from the end of its prompt up to the special token that ends
the reply. The prompts have the ids that the service computes.

The template of this project is ChatML with stripped messages: whitespace at the start of a content
would form tokens with the line break before it, which a model that begins a reply after this line
break never reads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain, takewhile
from typing import Any

from tokenizers import Tokenizer

from sightline.base.bundle import ChatTemplate
from sightline.base.errors import UsageError
from sightline.base.text.chat import JinjaTemplate, without_system
from sightline.base.text.prompt import ChatTemplateError
from sightline.base.text.tool_calls import REPLY, find_tool_format
from sightline.model.config import ArchitectureConfig, PretrainedConfig
from sightline.model.data.examples import Example
from sightline.model.data.records import DialogueMessage, DialogueRecord
from sightline.model.data.tokenizer_training import special_id

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (IM_START, IM_END)  # special tokens, which no text contains
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Templates may ask for the time. It must not change, so that a resumed run has the same examples.
_NOW = datetime(2024, 7, 26)


def dialogue_encoder(model: ArchitectureConfig | None, tokenizer: Tokenizer) -> "DialogueEncoder":
    """Return the encoder for a third-party model, or for another one, which may be new. Raises
    `UsageError` if it has no form of dialogues.
    """
    chat: Mapping[str, Any] = {"program": CHAT_TEMPLATE}
    if not isinstance(model, PretrainedConfig):
        special_id(tokenizer, IM_START)
    elif not (chat := model.chat):
        raise UsageError("the checkpoint has no chat template for dialogues; use one that has, or plain texts")
    return DialogueEncoder(JinjaTemplate(ChatTemplate(**chat), lambda: _NOW), tokenizer)


def exchanges(messages: Sequence[DialogueMessage]) -> Iterator[list[DialogueMessage]]:
    """Split a dialogue after each reply that is not followed by another reply or the results of its
    calls; messages after the last reply are left out.
    """
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    end = replies[-1] + 1 if replies else 0
    exchange: list[DialogueMessage] = []
    for index, message in enumerate(messages[:end]):
        exchange.append(message)
        if message.role == "assistant" and (index + 1 == end or messages[index + 1].role not in ("assistant", "tool")):
            yield exchange
            exchange = []


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

        A dialogue that is too long is split between exchanges, and each part begins with the system
        messages. An exchange that is too long by itself stays whole, so that the caller can drop
        it. Raises `UsageError` if the template does not allow the dialogue, or a message contains a
        special token.
        """
        self._check(record)
        encode = partial(self._encode, record.tools)
        system = list(takewhile(lambda message: message.role == "system", record.messages))
        parts, window = list(exchanges(record.messages[len(system) :])), list[DialogueMessage]()
        examples = encode([*system, *chain.from_iterable(parts)])
        if len(parts) < 2 or all(len(ids) <= max_length_tokens for ids, _ in examples):
            return examples
        examples = []
        for part in parts:
            longer = encode([*system, *window, *part])
            if window and any(len(ids) > max_length_tokens for ids, _ in longer):
                examples += encode([*system, *window])
                window = []
            window += part
        return examples + encode([*system, *window])

    def prompt(self, record: DialogueRecord) -> list[int]:
        """Return the token ids of a dialogue that ends with the beginning of a reply."""
        self._check(record)
        text = self._render(record.messages, record.tools, reply=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def end_token(self) -> int:
        """Return the id of the token that ends a reply."""
        ids, _ = self._reply((), (DialogueMessage("user", "x"), DialogueMessage("assistant", "y")))
        return ids[-1]

    def _encode(self, tools: Sequence[Mapping[str, Any]], messages: Sequence[DialogueMessage]) -> list[Example]:
        """Return one example up to the last reply with loss, or several if the template changes
        earlier messages when others follow, such as one that moves system messages to the last
        message of the user, or drops thoughts: a reply that is not part of the next example has its
        own one.
        """
        examples = list[Example]()
        for index in [index for index, message in enumerate(messages) if message.is_trained]:
            ids, start = self._reply(tools, messages[: index + 1])
            mask = list[int]()
            if examples and ids[: len(examples[-1][0])] == examples[-1][0]:
                mask = [*examples.pop()[1]]
            examples.append((ids, [*mask, *[0] * (start - len(mask)), *[1] * (len(ids) - start)]))
        return examples

    def _reply(self, tools: Sequence[Mapping[str, Any]], messages: Sequence[DialogueMessage]) -> tuple[list[int], int]:
        """Return the token ids of messages up to the end of the last one, which is a reply, and the
        index of its first token.
        """
        prompt, reply = self._texts(tools, messages)
        text = prompt + reply
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        start = next((index for index, (first, _) in enumerate(offsets) if first >= len(prompt)), len(ids))
        ends = list[int]()  # special tokens after the text of the reply
        for index in reversed(range(start, len(ids))):
            if ids[index] in self._special:
                ends.insert(0, index)
            elif text[slice(*offsets[index])].strip():
                break
        if not ends:
            raise UsageError(
                "the chat template of the model ends a reply without a special token, so that the model would "
                "not learn to stop; use another checkpoint"
            )
        end = ends[0]
        if messages[-1].tool_calls:  # special tokens may end the calls, too
            end = ends[-1]
            with suppress(UsageError):
                plain = replace(messages[-1], content=REPLY, tool_calls=())
                last = self._reply(tools, [*messages[:-1], plain])[0][-1]
                end = next((index for index in ends if ids[index] == last), end)
        return ids[: end + 1], start

    def _texts(self, tools: Sequence[Mapping[str, Any]], messages: Sequence[DialogueMessage]) -> tuple[str, str]:
        """Return the texts of a prompt and of the reply to it, which is the last message."""
        reply, calls = messages[-1], [call["function"]["name"] for call in messages[-1].tool_calls]
        prompt = self._render(messages[:-1], tools, reply=True)
        text = _after(prompt, self._render(messages, tools), messages[-2].content.strip() if messages[1:] else "")
        if text is None or (not calls and reply.content.strip() not in text):
            raise UsageError(
                "the chat template of the model changes the text of a reply, or of its prompt when the reply "
                "follows, so that it cannot be trained on; use another checkpoint"
            )
        if any(text.count(name) < calls.count(name) for name in calls):
            raise UsageError(
                "the chat template of the model leaves out calls of tools; start from another checkpoint with --from, "
                "or remove them"
            )
        return prompt, text

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
                f"the chat template of the model rejects a dialogue of {len(messages)} messages ({roles}): "
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
        if record.tools and self._render(record.messages, record.tools) == self._render(record.messages, ()):
            raise UsageError(
                "the dialogue has tools, but the chat template of the model takes none; start from another "
                "checkpoint with --from, or remove tools"
            )


_json = partial(json.dumps, ensure_ascii=False)


def _after(prompt: str, text: str, message: str) -> str | None:
    """Return the part of a text that follows a prompt, None if it has another prompt. Templates may
    change the beginning of the prompt when a reply follows: then the part follows the last message,
    and what the prompt has after it.
    """
    end = prompt if text.startswith(prompt) or message not in prompt else prompt[prompt.rindex(message) :]
    _, found, part = text.rpartition(end)
    return part if found else None
