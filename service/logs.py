"""Logs as one JSON object a line: what happened to each call, and nothing of what was in it."""

import contextlib
import io
import logging
import os
import queue
import select
import threading
import time
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson

FIELDS = "fields"  # the attribute of a log record that holds its own fields
MAX_WAITING_LINES = 4096  # some megabytes, and seconds of a busy service
WRITE_INTERVAL_S = 0.02  # between two writes, so that a thread does not wake up for every line
FLUSH_S = 0.5  # that the end of the process waits for the reader of the log

access_logger = logging.getLogger("sightline.access")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line; orjson escapes every control character, so nobody can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class QueuedHandler(logging.Handler):
    """Writes log lines from a thread of its own, so that no caller waits for the reader of the log.

    A line is dropped, and counted, when too many are waiting to be written or when the stream fails.

    The standard library's QueueListener is not used because its `stop` waits for the reader without a limit, and
    because a bounded `queue.Queue` deadlocks where the garbage collector logs in the middle of a `put`. The queue here
    is reentrant, and the handler's own lock makes checking its size and adding to it one step.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """`stream` is unbuffered: the interpreter could not end while a thread holds the lock of a buffer."""
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._stream = stream
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._num_refused = 0  # written by the threads that log
        self._num_failed = 0  # written by the thread that writes
        # A daemon: a reader that has stopped reading must not keep the process from ending.
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._num_failed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._waiting.qsize() < MAX_WAITING_LINES:
                self._waiting.put(record)
            else:
                self._num_refused += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines so far are written, for `FLUSH_S` at most.

        It takes no lock, so that a signal handler may call it.
        """
        written = threading.Event()
        self._waiting.put(written)
        written.wait(FLUSH_S)

    def close(self) -> None:
        self._waiting.put(None)
        super().close()

    def _write_lines(self) -> None:
        """Write the lines that are waiting, many at once; they are formatted here, away from the threads that log."""
        while True:
            items = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(items) < MAX_WAITING_LINES:
                    items.append(self._waiting.get_nowait())
            lines = [item for item in items if isinstance(item, logging.LogRecord)]
            if lines:
                try:
                    self._write(b"".join([self.format(line).encode() + b"\n" for line in lines]))
                except (OSError, ValueError):  # the reader has gone, the disk is full, or the stream is closed
                    self._num_failed += len(lines)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return
            time.sleep(WRITE_INTERVAL_S)

    def _write(self, line: bytes) -> None:
        while line:
            num_written = self._stream.write(line)
            if num_written is None:  # not now: somebody has made the pipe non-blocking
                select.select([], [self._stream], [])
            else:
                line = line[num_written:]


def open_missing_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent process has closed.

    Otherwise the next file or socket that is opened gets the descriptor of a standard stream, and whatever a library
    prints goes there; libuv even aborts the process when it closes such a descriptor.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def configure_logging(level: str, stream: BinaryIO | None = None) -> QueuedHandler:
    """Send all logs of this process to an unbuffered `stream`, by default standard output, one JSON object a line."""
    # No line shows these, and each costs a little of every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = QueuedHandler(stream or io.FileIO(1, "w", closefd=False))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What uvicorn says of its own start and end at "info" is said again, and better, by this service.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))
    return handler


def flush_logs() -> None:
    """Wait until the log lines so far are written; needed before `os._exit`, which flushes nothing itself."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def num_dropped_lines() -> int:
    """Return how many log lines were dropped because the reader was too slow or has gone."""
    handlers = logging.getLogger().handlers
    return sum(handler.num_dropped for handler in handlers if isinstance(handler, QueuedHandler))


def log_call(level: int, fields: dict[str, Any]) -> None:
    """Log the one line of a finished call."""
    if access_logger.isEnabledFor(level):
        # Made here, because the logger would look for the line of code that calls it, which costs more than all else.
        record = logging.LogRecord(access_logger.name, level, "", 0, "request", None, None)
        setattr(record, FIELDS, fields)
        access_logger.handle(record)
