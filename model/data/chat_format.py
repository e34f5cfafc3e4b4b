"""Chat format of dialogues that models are trained on: ChatML with stripped messages.

A message is `<|im_start|>ROLE`, a line break, its content without whitespace at both ends,
`<|im_end|>` and a line break. The content is stripped because whitespace at its start would form
tokens with the line break before it, which a model that begins a reply after this line break never
reads.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, takewhile

from sightline.model.data.examples import Example
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


def divided(
    messages: Sequence[DialogueMessage],
    encode: Callable[[Sequence[DialogueMessage]], list[Example]],
    max_length_tokens: int,
) -> list[Example]:
    """Return the examples of a dialogue up to its last reply. A dialogue that is too long is split
    between exchanges, and each part begins with the system messages. An exchange that is too long
    by itself stays whole, so that the caller can drop it.
    """
    system = list(takewhile(lambda message: message.role == "system", messages))
    parts, window = list(exchanges(messages[len(system) :])), list[DialogueMessage]()
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
