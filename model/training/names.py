"""Names of the tasks; importing them needs no PyTorch."""

from model.data.records import TASK_NAMES, TaskName

__all__ = ["TASK_NAMES", "TaskName"]
