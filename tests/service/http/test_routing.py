"""Invalid bodies: each gets a fast error that does not repeat its content."""

import time
from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody, path_of
from sightline.service.http.http_call import parse_body
from sightline.service.tasks.attention import AttentionBody
from sightline.service.tasks.encode import EncodeBody
from sightline.service.tasks.generate import GenerateBody
from sightline.service.tasks.score import ScoreBody
from sightline.service.tasks.tokens import DetokenizeBody, TokenizeBody
from tests.service.conftest import Running, Start

MARKER = "Zaubertrank"  # must never come back

MALFORMED: dict[str, bytes] = {
    "deep nesting": b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5000 digits": b'{"inputs":"x","parameters":{"max_new_tokens":' + b"9" * 5000 + b"}}",
}


@pytest.mark.anyio
@pytest.mark.parametrize("body", MALFORMED.values(), ids=list(MALFORMED))
async def test_invalid_json_is_a_short_and_fast_400(running: Running, body: bytes) -> None:
    started = time.process_time()
    response = await running.client.post("/v1/generate", content=body, headers={"content-type": "application/json"})
    assert time.process_time() - started < 2
    assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_json")
    assert len(response.content) < 2048
    assert (await running.client.get("/health/live")).status_code == 200


@pytest.mark.anyio
async def test_huge_invalid_values_cost_as_much_as_small_ones_and_are_never_returned(running: Running) -> None:
    for path, body in (
        ("/v1/generate", {"inputs": list(range(100_000))}),
        ("/v1/generate", {"inputs": 1, "parameters": {"stop": [MARKER] * 50_000}}),
        ("/v1/generate", {MARKER + str(index): 0 for index in range(30_000)}),
        ("/v1/generate", {"inputs": MARKER * 80_000}),
        ("/v1/detokenize", {"ids": [["x"] * 100_000]}),
        ("/v1/detokenize", {"ids": [[True] * 100_000]}),
        ("/v1/generate", {"inputs": "x", "parameters": {"suppress_tokens": [0] * 300_000}}),
        ("/v1/generate", {"inputs": "x", "parameters": {"target_prefix": MARKER * 80_000}}),
        ("/v1/score", {"inputs": "x", "targets": MARKER * 80_000}),
        ("/v1/score", {"inputs": ["x"], "targets": [MARKER] * 50_000}),
        ("/v1/attention", {"inputs": "x", "layers": ["x"] * 100_000}),
        ("/v1/attention", {"inputs": "x", "kinds": [MARKER] * 50_000}),
    ):
        started = time.process_time()
        response = await running.post(path, body)
        assert time.process_time() - started < 2, path
        assert response.status_code == 422, response.text
        assert len(response.content) < 2048
        assert MARKER + MARKER not in response.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=utf-8",
        'Application/JSON;charset="UTF-8"',
        "application/json;charset=UTF8",
    ],
)
async def test_json_in_utf_8_is_accepted_with_any_spelling_of_the_charset(running: Running, kind: str) -> None:
    response = await running.client.post("/v1/generate", content=b'{"inputs":"x"}', headers={"content-type": kind})
    assert response.status_code == 200


@pytest.mark.anyio
async def test_the_last_value_of_a_repeated_key_is_used(running: Running) -> None:
    body = b'{"inputs":["x","y"],"inputs":"x"}'
    response = await running.client.post("/v1/generate", content=body, headers={"content-type": "application/json"})
    assert len(response.json()["outputs"]) == 1


@pytest.mark.anyio
async def test_a_nul_character_is_a_character(running: Running) -> None:
    response = await running.post("/v1/tokenize", {"inputs": "a\x00b"})
    assert [token["text"] for token in response.json()["outputs"][0]] == [" a", "\x00", "b", "</s>"]


@pytest.mark.anyio
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_body_limit_is_exact_to_the_byte(start: Start, is_chunked: bool) -> None:
    async with start(max_body_bytes=100) as running:
        for size, status in ((99, 200), (100, 200), (101, 413)):
            body = b'{"inputs":"x"}'.ljust(size)

            async def chunks(body: bytes = body) -> AsyncIterator[bytes]:
                yield body[:60]
                yield body[60:]

            response = await running.client.post(
                "/v1/generate", content=chunks() if is_chunked else body, headers={"content-type": "application/json"}
            )
            assert response.status_code == status


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
BODIES = (GenerateBody, ScoreBody, EncodeBody, AttentionBody, TokenizeBody, DetokenizeBody)


@given(data=st.data(), body_type=st.sampled_from(BODIES))
@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
def test_any_json_is_parsed_or_rejected(data: st.DataObject, body_type: type[RequestBody]) -> None:
    document = data.draw(st.dictionaries(st.sampled_from(sorted(body_type.model_fields)), JSON))
    try:
        parse_body(orjson.dumps(document), body_type)
    except ApiError as error:
        assert error.kind.status in (400, 422)  # noqa: PT017


def test_error_paths_have_dots_and_brackets() -> None:
    assert path_of(("parameters", "stop", 1)) == "parameters.stop[1]"
    assert path_of(("ids", 0, 3)) == "ids[0][3]"
    assert path_of(()) == ""
