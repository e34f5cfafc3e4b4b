"""A command that exceeds a limit, or exits with a number: `python -m tests.export.limited WORK`."""

import os
import signal
import sys
import time
from typing import Any

from sightline.export import limits


def loop(*_: Any) -> None:
    while True:
        pass


def main(work: str) -> int:
    """Exceed a limit, or return a number."""
    limits.SECONDS, limits.ELAPSED_FACTOR = 1, 1 if work == "wait" else 60
    limits.begin_step(f"the work {work}", 0)
    try:
        if work == "loop":
            loop()
        if work == "wait":
            time.sleep(60)
        if work == "abort":
            os.write(2, b"\nmemory allocation failed\nnote: a note\n")
            os.abort()
        if work == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if work == "memory":
            bytes(4 << 30)
    except MemoryError:
        sys.stderr.write(f"error: {limits.out_of_memory()}\n")
        return 1
    return int(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
