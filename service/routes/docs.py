"""GET /openapi.json, and /docs: the same as one plain page that needs no script and no internet."""

import html
import json
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from service.calls import Call, json_answer
from service.routing import add_route

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font:600 1.1rem ui-monospace,monospace;margin-top:2rem}pre{background:#8882;padding:1rem;overflow:auto}"
    ":root{color-scheme:light dark}"
)


async def openapi(call: Call) -> Response:
    """Describe this API for machines."""
    return json_answer(call.app.openapi())


async def docs(call: Call) -> Response:
    """Show this API as a page."""
    return HTMLResponse(render(call.app.openapi()))


def render(openapi: dict[str, Any]) -> str:
    """The page."""
    routes = [
        _route(method, path, operation)
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]
    title = html.escape(openapi["info"]["title"])
    about = html.escape(openapi["info"]["description"])
    schemas = _details("Schemas", openapi["components"]["schemas"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title} {html.escape(openapi['info']['version'])}</h1><p>{about} For machines: "
        f'<a href="openapi.json">openapi.json</a>.</p>{"".join(routes)}{schemas}</html>'
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    answers = "".join(
        f"<li>{status}: {html.escape(answer['description'])}</li>" for status, answer in operation["responses"].items()
    )
    body = operation.get("requestBody")
    return (
        f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation.get('description', ''))}</p>"
        f"{_details('Body', body) if body else ''}<ul>{answers}</ul>"
    )


def _details(title: str, content: Any) -> str:
    text = html.escape(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>"


def add_routes(app: FastAPI) -> None:
    add_route(app, "GET", "/openapi.json", openapi)
    add_route(app, "GET", "/docs", docs, response_class=HTMLResponse)
