"""The hosts for which the service answers.

A web page can let a name of its own point to 127.0.0.1, and then send requests to a service there
(DNS rebinding). The header Host of these requests has the page's name.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from sightline.service.settings import is_loopback

PORT = re.compile(r":\d*$")
MAX_KNOWN = 1000  # headers that are remembered


class AllowedHosts:
    """The names in the header Host that the service accepts."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take the names in lower case, without ports.

        `*.example.org` stands for all names that end so, and `*` for any.
        """
        self._any = "*" in names
        self._names = frozenset(names)
        self._ends = tuple(name[1:] for name in names if name.startswith("*."))
        self.allow = lru_cache(MAX_KNOWN)(self._allow)

    def _allow(self, header: bytes | None) -> bool:
        """Return True if the header has an allowed name or a loopback address, or is absent.

        No web page has a loopback address as its own name, and HTTP/1.0 needs no header.
        """
        if self._any or header is None:
            return True
        name = PORT.sub("", header.decode("latin-1").lower()).removesuffix(".")
        return name in self._names or name.endswith(self._ends) or is_loopback(name.strip("[]"))
