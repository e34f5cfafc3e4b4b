import json
from typing import Any

import pytest

from sightline.loadtest.client import Response
from sightline.loadtest.outcome import Failure, Outcome, Rejection, Success, classify
from tests.loadtest.fake_service import DONE, final_event, token_event


def whole_response(status: int, body: object, **headers: str) -> Response:
    return Response(status, headers, [(12.0, json.dumps(body).encode())], ended=12.0)


def stream(*parts: tuple[float, bytes]) -> Response:
    return Response(200, {}, parts, ended=parts[-1][0])


def test_a_complete_response_is_a_success_with_its_tokens_and_without_a_first_token() -> None:
    outcome = classify(whole_response(200, {"usage": {"input_tokens": 7, "output_tokens": 5}}), 10.0, is_streamed=False)
    assert outcome == Success(latency_s=2.0, first_token_s=None, input_tokens=7, output_tokens=5)
    assert outcome.per_output_token_s is None


def test_a_response_of_encode_has_no_output_tokens() -> None:
    outcome = classify(whole_response(200, {"usage": {"input_tokens": 7}}), 10.0, is_streamed=False)
    assert outcome == Success(2.0, None, 7, 0)


def test_time_per_output_token_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    response = stream((11.0, token_event()), (12.0, token_event()), (13.0, token_event() + final_event(3) + DONE))
    outcome = classify(response, 10.0, is_streamed=True)
    assert outcome == Success(latency_s=3.0, first_token_s=1.0, input_tokens=7, output_tokens=3, longest_gap_s=1.0)
    assert outcome.per_output_token_s == 1.0


def test_one_token_has_no_time_per_output_token() -> None:
    outcome = classify(stream((11.0, token_event() + final_event(1) + DONE)), 10.0, is_streamed=True)
    assert isinstance(outcome, Success)
    assert outcome.per_output_token_s is None


def test_the_tokens_of_all_inputs_of_a_stream_add_up() -> None:
    response = stream((11.0, token_event()), (12.0, final_event(3, 4) + final_event(5, 6) + DONE))
    assert classify(response, 10.0, is_streamed=True) == Success(2.0, 1.0, 10, 8)


def test_usage_and_first_text_of_openais_api_are_read() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert classify(whole_response(200, {"data": [], "usage": usage}), 10.0, is_streamed=False) == Success(
        2.0, None, 7, 2
    )
    deltas: list[dict[str, str | None]] = [{"role": "assistant", "content": None}, {"content": "A"}, {"content": "b"}]
    chunks = [{"choices": [{"delta": delta}], "usage": None} for delta in deltas]
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in [*chunks, {"choices": [], "usage": usage}]]
    response = stream((10.5, events[0]), (11.0, events[1]), (12.0, events[2] + events[3] + DONE))
    assert classify(response, 10.0, is_streamed=True) == Success(2.0, 1.0, 7, 2, 1.0)


@pytest.mark.parametrize(
    "delta",
    [
        {"role": "assistant", "content": None, "reasoning": "Hm"},
        {"reasoning_content": "Hm", "content": ""},
        {"refusal": "I can't"},
        {"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": ""}}]},
    ],
)
def test_the_first_part_of_a_message_is_its_first_token(delta: dict[str, object]) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    deltas: list[Any] = [{"role": "assistant", "content": "", "reasoning": None}, delta, {"content": "b"}, {}, None]
    chunks = [{"choices": [{"delta": part}]} for part in deltas] + [{"choices": [], "usage": usage}]
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    response = stream(*((10.5 + index, event) for index, event in enumerate(events)), (16.5, DONE))
    assert classify(response, 10.0, is_streamed=True) == Success(6.5, 1.5, 7, 3, 1.0)


def test_the_longest_gap_is_between_two_events_with_tokens() -> None:
    response = stream(
        (11.0, token_event()), (11.1, token_event()), (13.1, token_event()), (20.0, final_event(3) + DONE)
    )
    outcome = classify(response, 10.0, is_streamed=True)
    assert isinstance(outcome, Success)
    assert outcome.longest_gap_s == pytest.approx(2.0)


def test_without_usage_the_events_with_text_are_the_output_tokens() -> None:
    texts: list[dict[str, str]] = [
        {"text_output": "A"},
        {"text_output": "b"},
        {"text_output": "", "finish_reason": "eos"},
    ]
    events = [f"data: {json.dumps(text)}\n\n".encode() for text in texts]
    response = stream((11.0, events[0]), (12.0, events[1]), (12.5, events[2]))
    assert classify(response, 10.0, is_streamed=True, has_usage=False) == Success(2.5, 1.0, 0, 2, 1.0)
    assert classify(response, 10.0, is_streamed=True) == Failure("incomplete stream")
    whole = whole_response(200, [[0.5, 0.1]])
    assert classify(whole, 10.0, is_streamed=False, has_usage=False) == Success(2.0, None, 0, 0)
    assert classify(whole, 10.0, is_streamed=False) == Failure("malformed response")


def test_a_429_is_a_rejection_with_the_code_or_the_type_of_its_error() -> None:
    quota = whole_response(429, {"error": {"code": "quota_exceeded"}}, **{"retry-after": "7"})
    assert classify(quota, 10.0, is_streamed=True) == Rejection("quota_exceeded", 7)
    tei = whole_response(429, {"error": "Model is overloaded", "error_type": "Overloaded"})
    assert classify(tei, 10.0, is_streamed=False, has_usage=False) == Rejection("Overloaded", None)


@pytest.mark.parametrize(("value", "seconds"), [("3", 3), ("", None), ("soon", None), ("-1", None)])
def test_a_429_is_a_rejection_with_its_code_and_retry_after(value: str, seconds: int | None) -> None:
    response = whole_response(429, {"error": {"code": "overloaded"}}, **{"retry-after": value})
    for is_streamed in (False, True):
        assert classify(response, 10.0, is_streamed) == Rejection("overloaded", seconds)


def test_a_503_of_a_proxy_is_a_rejection() -> None:
    assert classify(Response(503, {}, [(1.0, b"<html>")], 1.0), 0.0, is_streamed=False) == Rejection("no code", None)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (whole_response(500, {"error": {"code": "internal"}}), "500 internal"),
        (whole_response(504, {"error": {"code": "deadline_exceeded"}}), "504 deadline_exceeded"),
        (whole_response(404, []), "404 no code"),
        (whole_response(200, {"outputs": []}), "malformed response"),
        (whole_response(200, "text"), "malformed response"),
        (Response(200, {}, [(1.0, b"{")], 1.0), "malformed response"),
    ],
)
def test_any_other_response_is_a_failure_named_by_its_error(response: Response, reason: str) -> None:
    assert classify(response, 0.0, is_streamed=False) == Failure(reason)


ERROR = b'event: error\ndata: {"error": {"code": "deadline_exceeded"}}\n\n'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (token_event() + ERROR, Failure("error in the stream: deadline_exceeded")),
        (token_event() + final_event(1), Failure("incomplete stream")),
        (DONE, Failure("incomplete stream")),
        (b"", Failure("incomplete stream")),
        (token_event() + b'data: {"error": "out of memory"}\n\n' + DONE, Failure("error in the stream: no code")),
        (b'{"usage": {}}', Failure("incomplete stream")),
        (token_event() + DONE, Failure("malformed response")),
        (b"data: {\n\n" + DONE, Failure("malformed response")),
        (b"data: 3\n\n" + DONE, Failure("malformed response")),
    ],
)
def test_a_stream_that_does_not_end_well_is_a_failure(body: bytes, expected: Outcome) -> None:
    assert classify(stream((1.0, body)), 0.0, is_streamed=True) == expected
