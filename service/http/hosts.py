"""The hosts for which the service answers.

A web page can let a name of its own point to 127.0.0.1, and then send requests to a service there
(DNS rebinding). The header Host of these requests has the page's name.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from sightline.service.settings import is_loopback

PORT = re.compile(r":\d*$")
MAX_KNOWN = 1000  # headers that are remembered


def host_check(names: Sequence[str]) -> Callable[[bytes | None], bool]:
    """Return a function that tells for a header Host if the service answers.

    It takes the names in lower case, without ports. `*.example.org` stands for all names that end
    so, and `*` for any.
    """
    ends = tuple(name[1:] for name in names if name.startswith("*."))

    @lru_cache(MAX_KNOWN)
    def allows(header: bytes | None) -> bool:
        """Return True if the header has an allowed name or a loopback address, or is absent.

        No web page has a loopback address as its own name, and HTTP/1.0 needs no header.
        """
        if "*" in names or header is None:
            return True
        name = PORT.sub("", header.decode("latin-1").lower()).removesuffix(".")
        return name in names or name.endswith(ends) or is_loopback(name.strip("[]"))

    return allows
