"""Limit on the bytes of arriving request bodies over all connections."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sightline.service.api_errors import ApiError

EXCHANGE = "sightline.exchange"  # key of a request's Exchange in the ASGI scope


class IncomingBodies:
    """Counts the bytes of bodies that arrive, or that wait for the response to an earlier request.

    If the limit is exceeded, the body that has paused for longest is rejected, so that stalled
    clients do not block others. A complete body is rejected only while it waits for the response to
    an earlier request of its connection; otherwise its endpoint reads it immediately.
    """

    def __init__(self, max_bytes: int, on_limit: Callable[[], None]) -> None:
        """`on_limit` is called for each rejected body."""
        self._max_bytes = max_bytes
        self._on_limit = on_limit
        # Sorted by the time of their last bytes, oldest first.
        self._rejectable: OrderedDict[Exchange, None] = OrderedDict()
        self.num_bytes = 0

    def count(self, exchange: "Exchange") -> None:
        """Count the received bytes of a request's body."""
        self.num_bytes += exchange.num_received - exchange.num_counted
        exchange.num_counted = exchange.num_received
        self._rejectable[exchange] = None
        self._rejectable.move_to_end(exchange)
        if exchange.is_complete and exchange.has_turn:  # its endpoint can read it
            del self._rejectable[exchange]
        while self.num_bytes > self._max_bytes and self._rejectable:
            silent = next(iter(self._rejectable))
            self._on_limit()
            message = (
                f"The request bodies that are arriving exceed {self._max_bytes} bytes in total, and this one has "
                "paused for longest. Send the request again, without pauses."
            )
            silent.reject(ApiError("overloaded", message))

    def release(self, exchange: "Exchange") -> None:
        """Stop counting a request's body: admission counts it from now on, or it is gone."""
        self._rejectable.pop(exchange, None)
        self.num_bytes -= exchange.num_counted
        exchange.num_counted = 0


@dataclass(eq=False)
class Exchange:
    """State of one request that its connection and the application share, in the ASGI scope."""

    bodies: IncomingBodies
    cycle: Any  # request cycle of uvicorn
    break_off: Callable[[Any], None]  # closes the connection after an incomplete response
    has_turn: bool  # all earlier requests of the connection have their responses
    num_received: int = 0  # bytes of the body
    num_counted: int = 0  # bytes of the body that `bodies` counts
    is_complete: bool = False  # the whole body has arrived
    rejection: ApiError | None = None  # error of the body, which `receive_body` raises
    lost_code: str | None = None  # reason if the connection was lost before the response was complete
    on_lost: Callable[[], None] | None = field(default=None, repr=False)  # called when that happens

    def reject(self, error: ApiError) -> None:
        """Discard the body; the application gets the error instead."""
        self.rejection = error
        self.bodies.release(self)
        self.cycle.body = bytearray()
        self.cycle.message_event.set()

    def lose(self, code: str) -> None:
        """Record that the connection was lost before the response was complete."""
        self.lost_code = code
        self.bodies.release(self)
        if self.on_lost is not None:
            self.on_lost()
