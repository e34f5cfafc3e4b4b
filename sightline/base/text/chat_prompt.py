"""Chat templates: formatting of a dialogue as the token ids of a prompt."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sightline.base.bundle import NOW, ChatRole, ChatTemplate, Thinking
from sightline.base.text.tokenizer import TextTokenizer

Turn = tuple[ChatRole, str]  # a message of the user or the assistant: its role and text


@dataclass(frozen=True)
class Prompt:
    """A prompt as texts and ids of special tokens, in order.

    Two texts never follow each other: text between two special tokens is tokenized in one piece.
    """

    parts: tuple[str | int, ...]
    add_special_tokens: bool = True  # the tokenizer's own special tokens, if the parts have none
    around: tuple[Sequence[int], Sequence[int]] = ((), ())  # ids before and after several parts

    def __len__(self) -> int:
        """Return the number of inputs, which is always 1."""
        return 1

    def index(self, position: int) -> None:
        """Return the index of an input for an error: None, because it is not in a list."""

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Return the token ids. Names of special tokens in the texts are plain text."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return tokenizer.encode(self.parts[0], add_special_tokens=self.add_special_tokens)
        before, after = self.around
        ids = list(before)
        for index, part in enumerate(self.parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += tokenizer.encode(part, add_special_tokens=False, is_start=index == 0)
        return [*ids, *after]


def raw_prompt(text: str, tokenizer: TextTokenizer) -> Prompt:
    """Return a text in which the names of special tokens stand for them, as in Transformers."""
    return Prompt(tuple(merge_parts(tokenizer.split_special(text), tokenizer)), around=tokenizer.template_ids())


def apply_chat_template(
    template: ChatTemplate, system: Sequence[str], turns: Sequence[Turn], tokenizer: TextTokenizer
) -> Prompt:
    """Format a dialogue, whose first turn is the user's, as the prompt of a chat model.

    Special tokens in the template are recognized by their names. Messages are plain text, so that a
    user cannot end a message or insert one.

    If the template has no system message, system messages are put at the start of the first user
    message, like the instruction in Llama 2's Ghost Attention (Touvron et al. 2023, section 3.3).
    If it has `single_line`, line breaks would end a message, so they are replaced by spaces.

    The prompt ends with the beginning of the model's reply, or with the text of the last message if
    it is the assistant's: the model continues it.
    """
    parts = list[str | int]()
    for text, is_message in format_dialogue(template, system, turns):
        parts += [text] if is_message else tokenizer.split_special(text)
    return Prompt(tuple(merge_parts(parts, tokenizer)), template.add_special_tokens)


def format_dialogue(
    template: ChatTemplate, system: Sequence[str], turns: Sequence[Turn], now: datetime | None = None
) -> list[tuple[str, bool]]:
    """Format a dialogue as texts, in order, each with True if it is that of a message.

    `now` is the local time for the template; None for the time of the call.
    """
    now = datetime.now() if now is None else now
    if not system and template.default_system is not None:
        system = [_at(template.default_system, now)]
    if template.single_line:
        system, turns = [_single_line(text) for text in system], [(role, _single_line(text)) for role, text in turns]
    if "system" in template.trim:
        system = [text.strip() for text in system]
    continues = turns[-1][0] == "assistant"
    messages = _turns(template, turns)
    if template.system is not None:
        patterns = [template.system, *[template.later_system or template.system] * len(system)]
        messages = [*zip(patterns, system, strict=False), *messages]
    elif system and not (template.system_in_last and continues):
        separator = " " if template.single_line else "\n\n"
        before = _at(template.system_in_user or f"{{}}{separator}", now).replace("{}", separator.join(system))
        index = -1 if template.system_in_last else 0
        text = before + messages[index][1]
        if "user" in template.trim and template.trim_system_in_user:
            text = (before + turns[index][1]).strip()
        messages[index] = (messages[index][0], text)
    texts = [(_at(template.begin, now), False)]
    for pattern, text in messages:
        head, tail = pattern.split("{}")
        texts += [(_at(head, now), False), (text, True), (_at(tail, now), False)]
    if not continues:
        return _joined([*texts, (_at(template.reply, now), False)])
    texts.pop()
    if "assistant" in template.trim and not texts[-1][0] and not tail.startswith(" "):
        # Transformers removes whitespace at the end of the prompt, not only that of the message.
        texts[-2:] = [(texts[-2][0].rstrip(), False)]
    return _joined(texts)


def _turns(template: ChatTemplate, turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """Return the pattern and the text of each message of user and assistant."""
    thinking, last = template.thinking, len(turns) - 1
    questions = [index for index, (role, text) in enumerate(turns) if role == "user" and _is_question(thinking, text)]
    last_question = questions[-1] if questions else last
    messages = []
    for index, (role, text) in enumerate(turns):
        pattern = template.user if role == "user" else template.assistant
        if role == "assistant" and thinking is not None and thinking.end in text and index < last:
            text = _without_thinking(thinking, text, is_kept=thinking.is_kept and index > last_question)
        elif template.continued is not None and role == "assistant" and index == last and index > last_question:
            if thinking is None:
                pattern = template.continued
            elif thinking.end not in text:
                pattern, text = template.continued, text.lstrip(thinking.strip)
        if role in template.trim:
            # Transformers keeps whitespace at the end of a text to continue if a space follows it.
            keeps_end = role == "assistant" and index == last and pattern.split("{}")[1].startswith(" ")
            text = text.lstrip() if keeps_end else text.strip()
        messages.append((pattern, text))
    return messages


def _is_question(thinking: Thinking | None, text: str) -> bool:
    if thinking is None or thinking.tool_response is None:
        return True
    start, end = thinking.tool_response
    return not (text.startswith(start) and text.endswith(end))


def _without_thinking(thinking: Thinking, text: str, *, is_kept: bool) -> str:
    """Remove the thinking of a reply, or write it as models are trained to."""
    before, *_, after = text.split(thinking.end)
    after = after.lstrip(thinking.strip)
    thought = before.rstrip("\n").split(thinking.start)[-1].lstrip("\n")
    return f"{thinking.start}\n{thought}\n{thinking.end}\n\n{after}" if is_kept and thought else after


def _at(text: str, now: datetime) -> str:
    """Return a text of a template with the time in it."""
    return re.sub(NOW, lambda match: now.strftime(match[1]), text)


def _joined(texts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join texts of the template that follow each other."""
    joined = list[tuple[str, bool]]()
    for text, is_message in texts:
        if joined and not is_message and not joined[-1][1]:
            text = joined.pop()[0] + text
        joined.append((text, is_message))
    return joined


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
