"""Encoding of texts and dialogues for a language model that others trained first.

Dialogues have the chat template of the checkpoint. It may only add text around messages: the loss
is on the tokens of each reply up to the special token that ends it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from tokenizers import Tokenizer

from sightline.base.bundle import ChatTemplate
from sightline.base.errors import UsageError
from sightline.base.text.chat import JinjaTemplate
from sightline.base.text.prompt import ChatTemplateError
from sightline.model.config import PretrainedConfig
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
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # the template names special tokens
        added = tokenizer.get_added_tokens_decoder()
        self._special = {id_: token.content for id_, token in added.items() if token.special}

    def encode(self, messages: Sequence[DialogueMessage]) -> Example:
        """Return the token ids of a dialogue, and 1 for each token of a reply, otherwise 0. Raises
        `UsageError` if the template does not allow it, or a message contains a special token.
        """
        text = self._render(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        self._check_messages(messages)
        mask = [0] * len(encoding.ids)
        for index, message in enumerate(messages):
            if message.role == "assistant":
                start = self._render(messages[:index], reply=True)
                if not text.startswith(start):
                    raise UsageError(
                        "the chat template of the checkpoint changes earlier messages of a dialogue when a reply "
                        "follows, so that its prompts are not those of the training; use another checkpoint"
                    )
                self._mark(text, encoding, len(start), message.content.strip(), mask)
        return encoding.ids, mask

    def prompt(self, messages: Sequence[DialogueMessage]) -> list[int]:
        """Return the token ids of a dialogue that ends with the beginning of a reply."""
        self._check_messages(messages)
        text = self._render(messages, reply=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _render(self, messages: Sequence[DialogueMessage], *, reply: bool = False) -> str:
        listed = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(listed, reply=reply)
        except ChatTemplateError as error:
            roles = ", ".join(message.role for message in messages[:8])
            raise UsageError(
                f"the chat template of the checkpoint rejects a dialogue of {len(messages)} messages ({roles}): {error}"
                "; correct the dialogue, or use another checkpoint"
            ) from None

    def _check_messages(self, messages: Sequence[DialogueMessage]) -> None:
        for message in messages:
            token = next((name for name in self._special.values() if name and name in message.content), None)
            if token is not None:
                raise UsageError(
                    f"a message of the role {message.role} contains {token}, a special token of the tokenizer; remove "
                    "it from the message"
                )

    def _mark(self, text: str, encoding: Any, start: int, content: str, mask: list[int]) -> None:
        """Mark the tokens of a reply that begins at the index `start` of the text."""
        content_start = text.find(content, start)
        if content_start < 0:
            raise UsageError(
                "the chat template of the checkpoint changes the text of a reply, so that it cannot be trained on; use "
                "another checkpoint"
            )
        for index, (first, _) in enumerate(encoding.offsets):
            if first < start:
                continue
            mask[index] = 1
            if first >= content_start + len(content) and encoding.ids[index] in self._special:
                return
        raise UsageError(
            "the chat template of the checkpoint ends a reply without a special token, so that the model would not "
            "learn to stop; use another checkpoint"
        )


def end_token(config: PretrainedConfig, tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a reply in the chat template of a checkpoint."""
    template = read_chat_template(config)
    assert template is not None, "the caller checks it"
    ids, mask = DialogueEncoder(template, tokenizer).encode(
        [DialogueMessage("user", "x"), DialogueMessage("assistant", "y")]
    )
    return [id_ for id_, is_trained in zip(ids, mask, strict=True) if is_trained][-1]


def encode_records(
    config: PretrainedConfig, tokenizer: Tokenizer, records: Sequence[TextRecord | DialogueRecord]
) -> list[Example]:
    """Encode records of a language model that others trained first, one example for each.

    A text ends with the end token, and all its tokens but the first are part of the loss.
    """
    template = read_chat_template(config)
    dialogues = None if template is None else DialogueEncoder(template, tokenizer)
    examples = list[Example]()
    for record in records:
        if isinstance(record, TextRecord):
            ids = tokenizer.encode(record.text).ids
            ids = ids if ids[-1:] == [config.eos_id] else [*ids, config.eos_id]
            examples.append((ids, [0] + [1] * (len(ids) - 1)))
        elif dialogues is None:
            raise UsageError("the checkpoint has no chat template for dialogues; use one that has, or plain texts")
        else:
            examples.append(dialogues.encode(record.messages))
    return examples
