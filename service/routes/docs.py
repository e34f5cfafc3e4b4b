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


def add_routes(app: FastAPI) -> None:
    add_route(app, "GET", "/openapi.json", openapi)
    add_route(app, "GET", "/docs", docs, response_class=HTMLResponse)
