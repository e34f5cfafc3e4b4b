"""The port of the service: it hands each connection over to the worker with the fewest."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sightline.service.http.connections import network_of
from sightline.service.workers.handover import ended_connections, send_connection

BACKLOG = 2048
ACCEPTED_AT_ONCE = 32  # connections, before other work of the supervisor has its turn
RETRY_S = 0.01  # pause while no worker can take a connection
NO_DESCRIPTOR_S = 0.5  # pause if the process has no descriptor left
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerConnections:
    """The connections that a worker has, and the socket over which it gets them."""

    handover: socket.socket
    networks: dict[int, str] = field(default_factory=dict)  # client's network by number of the connection
    num_of_network: Counter[str] = field(default_factory=Counter)


class Listener:
    """Accepts connections while there is a worker for them."""

    def __init__(
        self, listeners: Sequence[socket.socket], candidates: Callable[[], Sequence[WorkerConnections]]
    ) -> None:
        """`candidates` returns the workers that can take a connection, the preferred one first."""
        self._listeners, self._candidates = listeners, candidates
        self._is_listening = False
        self._waiting: list[socket.socket] = []  # an accepted connection that no worker has taken yet
        self._next_connection = 0
        self._networks: Counter[str] = Counter()  # connections of all workers, by the client's network
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def add(self, worker: WorkerConnections) -> None:
        """Count the connections of a worker until it is removed."""
        asyncio.get_running_loop().add_reader(worker.handover.fileno(), self._forget_ended, worker)
        self.update()

    def remove(self, worker: WorkerConnections) -> None:
        """Forget a worker that has ended."""
        asyncio.get_running_loop().remove_reader(worker.handover.fileno())
        worker.handover.close()
        self._networks -= worker.num_of_network
        self.update()

    def update(self, *, is_possible: bool = True) -> None:
        """Accept connections from now on if there is a worker for them."""
        should_listen = is_possible and not self._waiting and bool(self._candidates())
        if should_listen == self._is_listening:
            return
        self._is_listening = should_listen
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            if listener.fileno() == -1:  # closed at the end of the drain window
                continue
            if should_listen:
                loop.add_reader(listener.fileno(), self._accept, listener)
            else:
                loop.remove_reader(listener.fileno())

    def close(self) -> None:
        self.update(is_possible=False)
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("connections cannot be accepted: %s", error.strerror)
                self._pause(NO_DESCRIPTOR_S)
                return
            if not self._hand_over(connection):
                self._waiting.append(connection)
                self._pause(RETRY_S)
                return

    def _pause(self, seconds: float) -> None:
        self.update(is_possible=False)
        asyncio.get_running_loop().call_later(seconds, self._continue)

    def _continue(self) -> None:
        while self._waiting and self._hand_over(self._waiting[0]):
            del self._waiting[0]
        if self._waiting:
            self._pause(RETRY_S)
        else:
            self.update()

    def _hand_over(self, connection: socket.socket) -> bool:
        """Send a connection to the first worker that takes it; return False if there is none."""
        try:
            peer = connection.getpeername()
        except OSError:  # the client has gone
            connection.close()
            return True
        network = network_of(peer[0])
        for worker in self._candidates():
            elsewhere = (
                self._networks.total() - len(worker.networks),
                self._networks[network] - worker.num_of_network[network],
            )
            with contextlib.suppress(OSError):  # it has just ended
                if send_connection(worker.handover, connection, self._next_connection, elsewhere):
                    worker.networks[self._next_connection] = network
                    worker.num_of_network[network] += 1
                    self._networks[network] += 1
                    self._next_connection += 1
                    connection.close()
                    return True
        return False

    def _forget_ended(self, worker: WorkerConnections) -> None:
        for number in ended_connections(worker.handover):
            network = worker.networks.pop(number)
            for counter in (worker.num_of_network, self._networks):
                counter[network] -= 1
                if not counter[network]:
                    del counter[network]
