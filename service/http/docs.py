"""GET /openapi.json, and /docs: the same as one plain page that needs no script and no internet."""

import asyncio
import gzip
import hashlib
import html
import json
from collections.abc import Callable, Mapping
from typing import Any

from service.api.endpoint import Endpoint, Raw, to_json
from service.http.compression import accepts_gzip
from service.inference.call import Call

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font:600 1.1rem ui-monospace,monospace;margin-top:2rem}pre{background:#8882;padding:1rem;overflow:auto}"
    ":root{color-scheme:light dark}"
)


class Page:
    """One document that does not change while the process runs, as the bytes that are sent."""

    def __init__(self, body: bytes, media_type: str) -> None:
        tag = hashlib.sha256(body).hexdigest()[:32]
        self._media_type = media_type
        # By content coding; other bytes need another tag.
        self._variants = {None: (body, f'"{tag}"'), "gzip": (gzip.compress(body, mtime=0), f'"{tag}-gzip"')}

    def response(self, request_headers: Mapping[bytes, bytes]) -> Raw:
        """Return the page in the best coding that the client accepts; 304 if the client has it already."""

        def header(name: bytes) -> str:
            return request_headers.get(name, b"").decode("latin-1")

        coding = "gzip" if accepts_gzip(request_headers) else None
        body, tag = self._variants[coding]
        headers = {"etag": tag, "vary": "Accept-Encoding", "cache-control": "no-cache"}
        known = {one.strip().removeprefix("W/") for one in header(b"if-none-match").split(",")}
        if known & {tag, "*"}:
            return Raw(b"", None, 304, headers)
        if coding is not None:
            headers["content-encoding"] = coding
        return Raw(body, self._media_type, 200, headers)


class Pages:
    """Both pages of one app. They are made at the first call, since they take a third of a second."""

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        """`describe` returns the OpenAPI document."""
        self._describe = describe
        self._made: asyncio.Future[tuple[Page, Page]] | None = None

    async def openapi(self, call: Call, headers: Mapping[bytes, bytes]) -> Raw:
        """Describe this API for machines."""
        page, _ = await self._pages()
        return page.response(headers)

    async def docs(self, call: Call, headers: Mapping[bytes, bytes]) -> Raw:
        """Show this API as a page."""
        _, page = await self._pages()
        return page.response(headers)

    async def _pages(self) -> tuple[Page, Page]:
        if self._made is None:  # in a thread, so that other calls go on
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)  # a caller that is cancelled must not cancel it for the others

    def _make(self) -> tuple[Page, Page]:
        described = self._describe()
        return Page(to_json(described), "application/json"), Page(
            render(described).encode(), "text/html; charset=utf-8"
        )


def render(openapi: dict[str, Any]) -> str:
    """The page."""
    schemas = openapi["components"]["schemas"]
    routes = [
        _route(method, path, operation, schemas)
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]
    title = html.escape(openapi["info"]["title"])
    about = html.escape(openapi["info"]["description"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title} {html.escape(openapi['info']['version'])}</h1><p>{about} For machines: "
        f'<a href="openapi.json">openapi.json</a>.</p>{"".join(routes)}{_details("Schemas", _json(schemas))}</html>'
    )


def _route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    about = html.escape(operation.get("description", ""))
    answers = "".join(_answer(*answer) for answer in operation["responses"].items())
    body = _body(operation["requestBody"], schemas) if "requestBody" in operation else ""
    return f"<h2>{method.upper()} {html.escape(path)}</h2><p>{about}</p>{body}{answers}"


def _body(body: dict[str, Any], schemas: dict[str, Any]) -> str:
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    examples = "".join(_json(example) for example in schemas[name]["examples"])
    return _details(f"Body: {name}, for example", examples)


def _answer(status: str, answer: dict[str, Any]) -> str:
    examples = {
        code: example for content in answer["content"].values() for code, example in content.get("examples", {}).items()
    }
    if not examples:
        return f"<p>{status}: {html.escape(answer['description'])}</p>"
    shown = "".join(f"<p>{html.escape(one['summary'])}</p>{_json(one['value'])}" for one in examples.values())
    return _details(f"{status}: {html.escape(answer['description'])}", shown)


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _json(content: Any) -> str:
    return f"<pre>{html.escape(json.dumps(content, indent=2, ensure_ascii=False))}</pre>"


def endpoints(describe: Callable[[], dict[str, Any]]) -> list[Endpoint]:
    """Return the endpoints of both pages; `describe` returns the OpenAPI document."""
    pages = Pages(describe)
    return [
        Endpoint("GET", "/openapi.json", pages.openapi),
        Endpoint("GET", "/docs", pages.docs, media_types=("text/html",)),
    ]
