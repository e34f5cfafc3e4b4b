"""The memory that the weights of a bundle need while they are loaded and after it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sightline.base.bundle_files import read_bundle
from sightline.service.runtime import base
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.runner import Array, Int64
from tests.service.test_unloaded_memory import WEIGHT_BYTES, write_large_bundle

LIBRARY_BYTES = 20_000_000  # of the libraries, which do not depend on the weights
# Loads a bundle and measures its threads with several sessions; prints the growth of the resident
# memory at its peak and at the end.
LOAD = """
import sys
from pathlib import Path

from sightline.service import loading
from sightline.service.engine.observer import EngineObserver
from sightline.service.runtime import base, thread_counts
from sightline.service.settings import Settings


def read(name):
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name))


thread_counts.MIN_SECONDS, thread_counts.MIN_SPEEDUP = 0.0, float(sys.argv[2])
thread_counts.MEASURED_S, base.SAMPLE_ROWS, base.SAMPLE_TOKENS = 0.0, 1, 1
loading.usable_threads = lambda: 2
before = read("VmRSS")
settings = Settings(bundles=Path(sys.argv[1]), max_batch_tokens=16)
backend = loading.load_backend(settings, lambda model: EngineObserver())
print(backend.loaded["large"].model.threads["encoder"], read("VmHWM") - before, read("VmRSS") - before)
"""


def load(folder: Path, min_speedup: float) -> list[int]:
    command = [sys.executable, "-c", LOAD, str(folder), str(min_speedup)]
    return [int(word) for word in subprocess.check_output(command, text=True).split()]


def test_loading_needs_at_most_thirteen_tenths_of_the_weights(bundle: Path, tmp_path: Path) -> None:
    """Regression: a session with other threads was opened beside the first one."""
    write_large_bundle(bundle, tmp_path / "large", layers=25)
    for min_speedup, expected in ((0.0, 2), (1e9, 1)):
        threads, peak, after = load(tmp_path, min_speedup)
        assert threads == expected
        assert 0.9 * WEIGHT_BYTES < after <= peak < 1.3 * WEIGHT_BYTES + LIBRARY_BYTES


@pytest.mark.parametrize(("share", "expected"), [(32, 32), (3, 3), (0.5, 1)])
def test_long_contexts_are_warmed_up_with_few_rows(
    share: float, expected: int, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the largest step of a model of 8192 positions allocated 630 MB at start."""
    manifest = read_bundle(bundle)
    monkeypatch.setattr(base, "WARM_UP_POSITIONS", int(share * manifest.limits.max_target_tokens))
    runner = OnnxRunner(bundle, manifest, num_threads=1, max_rows=64)
    rows: list[int] = []
    step = runner.step

    def record(token_ids: Int64, *arguments: Any) -> Mapping[str, Array]:
        rows.append(len(token_ids))
        return step(token_ids, *arguments)

    monkeypatch.setattr(runner, "step", record)
    runner.warm_up(64)
    assert rows == [expected, 1]
