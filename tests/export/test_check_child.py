"""The process that checks a bundle ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.export.folders_of_others import write_bert

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot end it")
EXPORT = """
import sys
from pathlib import Path
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint

if __name__ == "__main__":
    export_checkpoint(Export(Path(sys.argv[1]), Path(sys.argv[2]), BundleMetadata("bert")))
"""


def command_of(process: int) -> str:
    """Return the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def find_checks(parent: int) -> list[int]:
    """Return the processes that a process has started with `multiprocessing` for work."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and "spawn_main" in command_of(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("delay", "end"),
    [(0.0, signal.SIGTERM), (0.8, signal.SIGKILL)],
    ids=["terminated while it starts", "killed while it works"],
)
def test_an_export_that_is_ended_leaves_no_process(tmp_path: Path, delay: float, end: signal.Signals) -> None:
    script, folder = tmp_path / "run_export.py", tmp_path / "bert"
    script.write_text(EXPORT, encoding="utf-8")
    folder.mkdir()
    write_bert(folder)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, str(script), str(folder), str(tmp_path / "bundle")], env=environment)
    deadline = time.monotonic() + 60
    try:
        while not (checks := find_checks(parent.pid)):
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay)
    finally:
        parent.send_signal(end)
        parent.wait()
    (check,) = checks
    deadline = time.monotonic() + 20
    while "spawn_main" in command_of(check):
        assert time.monotonic() < deadline, "the check outlives its parent"
        time.sleep(0.02)
