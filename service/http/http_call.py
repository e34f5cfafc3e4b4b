"""A call over HTTP: its headers, its body and the state of its response."""

import asyncio
import contextlib
import random
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.message import Message as Headers
from email.parser import HeaderParser
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import orjson
from pydantic import BaseModel
from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from sightline.service.api.endpoint import FORM, IN_QUERY, MULTIPART, NATIVE_ERRORS, BodyFormat, Endpoint, ErrorFormat
from sightline.service.api_errors import ApiError, ClientGoneError
from sightline.service.body_fields import UploadedFile, paths_of, validate
from sightline.service.http.connections import network_of
from sightline.service.http.incoming import EXCHANGE, Exchange
from sightline.service.inference.call import Call
from sightline.service.inference.service import Service
from sightline.service.traces import Traces, traceresponse

if TYPE_CHECKING:
    from opentelemetry.trace import Span

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
NO_ROUTE = "none"
# Orchestrators and monitors poll these routes every few seconds, by any address of the service:
# they are logged as debug, never traced, and answer every host.
POLLED_ROUTES = frozenset(
    {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/ping", "/metrics"}
)
Body = TypeVar("Body", bound=BaseModel)
CheckFields = Callable[[Mapping[str, Any]], None]  # checks the fields of a body, before they are validated

MAX_FORM_FIELDS = 64
# Supported content codings, with the `wbits` argument of zlib.
CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class HttpCall(Call):
    """A call over HTTP."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        # If a header is repeated, the first value wins.
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        own_id = self.headers.get(b"x-request-id", b"").decode("latin-1")
        # `secrets` would release the interpreter lock, and then wait for it.
        super().__init__(service, own_id if REQUEST_ID.fullmatch(own_id) else f"{random.getrandbits(96):024x}")
        self.scope = scope
        if scope.get("client"):
            self.address = network_of(scope["client"][0])
        self.receive = receive  # `exchange.rejection` tells if the connection has rejected the body
        self._send = send
        self.exchange: Exchange | None = scope.get(EXCHANGE)  # absent in tests without a connection
        self.endpoint: Endpoint | None = None
        self.check_access: Callable[[HttpCall, Endpoint | None], None]  # set by `ErrorSender`
        self.error_format: ErrorFormat = NATIVE_ERRORS
        self.status: int | None = None  # status of the response once it has started
        self.code: str | None = None  # error code if the call failed
        self.span: Span | None = None  # of a call that is traced, once its response has started

    def check_query(self, endpoint: Endpoint) -> None:
        """Check that the endpoint knows all parameters of the query."""
        known = sorted(endpoint.takes & IN_QUERY)
        for name in QueryParams(self.scope["query_string"]):
            if name not in known:
                listed = f"they are {', '.join(known)}" if known else "it has none"
                message = f"The endpoint has no such parameter in the query of its URL; {listed}."
                if name == "model" and endpoint.body_type is not None:
                    message = "The endpoint does not read the model from the query of its URL; name it in the body."
                raise ApiError("invalid_parameter", message, path=f"?{name}")

    async def send(self, message: Message) -> None:
        """Send a part of the response, with the request id in its head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            # Browsers must not guess another type, such as HTML for a text of a client in JSON.
            own = (b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")
            message["headers"] = [*message["headers"], *own]
            if self.grant is not None:
                message["headers"] += self.grant.headers()
            if self.warnings:
                codes = {warning.code for warning in self.warnings.values()}
                message["headers"].append((b"x-sightline-warning", ", ".join(codes).encode()))
            if self.phases:
                phases = {**self.phases, "total": 1000 * (time.monotonic() - self.started)}
                durations = ", ".join([f"{name};dur={milliseconds:.3f}" for name, milliseconds in phases.items()])
                message["headers"].append((b"server-timing", durations.encode()))  # browsers show it
            if self.service.traces is not None:
                self.begin_span(self.service.traces)
            if self.span is not None:
                message["headers"].append((b"traceresponse", traceresponse(self.span)))
            if self.service.is_retiring:
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    def begin_span(self, traces: Traces) -> None:
        """Begin the span of the call, unless it has one or is not traced."""
        if self.span is None and self.route not in POLLED_ROUTES:
            name = self.scope["method"] + ("" if self.endpoint is None else f" {self.route}")
            self.span = traces.begin(name, self.scope["headers"], self.started)

    @property
    def route(self) -> str:
        """Path template of the call's endpoint."""
        return NO_ROUTE if self.endpoint is None else self.endpoint.path

    def fail(self, error: ApiError) -> None:
        """Record the error that ends the call, for the access log and the metrics."""
        self.code = error.code
        if error.limit is not None:
            self.service.metrics.count_limit(error.limit)

    def error_body(self, error: ApiError) -> bytes:
        """Write an error in the form of the endpoint's API."""
        names = self.field_names
        return self.error_format.write(error, error.message(names), error.param(names), self.request_id)


async def receive_body(
    call: HttpCall, body_format: BodyFormat, body_type: type[Body], check: CheckFields | None = None
) -> tuple[Body, bytes]:
    """Receive and validate a call's body; return it, and the bytes after its JSON.

    `check` gets its fields before they are validated. An error of the connection, such as
    `overloaded`, is raised here, too.
    """
    exchange, headers = call.exchange, call.headers
    media_type = headers.get(b"content-type", b"").decode("latin-1")
    if media_type not in body_format.media_types:
        media_type = _check_media_type(media_type, body_format)
    coding = _check_coding(call) if b"content-encoding" in headers else None
    try:
        data = await _receive(call)
        if coding is not None:
            data = decompress(data, coding, call.service.settings.max_body_bytes)
    finally:
        if exchange is not None and exchange.num_counted:
            exchange.bodies.release(exchange)  # admission counts the bytes from now on
    call.num_bytes, tail = len(data), b""
    call.field_names = paths_of(body_type)
    if not data and body_format.is_optional:
        return validate({}, body_type), tail
    if media_type in (FORM, MULTIPART) and body_format.is_form:
        # In a thread, because a megabyte of percent signs takes long.
        fields = await asyncio.to_thread(parse_form, data, headers[b"content-type"])
        if check is not None:
            check(fields)
        return validate(fields, body_type, is_strict=False), tail
    if body_format.length_header is not None:
        size = _json_bytes(call, data, body_format.length_header)
        data, tail = data[:size], data[size:]
    return parse_body(data, body_type, check), tail


def _check_media_type(header: str, body_format: BodyFormat) -> str:
    kind, *parameters = (part.strip().lower() for part in header.split(";"))
    charsets = [part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")]
    media_types = body_format.media_types
    if kind not in media_types or not {"utf-8", "utf8"}.issuperset(charsets):
        named = " or ".join(name for name in media_types if name and (name != FORM or body_format.is_form))
        raise ApiError("unsupported_media_type", f"The Content-Type must be {named}, in UTF-8.")
    return kind


def _check_coding(call: HttpCall) -> str | None:
    """Return the coding of the body, a key of `CODINGS`; None if it has none."""
    values = [value.decode("latin-1") for name, value in call.scope["headers"] if name == b"content-encoding"]
    coding = ", ".join(values).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in CODINGS:
        message = f"Content-Encoding must be {', '.join(CODINGS)} or identity, and only one of them."
        raise ApiError("unsupported_media_type", message)
    return coding


def decompress(data: bytes, coding: str, max_bytes: int) -> bytes:
    """Decompress a body up to its size limit; `malformed_json` if it is not one complete stream."""
    stream = zlib.decompressobj(CODINGS[coding])
    try:
        plain = stream.decompress(data, max_bytes + 1)
    except zlib.error:
        raise ApiError(
            "malformed_json", f"The body is not valid {coding}; compress it, or send no Content-Encoding."
        ) from None
    if len(plain) > max_bytes:
        raise ApiError(
            "body_too_large",
            f"The body must be at most {max_bytes} bytes after decompression (SIGHTLINE_MAX_BODY_BYTES).",
        )
    if not stream.eof or stream.unused_data:
        raise ApiError("malformed_json", f"The body must be one complete {coding} stream, with nothing after it.")
    return plain


async def _receive(call: HttpCall) -> bytes:
    settings, exchange, body = call.service.settings, call.exchange, b""
    limit, length = settings.max_body_bytes, call.headers.get(b"content-length", b"")
    announced = int(length) if length.isdigit() and len(length) < 20 else number_of(length)
    if announced is None or announced <= limit:
        has_arrived = exchange is not None and exchange.is_complete
        try:
            async with contextlib.nullcontext() if has_arrived else asyncio.timeout(settings.client_timeout_s):
                is_complete = False
                while not is_complete and len(body) <= limit:
                    message = await call.receive()
                    if exchange is not None and exchange.rejection is not None:
                        # A copy, because a raised exception holds the body through its traceback.
                        raise ApiError(exchange.rejection.code, exchange.rejection.message({}))
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    is_complete = not message.get("more_body", False)
        except TimeoutError:
            text = f"The body did not arrive within {settings.client_timeout_s:g} s (SIGHTLINE_CLIENT_TIMEOUT_S)."
            raise ApiError("client_too_slow", text) from None
        if len(body) <= limit:
            return body
    size = "" if announced is None else f", got {announced}"
    raise ApiError("body_too_large", f"The body must be at most {limit} bytes{size} (SIGHTLINE_MAX_BODY_BYTES).")


def _json_bytes(call: HttpCall, data: bytes, length_header: str) -> int:
    """Return the number of a body's bytes that are JSON."""
    length = call.headers.get(length_header.lower().encode())
    if length is None:
        return len(data)
    size = number_of(length)
    if size is None or size > len(data):
        message = f"It must be the number of bytes that are JSON, at most {len(data)}, the length of the body."
        raise ApiError("invalid_parameter", message, path=length_header)
    return size


def number_of(header: bytes) -> int | None:
    """Return the number in a header; None if it is none, or larger than any size."""
    digits = header.lstrip(b"0") or header[:1]
    # Python refuses to parse integers with very many digits.
    return int(digits) if digits.isdigit() and len(digits) <= 20 else None


def parse_body(data: bytes, body_type: type[Body], check: CheckFields | None = None) -> Body:
    """Parse and validate a JSON object. If a key is repeated in an object, the last value wins."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not data.strip():
            raise ApiError("malformed_json", "The body is empty; send a JSON object.") from None
        reason, line, column = error.msg, error.lineno, error.colno
        position = invalid_utf8(data)
        if position is not None:  # orjson does not find it
            reason, line = "invalid UTF-8", data.count(b"\n", 0, position) + 1
            column = position - data.rfind(b"\n", 0, position)
        message = f"The body is not valid JSON in UTF-8: {reason}, at line {line}, column {column}."
        raise ApiError("malformed_json", message) from None
    if not isinstance(document, dict):
        raise ApiError("invalid_parameter", "The body must be a JSON object.")
    if check is not None:
        check(document)
    return validate(document, body_type)


def invalid_utf8(data: bytes) -> int | None:
    """Return the index of the first byte that is not UTF-8; None if there is none."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def parse_form(data: bytes, content_type: bytes) -> dict[str, Any]:
    """Return the fields of a form, of which parts with the name of a file are files.

    The value of a repeated field is a list.
    """
    header, fields = Headers(), dict[str, list[str | UploadedFile]]()
    header["content-type"] = content_type.decode("latin-1")
    is_multipart = header.get_content_type() == MULTIPART
    mark = f"\r\n--{header.get_param('boundary', '')}".encode() if is_multipart else b"&"
    count = data.count(mark) + (not is_multipart)
    if count > MAX_FORM_FIELDS:
        message = f"A form must have at most {MAX_FORM_FIELDS} fields, got {count}; send more texts as a list in JSON."
        raise ApiError("malformed_json", message)
    try:
        pairs: Iterable[tuple[str, Any]] = _parts_of(data, mark)
        if not is_multipart:
            pairs = parse_qsl(data.decode(), keep_blank_values=True, strict_parsing=True, errors="strict")
        for name, value in pairs:
            fields.setdefault(name, []).append(value)
    except ValueError:
        raise ApiError("malformed_json", "The body is not a form in UTF-8.") from None
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


def _parts_of(data: bytes, mark: bytes) -> Iterator[tuple[str, str | UploadedFile]]:
    """Yield the fields of a multipart form; `mark` is before each part and the end."""
    _, *parts, end = (b"\r\n" + data).split(mark)
    if not end.startswith(b"--"):
        raise ValueError
    for part in parts:
        head, _, content = part.partition(b"\r\n\r\n")
        header = HeaderParser().parsestr(head.decode().lstrip())
        file = header.get_filename()
        name = str(header.get_param("name", header="content-disposition"))
        yield name, UploadedFile(file, content) if file else content.decode()
