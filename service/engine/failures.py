"""Consecutive failures of the graphs of a model, which tell a broken graph from calls that fail."""

import logging
from collections.abc import Mapping

from sightline.service.engine.checks import GraphName, run_test_input
from sightline.service.runtime.runner import Runner

# Consecutive failures of one graph, from distinct calls, before the test input is run.
MAX_FAILURES = 8
# Parts of messages about failures.
_FAILED: Mapping[GraphName, str] = {
    "encoder": "encoder graph failed for",
    "prefill": "decoder graph failed on prompts of",
    "decoder": "decoder graph failed for",
}
logger = logging.getLogger(__name__)


class RuntimeFailedError(Exception):
    """A graph fails even on the test input, for example because the device is broken.

    The engine cannot serve any request after this error.
    """


class GraphFailures:
    """Consecutive failed runs of each graph."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # Request ids of the failed runs; requests of a call share one.
        self._failed: dict[GraphName, set[str]] = {graph: set() for graph in _FAILED}

    def on_success(self, graph: GraphName) -> None:
        self._failed[graph].clear()

    def add(self, graph: GraphName, request_id: str, free_row: int) -> None:
        """Count a failed run; the test input may use the row `free_row`.

        Raises `RuntimeFailedError` if the graph failed `MAX_FAILURES` times in succession, for
        distinct calls, and also fails on the test input.
        """
        failed = self._failed[graph]
        failed.add(request_id)
        if len(failed) < MAX_FAILURES:
            return
        try:
            run_test_input(self._runner, graph, free_row)
        except Exception as error:
            raise RuntimeFailedError(
                f"the {_FAILED[graph]} {MAX_FAILURES} calls in succession and on the test input"
            ) from error
        logger.warning(
            "the %s %d calls in succession, but not on the test input: the calls caused the failures",
            _FAILED[graph],
            MAX_FAILURES,
        )
        failed.clear()
