import os
import subprocess
import time
from pathlib import Path

import pytest

from bench.process import EndedError, JsonWorker, Process
from bench.server import serving


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def wait_for_state(pid: int, states: str) -> None:
    end = time.monotonic() + 10
    while state_of(pid) not in states:
        assert time.monotonic() < end, state_of(pid)
        time.sleep(0.01)


def test_a_process_runs_only_during_its_turn() -> None:
    process = Process(["http.server", "0", "--bind", "127.0.0.1"], os.environ)
    try:
        process.suspend()
        wait_for_state(process.pid, "T")
        with process.running():
            wait_for_state(process.pid, "SR")
        wait_for_state(process.pid, "T")
    finally:
        process.end()
    assert process.exit_code is not None


def test_a_suspended_process_can_be_ended() -> None:
    process = Process(["http.server", "0", "--bind", "127.0.0.1"], os.environ, stdout=subprocess.DEVNULL)
    process.suspend()
    process.end()
    assert process.exit_code is not None


def test_a_worker_that_ends_without_a_response_is_named_in_the_error() -> None:
    process = JsonWorker(["json.tool", "nothing here"], os.environ)  # a module that exits with an error
    try:
        with pytest.raises(EndedError, match="nothing here ended without a response"):
            process.wait_until_ready()
    finally:
        process.end()


def test_a_service_that_cannot_start_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before it was ready"), serving(tmp_path / "nothing here"):
        pass
