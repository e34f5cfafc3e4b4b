"""Requests of a call in the engine of its model."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from sightline.service.api_errors import ApiError, ClientGoneError, Limit
from sightline.service.engine.request import Cancelled, Event, Failed, FailureCode, Request, Timings, TokenEvent
from sightline.service.engine.worker import RequestFuture, Worker
from sightline.service.inference.admission import Reservation
from sightline.service.inference.results import MAX_NUMBERS

T = TypeVar("T")

# The engine fails expired requests at its next step. If it hangs, the call ends this much later.
DEADLINE_SLACK_S = 0.5
# Messages of failures with which the engine stops generations whose maps exceed a limit.
MAP_ERRORS: Mapping[FailureCode, str] = {
    "overloaded": (
        "The responses in progress leave too little memory for the attention maps of this call "
        "(an eighth of SIGHTLINE_MEMORY_BYTES). Retry later."
    ),
    "response_too_large": (
        f"The attention maps have more than {MAX_NUMBERS} numbers, the maximum of a response. Select fewer kinds, "
        "layers or heads, or reduce the heads."
    ),
}


class Arrival(NamedTuple):
    """An event of a request with its arrival time."""

    number: int  # index of the request
    event: Any  # a `TokenEvent`, or the result of the request
    time: float  # in seconds of time.monotonic


class Submission:
    """Requests that an engine runs, and their events.

    At most as many requests as the call has reserved sequences are in the engine at once. The
    others follow as soon as earlier ones have succeeded.
    """

    def __init__(
        self, worker: Worker, model: str, requests: Sequence[Request], reservation: Reservation, deadline: float
    ) -> None:
        """Submit one or more requests; the deadline is on the clock `time.monotonic`."""
        self._worker = worker
        self._model = model
        self._reservation = reservation
        self._units = reservation.units / len(requests)  # work of a request
        self._num_requests = len(requests)
        self._waiting: Iterator[tuple[int, Request]] = enumerate(requests)
        self._futures: list[RequestFuture] = []
        self._arrived: list[Arrival] = []
        self._failure: Exception | None = None
        self._has_news = asyncio.Event()  # set when an event has arrived, or at a failure
        loop = asyncio.get_running_loop()
        seconds = deadline - time.monotonic() + DEADLINE_SLACK_S
        self._expiry = loop.call_later(seconds, self.fail, ApiError("deadline_exceeded"))
        self._submit(reservation.num_sequences)

    def close(self) -> None:
        """Cancel unfinished requests."""
        self._waiting = iter(())
        for future in self._futures:
            if not future.is_done:
                future.cancel()
        self._futures.clear()  # whose listeners hold this object
        self._failure = None  # its traceback holds this object
        self._expiry.cancel()

    async def gather(self, convert: Callable[[int, Any], T]) -> tuple[list[T], list[Timings]]:
        """Convert each result as soon as it arrives, while others still run, and close.

        `convert` makes an output of the index of a request and its result. Outputs and durations
        are in the order of the requests. The first failure is raised immediately.
        """
        outputs: dict[int, tuple[T, Timings]] = {}
        try:
            while len(outputs) < self._num_requests:
                # Results are not kept while others still run.
                outputs |= {
                    index: (convert(index, result), result.timings) for index, result, _ in await self.next_arrivals()
                }
        finally:
            self.close()
        ordered = [outputs[index] for index in range(self._num_requests)]
        return [output for output, _ in ordered], [times for _, times in ordered]

    async def next_arrivals(self) -> list[Arrival]:
        """Wait for events and return at least one, or raise the failure of the call."""
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            self._has_news.clear()
            await self._has_news.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    def fail(self, error: Exception) -> None:
        """End the wait for events with an error, unless there was one before."""
        self._failure = self._failure or error
        self._has_news.set()

    def _submit(self, count: int) -> None:
        for index, request in islice(self._waiting, count):
            self._futures.append(self._worker.submit(self._model, request, partial(self._listen, index)))

    def _listen(self, index: int, event: Event) -> None:
        is_last = not isinstance(event, TokenEvent)
        if is_last:
            self._reservation.units -= self._units
        if isinstance(event, Failed | Cancelled):
            self.fail(error_of(event))
            return
        self._arrived.append(Arrival(index, event, time.monotonic()))
        self._has_news.set()
        if is_last:
            self._submit(1)


def error_of(event: Failed | Cancelled) -> Exception:
    """Return the error of a call whose request failed or was cancelled."""
    if isinstance(event, Cancelled):
        return ClientGoneError()
    limit: Limit | None = "response_bytes" if event.code == "overloaded" else None
    return ApiError(event.code, MAP_ERRORS.get(event.code), limit=limit)
