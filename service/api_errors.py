"""API error codes, their HTTP statuses, and the error that carries them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ErrorType = Literal["invalid_request_error", "overloaded_error", "server_error"]
ErrorCode = Literal[
    "malformed_request",
    "malformed_json",
    "unauthorized",
    "forbidden",
    "not_found",
    "model_not_found",
    "method_not_allowed",
    "client_too_slow",
    "body_too_large",
    "unsupported_media_type",
    "misdirected_request",
    "invalid_parameter",
    "empty_input",
    "input_too_long",
    "unsupported_parameter",
    "unsupported_task",
    "response_too_large",
    "overloaded",
    "rate_limit_exceeded",
    "headers_too_large",
    "internal",
    "loading",
    "draining",
    "engine_dead",
    "deadline_exceeded",
]


@dataclass(frozen=True)
class ErrorKind:
    """HTTP status and type of an error code; `message` is for errors without one of their own."""

    status: int
    message: str
    type: ErrorType = "invalid_request_error"
    retry_after_s: int | None = None


_OVERLOADED: ErrorType = "overloaded_error"
_SERVER: ErrorType = "server_error"

ERRORS: Mapping[ErrorCode, ErrorKind] = {
    "malformed_request": ErrorKind(400, "The request is not valid HTTP/1.1; send it with an HTTP client."),
    "malformed_json": ErrorKind(400, "The body is not valid JSON in UTF-8; send one JSON object."),
    "unauthorized": ErrorKind(
        401, "The request needs an API key; send it in the header Authorization as `Bearer KEY`."
    ),
    "forbidden": ErrorKind(403, "The settings of the service do not allow this request; ask its operator."),
    "not_found": ErrorKind(404, "There is no such route; GET /docs lists all routes."),
    "model_not_found": ErrorKind(404, "There is no model of this name; GET /v1/models lists the models."),
    "method_not_allowed": ErrorKind(405, "The route does not accept this method; use a method of the header Allow."),
    "client_too_slow": ErrorKind(408, "The request did not arrive in time; send faster (SIGHTLINE_CLIENT_TIMEOUT_S)."),
    "body_too_large": ErrorKind(413, "The body is too large; send less at once (SIGHTLINE_MAX_BODY_BYTES)."),
    "unsupported_media_type": ErrorKind(
        415, "The route does not accept this Content-Type or Content-Encoding; send JSON without compression."
    ),
    "misdirected_request": ErrorKind(
        421,
        "The service does not answer requests for this host; use localhost in the URL, or set "
        "SIGHTLINE_ALLOWED_HOSTS to the names of the service.",
    ),
    "invalid_parameter": ErrorKind(422, "A value is not allowed; GET /docs lists the allowed values."),
    "empty_input": ErrorKind(422, "It is empty or contains only whitespace."),
    "input_too_long": ErrorKind(422, "The input has more tokens than the model accepts; shorten or split it."),
    "unsupported_parameter": ErrorKind(422, "The service or the model does not support this parameter; leave it out."),
    "unsupported_task": ErrorKind(
        422, "The model does not support this task; GET /v1/models lists the tasks of each model."
    ),
    "response_too_large": ErrorKind(422, "The response would be too large; send fewer inputs at once."),
    # A proxy tells errors apart by their status. It may send a request that got 503 to another
    # instance, because it was not processed; after 429 that would multiply the overload.
    "overloaded": ErrorKind(429, "The queue is full. Retry later.", _OVERLOADED, retry_after_s=1),
    "rate_limit_exceeded": ErrorKind(429, "The API key has used its quota. Retry later.", _OVERLOADED, retry_after_s=1),
    "headers_too_large": ErrorKind(
        431, "The headers of the request, or the trailers of its body, exceed 32 KiB; send less in them."
    ),
    "internal": ErrorKind(500, "Internal error; the log has the details under the request id.", _SERVER),
    "loading": ErrorKind(503, "The models are being loaded. Retry later.", _OVERLOADED, retry_after_s=1),
    "draining": ErrorKind(503, "The service is shutting down. Retry later.", _OVERLOADED, retry_after_s=5),
    "engine_dead": ErrorKind(
        503, "The engine has stopped; the process will exit. Retry later.", _SERVER, retry_after_s=5
    ),
    "deadline_exceeded": ErrorKind(
        504,
        "The request did not finish before its deadline (X-Request-Timeout-Ms, SIGHTLINE_REQUEST_TIMEOUT_S).",
        _SERVER,
    ),
}

# Values of the label "limit". The first four reject a connection or a body before it reaches an
# endpoint, the others a call.
Limit = Literal[
    "connections",
    "connections_per_address",
    "descriptors",
    "body_bytes",
    "waiting_sequences",
    "waiting_bytes",
    "waiting_tokens",
    "queue_time",
    "deadline",
    "response_bytes",
]

# Used only in logs and metrics: the client has left and gets no response.
CLIENT_GONE = "client_closed_request"
CLIENT_GONE_STATUS = 499


class ApiError(Exception):
    """An error that is returned to the client. Its message never repeats text of the input.

    Use cases name a field by its canonical name, such as `num_beams`. Each API replaces it by its
    own name, such as `parameters.num_beams` or `1 + alternatives`. Messages write canonical names
    in braces: "{num_beams} must be at most 8, got 12." A message about `field` or `path` may begin
    with "It": `complete_message` replaces the pronoun.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        *,
        field: str | None = None,
        index: int | None = None,
        path: str | None = None,
        limit: Limit | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Create an error.

        Args:
            message: full sentences; the code's own message if absent.
            field: canonical name of the field at fault.
            index: position of the value at fault in a field that is a list.
            path: path of the value at fault as the client wrote it, instead of `field`.
            limit: limit that rejected the call, for metrics.
            headers: of the response, beside those of every error.
        """
        self.code = code
        self.kind = ERRORS[code]
        self.text = message or self.kind.message
        self.retry_after_s = self.kind.retry_after_s
        self.field = field
        self.index = index
        self.limit = limit
        self._path = path
        self._headers = headers
        super().__init__(f"{code}: {self.text}")

    def param(self, names: Mapping[str, str]) -> str | None:
        """Return the path of the invalid value.

        `names` are the API's own names by canonical name; a name may have an index.
        """
        if self.field is None:
            return self._path
        name = names.get(self.field, self.field)
        if self.index is None:
            return name
        return names.get(f"{self.field}[{self.index}]", f"{name}[{self.index}]")

    def message(self, names: Mapping[str, str]) -> str:
        """Return the message; `names` maps canonical names to an API's own."""
        return self.text if self.field is None else self.text.format_map(_Names(names))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response, except its request id and length."""
        headers = [(b"content-type", b"application/json"), (b"x-error-code", self.code.encode()), *self._headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.code == "client_too_slow":  # the rest of its body may still come
            headers.append((b"connection", b"close"))
        return headers


def complete_message(message: str, param: str | None) -> str:
    """Return a message that names the value at fault, so that clients can show the message alone.

    "It must be a string." becomes "inputs[1] must be a string." Other messages that do not mention
    `param` are prefixed with it.
    """
    if param is None:
        return message
    if message.startswith("It "):
        return f"{param} {message[3:]}"
    is_named = re.search(rf"(?<![\w.]){re.escape(param)}(?![\w\[])", message)
    return message if is_named else f"{param}: {message}"


class _Names(dict[str, str]):
    """Maps a canonical name to an API's own; names that are the same in both need no entry."""

    def __missing__(self, name: str) -> str:
        return SAMPLING[name].format_map(self) if name in SAMPLING else name


# Names of sampling and of its absence; APIs without `do_sample` have their own.
SAMPLING = {"sampling": "{do_sample}: true", "no_sampling": "{do_sample}: false"}


class ClientGoneError(Exception):
    """The client closed its connection before the response was complete."""
