"""A running service as the transport of a client."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from numbers import Integral, Real
from typing import Any

import httpx2 as httpx

from sightline.client.transport import UNREADABLE, Request, SightlineError, T, require

JSON = {"content-type": "application/json"}
RETRIED = (429, 503)  # the service is overloaded, or does not serve yet or any more
LONGEST_DELAY_S = 30.0


class HttpTransport:
    """Sends requests to a service over HTTP, and those that it could not take now again."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float | None, max_retries: int) -> None:
        is_key = api_key is None or (isinstance(api_key, str) and re.fullmatch("[!-~]+", api_key))
        require(is_key, "api_key must be ASCII letters, digits and signs without spaces")
        is_time = timeout_s is None or (isinstance(timeout_s, Real) and timeout_s > 0)
        require(is_time, "timeout_s must be a number of seconds greater than 0, or None")
        require(isinstance(max_retries, Integral) and max_retries >= 0, "max_retries must be a whole number from 0")
        key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        need = "url must begin with http:// or https://, and have a host and a port up to 65535"
        try:
            base = httpx.URL(url)
            require(base.scheme in ("http", "https") and base.host and (base.port or 0) < 65_536, need)
            self._client = httpx.AsyncClient(base_url=base, headers=JSON | key, timeout=timeout_s)
        except (httpx.InvalidURL, TypeError):
            require(False, need)
        except (ImportError, OSError, ValueError) as error:
            require(False, f"check variables such as HTTPS_PROXY and SSL_CERT_FILE: {error}")
        self._url, self._max_retries = str(base.copy_with(userinfo=b"")), max_retries

    async def send(self, request: Request[T]) -> T:
        async with self._respond(request) as response:
            return request.read(json.loads(await response.aread()))

    async def events(self, request: Request[T]) -> AsyncGenerator[T]:
        buffer = b""
        async with self._respond(request) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise SightlineError.of_response(response.status_code, b"")
            async for part in response.aiter_bytes():
                *events, buffer = (buffer + part).split(b"\n\n")
                for event in events:
                    name, _, data = event.partition(b"data: ")
                    if name:  # an error, whose status was sent before
                        raise SightlineError.of_response(None, data)
                    if data == b"[DONE]":
                        return
                    yield request.read(json.loads(data))
        raise SightlineError(None, "unreachable", f"{self._url} ended the stream before its end; try again.")

    @asynccontextmanager
    async def _respond(self, request: Request[Any]) -> AsyncIterator[httpx.Response]:
        """Yield a successful response, whose body is read in the context."""
        try:
            for num_retries in count():
                async with self._client.stream("POST", request.path, content=request.body) as response:
                    if response.is_success:
                        try:
                            yield response
                        except UNREADABLE:
                            raise SightlineError.of_response(response.status_code, b"") from None
                        return
                    if response.status_code not in RETRIED or num_retries == self._max_retries:
                        raise SightlineError.of_response(response.status_code, await response.aread())
                await asyncio.sleep(delay_s(response, num_retries))
        except httpx.TimeoutException:
            message = f"{self._url} did not answer in time; send less at once, or raise timeout_s."
            raise SightlineError(None, "timeout", message) from None
        except httpx.HTTPError as error:
            message = f"{self._url} cannot be reached: {error or type(error).__name__}; check that it runs."
            raise SightlineError(None, "unreachable", message) from error

    async def close(self) -> None:
        await self._client.aclose()


def delay_s(response: httpx.Response, num_retries: int) -> float:
    """Return the seconds before the next try: those of the service, or else more each time."""
    named = response.headers.get("retry-after", "")
    return min(float(named) if named.isdecimal() else 0.5 * 2**num_retries, LONGEST_DELAY_S)
