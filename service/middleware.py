"""What surrounds every call, whatever its route: a request id, an answer to every exception, a log line, a count."""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.calls import RECORD, Record
from service.errors import CLIENT_GONE, CLIENT_GONE_STATUS, ApiError, ClientGoneError
from service.incoming import EXCHANGE, Exchange
from service.logs import log_call
from service.metrics import Metrics

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Asked every few seconds: logged as debug.
QUIET_ROUTES = frozenset(
    {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/metrics"}
)
# Where the scope keeps what closes the connection behind an answer that has begun and does not become whole.
BREAK_OFF = "sightline.break_off"
logger = logging.getLogger(__name__)


def request_id_of(scope: Scope) -> str:
    """The client's own where it is fit to be logged, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            wanted: str = value.decode("latin-1")
            if REQUEST_ID.fullmatch(wanted):
                return wanted
    return secrets.token_hex(12)


Refuse = Callable[[ApiError, str], None]  # takes the request id, too


def tell_end(metrics: Metrics, record: Record, method: str | None) -> None:
    """Count a call that has ended, and log its one line."""
    status = CLIENT_GONE_STATUS if record.status is None else record.status
    metrics.count_call(record.route, status, record.code)
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": method,
        "route": record.route,
        "model": record.model,
        "status": status,
        "code": record.code,
        **record.details,
        "total_ms": round(record.ms_since_start(), 3),
    }
    log_call(logging.DEBUG if record.route in QUIET_ROUTES else logging.INFO, fields)


def refusal_teller(metrics: Metrics) -> Refuse:
    """Tells of requests that ended before they reached the app."""

    def tell(error: ApiError, request_id: str) -> None:
        tell_end(metrics, Record(request_id, code=error.code, status=error.kind.status), None)

    return tell


class CallMiddleware:
    """Plain ASGI, around all that answers: it gives each call its record and request id, and tells its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(request_id_of(scope))
        scope[RECORD] = record
        # HEAD is answered wherever GET is (RFC 9110, 9.1); the server leaves out the body.
        inner_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(inner_scope, receive, send_with_id)
        finally:
            exchange: Exchange | None = scope.get(EXCHANGE)
            if exchange is not None and exchange.lost_code and record.code in (None, CLIENT_GONE):
                record.code = exchange.lost_code
            tell_end(self._metrics, record, scope["method"])


class ErrorMiddleware:
    """Plain ASGI, around the routes: it answers every exception. What is put around it sees that answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record: Record = scope[RECORD]
        try:
            try:
                await self._app(scope, receive, send)
            except ApiError as error:
                if error.code == "overloaded":
                    await asyncio.sleep(scope["app"].state.service.refusal_pace.delay_s())
                await _send_error(scope, send, record, error)
            except ClientGoneError:
                record.code = CLIENT_GONE
            except Exception:
                logger.exception("a call failed", extra={"fields": {"request_id": record.request_id}})
                await _send_error(scope, send, record, ApiError("internal"))
        except asyncio.CancelledError:  # uvicorn's, where the shutdown timeout is over
            await _send_error(scope, send, record, ApiError("draining"))


async def _send_error(scope: Scope, send: Send, record: Record, error: ApiError) -> None:
    """Answer with an error; where an answer has begun, all that is left is to break it off."""
    record.code = error.code
    if record.status is not None:
        break_off = scope.get(BREAK_OFF)
        if break_off is None:  # another server than ours
            raise error
        break_off()
        return
    body = record.error_body(error)
    headers = [*error.headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.kind.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def as_api_error(error: HTTPException) -> ApiError:
    """What the router found: no such route, or not with this method."""
    return ApiError("method_not_allowed" if error.status_code == 405 else "not_found")
