"""Durations and deadlines follow clocks that are never set."""

import re
from pathlib import Path

WALL_CLOCK = re.compile(
    r"\btime\.(?:time|time_ns|ctime|localtime|gmtime|strftime|CLOCK_REALTIME)\b"
    r"|\b(?:datetime|date)\.(?:now|today|utcnow)\b"
    r"|\bfrom time import\b"
)
ALLOWED = {
    "service/quotas.py": "the windows of quotas, which several services share",
    "service/traces.py": "the times of spans",
    "sightline/base/text/chat.py": "the date in chat templates",
    "service/compat/openai/text_response.py": "the field created",
    "service/compat/ollama.py": "the field created_at",
    "service/inference/glossaries.py": "the time at which a glossary was created",
    "service/inference/document_store.py": "the age of files, which several workers share",
}


def test_the_time_of_day_is_read_only_where_it_is_shown_or_shared() -> None:
    reading = {
        path.as_posix()
        for folder in ("service", "sightline/base")
        for path in Path(folder).rglob("*.py")
        if WALL_CLOCK.search(path.read_text(encoding="utf-8"))
    }
    assert reading == ALLOWED.keys(), "use time.monotonic for durations and deadlines"
