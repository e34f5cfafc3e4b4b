"""Server-sent events of a generation: one a token, one at the end of each input, then what the door ends with."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.calls import DEADLINE_SLACK_S, Call, success, timings_of, to_json
from service.engine.request import (
    Cancelled,
    Event,
    Failed,
    FinishReason,
    Generated,
    GenerateRequest,
    Token,
    TokenEvent,
)
from service.engine.worker import Ticket
from service.errors import CLIENT_GONE, ApiError, ClientGoneError
from service.maps import MapWriter
from service.outputs import generated_tokens, seed_of, token_of
from service.serving import ServedModel
from service.tokenizer import TextStream

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep the events back
]


class Arrival(NamedTuple):
    """What came, for the input at which place, and when: a reader may take long until it is sent."""

    place: int
    event: Event
    time: float  # on time.monotonic


Arrivals = asyncio.Queue[Arrival]


async def answer_stream(
    call: Call,
    model: ServedModel,
    requests: Sequence[GenerateRequest],
    tickets: Sequence[Ticket],
    stop: Sequence[str],
    maps: MapWriter | None,
    frames: "Frames",
) -> Response:
    """Wait for the first event, so that a failure before any token still has its own status; then stream.

    Raises:
        ApiError: the first event is a failure.
        ClientGoneError: the client left before it.
    """
    arrivals = _merge(call, tickets)
    first = await arrivals.get()
    if not isinstance(first.event, TokenEvent):
        success(first.event, Generated)
    outputs = [
        StreamedOutput(
            call, model, index, request, TextStream(model.target_tokenizer, stop, request.target_prefix), maps
        )
        for index, request in enumerate(requests)
    ]
    return StreamAnswer(call, arrivals, [first], outputs, frames)


def _merge(call: Call, tickets: Sequence[Ticket]) -> Arrivals:
    """The events of all tickets in one queue, and with them the end of the call's time and the client's leaving."""
    arrivals: Arrivals = asyncio.Queue()

    def arrive(place: int, event: Event) -> None:
        arrivals.put_nowait(Arrival(place, event, time.monotonic()))

    async def follow(index: int, ticket: Ticket) -> None:
        async for event in ticket:
            arrive(index, event)

    async def watch() -> None:
        await call.until_gone()
        arrive(-1, Cancelled())

    for task in (*(follow(index, ticket) for index, ticket in enumerate(tickets)), watch()):
        call.resources.callback(asyncio.ensure_future(task).cancel)
    late = asyncio.get_running_loop().call_later(
        call.seconds_left + DEADLINE_SLACK_S, arrive, -1, Failed("deadline_exceeded")
    )
    call.resources.callback(late.cancel)
    return arrivals


class StreamedOutput:
    """One input's part of a stream: its text so far."""

    def __init__(
        self,
        call: Call,
        model: ServedModel,
        index: int,
        request: GenerateRequest,
        text: TextStream,
        maps: MapWriter | None,
    ) -> None:
        self._call = call
        self._model = model
        self._metrics = call.service.metrics_of(model)
        self._index = index
        self._request = request
        self._text = text
        self._maps = maps
        self._pieces: list[str] = []
        self._last_arrival = 0.0
        self.num_tokens = 0
        self.has_last_token = False  # and is about to end
        self.finish_reason: FinishReason | None = None
        self.timings_ms: dict[str, float] = {}

    @property
    def num_input_tokens(self) -> int:
        return len(self._request.source_ids)

    def take(self, event: TokenEvent | Generated, arrived: float) -> dict[str, Any]:
        """What is sent for an event that arrived then."""
        return self._token(event.token, arrived) if isinstance(event, TokenEvent) else self._end(event)

    def _token(self, token: Token, arrived: float) -> dict[str, Any]:
        self._observe_arrival(arrived)
        self.num_tokens += 1
        piece = self._text.push(token.id)
        self.has_last_token = (
            token.id == self._model.manifest.tokens.end_id
            or self._text.has_stopped
            or self.num_tokens == self._request.parameters.max_new_tokens
        )
        if self.has_last_token:  # no other token will bring what is still held back
            piece += self._text.finish()
        self._pieces.append(piece)
        return {"index": self._index, "token": token_of(self._model.target_tokenizer, token), "text": piece}

    def _end(self, result: Generated) -> dict[str, Any]:
        (target,) = result.targets
        maps = {"attention": self._maps.write(self._request, target)} if self._maps else {}
        self.finish_reason = target.finish_reason
        self.timings_ms = timings_of(self._call, [result.timings])
        output_tokens = len(generated_tokens(self._request, target))
        return {
            "index": self._index,
            "finish_reason": target.finish_reason,
            "score": target.score,
            "text": "".join(self._pieces),
            "usage": {"input_tokens": self.num_input_tokens, "output_tokens": output_tokens},
            "timings_ms": self.timings_ms,
            **seed_of(self._request),
            **maps,
        }

    def observe_call(self, total_ms: float) -> None:
        self._metrics.call_seconds.observe(total_ms / 1000)

    def _observe_arrival(self, arrived: float) -> None:
        if self.num_tokens:
            self._metrics.between_tokens.observe(arrived - self._last_arrival)
        else:
            record = self._call.record
            self._metrics.first_token.observe(arrived - record.started)
            record.details.setdefault("ttft_ms", round(1000 * (arrived - record.started), 3))
        self._last_arrival = arrived


class Frames(Protocol):
    """How a door writes the events of a stream."""

    def event(self, output: StreamedOutput, event: dict[str, Any]) -> bytes:
        """Write what `StreamedOutput.take` gave."""
        ...

    def end(self, outputs: Sequence[StreamedOutput]) -> bytes:
        """Write what comes after the last event."""
        ...

    def error(self, body: bytes) -> bytes:
        """Write an error, with which the stream ends."""
        ...


class OwnFrames:
    """The events as they are, then `[DONE]`."""

    def event(self, output: StreamedOutput, event: dict[str, Any]) -> bytes:
        return frame(event)

    def end(self, outputs: Sequence[StreamedOutput]) -> bytes:
        return DONE

    def error(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"


def frame(content: Any) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


class StreamAnswer(Response):
    """Sends the events as they come; many that come at once are sent at once."""

    def __init__(
        self,
        call: Call,
        arrivals: Arrivals,
        arrived: list[Arrival],
        outputs: Sequence[StreamedOutput],
        frames: Frames,
    ) -> None:
        """`arrived` are the events that were taken from the queue already."""
        self._call = call
        self._arrivals = arrivals
        self._arrived = arrived
        self._outputs = outputs
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        record = self._call.record
        chunk = b""
        try:
            while self._arrived:
                for arrival in self._arrived:
                    chunk += self._frame(arrival)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = b""
                self._arrived = [] if self._is_whole else await self._next_arrivals()
            last = self._frames.end(self._outputs)
        except ApiError as error:
            last = chunk + self._error_frame(error)
        except ClientGoneError:
            record.code = CLIENT_GONE
            return
        except Exception:
            logger.exception("a stream failed", extra={"fields": {"request_id": record.request_id}})
            last = chunk + self._error_frame(ApiError("internal"))
        finally:
            self._tell()
        await send({"type": "http.response.body", "body": last})

    @property
    def _is_whole(self) -> bool:
        return all(output.finish_reason for output in self._outputs)

    async def _next_arrivals(self) -> list[Arrival]:
        """At least one, and what else is there."""
        arrived = [await self._arrivals.get()]
        while not self._arrivals.empty():
            arrived.append(self._arrivals.get_nowait())
        return arrived

    def _frame(self, arrival: Arrival) -> bytes:
        event = arrival.event
        if not isinstance(event, TokenEvent):
            event = success(event, Generated)
        output = self._outputs[arrival.place]
        return self._frames.event(output, output.take(event, arrival.time))

    def _error_frame(self, error: ApiError) -> bytes:
        record = self._call.record
        record.code = error.code
        return self._frames.error(record.error_body(error))

    def _tell(self) -> None:
        outputs = self._outputs
        ended = [output for output in outputs if output.finish_reason]
        timings_ms = {
            name: max(output.timings_ms[name] for output in ended) for name in (ended[0].timings_ms if ended else ())
        }
        self._call.tell_result(
            sum(output.num_input_tokens for output in outputs),
            sum(output.num_tokens for output in outputs),
            timings_ms,
            *(output.finish_reason for output in outputs if output.finish_reason),
        )
        if len(ended) == len(outputs):
            outputs[0].observe_call(timings_ms["total"])
