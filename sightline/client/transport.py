"""Requests of a client, and the errors that they raise."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # of responses of other programs


@dataclass(frozen=True)
class Request(Generic[T]):
    """A request: the path and the body of an endpoint, and a function that reads its response.

    The response to a request for a stream is one of its events.
    """

    path: str
    body: str  # as JSON
    read: Callable[[Any], T]


class SightlineError(Exception):
    """A request failed.

    Attributes:
        status: HTTP status, also without HTTP; None if there was no response.
        code: error code of the API, such as `model_not_found`; `timeout`, `unreachable`,
            `cannot_load`, or `http_error` for a response that is not of Sightline.
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
            return cls(status, str.strip(error["code"]), str.strip(error["message"]), error["request_id"])
        except UNREADABLE:
            return cls(status, "http_error", "The response is not one of Sightline: check the URL and the proxies.")


def require(is_right: object, message: str) -> None:
    """Raise the error of a wrong argument, unless it is right."""
    if not is_right:
        raise SightlineError(None, "invalid_parameter", message)
