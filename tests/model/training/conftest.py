"""Processes of tests that train."""

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Context whose processes have PyTorch and its optimizers, so that they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.model.training.toys", "torch._dynamo"])
    return context
