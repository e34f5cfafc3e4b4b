import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from lab.bench.process import EndedError, JsonWorker, Process, family_cpu_seconds
from lab.bench.server import serving

SERVER = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"]
# Starts a child in a session of its own, which works for a while; then both wait.
WORK = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}], start_new_session=True)"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def wait_for_state(pid: int, states: str) -> None:
    end = time.monotonic() + 10
    while state_of(pid) not in states:
        assert time.monotonic() < end, state_of(pid)
        time.sleep(0.01)


def test_a_process_runs_only_during_its_turn() -> None:
    process = Process(SERVER, os.environ)
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
    process = Process(SERVER, os.environ)
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


def test_cpu_time_and_turns_are_those_of_all_processes() -> None:
    process = Process([sys.executable, "-c", PARENT], os.environ)
    try:
        end = time.monotonic() + 10
        while process.cpu_seconds() < 0.3:
            assert time.monotonic() < end
            time.sleep(0.01)
        family = family_cpu_seconds(process.pid)
        assert len(family) == 2 and next(iter(family)) == process.pid
        assert family[process.pid] < 0.3
        process.suspend()
        for pid in family:
            wait_for_state(pid, "T")
        worked = process.cpu_seconds()
        time.sleep(0.1)
        assert process.cpu_seconds() - worked < 0.1
    finally:
        process.end()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
