"""Hand-over of accepted connections from the supervisor to a worker.

Each message over the pair of sockets is one record. The supervisor sends a connection: its number
and counts of the connections elsewhere, with its descriptor. The worker sends the number back when
the connection has ended.
"""

import asyncio
import functools
import socket
import struct
from collections.abc import Callable, Iterator

_CONNECTION = struct.Struct("!QII")
_ENDED = struct.Struct("!Q")
RETRY_S = 0.01  # time after which a record is sent again that found the buffer full

# Takes a connection, a function that reports its end, and the numbers of connections of the
# other workers: of all clients, and of the same client.
Accept = Callable[[socket.socket, Callable[[], None], tuple[int, int]], None]


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the boundaries of records."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setblocking(False)
    return pair


def send_connection(sock: socket.socket, connection: socket.socket, number: int, elsewhere: tuple[int, int]) -> bool:
    """Send a connection to a worker; return False if the worker has not read the last ones.

    Raises `OSError` if the worker has ended.
    """
    try:
        socket.send_fds(sock, [_CONNECTION.pack(number, *elsewhere)], [connection.fileno()])
    except BlockingIOError:
        return False
    return True


def ended_connections(sock: socket.socket) -> Iterator[int]:
    """Yield the numbers of connections that a worker reports as ended."""
    while True:
        try:
            record = sock.recv(_ENDED.size)
        except OSError:  # nothing more for now, or the worker has ended
            return
        if not record:
            return
        yield _ENDED.unpack(record)[0]


class Handover:
    """The worker's side."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self, accept: Accept) -> None:
        """Call `accept` with each connection, from now on, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._receive_all, accept)

    def stop_receiving(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock.fileno())

    def _receive_all(self, accept: Accept) -> None:
        while True:
            try:
                record, descriptors, _, _ = socket.recv_fds(self._sock, _CONNECTION.size, 1)
            except OSError:
                return
            if not record:  # the supervisor has ended
                self.stop_receiving()
                return
            number, *elsewhere = _CONNECTION.unpack(record)
            if not descriptors:  # this process has no descriptor left
                self._send_end(number)
                continue
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            accept(connection, functools.partial(self._send_end, number), (elsewhere[0], elsewhere[1]))

    def _send_end(self, number: int) -> None:
        try:
            self._sock.send(_ENDED.pack(number))
        except BlockingIOError:
            asyncio.get_running_loop().call_later(RETRY_S, self._send_end, number)
        except OSError:  # the supervisor has ended
            return
