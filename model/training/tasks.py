"""Tasks of the systems by name."""

from collections.abc import Mapping
from typing import Any

from model.training.chat import chat_task
from model.training.classification import CLASSIFICATION
from model.training.task import Task
from model.training.translation import TRANSLATION

TASKS: Mapping[str, Task[Any, Any, Any]] = {
    "translation": TRANSLATION,
    "classification": CLASSIFICATION,
    "chat": chat_task(has_ghost_attention=False),
    "ghost-attention": chat_task(has_ghost_attention=True),
}
