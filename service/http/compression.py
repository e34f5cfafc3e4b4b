"""Compression of responses, for clients that accept gzip."""

import asyncio
import re
import zlib
from collections.abc import Mapping

MIN_BYTES = 1024  # a smaller body fits into one packet as it is
MAX_INLINE_BYTES = 8 * 1024  # a larger body takes long enough to be compressed in another thread
LEVEL = 1  # level 6 makes attention maps a tenth smaller and takes seven times as long
GZIP_FORMAT = 16 + zlib.MAX_WBITS
# In Accept-Encoding, with any weight but 0.
GZIP_ACCEPTED = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;\s*q=(?!0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)


def accepts_gzip(request_headers: Mapping[bytes, bytes]) -> bool:
    """Return True if the client accepts a response in gzip."""
    header = request_headers.get(b"accept-encoding")
    return header is not None and GZIP_ACCEPTED.search(header.decode("latin-1")) is not None


async def compress(body: bytes) -> bytes:
    """Compress a body with gzip."""
    if len(body) <= MAX_INLINE_BYTES:
        return zlib.compress(body, LEVEL, GZIP_FORMAT)
    return await asyncio.to_thread(zlib.compress, body, LEVEL, GZIP_FORMAT)
