"""Quotas of API keys: requests and tokens in a minute, and sequences at the same time."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.bench.server import free_port
from sightline.base.errors import UsageError
from sightline.service import quotas
from sightline.service.keys import Quota
from sightline.service.quotas import QuotaStore, open_limiter
from tests.service.conftest import MakeBackend, Running, Start, until
from tests.support.redis import running_redis

pytestmark = pytest.mark.anyio

BODY = {"inputs": "x"}


class Clock:
    """Moves the time that the library counts by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + self.ahead_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_requests_are_counted_until_the_end_of_a_minute(clock: Clock) -> None:
    store, quota = QuotaStore(None), Quota(requests_per_minute=2)
    grants = [await store.begin("a", quota) for _ in range(3)]
    assert [(one.exceeded, one.windows["requests"].remaining) for one in grants] == [
        (None, 1),
        (None, 0),
        ("requests", 0),
    ]
    assert (await store.begin("b", quota)).exceeded is None
    assert 58 <= grants[2].windows["requests"].reset_s <= 60
    clock.ahead_s = 61
    assert (await store.begin("a", quota)).windows["requests"].remaining == 1


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
async def test_a_step_of_the_clock_locks_nobody_out(clock: Clock, step_s: float) -> None:
    store, quota = QuotaStore(None), Quota(requests_per_minute=1)
    assert [(await store.begin("a", quota)).exceeded for _ in range(2)] == [None, "requests"]
    clock.ahead_s = -0.5
    assert (await store.begin("a", quota)).exceeded == "requests"
    clock.ahead_s = step_s
    grants = [await store.begin("a", quota) for _ in range(2)]
    assert [one.exceeded for one in grants] == [None, "requests"]
    assert 1 <= grants[1].windows["requests"].reset_s <= 60


async def test_tokens_are_counted_at_the_end_of_calls_also_above_the_limit(clock: Clock) -> None:
    store, quota = QuotaStore(None), Quota(tokens_per_minute=100, requests_per_minute=9)
    assert (await store.begin("a", quota)).windows["tokens"].remaining == 100
    await store.end("a", 100, 99, 0, 0.0)
    grant = await store.begin("a", quota)
    assert (grant.exceeded, grant.windows["tokens"].remaining) == (None, 1)
    await store.end("a", 100, 500, 0, 0.0)
    grant = await store.begin("a", quota)
    assert (grant.exceeded, grant.windows["tokens"].remaining) == ("tokens", 0)
    assert grant.windows["requests"].remaining == 7, "a request without a token left is not counted"
    clock.ahead_s = 61
    assert (await store.begin("a", quota)).exceeded is None


async def test_reserved_tokens_count_until_the_call_ends_and_one_call_at_most_exceeds_the_limit(clock: Clock) -> None:
    store, quota = QuotaStore(None), Quota(tokens_per_minute=100)

    async def remaining() -> int:
        return (await store.begin("a", quota)).windows["tokens"].remaining

    grants = await asyncio.gather(*[store.reserve("a", 100, 60) for _ in range(24)])
    assert [one.exceeded for one in grants] == [None, None, *["tokens"] * 22]
    assert await remaining() == 0
    for tokens, left in ((10, 30), (0, 90)):
        await store.end("a", 100, tokens, 60, grants[0].ends_at)
        assert await remaining() == left
    (late,) = [await store.reserve("a", 100, 500)]
    clock.ahead_s = 61
    await store.end("a", 100, 1, 500, late.ends_at)  # they counted in the last minute
    assert await remaining() == 100


async def test_sequences_of_all_processes_count_together_until_they_end() -> None:
    store = QuotaStore(None)
    holds = [store.hold(process, "a", more, 4) for process, more in ((1, 3), (2, 2), (2, 1), (3, 1))]
    assert holds == [True, False, True, False]
    assert store.hold(1, "a", -1, 4) and store.hold(3, "a", 1, 4) and not store.hold(2, "a", 1, 4)
    store.forget(3)
    assert store.hold(2, "a", 1, 4)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Return a file of keys that a test can change."""
    return Path(shutil.copy("tests/data/keys.json", tmp_path))


def give_quota(path: Path, **quota: int) -> None:
    """Give the key `sl-alice` a quota."""
    document = json.loads(path.read_text(encoding="utf-8"))
    document["keys"][0]["quota"] = quota
    path.write_text(json.dumps(document), encoding="utf-8")


async def test_a_call_beyond_the_requests_gets_429_with_the_time_to_wait(start: Start, keys: Path) -> None:
    give_quota(keys, requests_per_minute=2, tokens_per_minute=1000)
    async with start(keys=keys) as running:
        used = []
        for path, body in (
            ("/v1/generate", BODY),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/generate", BODY),
            ("/embed", BODY),
        ):
            used.append(await running.client.post(path, json=body, headers={"x-api-key": "sl-alice"}))
        assert [one.status_code == 429 for one in used] == [False, False, True, True]
        assert [one.headers["x-ratelimit-remaining-requests"] for one in used] == ["1", "0", "0", "0"]
        assert used[0].headers["x-ratelimit-limit-requests"] == "2"
        assert used[0].headers["x-ratelimit-remaining-tokens"] == "1000"
        seconds = int(used[2].headers["retry-after"])
        assert 1 <= seconds <= 60 and used[2].headers["x-ratelimit-reset-requests"] == f"{seconds}s"
        assert used[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert "may send 2 requests a minute" in used[2].json()["error"]["message"]
        models = await running.client.get("/v1/models", headers={"x-api-key": "sl-alice"})
        assert models.status_code == 200 and "x-ratelimit-limit-requests" not in models.headers
        other = await running.client.post("/v1/generate", json=BODY, headers={"x-api-key": "sl-boss"})
        assert other.status_code == 200 and "x-ratelimit-limit-requests" not in other.headers
        translate = {"q": "x", "source": "en", "target": "de", "api_key": "sl-alice"}
        assert (await running.client.post("/translate", json=translate)).status_code == 429


async def test_tokens_of_inputs_and_outputs_are_counted(start: Start, keys: Path) -> None:
    """Those of single responses, of streams, and of calls above the limit."""
    give_quota(keys, tokens_per_minute=100)
    parameters = {"min_new_tokens": 30, "max_new_tokens": 30}
    async with start(keys=keys) as running:

        async def post(**fields: Any) -> tuple[int, str]:
            """Return the tokens that are left before the call, and the text of its response."""
            body = {"inputs": "a dog", "parameters": parameters, **fields}
            response = await running.client.post("/v1/generate", json=body, headers={"x-api-key": "sl-alice"})
            await asyncio.sleep(0)  # tokens are counted after the response
            return int(response.headers["x-ratelimit-remaining-tokens"]), response.text

        left, text = await post()
        assert left == 100
        num_tokens = total(json.loads(text)["usage"])
        assert num_tokens > 30
        left, text = await post(stream=True)
        assert left == 100 - num_tokens
        (end,) = [line for line in text.splitlines() if '"usage"' in line]
        assert total(json.loads(end.removeprefix("data:"))["usage"]) == num_tokens
        left, _ = await post(inputs=["a dog"] * 2)
        assert left == 100 - 2 * num_tokens > 0
        left, text = await post()
        assert left == 0 and "may use 100 tokens a minute" in json.loads(text)["error"]["message"]


async def test_calls_at_once_exceed_the_tokens_by_one_call_at_most(
    start: Start, keys: Path, make_backend: MakeBackend
) -> None:
    """Each reserves the most tokens that it can use; forced targets and samples count too."""
    give_quota(keys, tokens_per_minute=100)
    parameters = {"max_new_tokens": 12, "num_return_sequences": 2, "do_sample": True}
    body = {"inputs": ["a dog"] * 2, "parameters": parameters}
    async with start(make_backend(step_s=0.01), keys=keys) as running:
        calls = [running.client.post("/v1/generate", json=body, headers={"x-api-key": "sl-alice"}) for _ in range(24)]
        responses = await asyncio.gather(*calls)
        used = [total(one.json()["usage"]) for one in responses if one.status_code == 200]
        assert {one.status_code for one in responses} == {200, 429} and 0 < sum(used) <= 100 + max(used)
        await asyncio.sleep(0)
        window = (await store_of(running).begin("alice", Quota(tokens_per_minute=100))).windows["tokens"]
        assert window.remaining == max(0, 100 - sum(used)), "what the calls did not use is given back"


def store_of(running: Running) -> QuotaStore:
    store: QuotaStore = running.app.state.service.peers._handlers["end_quota"].__self__
    return store


def total(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["output_tokens"]


async def test_a_key_has_at_most_so_many_sequences_in_progress(
    start: Start, keys: Path, make_backend: MakeBackend
) -> None:
    """A larger call runs with fewer sequences at a time; others get 429 until it has ended."""
    give_quota(keys, concurrent_sequences=2)
    async with start(make_backend(step_s=0.01), keys=keys) as running:
        held, headers = store_of(running)._held, {"x-api-key": "sl-alice"}
        large = asyncio.create_task(running.client.post("/v1/generate", json={"inputs": ["x"] * 5}, headers=headers))
        await until(lambda: held["alice"].total() == 2)
        rejected = await running.client.post("/v1/generate", json=BODY, headers=headers)
        assert rejected.status_code == 429 and "2 sequences in progress" in rejected.json()["error"]["message"]
        assert rejected.headers["retry-after"] == "1"
        assert (await large).status_code == 200
        await until(lambda: held["alice"].total() == 0)
        assert (await running.client.post("/v1/generate", json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memcached://localhost", "must be a URL that begins with redis"),
        ("localhost:6379", "must be a URL that begins with redis"),
        ("redis://localhost:port", "is not valid"),
    ],
)
def test_a_wrong_storage_is_an_error_at_start(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        open_limiter(url)


async def test_while_the_storage_fails_no_call_is_rejected_and_it_is_not_tried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, quota = QuotaStore(f"redis://:secret@127.0.0.1:{free_port()}"), Quota(requests_per_minute=1)
    for _ in range(3):
        grant = await store.begin("a", quota)
        assert grant.exceeded is None and not grant.windows
    assert caplog.text.count("quotas are not counted for 5 s") == 1 and "secret" not in caplog.text
    monkeypatch.setattr(quotas, "RETRY_STORAGE_S", 0.0)
    store._retry_at = 0.0
    await store.begin("a", quota)
    assert caplog.text.count("quotas are not counted") == 2
    await store.end("a", 1, 1, 0, 0.0)
    assert caplog.text.count("quotas are not counted") == 3


@pytest.fixture
def redis() -> Iterator[str]:
    with running_redis() as url:
        yield url


@pytest.mark.redis
async def test_services_share_the_counts_of_a_redis(start: Start, keys: Path, redis: str) -> None:
    give_quota(keys, requests_per_minute=3, tokens_per_minute=10_000)
    headers = {"x-api-key": "sl-alice"}
    async with start(keys=keys, quota_storage=redis) as one, start(keys=keys, quota_storage=redis) as two:

        async def is_connected() -> bool:
            response = await one.client.post("/v1/generate", json=BODY, headers=headers)
            store_of(one)._retry_at = 0.0
            return "x-ratelimit-limit-requests" in response.headers

        async with asyncio.timeout(10):
            while not await is_connected():
                await asyncio.sleep(0.05)
        statuses, remaining = [], []
        for running in (two, one, two):
            response = await running.client.post("/v1/generate", json=BODY, headers=headers)
            statuses.append(response.status_code)
            remaining.append(int(response.headers["x-ratelimit-remaining-tokens"]))
            await asyncio.sleep(0.05)  # tokens are counted after the response
        assert statuses == [200, 200, 429]
        assert remaining == sorted(remaining, reverse=True) and remaining[0] < 10_000
        for running in (one, two):  # the library closes no connection
            limiter: Any = store_of(running)._limiter
            await limiter.storage.bridge.storage.aclose()
