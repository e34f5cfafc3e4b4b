"""`make serve` is replaced by the service, so that signals reach it."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.service.conftest import wait_until

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def test_a_signal_to_make_ends_the_service(tmp_path: Path) -> None:
    """The environment is a folder whose Python writes its process id and arguments, and waits."""
    (tmp_path / "bin").mkdir()
    python, written = tmp_path / "bin" / "python", tmp_path / "written"
    python.write_text(f'#!/bin/sh\necho "$$ $@" > {written}.new\nmv {written}.new {written}\nexec sleep 60\n')
    python.chmod(0o755)
    (tmp_path / "ready").touch()
    with subprocess.Popen(["make", "serve", f"SERVE={tmp_path}"], stdout=subprocess.DEVNULL) as make:
        wait_until(written.exists)
        process, *words = written.read_text("utf-8").split()
        assert words == ["-m", "sightline.service", "--bundles", "bundles"]
        make.send_signal(signal.SIGTERM)
        make.wait(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
