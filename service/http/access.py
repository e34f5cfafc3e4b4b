"""Access by API key: all but the health checks need one, if the settings name a file of keys."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from sightline.service.api.endpoint import HTML, Endpoint, prefers
from sightline.service.api_errors import ApiError
from sightline.service.http.http_call import HttpCall
from sightline.service.keys import KeyRing

# Schemes of the header Authorization that are followed by the key.
KEY_SCHEMES = (b"bearer", b"deepl-auth-key")
MISSING = (
    "The service needs an API key: send it in the header Authorization as `Bearer KEY`, or in the header X-API-Key."
)
# A browser asks its user for the key of a page.
BASIC = b'Basic realm="Sightline: the password is an API key", charset="UTF-8"'
UNKNOWN = "The service does not know this API key; ask its operator for another one."


def authorize(call: HttpCall, endpoint: Endpoint | None, keys: KeyRing) -> None:
    """Find the key of a call in its headers; `endpoint` is None if no route matches.

    A call without a key passes if the endpoint is open, or finds the key in its body. Other calls
    fail with `unauthorized`, or with `forbidden` if the key lacks the role of the endpoint.
    """
    if endpoint is not None and endpoint.is_open:
        return
    secret = key_in_headers(call.headers, call.scope["method"])
    if secret is None and endpoint is not None and endpoint.key_field is not None:
        return
    authorize_with(call, endpoint, keys, secret)


def authorize_with(call: HttpCall, endpoint: Endpoint | None, keys: KeyRing, secret: bytes | None) -> None:
    """Find the key of a call by its text, see `authorize`."""
    call.key = keys.find(secret) if secret else None
    if call.key is None:
        scheme = BASIC if prefers(HTML, call.headers) else b"Bearer"
        message = UNKNOWN if secret else MISSING
        raise ApiError("unauthorized", message, headers=[(b"www-authenticate", scheme)])
    call.caller = call.key.label
    if endpoint is not None and endpoint.role == "admin" and call.key.role != "admin":
        raise ApiError("forbidden", "This route needs an API key with the role admin; ask the operator for one.")


def authorize_by_field(call: HttpCall, endpoint: Endpoint, keys: KeyRing, fields: Mapping[str, Any]) -> None:
    """Find the key of a call in the fields of its body, see `authorize`."""
    secret = fields.get(endpoint.key_field or "")
    authorize_with(call, endpoint, keys, secret.encode() if isinstance(secret, str) else None)


def key_in_headers(headers: Mapping[bytes, bytes], method: str) -> bytes | None:
    """Return the key in the headers of a request; None if there is none.

    A browser sends the user's Basic credentials with every request to the service, also with those
    that another site has caused. There they count only for links, which change nothing.
    """
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    scheme = scheme.lower()
    if scheme in KEY_SCHEMES:
        return value.strip() or None
    if scheme == b"basic":
        if method not in ("GET", "HEAD") and _is_of_another_site(headers):
            return None
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2] or None
        except binascii.Error:
            return None
    return headers.get(b"x-api-key") or None


def _is_of_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a page of another site has caused a request, or may have caused it.

    A browser sends `Sec-Fetch-Site` only to https and to its own machine. Otherwise, `Origin` or
    `Referer` names the page. Programs send none of them.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"none", b"same-origin")
    page = headers.get(b"origin", headers.get(b"referer"))
    try:
        return page is not None and urlsplit(page.lower()).netloc != headers.get(b"host", b"").lower()
    except ValueError:  # not a URL
        return True
