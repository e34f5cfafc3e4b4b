"""Telemetry of ONNX Runtime is disabled: it writes no files to the home folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "sightline.service.runtime.ort",
        "sightline.service.server",
        "sightline.export.check.sessions",
        "sightline.export.commands",
    ],
)
def test_onnx_runtime_is_always_loaded_without_telemetry(module: str, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}  # no variable that disables it
    program = f"import sys, {module}; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []
