"""API error codes, their HTTP statuses, and the error that carries them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ErrorType = Literal["invalid_request_error", "overloaded_error", "server_error"]
ErrorCode = Literal[
    "malformed_request",
    "malformed_json",
    "not_found",
    "model_not_found",
    "method_not_allowed",
    "client_too_slow",
    "body_too_large",
    "unsupported_media_type",
    "invalid_parameter",
    "empty_input",
    "input_too_long",
    "unsupported_parameter",
    "unsupported_task",
    "response_too_large",
    "headers_too_large",
    "internal",
    "overloaded",
    "loading",
    "draining",
    "engine_dead",
    "deadline_exceeded",
]


@dataclass(frozen=True)
class ErrorKind:
    """HTTP status and type of an error code; `message` is used where an error has no message of its own."""

    status: int
    type: ErrorType
    message: str
    retry_after_s: int | None = None


_INVALID: ErrorType = "invalid_request_error"
_OVERLOADED: ErrorType = "overloaded_error"
_SERVER: ErrorType = "server_error"

ERRORS: Mapping[ErrorCode, ErrorKind] = MappingProxyType(
    {
        "malformed_request": ErrorKind(400, _INVALID, "The request is not valid HTTP/1.1."),
        "malformed_json": ErrorKind(400, _INVALID, "The body is not JSON in UTF-8."),
        "not_found": ErrorKind(404, _INVALID, "There is no such route."),
        "model_not_found": ErrorKind(404, _INVALID, "There is no such model; GET /v1/models lists them."),
        "method_not_allowed": ErrorKind(405, _INVALID, "The route exists, but not with this method."),
        "client_too_slow": ErrorKind(408, _INVALID, "The request did not arrive in time."),
        "body_too_large": ErrorKind(413, _INVALID, "The body is too large."),
        "unsupported_media_type": ErrorKind(415, _INVALID, "The route does not read bodies of this kind."),
        "invalid_parameter": ErrorKind(422, _INVALID, "A value is not allowed."),
        "empty_input": ErrorKind(422, _INVALID, "There is nothing but blanks in it."),
        "input_too_long": ErrorKind(422, _INVALID, "The model cannot read so many tokens."),
        "unsupported_parameter": ErrorKind(422, _INVALID, "This service or model cannot do that."),
        "unsupported_task": ErrorKind(422, _INVALID, "This model cannot do that task."),
        "response_too_large": ErrorKind(422, _INVALID, "The answer would be too large."),
        "headers_too_large": ErrorKind(
            431, _INVALID, "The headers of the request, or the trailers of its body, exceed 32 KiB."
        ),
        "internal": ErrorKind(500, _SERVER, "Something went wrong on our side; the log has it by its request id."),
        "overloaded": ErrorKind(503, _OVERLOADED, "The queue is full.", retry_after_s=1),
        "loading": ErrorKind(503, _OVERLOADED, "The models are being loaded.", retry_after_s=1),
        "draining": ErrorKind(503, _OVERLOADED, "The service is shutting down.", retry_after_s=5),
        "engine_dead": ErrorKind(503, _SERVER, "The engine has stopped; the process will end.", retry_after_s=5),
        "deadline_exceeded": ErrorKind(504, _SERVER, "The request's time was over before its answer was whole."),
    }
)

# Only in logs and metrics: no client is left to read a response.
CLIENT_GONE = "client_closed_request"
CLIENT_GONE_STATUS = 499


class ApiError(Exception):
    """An error that the client is told of. Its message must repeat nothing of the input.

    The use cases name a field of a request by its canonical name, such as `num_beams`; each API shows it by its own,
    such as `parameters.num_beams` or `1 + alternatives`. In the message of such an error, canonical names stand in
    braces: "{num_beams} must be at most 8, got 12."
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        *,
        field: str | None = None,
        index: int | None = None,
        path: str | None = None,
    ) -> None:
        """Make an error.

        Args:
            code: the error code.
            message: full sentences; the code's own message if absent.
            field: canonical name of the field at fault.
            index: position of the value at fault in a field that is a list.
            path: path of the value at fault as the client wrote it, instead of `field`.
        """
        self.code = code
        self.kind = ERRORS[code]
        self._message = message or self.kind.message
        self._field = field
        self._index = index
        self._path = path
        super().__init__(f"{code}: {self._message}")

    def param(self, names: Mapping[str, str]) -> str | None:
        """Return the path of the value at fault; `names` maps canonical names, and `name[index]`, to an API's own."""
        if self._field is None:
            return self._path
        name = names.get(self._field, self._field)
        if self._index is None:
            return name
        return names.get(f"{self._field}[{self._index}]", f"{name}[{self._index}]")

    def message(self, names: Mapping[str, str]) -> str:
        """Return the message; `names` maps canonical names to an API's own."""
        return self._message if self._field is None else self._message.format_map(_Names(names))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response, except its request id and length."""
        headers = [(b"content-type", b"application/json")]
        if self.kind.retry_after_s is not None:
            headers.append((b"retry-after", str(self.kind.retry_after_s).encode()))
        if self.code == "client_too_slow":  # the rest of its body may still come
            headers.append((b"connection", b"close"))
        return headers


class _Names(dict[str, str]):
    """Maps a canonical name to an API's own; names that are the same in both need no entry."""

    def __missing__(self, name: str) -> str:
        return name


class ClientGoneError(Exception):
    """The client closed its connection before the response was complete."""
