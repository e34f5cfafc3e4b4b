"""Request bodies on their way in: those that are large or do not come at once are counted over all connections."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from service.errors import ApiError

EXCHANGE = "sightline.exchange"  # where the ASGI scope keeps a request's Exchange


class IncomingBodies:
    """Counts the bytes of all bodies that are arriving, or that wait for the response to an earlier request.

    Beyond the limit the body is refused of which nothing has arrived for longest. So clients that stall do not keep out
    those that send without pauses. A complete body is refused only while it waits for the response to an earlier
    request of its connection: otherwise its endpoint reads it at once.
    """

    def __init__(self, max_bytes: int, on_limit: Callable[[], None]) -> None:
        """`on_limit` is called for each body that is refused."""
        self._max_bytes = max_bytes
        self._on_limit = on_limit
        self._refusable: OrderedDict[Exchange, None] = OrderedDict()  # by their last bytes, the oldest first
        self.num_bytes = 0

    def count(self, exchange: "Exchange") -> None:
        """Count the bytes of a request's body that have come."""
        self.num_bytes += exchange.num_received - exchange.num_counted
        exchange.num_counted = exchange.num_received
        self._refusable[exchange] = None
        self._refusable.move_to_end(exchange)
        self._settle(exchange)
        while self.num_bytes > self._max_bytes and self._refusable:
            silent = next(iter(self._refusable))
            self._on_limit()
            message = (
                f"The request bodies that are arriving exceed {self._max_bytes} bytes in total, and this one has "
                "paused for longest. Send the request again, without pauses."
            )
            silent.refuse(ApiError("overloaded", message))

    def _settle(self, exchange: "Exchange") -> None:
        """Refuse a body no more that is complete and that its endpoint reads."""
        if exchange.is_complete and exchange.has_turn:
            self._refusable.pop(exchange, None)

    def start(self, exchange: "Exchange") -> None:
        """Note that the requests before this one are answered."""
        exchange.has_turn = True
        self._settle(exchange)

    def release(self, exchange: "Exchange") -> None:
        """Count a request's body no longer: admission controls it, or it is gone."""
        self._refusable.pop(exchange, None)
        self.num_bytes -= exchange.num_counted
        exchange.num_counted = 0


@dataclass(eq=False)
class Exchange:
    """One request, as far as its connection and the application share it; the ASGI scope holds it."""

    bodies: IncomingBodies
    cycle: Any  # uvicorn's
    break_off: Callable[[Any], None]  # closes the connection of a cycle after a response that cannot be ended
    has_turn: bool  # the requests before it on its connection are answered
    num_received: int = 0  # bytes of the body
    num_counted: int = 0  # bytes of the body that `bodies` counts
    is_complete: bool = False  # the whole body has arrived
    refusal: ApiError | None = None  # of the body; `HttpCall` raises it in the place of the rest
    lost_code: str | None = None  # why the connection was lost before the response was complete
    on_lost: Callable[[], None] | None = field(default=None, repr=False)  # called when that happens

    def refuse(self, error: ApiError) -> None:
        """Take no more of the body; the application gets the error instead."""
        self.refusal = error
        self.bodies.release(self)
        self.cycle.body = bytearray()
        self.cycle.message_event.set()

    def lose(self, code: str) -> None:
        """Note that the connection was lost before the response was complete, and why."""
        self.lost_code = code
        self.bodies.release(self)
        if self.on_lost is not None:
            self.on_lost()
