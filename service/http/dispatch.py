"""Routes of the endpoints, and ASGI middleware: one response and one log line for each request.

A route reads the body itself: FastAPI would answer some bad bodies with 500, and needs more time
than the rest of a call together (see docs/adr/0051-fastapi-finds-and-describes-the-endpoints.md).
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import _TrustedHosts

from sightline.base.threads import INTERRUPTIONS
from sightline.service.api.endpoint import CALL, JSON, Endpoint, EventStream, Raw
from sightline.service.api_errors import CLIENT_GONE, CLIENT_GONE_STATUS, ApiError, ClientGoneError
from sightline.service.http.access import authorize, authorize_by_field
from sightline.service.http.compression import MIN_BYTES, accepts_gzip, compress
from sightline.service.http.hosts import host_check
from sightline.service.http.http_call import NO_ROUTE, POLLED_ROUTES, CheckFields, HttpCall, receive_body
from sightline.service.http.incoming import EXCHANGE
from sightline.service.http.openapi import KEY_SCHEMES, RESPONSE_HEADERS, declared_errors, declared_request, schema_of
from sightline.service.inference.service import Service
from sightline.service.inference.streaming import StreamToken
from sightline.service.logs import FIELDS, access_logger
from sightline.service.metrics import Metrics
from sightline.service.traces import OPERATIONS, PARAMETERS, trace_id

MAX_LOGGED = 200  # characters of a text that the client chose
LARGE_BYTES = 65_536  # above this size, the transport applies back pressure
EVENT_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the events
]
NO_MATCH: tuple[Match, Scope] = (Match.NONE, {})  # creating it takes longer than all else in `matches`
logger = logging.getLogger(__name__)

OnRejection = Callable[[ApiError, str], None]  # takes the error and the request id


def log_call(level: int, fields: dict[str, Any]) -> None:
    """Log the access log line of a finished call."""
    if access_logger.isEnabledFor(level):
        # Created here, because the logger would look up the calling line of code, which costs more
        # than the rest.
        record = logging.LogRecord(access_logger.name, level, "", 0, "request", None, None)
        setattr(record, FIELDS, fields)
        access_logger.handle(record)


def rejection_logger(metrics: Metrics) -> OnRejection:
    """Return a function that counts and logs a request that never reached the application."""

    def log(error: ApiError, request_id: str) -> None:
        metrics.call_counter(NO_ROUTE, error.kind.status, error.code)()
        head: dict[str, Any] = {"request_id": request_id, "method": None, "route": NO_ROUTE, "model": None}
        log_call(logging.INFO, head | {"status": error.kind.status, "code": error.code, "total_ms": 0.0})

    return log


class CallLog:
    """Middleware that creates the call of each request, and counts and logs it at its end."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        # Proxies whose header X-Forwarded-For is believed in the log, by uvicorn's variable.
        self._proxies = _TrustedHosts(os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1"))
        self._counter_of = functools.cache(service.metrics.call_counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = scope[CALL] = HttpCall(self._service, scope, receive, send)
        try:
            await self._app(scope, receive, call.send)
        finally:
            call.close()
            self._log_end(call)
            # Reference cycles would keep each call, with its results, until the garbage collector
            # runs.
            del scope[CALL]
            if call.exchange is not None:
                call.exchange.on_lost = None
                del scope[EXCHANGE]

    def _log_end(self, call: HttpCall) -> None:
        """Count and log a finished call."""
        exchange, status, code = call.exchange, call.status, call.code
        if exchange is not None:
            if exchange.num_counted:
                exchange.bodies.release(exchange)
            if exchange.lost_code and code in (None, CLIENT_GONE):
                code = exchange.lost_code
        if status is None:
            status = CLIENT_GONE_STATUS
        route = call.route
        self._counter_of(route, status, code, call.model_name)()
        label = None if call.key is None else call.key.label
        if self._service.keys is not None:
            self._service.metrics.count_key(label or "", status, call.details)
        fields = {
            "request_id": call.request_id,
            "method": call.scope["method"],
            "route": route,
            **({"path": quote(call.scope["path"])[:MAX_LOGGED]} if route == NO_ROUTE else {}),
            "client": self._client_of(call),
            "user_agent": call.headers.get(b"user-agent", b"").decode("latin-1")[:MAX_LOGGED] or None,
            **({} if label is None else {"key": label}),
            "model": call.model_name,
            "status": status,
            "code": code,
            **call.details,
            "total_ms": round(1000 * (time.monotonic() - call.started), 3),
        }
        if (traces := self._service.traces) is not None:
            call.begin_span(traces)  # of a call whose client has left before the response began
            if call.span is not None:
                fields["trace_id"] = trace_id(call.span)
                error = code if status >= 500 else None
                traces.end(call.span, _attributes(call, status, code), error, call.phases, call.computed)
        log_call(logging.DEBUG if route in POLLED_ROUTES else logging.INFO, fields)

    def _client_of(self, call: HttpCall) -> str | None:
        """Return the address of a call's client, or the one that a trusted proxy states."""
        client = call.scope.get("client")
        address = client[0].removeprefix("::ffff:") if client else None
        if b"x-forwarded-for" in call.headers and address in self._proxies:
            forwarded = b",".join(value for name, value in call.scope["headers"] if name == b"x-forwarded-for")
            with contextlib.suppress(ValueError, IndexError):  # not an address
                return str(ip_address(self._proxies.get_trusted_client_address(forwarded.decode("latin-1"))[0]))
        return address


def _attributes(call: HttpCall, status: int, code: str | None) -> dict[str, Any]:
    """Return the attributes of a call's span, by the names of OpenTelemetry's conventions."""
    details, parameters = call.details, call.parameters
    fields = () if parameters is None else parameters.model_fields_set
    return {
        "http.request.method": call.scope["method"],
        "http.route": None if call.endpoint is None else call.route,
        "http.response.status_code": status,
        "error.type": code,
        "gen_ai.provider.name": None if call.model_name is None else "sightline",
        "gen_ai.operation.name": None if call.task is None else OPERATIONS.get(call.task, call.task),
        "gen_ai.request.model": call.model_name,
        **{f"gen_ai.request.{name}": getattr(parameters, key) for key, name in PARAMETERS.items() if key in fields},
        "gen_ai.usage.input_tokens": details.get("input_tokens"),
        "gen_ai.usage.output_tokens": details.get("output_tokens"),
        "gen_ai.response.finish_reasons": details.get("finish_reasons") or None,
        "sightline.request_id": call.request_id,
        "sightline.key": None if call.key is None else call.key.label,
    }


class ErrorSender:
    """Middleware that sends the errors of calls.

    FastAPI's handlers would send unexpected errors without CORS headers, and see neither a panic in
    Rust nor a cancellation.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._allows_host = host_check(service.settings.allowed_host_names)
        self._admin_port = service.settings.admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call: HttpCall = scope[CALL]
        call.check_access = self._check_access
        try:
            try:
                # HEAD has the headers of GET (RFC 9110, 9.1); the server omits the body.
                await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send)
            except ApiError as error:
                if error.code in ("overloaded", "rate_limit_exceeded"):
                    error.retry_after_s = (error.retry_after_s or 0) + await self._service.rejection_pacer.wait()
                await _send_error(call, send, error)
            except ClientGoneError:
                call.code = CLIENT_GONE
            except INTERRUPTIONS:
                raise
            except BaseException:
                logger.exception("a call failed", extra={"fields": {"request_id": call.request_id}})
                await _send_error(call, send, ApiError("internal"))
        except asyncio.CancelledError:  # by uvicorn, at the end of the shutdown timeout
            await _send_error(call, send, ApiError("draining"))

    def _check_access(self, call: HttpCall, endpoint: Endpoint | None) -> None:
        """Check the host, the port and the API key of a call; see `authorize`."""
        if endpoint is not None:
            if endpoint.path not in POLLED_ROUTES and not self._allows_host(call.headers.get(b"host")):
                raise ApiError("misdirected_request")
            server = call.scope.get("server")
            is_admin = server is not None and server[1] == self._admin_port
            if self._admin_port is not None and not endpoint.is_open and is_admin != (endpoint.role == "admin"):
                raise ApiError("not_found", "The service has this route on its other port (SIGHTLINE_ADMIN_ADDRESS).")
        if self._service.keys is not None:
            authorize(call, endpoint, self._service.keys)


class EndpointRoute(APIRoute):
    """The route of an endpoint, which FastAPI finds and describes, and `respond` answers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.declared = endpoint
        key_schemes = () if endpoint.is_open else KEY_SCHEMES
        super().__init__(
            endpoint.path,
            endpoint.handler,
            methods=[endpoint.method],
            name=endpoint.name,
            operation_id=operation_id_of(endpoint),
            summary=summary_of(endpoint.handler),
            description=inspect.getdoc(endpoint.handler) or summary_of(endpoint.handler),
            tags=[*endpoint.tags],
            dependencies=[Depends(check) for check in (*endpoint.dependencies, *key_schemes)],
            response_model=endpoint.response,
            response_class=JSONResponse if JSON in endpoint.media_types else Response,
            responses={
                200: {
                    "headers": RESPONSE_HEADERS,
                    "content": {kind: {"schema": schema_of(kind)} for kind in endpoint.media_types if kind != JSON},
                },
                **declared_errors(endpoint),
                "default": {},  # otherwise FastAPI declares its own 422; `Application.openapi` removes it
            },
            openapi_extra=declared_request(endpoint),
        )
        self._fixed_part = endpoint.path.rpartition("}")[2] or endpoint.path.partition("{")[0]
        # Starlette's `$` would ignore a line break at the end of a path.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return functools.partial(respond, self.declared)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Decline most paths without the regular expression, which takes five times as long."""
        return super().matches(scope) if self._fixed_part in scope["path"] else NO_MATCH


def operation_id_of(endpoint: Endpoint) -> str:
    """Return the name of an operation in the OpenAPI document, from which clients are generated.

    Operations of compatible APIs begin with the name of their API, the first of several.
    """
    name, api = endpoint.name or endpoint.handler.__name__, endpoint.tags[0].replace("-", "_")
    return name if api == "sightline" else f"{api}_{name}"


def summary_of(handler: Callable[..., Any]) -> str:
    """Return the first sentence of a handler's docstring, or its name if there is none (`-OO`)."""
    text = inspect.getdoc(handler) or f"{handler.__name__.replace('_', ' ').capitalize()}."
    return re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0].strip().rstrip(".")


async def respond(endpoint: Endpoint, request: Request) -> Response:
    """Call the endpoint of a request, if the caller has access, and return its response."""
    call: HttpCall = request.scope[CALL]
    if endpoint.with_file is not None and call.headers.get(b"content-type", b"").lower().startswith(b"multipart/"):
        endpoint = endpoint.with_file
    call.endpoint, call.error_format = endpoint, endpoint.error_format
    call.check_access(call, endpoint)
    service, arguments = call.service, dict[str, Any](request.scope["path_params"])
    check_key, tail = None, b""
    if endpoint.key_field is not None and service.keys is not None and call.key is None:
        check_key = functools.partial(authorize_by_field, call, endpoint, service.keys)
    try:
        if endpoint.body_type is not None:
            arguments["body"], tail = await _receive(call, endpoint, endpoint.body_type, check_key)
        if call.scope["query_string"] and not endpoint.ignores_query:
            call.check_query(endpoint)
    except ApiError as error:
        if check_key is not None and call.key is None and error.kind.status in (400, 415, 422):
            check_key({})  # strangers do not learn what is wrong with their requests
        raise
    if endpoint.takes:
        provided = {**request.query_params, "tail": tail, "headers": call.headers}
        arguments |= {name: provided.get(name) for name in endpoint.takes}
    for check in endpoint.dependencies:
        await check(**{name: arguments.pop(name) for name in inspect.signature(check).parameters})
    response = await endpoint.handler(call, **arguments)
    return EventsResponse(call, response) if isinstance(response, EventStream) else BodyResponse(call, response)


async def _receive(
    call: HttpCall, endpoint: Endpoint, body_type: type[BaseModel], check: CheckFields | None
) -> tuple[BaseModel, bytes]:
    """Receive the body of a call once its quota and its deadline have begun, see `receive_body`."""
    service = call.service
    if service.unavailable_code is not None:
        raise ApiError(service.unavailable_code)
    if call.key is not None:
        await call.begin_quota()
    if call.exchange is not None:
        call.exchange.on_lost = call.on_client_gone
    received = await receive_body(call, endpoint.body_format, body_type, check)
    call.deadline = call.started + service.settings.request_timeout_s
    if b"x-request-timeout-ms" in call.headers:
        call.deadline = min(call.deadline, call.started + requested_timeout_s(call))
    if check is not None:
        await call.begin_quota()
    return received


@dataclass(eq=False)
class BodyResponse(Response):
    """Response of one body: of a `Raw`, or of an object that becomes JSON."""

    call: HttpCall
    content: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, response = self.call, self.content
        if call.grant is not None:
            call.release_sequences()  # before the client can send its next call to another worker
        if not isinstance(response, Raw):
            response = Raw(orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY), JSON)
        call.observe_latency()
        body = response.body
        headers = [(name.lower().encode(), value.encode()) for name, value in (response.headers or {}).items()]
        has_coding = b"vary" in dict(headers)  # the endpoint has chosen it
        if len(body) >= MIN_BYTES and not has_coding:
            headers.append((b"vary", b"Accept-Encoding"))
            if accepts_gzip(call.headers):
                body = await compress(body)
                headers.append((b"content-encoding", b"gzip"))
        if (kind := response.media_type) is not None:
            headers = [(b"content-length", b"%d" % len(body)), (b"content-type", kind.encode()), *headers]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        if len(body) > LARGE_BYTES:
            # uvicorn waits for the reader before the next part, but not after the last one. With an
            # empty last part, the call keeps its reservation until most of the body is read.
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
            await asyncio.sleep(0)  # the loop reports a connection that this part found closed
        await send({"type": "http.response.body", "body": body})


@dataclass(eq=False)
class EventsResponse(Response):
    """Response of events, sent as they arrive; those that arrive together are sent in one part."""

    call: HttpCall
    content: EventStream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, encoder = self.call, self.content.encoder
        headers = [(b"content-type", self.content.media_type.encode()), *EVENT_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunk = b""
        try:
            async with contextlib.aclosing(aiter(self.content.stream)) as groups:
                async for events in groups:
                    for sequence, event in events:
                        if isinstance(event, StreamToken):
                            chunk += encoder.token(sequence, event)
                        else:
                            chunk += encoder.end(sequence, event)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    chunk = b""
            last = encoder.close(self.content.stream)
        except ApiError as error:
            call.fail(error)
            last = chunk + encoder.error(call.error_body(error))
        except (ClientGoneError, *INTERRUPTIONS):
            raise
        except BaseException:
            logger.exception("a stream failed", extra={"fields": {"request_id": call.request_id}})
            call.code = "internal"
            last = chunk + encoder.error(call.error_body(ApiError("internal")))
        await send({"type": "http.response.body", "body": last})


async def _send_error(call: HttpCall, send: Send, error: ApiError) -> None:
    """Send an error. A response that has started is aborted instead."""
    call.fail(error)
    if call.status is not None:
        if call.exchange is None:  # another server than `DrainingServer`
            raise error
        call.exchange.break_off(call.exchange.cycle)
        return
    body = call.error_body(error)
    headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": call.error_format.status(error.code), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def requested_timeout_s(call: HttpCall) -> float:
    """Return the seconds of `X-Request-Timeout-Ms`."""
    requested = call.headers[b"x-request-timeout-ms"]
    if not (requested.isdigit() and float(requested) > 0):
        message = "It must be a whole number of milliseconds above 0."
        raise ApiError("invalid_parameter", message, path="X-Request-Timeout-Ms")
    return float(requested) / 1000
