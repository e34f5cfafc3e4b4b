"""Limits on open connections: in total, per client address, and by the file descriptors."""

import ipaddress
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sightline.service.api_errors import ApiError, Limit

# Without free file descriptors, the event loop resets new connections silently. The kernel assigns
# the lowest free number, so a high number means that few are left. This many are kept for
# rejections and files.
DESCRIPTOR_RESERVE = 32
MAX_LINGERING = 256
IPV6_PREFIX = 64  # bits of an IPv6 address that count as one client
LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ConnectionLimits:
    """Counts the open connections of the process, in total and per client address."""

    max_total: int
    max_per_address: int
    on_limit: Callable[[Limit], None]  # takes the limit of each rejected connection
    num_open: int = 0
    num_lingering: int = 0  # rejected connections whose clients have not read the response yet
    _last_log: dict[Limit, float] = field(default_factory=dict)
    _num_unlogged: Counter[Limit] = field(default_factory=Counter)
    _of_network: Counter[str] = field(default_factory=Counter)

    def admit(self, address: str, descriptor: int, elsewhere: tuple[int, int] = (0, 0)) -> None:
        """Count a connection until `release`, unless it is rejected with `overloaded`.

        `elsewhere` counts those of other processes of the service: of all clients, and of this one.
        """
        num_elsewhere, num_of_address_elsewhere = elsewhere
        if self.num_open + num_elsewhere >= self.max_total:
            raise self._error(
                "connections",
                f"The service has {self.max_total} open connections, which is the limit (SIGHTLINE_MAX_CONNECTIONS).",
            )
        network = network_of(address)
        if self._of_network[network] + num_of_address_elsewhere >= self.max_per_address:
            message = (
                f"{'This address' if network == address else f'The network {network}'} has "
                f"{self.max_per_address} open connections, which is the limit "
                "(half of SIGHTLINE_MAX_CONNECTIONS). Reuse them."
            )
            raise self._error("connections_per_address", message)
        if descriptors_after(descriptor) < DESCRIPTOR_RESERVE:
            raise self._error("descriptors", "The service has no file descriptor left for another connection.")
        self.num_open += 1
        self._of_network[network] += 1

    def release(self, address: str) -> None:
        """Stop counting a connection."""
        self.num_open -= 1
        network = network_of(address)
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]

    def may_linger(self, descriptor: int) -> bool:
        """Return True if a rejected connection may wait until its client has read the response."""
        return self.num_lingering < MAX_LINGERING and descriptors_after(descriptor) >= DESCRIPTOR_RESERVE // 2

    def _error(self, limit: Limit, message: str) -> ApiError:
        self.on_limit(limit)
        self._num_unlogged[limit] += 1
        now = time.monotonic()
        if now - self._last_log.get(limit, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._last_log[limit] = now
            fields = {"limit": limit, "rejected": self._num_unlogged.pop(limit), "open": self.num_open}
            logger.warning("connections are rejected", extra={"fields": fields})
        return ApiError("overloaded", f"{message} Retry later.")


def network_of(address: str) -> str:
    """Return the part of a client's address that counts as one client.

    An IPv6 client usually has a whole network of 2**64 addresses, so its first 64 bits count. Other
    addresses count as they are.
    """
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), IPV6_PREFIX), strict=False))


def descriptors_after(descriptor: int) -> float:
    """Return the number of descriptors above this one that the process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit - 1 - descriptor
