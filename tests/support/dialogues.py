"""Dialogues for tests."""

from sightline.base.text.chat_prompt import Turn


def in_turn(*texts: str) -> list[Turn]:
    """Return messages of user and assistant in turn."""
    return [("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]
