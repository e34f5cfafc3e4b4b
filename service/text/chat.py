"""Chat templates: formatting of a dialogue as the token ids of a prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.bundle import ChatRole, ChatTemplate
from service.text.tokenizer import TextTokenizer

Turn = tuple[ChatRole, str]  # a message of the user or the assistant: its role and text


@dataclass(frozen=True)
class Prompt:
    """A prompt as texts and ids of special tokens, in order.

    Two texts never follow each other: text between two special tokens is tokenized in one piece.
    """

    parts: tuple[str | int, ...]
    add_special_tokens: bool = True  # the tokenizer's own special tokens, if the parts have none

    def __len__(self) -> int:
        """Return the number of inputs, which is always 1."""
        return 1

    @property
    def texts(self) -> list[str]:
        """The texts among the parts."""
        return [part for part in self.parts if isinstance(part, str)]

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Return the token ids. Names of special tokens in the texts are plain text."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return tokenizer.encode(self.parts[0], add_special_tokens=self.add_special_tokens)
        ids: list[int] = []
        for index, part in enumerate(self.parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += tokenizer.encode(part, add_special_tokens=False, is_start=index == 0)
        return ids


def apply_chat_template(
    template: ChatTemplate, system: Sequence[str], turns: Sequence[Turn], tokenizer: TextTokenizer
) -> Prompt:
    """Format a dialogue as the prompt of a chat model.

    Special tokens in the template are recognized by their names. Messages are plain text, so that a
    user cannot end a message or insert one.

    If the template has no system message, system messages are put at the start of the first user
    message, like the instruction in Llama 2's Ghost Attention (Touvron et al. 2023, section 3.3).
    If it has `single_line`, line breaks would end a message, so they are replaced by spaces.

    The prompt ends with the begin of the model's reply, or with the text of the last message if it
    is the assistant's: the model continues it.

    Args:
        template: chat template of the model.
        system: system messages.
        turns: messages of user and assistant; the first is the user's.
        tokenizer: tokenizer of the source.
    """
    if not system and template.default_system is not None:
        system = [template.default_system]
    if template.single_line:
        system, turns = [_single_line(text) for text in system], [(role, _single_line(text)) for role, text in turns]
    if "system" in template.trim:
        system = [text.strip() for text in system]
    messages: list[tuple[str, str]] = []
    if template.system is not None:
        messages = [(template.system, text) for text in system]
    elif system:
        separator = " " if template.single_line else "\n\n"
        pattern = template.system_in_user or f"{{}}{separator}"
        (role, first), *following = turns
        turns = [(role, pattern.replace("{}", separator.join(system)) + first), *following]
    patterns = {"user": template.user, "assistant": template.assistant}
    for role, text in turns:
        messages.append((patterns[role], text.strip() if role in template.trim else text))
    parts = list(tokenizer.split_special(template.begin))
    after = ""
    for pattern, text in messages:
        parts += tokenizer.split_special(after)
        before, after = pattern.split("{}")
        parts += [*tokenizer.split_special(before), text]
    if turns[-1][0] == "user":
        parts += [*tokenizer.split_special(after), *tokenizer.split_special(template.reply)]
    return Prompt(tuple(merge_parts(parts, tokenizer)), template.add_special_tokens)


def _single_line(text: str) -> str:
    return " ".join(text.splitlines())


def merge_parts(parts: Sequence[str | int], tokenizer: TextTokenizer) -> Iterator[str | int]:
    """Join texts that follow each other, and remove the whitespace that special tokens absorb."""
    text, strips_left = "", False
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        absorbs_left, absorbs_right = tokenizer.absorbs_whitespace(part)
        text = text.lstrip() if strips_left else text
        text = text.rstrip() if absorbs_left else text
        if text:
            yield text
        yield part
        text, strips_left = "", absorbs_right
    text = text.lstrip() if strips_left else text
    if text:
        yield text
