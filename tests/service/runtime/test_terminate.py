"""After `terminate`, every run of a graph raises, so that a run that does not end is ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle_files import read_bundle
from sightline.service.runtime.ort import OnnxRunner

IDS, ONE = np.full((1, 4), 5, np.int64), np.ones(1, np.int32)
TOP = ("top_ids", "top_logprobs")
Run = Callable[[OnnxRunner], Any]
# `tests/export/test_predictions.py` tests `predict`, for which no shared bundle has a graph.
TRANSLATION: dict[str, Run] = {
    "encode": lambda runner: runner.run_encoder(IDS, 4 * ONE, ("hidden",)),
    "step": lambda runner: runner.step(IDS[0, :1], ONE, 4 * ONE, TOP),
}
CHAT: dict[str, Run] = {
    "prefill": lambda runner: runner.prefill(0, IDS[0], 0),
    "prefill with scores": lambda runner: runner.prefill(0, IDS[0], 0, TOP),
    "step of a decoder-only model": lambda runner: runner.step(IDS[0, :1], ONE, ONE, TOP),
}


def check(folder: Path, run: Run) -> None:
    """Check that a run succeeds until the runner is terminated, and then raises."""
    runner = OnnxRunner(folder, read_bundle(folder), num_threads=1, max_rows=2)
    run(runner)
    runner.terminate()
    for _ in range(2):
        with pytest.raises(Exception, match="terminate"):
            run(runner)


@pytest.mark.parametrize("run", TRANSLATION.values(), ids=TRANSLATION)
def test_a_terminated_runner_of_a_translation_model_raises(bundle: Path, run: Run) -> None:
    check(bundle, run)


@pytest.mark.parametrize("run", CHAT.values(), ids=CHAT)
def test_a_terminated_runner_of_a_decoder_only_model_raises(run: Run) -> None:
    check(Path("bundles/smalltalk-chat-gatt"), run)
