"""One HTTP call on its way to the engine and back: its body, its place, its deadline, its client that may leave."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import orjson
from prometheus_client import Histogram
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.admission import Reservation, ResponseReservation
from service.engine.request import (
    Cancelled,
    Compared,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Generated,
    GenerateRequest,
    Request,
    SimilarRequest,
    Timings,
)
from service.engine.throughput import Throughput
from service.engine.worker import Ticket
from service.errors import ApiError, ClientGoneError, ErrorWriter
from service.serving import ServedModel, Service

T = TypeVar("T")
Result = TypeVar("Result", Generated, Encoded, Compared)

FLOAT_BYTES = 4
RECORD = "sightline.record"  # where the scope keeps a call's Record
# The engine ends what is late at its next step; where no step comes any more, the call ends by itself so much later.
DEADLINE_SLACK_S = 0.5


@dataclass
class Record:
    """What is told of a call in its log line, and counted of it."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    route: str = "none"
    model: str | None = None
    code: str | None = None
    status: int | None = None  # of the answer, once it has begun
    details: dict[str, Any] = field(default_factory=dict)  # tokens, times and reasons, by their names in the log
    write_error: ErrorWriter = ApiError.body  # the route's

    def error_body(self, error: ApiError) -> bytes:
        """An error as the clients of the route read it."""
        return self.write_error(error, self.request_id)

    def ms_since_start(self) -> float:
        return 1000 * (time.monotonic() - self.started)


class Call(HttpRequest):
    """A request to one of our routes. What is entered into `resources` is let go when the answer was sent."""

    def __init__(self, scope: Any, receive: Any, send: Any, resources: contextlib.ExitStack) -> None:
        super().__init__(scope, receive, send)
        self.resources = resources
        self.service: Service = scope["app"].state.service
        self.record: Record = scope[RECORD]
        self.num_bytes = 0  # of the body
        self.tail = b""  # what came behind the JSON of the body
        self.tokenize_ms = 0.0  # spent on it so far
        self.deadline = float("inf")  # on the engines' clock, `time.monotonic`
        self._to_observe: tuple[Histogram, float] | None = None
        self._reservation: Reservation | None = None
        self.response_memory = ResponseReservation(self.service.response_memory)
        resources.callback(self.response_memory.release)

    @contextlib.contextmanager
    def tokenizing(self) -> Iterator[None]:
        """What the block takes is time spent on tokens."""
        started = time.perf_counter()
        yield
        self.tokenize_ms += 1000 * (time.perf_counter() - started)

    def limit_time(self) -> None:
        """Set the deadline. A client can only shorten the server's.

        Raises:
            ApiError: the client's wish makes no sense.
        """
        timeout_s = self.service.settings.request_timeout_s
        wanted = self.headers.get("x-request-timeout-ms")
        if wanted is not None:
            if not (wanted.isascii() and wanted.isdigit() and float(wanted) > 0):
                message = "It must be a whole number of milliseconds above 0."
                raise ApiError("invalid_parameter", message, param="X-Request-Timeout-Ms")
            timeout_s = min(timeout_s, float(wanted) / 1000)
        self.deadline = self.record.started + timeout_s

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def reserve(self, model: ServedModel, sequences: int, units: float = 0.0) -> Reservation:
        """Have the call admitted to a model until its response was sent, before anything is spent on it.

        Args:
            model: which model.
            sequences: of the call.
            units: estimated work of all its sequences, see `Throughput`; 0 if the engine has none.

        Raises:
            ApiError: `overloaded`.
        """
        self.record.model = model.name
        reservation = self.service.admission(model).reserve(sequences, self.num_bytes, units, self.seconds_left)
        self._reservation = self.resources.enter_context(reservation)
        return reservation

    def submit(self, model: ServedModel, requests: Sequence[Request]) -> list[Ticket]:
        """Hand requests to the engine; whatever ends the call also gives them up."""
        worker, reservation = self.service.backend.worker, self._reservation
        assert reservation is not None, "a call is admitted before it submits"
        units = [units_of(request, self.service.admission(model).throughput) for request in requests]
        reservation.units = sum(units)
        self.response_memory.reserve(sum(bytes_of(request, model) for request in requests))
        tickets = []
        for request, work in zip(requests, units, strict=True):
            ticket = worker.submit(model.name, request, partial(reservation.finish, work))
            self.resources.callback(ticket.cancel)
            tickets.append(ticket)
        return tickets

    async def results(self, tickets: Sequence[Ticket], kind: type[Result]) -> list[Result]:
        """Wait for the results of all tickets, in order; raises as `together` does."""
        return await self.together([result_of(ticket, kind) for ticket in tickets])

    async def together(self, parts: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for all parts, in order.

        Raises:
            ApiError: the first failure, without waiting for the rest; or the call's time is over.
            ClientGoneError: the client left; nobody needs the results.
        """
        work = asyncio.ensure_future(_gather(parts))
        gone = asyncio.ensure_future(self.until_gone())
        try:
            timeout = self.seconds_left + DEADLINE_SLACK_S
            done, _ = await asyncio.wait((work, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return work.result()
            raise ClientGoneError if gone in done else ApiError("deadline_exceeded")
        finally:
            gone.cancel()
            work.cancel()

    async def run_in_time(self, work: Callable[[], T], *, is_short: bool) -> T:
        """Run a function: a short one at once, another one in a thread until the call's deadline.

        Raises:
            ApiError: `deadline_exceeded`; the thread is left to end by itself.
        """
        if is_short:
            return work()
        try:
            return await asyncio.wait_for(asyncio.to_thread(work), self.seconds_left)
        except TimeoutError:
            raise ApiError("deadline_exceeded") from None

    async def until_gone(self) -> None:
        """Wait until the client has closed its connection. The body must have been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def account(
        self, model: ServedModel, parts: Sequence[Timings], input_tokens: int, output_tokens: int, *reasons: str
    ) -> dict[str, float]:
        """Where the call's time went, in milliseconds, for its answer; the log and the metrics will be told too.

        Args:
            model: which answered.
            parts: of the call's sequences. They run side by side, so each time is the longest among them.
            input_tokens: of all.
            output_tokens: of all.
            reasons: why each output ended.
        """
        timings_ms = timings_of(self, parts)
        self.tell_result(input_tokens, output_tokens, timings_ms, *reasons)
        self._to_observe = self.service.metrics_of(model).call_seconds, timings_ms["total"] / 1000
        return timings_ms

    def count_success(self) -> None:
        """Tell the metrics how long an answer took that nothing refuses any more."""
        if self._to_observe is not None:
            histogram, seconds = self._to_observe
            histogram.observe(seconds)

    def tell_result(self, input_tokens: int, output_tokens: int, timings_ms: dict[str, float], *reasons: str) -> None:
        """Keep for the log line what the answer says too."""
        self.record.details |= {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "finish_reasons": list(reasons),
        } | {f"{name}_ms": value for name, value in timings_ms.items() if name != "total"}


def units_of(request: Request, throughput: Throughput) -> float:
    """Estimated work of a request, see `Throughput`."""
    if not isinstance(request, GenerateRequest):
        return 1.0
    return throughput.generation_units(request.parameters, len(request.target_prefix))


def bytes_of(request: Request, model: ServedModel) -> int:
    """Bytes of the vectors that a request's result holds; its tokens and attention maps are not counted here."""
    if isinstance(request, EncodeRequest):
        return FLOAT_BYTES * len(request.source_ids) * model.hidden_size
    if isinstance(request, SimilarRequest):
        return 2 * FLOAT_BYTES * len(request.token_ids) * model.manifest.limits.vocabulary  # cosines and their sum
    return 0


async def _gather(parts: Sequence[Awaitable[T]]) -> list[T]:
    # A task of its own: a bare gather that is cancelled complains in the log that nobody took its exception.
    return await asyncio.gather(*parts)


async def result_of(ticket: Ticket, kind: type[Result]) -> Result:
    """Wait for a request's result; raises as `success` does."""
    return success(await ticket.result(), kind)


def success(event: Event, kind: type[Result]) -> Result:
    """A final event's result.

    Raises:
        ApiError: the request failed.
        ClientGoneError: it was given up.
    """
    if isinstance(event, Failed):
        raise ApiError(event.code)
    if isinstance(event, Cancelled):
        raise ClientGoneError
    assert isinstance(event, kind)
    return event


def timings_of(call: Call, parts: Sequence[Timings]) -> dict[str, float]:
    """Where a call's time went. Sequences run side by side, so each part is the longest among them."""
    return {
        "tokenize": round(call.tokenize_ms, 3),
        "queue": round(max(part.queue for part in parts), 3),
        "encode": round(max(part.encode for part in parts), 3),
        "decode": round(max(part.decode for part in parts), 3),
        "total": round(call.record.ms_since_start(), 3),
    }


def json_answer(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


def to_json(content: Any) -> bytes:
    """JSON of what an answer holds, NumPy arrays included."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
