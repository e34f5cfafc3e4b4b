"""Logs as one JSON object a line: what happened to each call, and nothing of what was in it."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

FIELDS = "fields"  # the attribute of a log record that holds its own fields

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


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send everything that is logged in this process to `stream` (standard output), one JSON object a line."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What uvicorn says of its own start and end at "info" is said again, and better, by this service.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))


def log_call(level: int, fields: dict[str, Any]) -> None:
    """The one line of a finished call."""
    if access_logger.isEnabledFor(level):
        access_logger.log(level, "request", extra={FIELDS: fields})
