"""What became of one request: a success with its times and tokens, a refusal or a failure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from loadtest.client import Answer
from loadtest.events import Event, parse_events


@dataclass(frozen=True)
class Success:
    """A whole answer.

    Args:
        latency_s: from when the request was due to the end of the answer.
        first_token_s: from when the request was due to the first event; None where the answer was not streamed.
        input_tokens: as the service counts them.
        output_tokens: as the service counts them; 0 for an endpoint that generates none.
    """

    latency_s: float
    first_token_s: float | None
    input_tokens: int
    output_tokens: int

    @property
    def per_output_token_s(self) -> float | None:
        """(latency - time to first token) / (output tokens - 1), None where that has no meaning."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Refusal:
    """A 503: the service said no at once and says when to come back."""

    code: str
    retry_after_s: int | None


@dataclass(frozen=True)
class Failure:
    """Anything else; `reason` is short and the same for the same fault, to be counted by."""

    reason: str


Outcome = Success | Refusal | Failure


def judge(answer: Answer, due: float, is_streamed: bool) -> Outcome:
    """Say what `answer` is to a request that was due at `due` by `time.perf_counter`."""
    if answer.status == 503:
        return Refusal(_error_code(answer.body) or "no code", _retry_after_s(answer.headers))
    if answer.status != 200:
        return Failure(f"{answer.status} {_error_code(answer.body) or 'no code'}")
    try:
        return _judge_stream(answer, due) if is_streamed else _judge_whole(answer, due)
    except (ValueError, KeyError, TypeError, AttributeError):  # not JSON, or not JSON of this service
        return Failure("malformed answer")


def _judge_whole(answer: Answer, due: float) -> Success:
    usage = orjson.loads(answer.body)["usage"]
    return Success(answer.ended - due, None, int(usage["input_tokens"]), int(usage.get("output_tokens", 0)))


def _judge_stream(answer: Answer, due: float) -> Success | Failure:
    events = list(parse_events(answer.parts))
    failure = next((event for event in events if event.name == "error"), None)
    if failure is not None:
        return Failure(f"error in the stream: {_error_code(failure.data) or 'no code'}")
    if len(events) < 2 or events[-1].data != b"[DONE]":
        return Failure("stream without its end")
    usages = [usage for event in events[:-1] if (usage := _usage(event)) is not None]
    if not usages:
        return Failure("malformed answer")
    return Success(
        latency_s=answer.ended - due,
        first_token_s=events[0].arrived - due,
        input_tokens=sum(int(usage["input_tokens"]) for usage in usages),
        output_tokens=sum(int(usage["output_tokens"]) for usage in usages),
    )


def _usage(event: Event) -> Mapping[str, Any] | None:
    usage: Mapping[str, Any] | None = orjson.loads(event.data).get("usage")
    return usage


def _error_code(body: bytes) -> str | None:
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def _retry_after_s(headers: Mapping[str, str]) -> int | None:
    value = headers.get("retry-after", "")
    return int(value) if value.isascii() and value.isdigit() else None
