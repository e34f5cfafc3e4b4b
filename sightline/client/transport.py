"""Requests of a client, the errors that they raise, and what carries them."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[T]):
    """A request: the path and the body of an endpoint, and a function that reads its response."""

    path: str
    body: Mapping[str, Any]
    read: Callable[[Any], T]


def write_body(body: Mapping[str, Any]) -> bytes:
    """Write a body as JSON, in which arrays and other sequences are lists."""
    return json.dumps(body, default=lambda value: value.tolist() if hasattr(value, "tolist") else list(value)).encode()


class SightlineError(Exception):
    """A request failed.

    Attributes:
        status: HTTP status, also without HTTP; None if there was no response.
        code: error code of the API, such as `model_not_found`; `timeout`, `unreachable`, or
            `http_error` for a response that is not of Sightline.
        message: what is wrong, and the way out.
        request_id: id of the request in the log of the service.
    """

    def __init__(self, status: int | None, code: str, message: str, request_id: str | None = None) -> None:
        self.status, self.code, self.message, self.request_id = status, code, message, request_id
        known = [str(each) for each in (status, code, request_id) if each is not None]
        super().__init__(f"{message} ({', '.join(known)})")

    @classmethod
    def of_response(cls, status: int | None, body: str | bytes) -> "SightlineError":
        """Return the error of a response."""
        try:
            error = json.loads(body)["error"]
            return cls(status, error["code"], error["message"], error["request_id"])
        except (ValueError, TypeError, KeyError):
            return cls(status, "http_error", "The response is not one of Sightline: check the URL and the proxies.")


class Transport(Protocol):
    """Carries requests to the models. All methods run on the event loop of the client."""

    async def send(self, request: Request[T]) -> T:
        """Return what a request reads from its response. Raises `SightlineError`."""
        ...

    def events(self, request: Request[Any]) -> AsyncGenerator[Any]:
        """Yield the JSON of each event of a streamed response. Raises `SightlineError`."""
        ...

    async def close(self) -> None: ...
