"""Constraints on generated texts, as requests have them."""

from typing import Annotated, Any, Self

import orjson
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from sightline.service.body_fields import RequestBody, construct, field_error

MAX_CHARACTERS = 65_536  # of a constraint


def _checked(text: str, *path: str) -> str:
    if len(text) > MAX_CHARACTERS:
        message = f"It must have at most {MAX_CHARACTERS} characters, got {len(text)}."
        raise field_error("invalid_parameter", message, *path)
    return text


def check_schema(value: Any, *path: str) -> str:
    """Return a JSON Schema as text. Raises `PydanticCustomError`, with a relative path."""
    if not isinstance(value, dict):
        raise field_error("invalid_parameter", "It must be an object, a JSON Schema.", *path)
    try:
        return _checked(orjson.dumps(value).decode(), *path)
    except orjson.JSONEncodeError:
        raise field_error("invalid_parameter", "It is nested too deeply.", *path) from None


def check_text(value: Any, *path: str) -> str:
    """Return an expression or a grammar. Raises `PydanticCustomError`, with a relative path."""
    if not isinstance(value, str):
        raise field_error("invalid_parameter", "It must be a string.", *path)
    return _checked(value, *path)


JsonSchema = Annotated[str, PlainValidator(check_schema), WithJsonSchema({"type": "object"})]
Expression = Annotated[str, PlainValidator(check_text), WithJsonSchema({"type": "string", "maxLength": MAX_CHARACTERS})]


class Constraint(RequestBody):
    """The texts that a model may generate, by one of the fields.

    In a grammar, `<[id]>` is the token with an id, and `<name>` the special token of that name. The
    same characters in a text are never the token.
    """

    json_schema: JsonSchema | None = Field(default=None, description="JSON Schema that the text must match.")
    regex: Expression | None = Field(
        default=None,
        description="Regular expression that the whole text must match, without look-around and references.",
    )
    lark: Expression | None = Field(
        default=None,
        description="Grammar whose rule `start` the text must match, in llguidance's variant of Lark's syntax.",
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if [self.json_schema, self.regex, self.lark].count(None) != 2:
            raise field_error("invalid_parameter", "It must have one of json_schema, regex and lark.")
        return self


ANY_OBJECT = construct(Constraint, json_schema='{"type": "object"}')
