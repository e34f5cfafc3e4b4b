"""Prompts of models that continue a text: texts, the special tokens between them, and dialogues.

Rerankers that are language models read a query and a document as one such text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sightline.base.bundle import PairTemplate
from sightline.base.text.tokenizer import TextTokenizer

_SLOT = re.compile(r"\{(instruction|query|document)\}")  # of a template of pairs


class ChatTemplateError(ValueError):
    """A chat template cannot be used, or rejects a dialogue; the message states why about "it".

    `reason` is the message without `detail`, which may contain text of the dialogue.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class TemplateLimitError(ChatTemplateError):
    """A chat template exceeds a limit of its size or its work."""


@dataclass(frozen=True)
class Dialogue:
    """Messages, as Transformers has them, that a chat template formats as one prompt.

    The model replies to the last message, or continues it if it is the assistant's.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None  # definitions of functions, as JSON Schema

    def __len__(self) -> int:
        """Return the number of inputs, which is always 1."""
        return 1

    def index(self, position: int) -> None:
        """Return the index of an input for an error: None, because it is not in a list."""

    @property
    def texts(self) -> list[str]:
        texts = [str(message["content"]) for message in self.messages]
        others = [[message.get("tool_calls") for message in self.messages], self.tools]
        return [*texts, *(json.dumps(other) for other in others if any(other or ()))]

    @property
    def continues(self) -> bool:
        """True if the model continues the last message."""
        return bool(self.messages[-1]["role"] == "assistant")


@dataclass(frozen=True)
class Prompt:
    """A prompt as texts and ids of special tokens, in order.

    Two texts never follow each other: text between two special tokens is tokenized in one piece.
    """

    parts: tuple[str | int, ...]
    around: tuple[Sequence[int], Sequence[int]] = ((), ())  # ids before and after the parts

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    def encode(self, tokenizer: TextTokenizer, max_tokens: int | None = None) -> list[int]:
        """Return the token ids. Names of special tokens in the texts are plain text.

        With `max_tokens`, no text has more ids than that.
        """
        before, after = self.around
        ids = list(before)
        for index, part in enumerate(self.parts):
            if isinstance(part, int):
                ids.append(part)
            elif max_tokens is None:
                ids += tokenizer.encode(part, add_special_tokens=False, is_start=index == 0)
            else:
                ids += tokenizer.first_ids(part, max_tokens, is_start=index == 0)
        return [*ids, *after]


def raw_prompt(text: str, tokenizer: TextTokenizer) -> Prompt:
    """Return a text in which the names of special tokens stand for them, as in Transformers."""
    return Prompt(tuple(merge_parts(tokenizer.split_special(text), tokenizer)), tokenizer.template_ids)


def merge_parts(parts: Sequence[str | int], tokenizer: TextTokenizer) -> Iterator[str | int]:
    """Join texts that follow each other, and remove the whitespace that special tokens absorb."""
    text, strips_left = "", False
    for part in (*parts, None):
        if isinstance(part, str):
            text += part
            continue
        absorbs_left, absorbs_right = (False, False) if part is None else tokenizer.absorbs_whitespace[part]
        text = text.lstrip() if strips_left else text
        text = text.rstrip() if absorbs_left else text
        if text:
            yield text
        if part is not None:
            yield part
        text, strips_left = "", absorbs_right


def tokenize_with_template(
    tokenizer: TextTokenizer,
    template: PairTemplate,
    query: str,
    document: str,
    max_tokens: int | None = None,
    instruction: str | None = None,
) -> list[int]:
    """Return at most `max_tokens` ids of a query and a document, whose end is cut if necessary.

    Special tokens in the template are recognized by their names. The query, the document and the
    instruction (that of the template if None) are plain text. Raises `ValueError` if the texts
    before the document leave no token for it.
    """
    values = {"query": query, "document": document}
    values["instruction"] = template.instruction if instruction is None else instruction
    parts: list[str | int] = []
    document_end = 0
    for index, piece in enumerate(_SLOT.split(template.text)):
        parts += [values[piece]] if index % 2 else tokenizer.split_special(piece)
        if index % 2 and piece == "document":
            document_end = len(parts)
    merged, after = (tuple(merge_parts(some, tokenizer)) for some in (parts, parts[document_end:]))
    before = merged[: len(merged) - len(after)]  # its last text ends with the document
    ids, ids_after = (Prompt(some).encode(tokenizer, max_tokens) for some in (before, after))
    if max_tokens is not None:
        num_around = len(Prompt(before[:-1]).encode(tokenizer, max_tokens)) + len(ids_after)
        if num_around >= max_tokens:
            raise ValueError(f"max_tokens must be greater than the {num_around} tokens around the document")
        ids = ids[: max_tokens - len(ids_after)]
    return [*ids, *ids_after]
