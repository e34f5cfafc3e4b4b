"""Every way to say no: the closed list of codes, the status of each, and the one body that carries them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import orjson

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
    """What a code means in HTTP. `message` is what is said where the code itself says all."""

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

# In logs and metrics alone: nobody is left to read an answer.
CLIENT_GONE = "client_closed_request"
CLIENT_GONE_STATUS = 499


class ApiError(Exception):
    """A refusal or failure that the client is told of. Its message must repeat nothing of the input."""

    def __init__(self, code: ErrorCode, message: str | None = None, *, param: str | None = None) -> None:
        """`param` is the path of the value at fault, such as `inputs[3]` or `parameters.top_p`."""
        self.code = code
        self.kind = ERRORS[code]
        self.message = message or self.kind.message
        self.param = param
        super().__init__(f"{code}: {self.message}")

    def body(self, request_id: str) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "code": self.code,
                    "type": self.kind.type,
                    "message": self.message,
                    "param": self.param,
                    "request_id": request_id,
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer, its request id and length excepted."""
        headers = [(b"content-type", b"application/json")]
        if self.kind.retry_after_s is not None:
            headers.append((b"retry-after", str(self.kind.retry_after_s).encode()))
        if self.code == "client_too_slow":  # the rest of its body may still come
            headers.append((b"connection", b"close"))
        return headers


# The body of an error answer, from the error and the request id. `ApiError.body` is one; a family may have its own.
ErrorWriter = Callable[[ApiError, str], bytes]


class ClientGoneError(Exception):
    """The client closed its connection before the answer was whole."""
