"""A command that exceeds a limit, or exits with a number: `python -m tests.export.limited WORK`."""

import os
import signal
import sys

from export import limits


def main(work: str) -> int:
    """Exceed a limit, or return a number."""
    limits.SECONDS = 1
    limits.begin_step(f"the work {work}", 0)
    try:
        if work == "loop":
            while True:
                pass
        if work == "panic":
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
