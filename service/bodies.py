"""Bodies of requests: read within limits, parsed, checked. The first thing that is not allowed is the refusal."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import orjson
from pydantic import BaseModel, ValidationError

from service.calls import Call
from service.errors import ERRORS, ApiError, ClientGoneError, ErrorCode
from service.incoming import EXCHANGE, Exchange

Body = TypeVar("Body", bound=BaseModel)

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
MAX_FORM_FIELDS = 64
# Content codings that are decompressed, with the header that zlib expects of each.
CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


@dataclass(frozen=True)
class BodyFormat:
    """How the body of a route is sent."""

    media_types: Sequence[str] = (JSON,)  # "" is that of a request which names none
    length_header: str | None = None  # says how many bytes are JSON, all where it is absent; `Call.tail` has the rest
    is_optional: bool = False  # whether an empty body is an empty object


async def receive_body(call: Call, body_format: BodyFormat, body_type: type[Body]) -> Body:
    """Read a call's body and check it.

    Raises:
        ApiError: `unsupported_media_type`, `body_too_large`, `client_too_slow`, `malformed_json`, the first thing that
            is not allowed, or what the connection has against the body: `overloaded`, `malformed_request` or
            `headers_too_large`.
        ClientGoneError: the client left before it had sent everything.
    """
    media_type = _check_media_type(call, body_format.media_types)
    coding = _check_coding(call)
    try:
        data = await _read(call)
        if coding is not None:
            data = decompress(data, coding, call.service.settings.max_body_bytes)
        call.num_bytes = len(data)
        if not data and body_format.is_optional:
            return check_body({}, body_type)
        if media_type == FORM:  # away from the event loop: a megabyte of percent signs takes a while
            return await asyncio.to_thread(parse_form, data, body_type)
        return parse_body(_json_part(call, data, body_format.length_header), body_type)
    finally:
        exchange: Exchange | None = call.scope.get(EXCHANGE)  # of a connection: tests may call without one
        if exchange is not None:
            exchange.release()  # from here on a door counts the bytes


def _check_media_type(call: Call, media_types: Sequence[str]) -> str:
    kind, *parameters = (part.strip().lower() for part in call.headers.get("content-type", "").split(";"))
    charsets = [part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")]
    if kind not in media_types or any(one != "utf-8" for one in charsets):
        named = " or ".join(one for one in media_types if one)
        raise ApiError("unsupported_media_type", f"Send Content-Type: {named}, in UTF-8.")
    return kind


def _check_coding(call: Call) -> str | None:
    """Return the coding of the body, a key of `CODINGS`; None where it has none."""
    coding = ", ".join(call.headers.getlist("content-encoding")).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in CODINGS:
        message = f"Content-Encoding must be {', '.join(CODINGS)} or identity, and only one of them."
        raise ApiError("unsupported_media_type", message)
    return coding


def decompress(data: bytes, coding: str, max_bytes: int) -> bytes:
    """Decompress a body that was sent with `Content-Encoding`, and never more than its limit.

    Raises:
        ApiError: `body_too_large`; `malformed_json` where it is not one complete stream of that coding.
    """
    stream = zlib.decompressobj(CODINGS[coding])
    try:
        plain = stream.decompress(data, max_bytes + 1)
    except zlib.error:
        raise ApiError("malformed_json", f"The body is not valid {coding}.") from None
    if len(plain) > max_bytes:
        raise ApiError("body_too_large", f"The body must be at most {max_bytes} bytes after decompression.")
    if not stream.eof or stream.unused_data:
        raise ApiError("malformed_json", f"The body must be one complete {coding} stream, with nothing after it.")
    return plain


async def _read(call: Call) -> bytes:
    limit = call.service.settings.max_body_bytes
    too_large = ApiError("body_too_large", f"The body is larger than {limit} bytes.")
    announced = call.headers.get("content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(call.service.settings.body_timeout_s):
            while True:
                message = await call.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError("client_too_slow") from None


def _json_part(call: Call, data: bytes, length_header: str | None) -> bytes:
    """The JSON of a body; the call keeps what comes behind it."""
    length = call.headers.get(length_header) if length_header else None
    if length is None:
        return data
    # No more digits than are needed: Python refuses to read very long ones.
    if not (length.isascii() and length.isdigit() and len(length) <= 20 and int(length) <= len(data)):
        message = f"It must be the number of bytes that are JSON, of {len(data)} in the body."
        raise ApiError("invalid_parameter", message, param=length_header)
    call.tail = data[int(length) :]
    return data[: int(length)]


def parse_body(data: bytes, body_type: type[Body]) -> Body:
    """Parse and check a JSON object.

    Of a key that stands twice in an object the last counts, as in every JSON reader at hand.

    Raises:
        ApiError: `malformed_json`, or the first thing that is not allowed.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise ApiError("malformed_json") from None
    if not isinstance(document, dict):
        raise ApiError("invalid_parameter", "The body must be a JSON object.")
    return check_body(document, body_type)


def parse_form(data: bytes, body_type: type[Body]) -> Body:
    """Parse and check a form; a number is its digits. Of a field that stands twice the last counts.

    Raises:
        ApiError: `malformed_json`, or the first thing that is not allowed.
    """
    try:
        pairs = parse_qsl(
            data.decode(), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=MAX_FORM_FIELDS
        )
    except ValueError:
        raise ApiError("malformed_json", "The body is not a form in UTF-8.") from None
    return _checked(lambda: body_type.model_validate_strings(dict(pairs), strict=False))


def check_body(document: dict[str, Any], body_type: type[Body]) -> Body:
    """Check a JSON object.

    Raises:
        ApiError: the first thing that is not allowed.
    """
    return _checked(lambda: body_type.model_validate(document))


def _checked(validate: Callable[[], Body]) -> Body:
    try:
        return validate()
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints, without the value that it is about."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    param = path_of((*first["loc"], *context.get("path", ())))
    code: ErrorCode = "invalid_parameter"
    if first["type"] in ERRORS:  # one of our own
        code = first["type"]  # type: ignore[assignment]
    message = context.get("message") or f"{first['msg']}."
    return ApiError(code, message, param=param or None)


def path_of(location: Sequence[str | int]) -> str:
    """`("parameters", "stop", 1)` as `parameters.stop[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
