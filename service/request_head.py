"""Validation of a request's head: what the HTTP parser accepts and RFC 9110 and 9112 forbid."""

import re
from collections.abc import Sequence

from service.errors import ApiError

HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
PATH = rb"[!-\"$-~]*"  # with a query; nobody sends fragments
ORIGIN_FORM = re.compile(rb"/" + PATH)
ABSOLUTE_FORM = re.compile(rb"(?i:https?)://(?!:)([^/?#]+)([/?]" + PATH + rb")?")


def check_head(method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the request's target in origin form, a path with its query.

    Args:
        method: in capitals.
        target: as it was sent.
        version: of HTTP, such as `1.1`.
        headers: with their names in small letters.

    Raises:
        ApiError: `malformed_request`.
    """
    if version not in ("1.0", "1.1"):
        raise ApiError("malformed_request", "The HTTP version must be 1.1 or 1.0.")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise ApiError("malformed_request", f"The request must have one Host header, got {len(hosts)}.")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise ApiError(
            "malformed_request", "The Host header must be a host name or address, and its port if it has one."
        )
    if method == b"OPTIONS" and target == b"*":
        return target
    path = None if method == b"CONNECT" else origin_form(target)
    if path is None:
        message = "The request's target must be a path or an http URL; the service is no proxy and has no CONNECT."
        raise ApiError("malformed_request", message)
    return path


def origin_form(target: bytes) -> bytes | None:
    """Return the path and query of a target; None where it has none."""
    absolute = ABSOLUTE_FORM.fullmatch(target)
    if absolute and HOST.fullmatch(absolute[1]):
        path = absolute[2] or b""
        return path if path.startswith(b"/") else b"/" + path
    return target if ORIGIN_FORM.fullmatch(target) else None
