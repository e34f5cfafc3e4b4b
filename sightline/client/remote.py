"""A running service as the transport of a client."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx

from sightline.client.transport import Request, SightlineError, T, write_body

JSON = {"content-type": "application/json"}
RETRIED = (429, 503)  # the service is overloaded, or does not serve yet or any more
LONGEST_DELAY_S = 30.0


class HttpTransport:
    """Sends requests to a service over HTTP, and those that it could not take now again."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float | None, max_retries: int) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._url, self._max_retries = url, max_retries
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s)

    async def send(self, request: Request[T]) -> T:
        async with self._respond(request) as response:
            data = await response.aread()
        try:
            return request.read(json.loads(data))
        except (ValueError, TypeError, KeyError):
            raise SightlineError.of_response(response.status_code, b"") from None

    async def events(self, request: Request[Any]) -> AsyncGenerator[Any]:
        buffer = b""
        async with self._respond(request) as response:
            async for part in response.aiter_bytes():
                *events, buffer = (buffer + part).split(b"\n\n")
                for event in events:
                    name, _, data = event.partition(b"data: ")
                    if name:  # an error, whose status was sent before
                        raise SightlineError.of_response(None, data)
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
        raise SightlineError(None, "unreachable", f"{self._url} ended the stream before its end; try again.")

    @asynccontextmanager
    async def _respond(self, request: Request[Any]) -> AsyncIterator[httpx.Response]:
        """Yield a successful response, whose body can be read in parts."""
        data, num_retries = write_body(request.body), 0
        try:
            while True:
                async with self._client.stream("POST", request.path, content=data, headers=JSON) as response:
                    if response.is_success:
                        yield response
                        return
                    if response.status_code not in RETRIED or num_retries == self._max_retries:
                        raise SightlineError.of_response(response.status_code, await response.aread())
                await asyncio.sleep(delay_s(response, num_retries))
                num_retries += 1
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
    return min(float(named) if named.isdigit() else 0.5 * 2**num_retries, LONGEST_DELAY_S)
