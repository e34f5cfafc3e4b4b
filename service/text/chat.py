"""Chat templates: a dialogue as the text that a model continues."""

from collections.abc import Sequence

from service.bundle import ChatTemplate


def write_dialogue(template: ChatTemplate, system: Sequence[str], turns: Sequence[str]) -> str:
    """Return the text that the model continues with its answer.

    System messages come before the user's first message, as the instruction of Llama 2's Ghost Attention does (Touvron
    et al. 2023, section 3.3). A line break would end a message, so it becomes a blank.

    Args:
        template: of the model.
        system: system messages.
        turns: messages of the user and the assistant in turn; the user's are the first and the last.
    """
    first, *others = [" ".join(turn.splitlines()) for turn in turns]
    first = " ".join([*(" ".join(text.splitlines()) for text in system), first])
    forms = (template.user, template.assistant)
    written = [forms[place % 2].replace("{}", turn) for place, turn in enumerate([first, *others])]
    return "".join(written) + template.reply
