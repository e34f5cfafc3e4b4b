"""Quotas of API keys: requests and tokens in a minute, and sequences at the same time.

Windows of a minute are counted by the library limits, in memory or in Redis. The window of a key
begins with its first request.
"""

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from sightline.base.errors import UsageError
from sightline.base.extras import install_command
from sightline.service.api_errors import ApiError
from sightline.service.keys import Quota
from sightline.service.peers import Handler

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.aio.strategies import FixedWindowRateLimiter

STORAGE_SCHEMES = ("redis", "rediss", "redis+unix")
STORAGE_TIMEOUT_S = 1.0
RETRY_STORAGE_S = 5.0  # after a failure of the storage, time in which no request is counted
RETRY_SEQUENCES_S = 1
WINDOW_MARGIN_S = 2.0  # before the end of a window, in which reserved tokens are not given back
CLOCK_STEP_S = 1.0  # smaller corrections of the clock have no effect
MESSAGES = {
    "requests": "The API key may send {limit} requests a minute. Retry in {seconds} s.",
    "tokens": (
        "The API key may use {limit} tokens a minute, of inputs and outputs; a call in progress counts as the most "
        "tokens that it can use. Retry in {seconds} s."
    ),
    "sequences": "The API key may have {limit} sequences in progress at the same time. Retry when some have ended.",
}
logger = logging.getLogger(__name__)

Measure = Literal["requests", "tokens", "sequences"]


class QuotaExceededError(ApiError):
    """An API key has used its quota."""

    def __init__(self, measure: Measure, limit: int, seconds: int) -> None:
        super().__init__("rate_limit_exceeded", MESSAGES[measure].format(limit=limit, seconds=seconds))
        self.retry_after_s = seconds


@dataclass(frozen=True)
class QuotaWindow:
    """Use of a quota in the current minute."""

    limit: int
    remaining: int
    reset_s: int  # seconds until the minute ends


@dataclass(frozen=True)
class Grant:
    """The use of a key's quota at the start of a call."""

    windows: Mapping[str, QuotaWindow]  # by measure
    exceeded: Literal["requests", "tokens"] | None = None
    ends_at: float = 0.0  # no later than the end of the window in which tokens are reserved

    def check(self) -> None:
        """Raise `QuotaExceededError` if the call may not start."""
        if self.exceeded is not None:
            window = self.windows[self.exceeded]
            raise QuotaExceededError(self.exceeded, window.limit, window.reset_s)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the headers of the response, as OpenAI's API has them."""
        for measure, window in self.windows.items():
            for name, value in (("limit", window.limit), ("remaining", window.remaining), ("reset", window.reset_s)):
                text = f"{value}s" if name == "reset" else str(value)
                yield f"x-ratelimit-{name}-{measure}".encode(), text.encode()


GRANT = TypeAdapter(Grant)  # reads a grant of this process, or one in JSON of another


class QuotaStore:
    """Counts the use of quotas. It belongs to one event loop."""

    def __init__(self, storage: str | None) -> None:
        """`storage` is the URL of a Redis, or None to count in memory."""
        self._storage = storage
        self._limiter: FixedWindowRateLimiter | None = None
        self._retry_at = 0.0
        self._clock_offset = -math.inf  # of the time of day, from `time.monotonic`
        # Sequences in progress by key and process.
        self._held: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def handlers(self, process: int = 0) -> dict[str, Handler]:
        """Return the functions that the calls of a process use, by name."""
        return {
            "begin_quota": lambda label, quota: self.begin(label, Quota.model_validate(quota)),
            "hold_quota": partial(self.hold, process),
            "reserve_quota": self.reserve,
            "end_quota": self.end,
        }

    async def begin(self, label: str, quota: Quota) -> Grant:
        """Count a request of a key, unless it has no token left, and return the use of its quota.

        If the storage cannot be reached, nothing is counted and no request is rejected.
        """
        from limits import RateLimitItemPerMinute

        windows: dict[str, QuotaWindow] = {}
        exceeded: Literal["requests", "tokens"] | None = None
        if time.monotonic() >= self._retry_at:
            with self._surviving():
                if quota.tokens_per_minute is not None:
                    tokens = RateLimitItemPerMinute(quota.tokens_per_minute)
                    windows["tokens"] = window = await self._window(tokens, "tokens", label)
                    exceeded = None if window.remaining else "tokens"
                if quota.requests_per_minute is not None:
                    requests = RateLimitItemPerMinute(quota.requests_per_minute)
                    if exceeded is None and not await self._open().hit(requests, "requests", label):
                        exceeded = "requests"
                    windows["requests"] = await self._window(requests, "requests", label)
                return Grant(windows, exceeded)
        return Grant({})

    async def reserve(self, label: str, tokens_per_minute: int, tokens: int) -> Grant:
        """Count the most tokens that a call can use, unless calls before it have used or reserved
        all. If the storage cannot be reached, nothing is counted and the call may start.
        """
        from limits import RateLimitItemPerMinute

        item = RateLimitItemPerMinute(tokens_per_minute)
        if time.monotonic() >= self._retry_at:
            with self._surviving():
                is_exceeded = await self._add(item, label, tokens) - tokens >= tokens_per_minute
                if is_exceeded:
                    await self._add(item, label, -tokens)
                window = await self._window(item, "tokens", label)
                ends_at = time.time() + window.reset_s - WINDOW_MARGIN_S
                return Grant({"tokens": window}, "tokens" if is_exceeded else None, ends_at)
        return Grant({})

    async def end(self, label: str, tokens_per_minute: int, tokens: int, reserved: int, ends_at: float) -> None:
        """Count the tokens of a call, also above the limit, instead of those that it reserved.

        The minute in which the call has reserved tokens may be over: then they counted there.
        """
        from limits import RateLimitItemPerMinute

        is_over = reserved and time.time() > ends_at
        if tokens != reserved and not is_over and time.monotonic() >= self._retry_at:
            with self._surviving():
                await self._add(RateLimitItemPerMinute(tokens_per_minute), label, tokens - reserved)

    async def _add(self, item: "RateLimitItem", label: str, tokens: int) -> int:
        """Add to the tokens of a key, in one step; return their new number."""
        return await self._open().storage.incr(item.key_for("tokens", label), item.get_expiry(), amount=tokens)

    def hold(self, process: int, label: str, more: int, limit: int) -> bool:
        """Count more or, if negative, fewer sequences of a key in progress; return False if they
        exceed its limit.
        """
        held = self._held[label]
        is_granted = more < 0 or held.total() + more <= limit
        held[process] += more if is_granted else 0
        return is_granted

    def forget(self, process: int) -> None:
        """Forget the sequences of a process that has ended."""
        for held in self._held.values():
            held.pop(process, None)

    async def _window(self, item: Any, measure: str, label: str) -> QuotaWindow:
        stats = await self._open().get_window_stats(item, measure, label)
        # A window that has not begun yet may have a reset time in the past.
        return QuotaWindow(item.amount, stats.remaining, max(1, math.ceil(stats.reset_time - time.time())))

    def _open(self) -> "FixedWindowRateLimiter":
        offset = time.time() - time.monotonic()
        # Windows in memory end by the time of day. If the clock is set back, they would last too
        # long.
        is_set_back = self._storage is None and offset < self._clock_offset - CLOCK_STEP_S
        if self._limiter is None or is_set_back:
            self._limiter = open_limiter(self._storage)
        self._clock_offset = offset
        return self._limiter

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Log a failure of the storage; for some seconds, nothing is counted then."""
        from limits.errors import StorageError

        try:
            yield
        except StorageError as error:
            self._retry_at = time.monotonic() + RETRY_STORAGE_S
            kind = type(error.__cause__ or error).__name__  # the message may have the password of the URL
            logger.error("quotas are not counted for %g s, because their storage fails: %s", RETRY_STORAGE_S, kind)


def open_limiter(storage: str | None) -> "FixedWindowRateLimiter":
    """Return a limiter that counts in a Redis, or in memory.

    Raises `UsageError` if the URL is not that of a Redis, or its client library is missing.
    """
    from limits.aio.storage import MemoryStorage
    from limits.aio.strategies import FixedWindowRateLimiter
    from limits.errors import ConfigurationError
    from limits.storage import storage_from_string

    if storage is None:
        return FixedWindowRateLimiter(MemoryStorage())
    if storage.partition("://")[0] not in STORAGE_SCHEMES:
        raise UsageError(f"SIGHTLINE_QUOTA_STORAGE must be a URL that begins with {', '.join(STORAGE_SCHEMES)}")
    if find_spec("redis") is None:
        raise UsageError(f"SIGHTLINE_QUOTA_STORAGE needs Redis's client: {install_command('cpu,redis')}")
    try:
        opened: Any = storage_from_string(
            f"async+{storage}",
            implementation="redispy",
            wrap_exceptions=True,
            socket_timeout=STORAGE_TIMEOUT_S,
            socket_connect_timeout=STORAGE_TIMEOUT_S,
        )
    except (ConfigurationError, ValueError):  # whose messages may have the password of the URL
        raise UsageError("the URL of SIGHTLINE_QUOTA_STORAGE is not valid") from None
    return FixedWindowRateLimiter(opened)
