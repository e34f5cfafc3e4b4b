"""Content that does not change while the process runs, with entity tags and compression."""

import gzip
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable

from sightline.service.api.endpoint import HTML, SVG, Raw
from sightline.service.http.compression import accepts_gzip

MEDIA_TYPES = {"css": "text/css", "html": HTML, "js": "text/javascript", "svg": SVG}
# Of pages: they run only their own scripts and load nothing from other hosts.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors "
)


class StaticContent:
    """A document or file as the bytes to send."""

    def __init__(self, body: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Compress the content. `headers` are sent with each response."""
        tag = hashlib.sha256(body).hexdigest()[:32]
        self._media_type = media_type
        self._headers = {"vary": "Accept-Encoding", "cache-control": "no-cache", **(headers or {})}
        # By content coding; each coding needs its own tag.
        self._variants = {None: (body, f'"{tag}"'), "gzip": (gzip.compress(body, mtime=0), f'"{tag}-gzip"')}

    def response(self, request_headers: Mapping[bytes, bytes]) -> Raw:
        """Return the content, compressed if the client accepts it, or 304 if the client has it."""
        coding = "gzip" if accepts_gzip(request_headers) else None
        body, tag = self._variants[coding]
        headers = self._headers | {"etag": tag}
        known = request_headers.get(b"if-none-match", b"").decode("latin-1").split(",")
        if {tag, "*"} & {entity_tag.strip().removeprefix("W/") for entity_tag in known}:
            return Raw(b"", None, 304, headers)
        if coding is not None:
            headers["content-encoding"] = coding
        return Raw(body, self._media_type, 200, headers)


def read_files(
    files: Iterable[Traversable], frame_ancestors: Sequence[str], vary: str = "Accept-Encoding"
) -> dict[str, StaticContent]:
    """Return the files of a page by name; those of other types than `MEDIA_TYPES` are left out.

    `frame_ancestors` are the origins of pages that may show this page in a frame.
    """
    headers = {
        "content-security-policy": POLICY + (" ".join(frame_ancestors) or "'none'"),
        "referrer-policy": "no-referrer",
        "vary": vary,
    }
    return {
        file.name: StaticContent(file.read_bytes(), f"{MEDIA_TYPES[suffix]}; charset=utf-8", headers)
        for file in files
        if (suffix := file.name.rpartition(".")[2]) in MEDIA_TYPES
    }
