"""Dialogues and a chat template for tests."""

from sightline.base.bundle import ChatTemplate

# One line for each message. The tokenizer of the fake models ends an input with the end token.
LINES = ChatTemplate(
    program="{% for message in messages %}"
    "{{ {'system': 'S', 'user': 'U', 'assistant': 'B'}[message.role] + (message.name or '') }}"
    "{{ ': ' + message.content + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'B:' + eos_token }}{% endif %}",
    tokens={"eos_token": "</s>"},
)


def in_turn(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return messages of user and assistant in turn, after one of the system."""
    said = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]
    return ([] if system is None else [{"role": "system", "content": system}]) + said
