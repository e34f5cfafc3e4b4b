"""Types of JSON Schema in words, for the tables of the documentation."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any


def type_of(schema: Mapping[str, Any], name_of: Callable[[str], str], hidden: Collection[str] = ()) -> str:
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
    if schema.get("maxItems") == 0 or schema.get("properties") == {}:
        return "`[]`" if kind == "array" else "`{}`"
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
