"""Request bodies on their way in: their bytes are counted over all connections until a route has read them."""

from collections import OrderedDict
from collections.abc import Callable

from service.errors import ApiError

EXCHANGE = "sightline.exchange"  # where the ASGI scope keeps a request's Exchange


class IncomingBodies:
    """Counts the bytes of all bodies that have come in and that no admission controller counts yet.

    Beyond the limit the body is refused of which nothing has arrived for longest. So clients that stall do not keep out
    those that send without pauses. A complete body is refused only while it waits for the response to an earlier
    request of its connection: otherwise its route reads it at once.
    """

    def __init__(self, max_bytes: int, on_limit: Callable[[], None]) -> None:
        """`on_limit` is called for each body that is refused."""
        self._max_bytes = max_bytes
        self._on_limit = on_limit
        self._refusable: OrderedDict[Exchange, None] = OrderedDict()  # by their last bytes, the oldest first
        self.num_bytes = 0

    def add(self, exchange: "Exchange", num_bytes: int) -> None:
        """Count bytes of a request's body that have arrived."""
        exchange.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._refusable[exchange] = None
        self._refusable.move_to_end(exchange)
        while self.num_bytes > self._max_bytes and self._refusable:
            silent = next(iter(self._refusable))
            self._on_limit()
            message = (
                f"The request bodies that are arriving exceed {self._max_bytes} bytes in total, and this one has "
                "paused for longest. Send the request again, without pauses."
            )
            silent.refuse(ApiError("overloaded", message))

    def settle(self, exchange: "Exchange") -> None:
        """Note that a body is complete and that its route reads it."""
        self._refusable.pop(exchange, None)

    def release(self, exchange: "Exchange") -> None:
        """Count a request's body no longer."""
        self.settle(exchange)
        self.num_bytes -= exchange.num_bytes
        exchange.num_bytes = 0


class Exchange:
    """One request, as far as its connection and the application share it; the ASGI scope holds it."""

    def __init__(self, bodies: IncomingBodies, on_refusal: Callable[[], None]) -> None:
        """`on_refusal` drops the body and wakes the route, whose next `receive` raises the refusal."""
        self._bodies = bodies
        self._on_refusal = on_refusal
        self.num_bytes = 0  # of the body, that `bodies` counts
        self.is_complete = False  # whether the whole body has arrived
        self.has_turn = False  # whether the requests before it on its connection are answered
        self.refusal: ApiError | None = None  # of the body
        self.lost_code: str | None = None  # why the connection was lost before the response was complete

    def add_bytes(self, num_bytes: int) -> None:
        self._bodies.add(self, num_bytes)

    def complete(self) -> None:
        """Note that the whole body has arrived."""
        self.is_complete = True
        self._settle()

    def take_turn(self) -> None:
        """Note that the requests before this one are answered."""
        self.has_turn = True
        self._settle()

    def _settle(self) -> None:
        if self.is_complete and self.has_turn:
            self._bodies.settle(self)

    def refuse(self, error: ApiError) -> None:
        """Take no more of the body; the route is given the error instead."""
        self.refusal = error
        self.release()
        self._on_refusal()

    def release(self) -> None:
        """Count the body no longer: an admission controller does, or nobody holds it any more."""
        self._bodies.release(self)
