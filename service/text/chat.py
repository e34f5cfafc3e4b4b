"""Chat templates: formatting of a dialogue as a prompt."""

from collections.abc import Sequence

from service.bundle import ChatTemplate


def apply_chat_template(template: ChatTemplate, system: Sequence[str], turns: Sequence[str]) -> str:
    """Format a dialogue as the prompt of a chat model.

    System messages are put before the first user message, like the instruction in Llama 2's Ghost
    Attention (Touvron et al. 2023, section 3.3). Line breaks would end a message, so they are
    replaced by spaces.

    Args:
        template: chat template of the model.
        system: system messages.
        turns: alternating messages of user and assistant; the first and the last are the user's.
    """
    first, *others = [" ".join(turn.splitlines()) for turn in turns]
    first = " ".join([*(" ".join(text.splitlines()) for text in system), first])
    templates = (template.user, template.assistant)
    written = [templates[index % 2].replace("{}", turn) for index, turn in enumerate([first, *others])]
    return "".join(written) + template.reply
