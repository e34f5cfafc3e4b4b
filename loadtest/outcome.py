"""Outcome of a request: a success with times and token counts, a rejection or a failure."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from sightline.loadtest.client import Response
from sightline.loadtest.events import parse_events


@dataclass(frozen=True, slots=True)
class Success:
    """Complete successful response.

    Args:
        latency_s: seconds from the time when the request was due to the end of the response.
        first_token_s: seconds from that time to the first event with a token; None if not streamed.
        input_tokens: number that the service reports; 0 if it reports none.
        output_tokens: number that the service reports, or else of the events with a token; 0 for an
            endpoint that generates none.
        longest_gap_s: longest time between two events with tokens; None with fewer than two.
    """

    latency_s: float
    first_token_s: float | None
    input_tokens: int
    output_tokens: int
    longest_gap_s: float | None = None

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
    """Response 429 or 503: the service rejected the request and may state when to retry."""

    code: str
    retry_after_s: int | None


@dataclass(frozen=True)
class Failure:
    """Failed request; `reason` is short and equal for equal failures, so that it can be counted."""

    reason: str


Outcome = Success | Rejection | Failure
OWN = "load test: "  # start of the reasons of failures of the load test itself, which say nothing about the service


def classify(response: Response, due: float, is_streamed: bool, has_usage: bool = True) -> Outcome:
    """Classify the response to a request that was due at `due` (`time.perf_counter`).

    With `has_usage`, it must have the numbers of tokens, and a stream must end with `[DONE]`.
    """
    if response.status in (429, 503):
        return Rejection(_error_code(response.body) or "no code", _retry_after_s(response.headers))
    if response.status != 200:
        return Failure(f"{response.status} {_error_code(response.body) or 'no code'}")
    try:
        if is_streamed:
            return _classify_stream(response, due, has_usage)
        body = orjson.loads(response.body)
        usage = body["usage"] if has_usage else {"input_tokens": 0}
        return Success(response.ended - due, None, _input_tokens(usage), _output_tokens(usage))
    except (ValueError, KeyError, TypeError, AttributeError):  # not JSON, or JSON of another service
        return Failure("malformed response")


def _classify_stream(response: Response, due: float, has_usage: bool) -> Success | Failure:
    events = list(parse_events(response.parts))
    failure = next((event for event in events if event.name == "error"), None)
    if failure is not None:
        return Failure(f"error in the stream: {_error_code(failure.data) or 'no code'}")
    if (has_usage and (len(events) < 2 or events.pop().data != b"[DONE]")) or not events:
        return Failure("incomplete stream")
    items = [orjson.loads(event.data) for event in events]
    if any("error" in item for item in items):
        return Failure("error in the stream: no code")
    times = [event.arrived for event, item in zip(events, items, strict=True) if _has_token(item)]
    usages = [item["usage"] for item in items if item.get("usage") is not None]
    if has_usage and not usages:
        return Failure("malformed response")
    return Success(
        latency_s=response.ended - due,
        first_token_s=(times[0] if times else events[0].arrived) - due,
        input_tokens=sum(map(_input_tokens, usages)),
        output_tokens=sum(map(_output_tokens, usages)) if usages else len(times),
        longest_gap_s=max((after - before for before, after in pairwise(times)), default=None),
    )


def _input_tokens(usage: Mapping[str, Any]) -> int:
    """Return the number of input tokens, by its own name or that of OpenAI's API."""
    return int(usage["input_tokens"] if "input_tokens" in usage else usage["prompt_tokens"])


def _output_tokens(usage: Mapping[str, Any]) -> int:
    return int(usage.get("output_tokens", usage.get("completion_tokens", 0)))


def _has_token(item: Mapping[str, Any]) -> bool:
    """Return False for an event that has only a role, the finish reason or the usage."""
    if (choices := item.get("choices")) is not None:  # of OpenAI's API
        return any(choice.get("text") or _has_part(choice.get("delta") or {}) for choice in choices)
    if "text_output" in item:  # of Triton's generate endpoint
        return bool(item["text_output"])
    return "finish_reason" not in item


def _has_part(delta: Mapping[str, Any]) -> bool:
    """Return True for a part of a message: a text, a thought (`reasoning`), a refusal or a call."""
    return any(value for name, value in delta.items() if name != "role")


def _error_code(body: bytes) -> str | None:
    """Return the code of an error, or the type of an error of Text Embeddings Inference."""
    try:
        fields = orjson.loads(body)
        return str(fields["error_type"] if "error_type" in fields else fields["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def _retry_after_s(headers: Mapping[str, str]) -> int | None:
    value = headers.get("retry-after", "")
    return int(value) if value.isascii() and value.isdigit() else None
