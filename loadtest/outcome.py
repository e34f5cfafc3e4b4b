"""Outcome of a request: a success with times and token counts, a rejection or a failure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from loadtest.client import Response
from loadtest.events import Event, parse_events


@dataclass(frozen=True)
class Success:
    """Complete successful response.

    Args:
        latency_s: seconds from the time when the request was due to the end of the response.
        first_token_s: seconds from the time when the request was due to the first event; None
            without streaming.
        input_tokens: number of input tokens that the service reports.
        output_tokens: number of output tokens that the service reports; 0 for an endpoint that
            generates none.
    """

    latency_s: float
    first_token_s: float | None
    input_tokens: int
    output_tokens: int

    @property
    def per_output_token_s(self) -> float | None:
        """Seconds per output token after the first: (latency - time to first token) / (tokens - 1).

        None without streaming or with fewer than two tokens.
        """
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Rejection:
    """Response 503: the service rejected the request and may say when to retry."""

    code: str
    retry_after_s: int | None


@dataclass(frozen=True)
class Failure:
    """Failed request; `reason` is short and equal for equal failures, so that it can be counted."""

    reason: str


Outcome = Success | Rejection | Failure


def classify(response: Response, due: float, is_streamed: bool) -> Outcome:
    """Classify the response to a request that was due at `due` (`time.perf_counter`)."""
    if response.status == 503:
        return Rejection(_error_code(response.body) or "no code", _retry_after_s(response.headers))
    if response.status != 200:
        return Failure(f"{response.status} {_error_code(response.body) or 'no code'}")
    try:
        return _classify_stream(response, due) if is_streamed else _classify_complete(response, due)
    except (ValueError, KeyError, TypeError, AttributeError):  # not JSON, or JSON of another service
        return Failure("malformed response")


def _classify_complete(response: Response, due: float) -> Success:
    usage = orjson.loads(response.body)["usage"]
    return Success(response.ended - due, None, _input_tokens(usage), _output_tokens(usage))


def _classify_stream(response: Response, due: float) -> Success | Failure:
    events = list(parse_events(response.parts))
    failure = next((event for event in events if event.name == "error"), None)
    if failure is not None:
        return Failure(f"error in the stream: {_error_code(failure.data) or 'no code'}")
    if len(events) < 2 or events[-1].data != b"[DONE]":
        return Failure("incomplete stream")
    usages = [usage for event in events[:-1] if (usage := _usage(event)) is not None]
    if not usages:
        return Failure("malformed response")
    return Success(
        latency_s=response.ended - due,
        first_token_s=next((event for event in events[:-1] if _has_text(event)), events[0]).arrived - due,
        input_tokens=sum(map(_input_tokens, usages)),
        output_tokens=sum(map(_output_tokens, usages)),
    )


def _input_tokens(usage: Mapping[str, Any]) -> int:
    """Return the number of input tokens, by its own name or that of OpenAI's API."""
    return int(usage["input_tokens"] if "input_tokens" in usage else usage["prompt_tokens"])


def _output_tokens(usage: Mapping[str, Any]) -> int:
    return int(usage.get("output_tokens", usage.get("completion_tokens", 0)))


def _has_text(event: Event) -> bool:
    """Return False for an event of OpenAI's API that has only a role or the usage."""
    choices = orjson.loads(event.data).get("choices")
    return choices is None or any(one.get("text") or one.get("delta", {}).get("content") for one in choices)


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
