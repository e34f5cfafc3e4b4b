"""Logging: one line for each event, as JSON or as text for people, without the texts of requests.

A record may carry two extra attributes: `fields`, a dict of values that belong to the event, and
`text`, a sentence that replaces message and fields where people read the log.
"""

import contextlib
import io
import json
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson

FIELDS, TEXT = "fields", "text"  # the extra attributes of a log record
MAX_WAITING_LINES = 4096  # some megabytes, and seconds of a busy service
WRITE_INTERVAL_S = 0.02  # between two writes, so that the thread does not wake up for each line
FLUSH_S = 0.5  # time that the end of the process waits for the reader of the log

# ANSI escape sequences
DIM, RESET = "\x1b[2m", "\x1b[0m"
COLORS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
# Characters that would start a new line, or control a terminal. A tab is harmless.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 9}
CONTROLS |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}

access_logger = logging.getLogger("sightline.access")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    orjson escapes control characters, so no value can forge a line.
    """

    def __init__(self, worker: int | None) -> None:
        """`worker` is the number of the worker process in each line; None leaves it out."""
        super().__init__()
        self._fields = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _to_json(line)


class TextFormatter(logging.Formatter):
    """Formats a record as text: time of day, level, message and fields, then an exception.

    Control characters are escaped, so that no value can forge a line or control the terminal.
    """

    def __init__(self, *, has_colors: bool, worker: int | None) -> None:
        """`worker` is the number of the worker process before each message; None leaves it out."""
        super().__init__()
        self._has_colors = has_colors
        self._worker = "" if worker is None else f"[{worker}] "

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        text: str | None = getattr(record, TEXT, None)
        if text is None and record.name == access_logger.name:
            text, fields = self._describe_call(fields)
        elif text is not None:
            fields = {}
        clock = datetime.fromtimestamp(record.created).astimezone().isoformat(sep=" ", timespec="milliseconds")[11:23]
        level = self._paint(f"{record.levelname.lower():<7}", COLORS.get(record.levelname, ""))
        message = (record.getMessage() if text is None else text).translate(CONTROLS)
        line = f"{self._paint(clock, DIM)} {level} {self._worker}{message}"
        shown = " ".join(f"{name}={_written(value)}" for name, value in fields.items() if value is not None)
        if shown:
            line += "  " + self._paint(shown.translate(CONTROLS), DIM)
        if record.exc_info:
            for part in self.formatException(record.exc_info).split("\n"):
                line += "\n    " + part.translate(CONTROLS)
        return line

    @staticmethod
    def _describe_call(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the message of an access log line, and the fields that are not part of it."""
        own = ("method", "route", "status", "code", "total_ms")
        method, route, status, code, total_ms = (fields.get(name) for name in own)
        outcome = f"{status} {code}" if code else f"{status}"
        message = f"{method or '-'} {route} {outcome} {total_ms} ms"
        return message, {name: value for name, value in fields.items() if name not in own}

    def _paint(self, text: str, color: str) -> str:
        return f"{color}{text}{RESET}" if self._has_colors else text


def _written(value: Any) -> str:
    """Write the value of a field: words as they are, everything else as JSON."""
    if isinstance(value, str) and value and not any(character.isspace() or character in '"=' for character in value):
        return value
    return _to_json(value)


def _to_json(value: Any) -> str:
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:  # a lone surrogate, as in a file name that is not UTF-8
        return json.dumps(value, default=str)


class QueuedHandler(logging.Handler):
    """Writes log lines in a thread of its own, so that no caller waits for the reader of the log.

    A line is dropped and counted if too many lines wait to be written, or if the stream fails.

    The standard library's QueueListener is not used because its `stop` waits for the reader without
    a limit, and because a bounded `queue.Queue` deadlocks if the garbage collector logs in the
    middle of a `put`. The queue here is reentrant, and the handler's own lock makes checking its
    size and adding to it one step.
    """

    def __init__(self, stream: BinaryIO, formatter: logging.Formatter) -> None:
        """Start the thread that writes.

        `stream` must be unbuffered: the interpreter cannot end while a thread locks a buffer.
        """
        super().__init__()
        self.setFormatter(formatter)
        self._stream = stream
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._num_rejected = 0  # written by the threads that log
        self._num_failed = 0  # written by the thread that writes
        # A daemon: a reader that has stopped reading must not keep the process from ending.
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    @property
    def num_dropped(self) -> int:
        return self._num_rejected + self._num_failed

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < MAX_WAITING_LINES:
            self._waiting.put(record)
        else:
            self._num_rejected += 1

    def flush(self) -> None:
        """Wait until all lines so far are written, at most `FLUSH_S` seconds.

        Takes no lock, so that a signal handler may call it.
        """
        written = threading.Event()
        self._waiting.put(written)
        written.wait(FLUSH_S)

    def close(self) -> None:
        self._waiting.put(None)
        super().close()

    def _write_lines(self) -> None:
        """Format and write the lines that wait, many at once."""
        while True:
            items = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(items) < MAX_WAITING_LINES:
                    items.append(self._waiting.get_nowait())
            lines = [item for item in items if isinstance(item, logging.LogRecord)]
            if lines:
                try:
                    for part in _atomic_parts([self._encode(line) for line in lines]):
                        self._write(part)
                except (OSError, ValueError):
                    # The reader has closed its end, the disk is full, or the stream is closed.
                    self._num_failed += len(lines)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return
            time.sleep(WRITE_INTERVAL_S)

    def _encode(self, record: logging.LogRecord) -> bytes:
        """Return a formatted line; nothing if its arguments do not fit its message."""
        try:
            return self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # one bad record must not end the thread
            self._num_failed += 1
            return b""

    def _write(self, line: bytes) -> None:
        while line:
            num_written = self._stream.write(line)
            if num_written is None:  # the pipe is full and was made non-blocking by another process
                select.select([], [self._stream], [])
            else:
                line = line[num_written:]


def _atomic_parts(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Join lines to parts that a pipe takes as a whole.

    Otherwise the lines of several processes would mix.
    """
    part = b""
    for line in lines:
        if part and len(part) + len(line) > select.PIPE_BUF:
            yield part
            part = b""
        part += line
    yield part


def open_missing_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent process has closed.

    Otherwise the next file or socket gets the descriptor of a standard stream, and receives
    everything that a library prints; libuv even aborts the process when it closes one.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def configure_logging(level: str, stream: BinaryIO | None = None, *, worker: int | None = None) -> QueuedHandler:
    """Send all logs of this process to a stream: as text to a terminal, as JSON to anything else.

    The variable NO_COLOR disables colors (https://no-color.org). The stream must be unbuffered; the
    default is standard output. Each line has the number of the `worker` unless it is None.
    """
    # No line shows these, and each costs a little time for every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    stream = stream or io.FileIO(1, "w", closefd=False)
    formatter: logging.Formatter = JsonFormatter(worker)
    if stream.isatty():
        formatter = TextFormatter(has_colors=not os.environ.get("NO_COLOR"), worker=worker)
    handler = QueuedHandler(stream, formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # This service logs its own start and end, so uvicorn's lines of level "info" would repeat them.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))
    return handler


def flush_logs() -> None:
    """Wait until the log lines so far are written.

    Call it before `os._exit`, which flushes nothing.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()


def num_dropped_lines() -> int:
    """Return the number of log lines dropped because their reader was too slow or had gone."""
    handlers = logging.getLogger().handlers
    return sum(handler.num_dropped for handler in handlers if isinstance(handler, QueuedHandler))
