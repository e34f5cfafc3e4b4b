"""Chat format of dialogues that models are trained on: ChatML with stripped messages.

A message is `<|im_start|>ROLE`, a line break, its content without whitespace at both ends,
`<|im_end|>` and a line break. The content is stripped because whitespace at its start would form
tokens with the line break before it, which a model that begins a reply after this line break never
reads.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from sightline.model.data.records import DialogueMessage, Role

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (IM_START, IM_END)  # special tokens, which no text contains

# The same format as a template of Transformers. The first message needs no start token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BETWEEN = "\n"  # text between the end of a message and the start of the next


def header(role: Role) -> str:
    """Return the text between `IM_START` and the content of a message."""
    return f"{role}\n"


def text_of(message: DialogueMessage) -> str:
    """Return the text between `IM_START` and `IM_END`."""
    return header(message.role) + message.content.strip()


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


def system_messages(messages: Sequence[DialogueMessage]) -> Sequence[DialogueMessage]:
    """Return the system messages at the start of a dialogue."""
    return list(takewhile(lambda message: message.role == "system", messages))
