"""GET /openapi.json and GET /docs: the API as JSON, and as a page of tables, examples and forms."""

import asyncio
import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from sightline.service.api.endpoint import JSON, Call, Endpoint, Headers, Raw, to_json
from sightline.service.http.http_call import HttpCall
from sightline.service.http.static import StaticContent

MAX_DEPTH = 3  # of nested fields in a table
EXAMPLE_TEXTS = {
    "model": "multi30k-en-de",
    "id": "multi30k-en-de",
    "text": "Ein Hund rennt.",
    "source": "en",
    "target": "de",
    "object": "list",
}
EXAMPLE_INTEGERS = {"index": 0, "rank": 0, "created": 1_764_000_000}


class Pages:
    """Both pages of an app, rendered at the first call, because that takes about half a second."""

    def __init__(self, describe: Callable[[], dict[str, Any]], frame_ancestors: Sequence[str] = ()) -> None:
        """Take a function that returns the OpenAPI document, and origins that may frame a page."""
        self._describe = describe
        self._frame_ancestors = " ".join(frame_ancestors) or "'none'"
        self._made: asyncio.Future[tuple[StaticContent, StaticContent]] | None = None

    async def made(self) -> tuple[StaticContent, StaticContent]:
        """Return the OpenAPI document and the page."""
        if self._made is None:  # in a thread, so that other calls continue
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)  # a caller that is cancelled must not cancel it for the others

    def _make(self) -> tuple[StaticContent, StaticContent]:
        described = self._describe()
        page = render(described)
        policy = (
            f"default-src 'none'; script-src {_hash_of('script', page)}; style-src {_hash_of('style', page)}; "
            f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {self._frame_ancestors}"
        )
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
        return StaticContent(to_json(described), "application/json"), StaticContent(
            page.encode(), "text/html; charset=utf-8", headers
        )


def _hash_of(tag: str, page: str) -> str:
    """Return the source of a content security policy for the only inline element with a tag."""
    content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def openapi(call: Call, headers: Headers) -> Raw:
    """Describe this API for machines."""
    document, _ = await _pages_of(call).made()
    return document.response(headers)


async def docs(call: Call, headers: Headers) -> Raw:
    """Show this API as a page."""
    _, page = await _pages_of(call).made()
    return page.response(headers)


def _pages_of(call: Call) -> Pages:
    assert isinstance(call, HttpCall)
    pages: Pages = call.scope["app"].state.pages
    return pages


def render(document: dict[str, Any]) -> str:
    """Return the page as HTML. It loads nothing from other hosts; its script sends the forms."""
    components = document["components"]
    operations = [
        (method, path, operation)
        for path, by_method in document["paths"].items()
        for method, operation in by_method.items()
    ]
    contents = "".join(
        f'<li><a href="#{_anchor(method, path)}">{_title(method, path)}</a> {html.escape(operation["summary"])}</li>'
        for method, path, operation in operations
    )
    routes = "".join(_route(method, path, operation, components) for method, path, operation in operations)
    style, script = ((files("sightline.service.http") / name).read_text("utf-8") for name in ("docs.css", "docs.js"))
    title, about = html.escape(document["info"]["title"]), html.escape(document["info"]["description"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style>'
        f"<h1>{title} {html.escape(document['info']['version'])}</h1><p>{about} The same reference for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p><nav><h2>Contents</h2><ul>{contents}</ul></nav>'
        f"{routes}<script>{script}</script></html>"
    )


def _anchor(method: str, path: str) -> str:
    return html.escape(f"{method}{path.replace('{', '').replace('}', '').replace('/', '-')}")


def _title(method: str, path: str) -> str:
    return f"{method.upper()} {html.escape(path)}"


def _route(method: str, path: str, operation: dict[str, Any], components: dict[str, Any]) -> str:
    schemas = components["schemas"]
    content = operation.get("requestBody", {}).get("content", {}).get(JSON)
    body = content["schema"] if content else None
    parts = [
        f'<section><h2 id="{_anchor(method, path)}">{_title(method, path)}</h2>',
        "".join(f"<p>{_prose(text)}</p>" for text in operation["description"].split("\n\n")),
        _table("Parameters", [(param["name"], *_parameter_cells(param)) for param in operation["parameters"]]),
    ]
    examples = _resolve(body, schemas).get("examples", []) if body else []
    if body:
        parts.append(_table("Request", _rows(body, schemas)))
        parts.append(_details("Request examples", "".join(map(_json, examples))))
    success = operation["responses"].get("200", {}).get("content", {})
    for media_type, described in success.items():
        schema = described.get("schema")
        if media_type == JSON and schema:
            rows = [(name, kind.removesuffix(", required"), *others) for name, kind, *others in _rows(schema, schemas)]
            parts.append(_table("Response", rows))
            parts.append(_details("Response example", _json(example_of(schema, schemas))))
        elif media_type != JSON:
            parts.append(f"<p>The response can be <code>{html.escape(media_type)}</code>.</p>")
    errors = "".join(
        _error(status, _resolve(response, components["responses"]))
        for status, response in operation["responses"].items()
        if status != "200"
    )
    parts += [_details("Errors", errors), _form(method, path, operation["parameters"], examples), "</section>"]
    return "".join(parts)


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a schema or a response, or the shared one that it refers to."""
    return schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def _parameter_cells(parameter: dict[str, Any]) -> tuple[str, str, str]:
    required = ", required" if parameter.get("required") else ""
    return f"{type_of(parameter['schema'])}, {parameter['in']}{required}", "", parameter["description"]


def _rows(schema: dict[str, Any], schemas: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield the path, type, default and description of each field of a schema and of its objects.

    Alternatives of an object can repeat a row.
    """
    schema = _resolve(schema, schemas)
    for kind in schema.get("anyOf", ()):
        yield from _rows(kind, schemas, prefix)
    if "items" in schema:
        yield from _rows(schema["items"], schemas, f"{prefix}[]")
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}.{name}".removeprefix(".")
        required = ", required" if name in schema.get("required", ()) and "default" not in field else ""
        default = json.dumps(field["default"]) if field.get("default") is not None else ""
        if "{" in default:
            default = ""
        yield path, type_of(field) + required, default, field["description"]
        if path.count(".") < MAX_DEPTH:
            yield from _rows({key: value for key, value in field.items() if key != "default"}, schemas, path)


def type_of(
    schema: Mapping[str, Any], name_of: Callable[[str], str] = lambda name: "object", hidden: Collection[str] = ()
) -> str:
    """Return a JSON Schema as words, such as `integer, 1 to 8`.

    `name_of` returns the words for an object from its name. Alternatives leave out `hidden` types.
    """
    if "$ref" in schema:
        return name_of(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        kinds = [alternative for alternative in schema["anyOf"] if alternative.get("type") not in hidden]
        return " or ".join(dict.fromkeys(type_of(alternative, name_of, hidden) for alternative in kinds))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list{_count_of(schema)} of {type_of(items, name_of, hidden)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {type_of(schema['additionalProperties'], name_of, hidden)}"
    return f"{kind}{_range_of(schema)}"


def _count_of(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minItems"), schema.get("maxItems")
    if most is None:
        return ""
    return f" ({most})" if least == most else f" ({least or 0} to {most})"


def _range_of(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum", schema.get("minLength")), schema.get("maximum", schema.get("maxLength"))
    unit = " characters" if "maxLength" in schema else ""
    if "exclusiveMaximum" in schema:
        return f", {'' if low is None else f'{low:,g} to '}below {schema['exclusiveMaximum']:g}"
    if "exclusiveMinimum" in schema:
        return f", above {schema['exclusiveMinimum']:g}" + ("" if high is None else f" to {high:g}")
    if low is not None and high is not None:
        return f", {low:,g} to {_number(high)}{unit}"
    if high is not None:
        return f", at most {_number(high)}{unit}"
    return "" if low is None else f", at least {low:g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _table(title: str, rows: Iterable[tuple[str, ...]]) -> str:
    head = "<tr><th>Name<th>Type<th>Default<th>Description</tr>"
    cells = "".join(
        f"<tr><td><code>{html.escape(name)}</code><td>{_prose(kind)}<td>{html.escape(default)}"
        f"<td>{_prose(description)}</tr>"
        for name, kind, default, description in dict.fromkeys(rows)
    )
    return f"<h3>{title}</h3><table>{head}{cells}</table>" if cells else ""


def example_of(schema: dict[str, Any], schemas: dict[str, Any], name: str = "", depth: int = 0) -> Any:
    """Return an example of a response: a value that fits its schema, with every field."""
    schema = _resolve(schema, schemas)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
        return example_of(kinds[0], schemas, name, depth)
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {key: example_of(field, schemas, key, depth + 1) for key, field in schema["properties"].items()}
        case "object":
            return {}
        case "array" if "prefixItems" in schema:
            return [example_of(item, schemas, name, depth + 1) for item in schema["prefixItems"]]
        case "array":
            return [example_of(schema.get("items", {}), schemas, name, depth + 1)]
        case "integer":
            return EXAMPLE_INTEGERS.get(name, 1)
        case "number":
            return -0.25 if "logprob" in name else 0.5
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return EXAMPLE_TEXTS.get(name, "text")


def _error(status: str, response: dict[str, Any]) -> str:
    by_code = {
        code: example
        for content in response["content"].values()
        for code, example in content.get("examples", {}).items()
    }
    text = "".join(f"<p>{html.escape(example['summary'])}</p>{_json(example['value'])}" for example in by_code.values())
    return f"<h4>{status}: {_prose(response['description'])}</h4>{text}"


def _form(method: str, path: str, parameters: Sequence[dict[str, Any]], examples: Sequence[Any]) -> str:
    """Return a form that sends a request; `docs.js` shows the response in it."""
    inputs = "".join(
        f'<label>{html.escape(param["name"])} <input name="{html.escape(param["name"])}" data-in="{param["in"]}"'
        f"{' required' if param.get('required') else ''}></label>"
        for param in parameters
        if param["in"] != "header"
    )
    body = ""
    if examples:
        text = html.escape(json.dumps(examples[0], indent=2, ensure_ascii=False))
        body = f'<label>Body <textarea rows="{text.count(chr(10)) + 2}" spellcheck="false">{text}</textarea></label>'
    return (
        f'<details><summary>Try it</summary><form data-method="{method.upper()}" data-path="{html.escape(path)}">'
        f'{inputs}{body}<button>Send</button><pre class="result" aria-live="polite"></pre></form></details>'
    )


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def _prose(text: str) -> str:
    """Return a description as HTML; text between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _json(content: Any) -> str:
    return f"<pre>{html.escape(json.dumps(content, indent=2, ensure_ascii=False))}</pre>"


ENDPOINTS = (
    Endpoint("GET", "/openapi.json", openapi, ignores_query=True),
    Endpoint("GET", "/docs", docs, media_types=("text/html",), ignores_query=True),
)
