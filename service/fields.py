"""What the fields of a request are made of: objects whose every field is known, texts, refusals with a path."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_INPUTS = 32
MAX_WORD_CHARACTERS = 128
MAX_ID = 2**31 - 1  # no tokenizer has more; larger integers are none in every JSON reader
# A character that `str.strip` leaves. Languages differ in what `\s` is.
NOT_BLANK = r"[^\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
JSON_TYPES = {bool: "boolean", int: "number", str: "string", dict: "object", list: "array"}

# In JSON Schema, where it says what holds of several fields together.
NULL: dict[str, Any] = {"type": "null"}
AT_MOST_ONE: dict[str, Any] = {"maximum": 1}


def case(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of an object with these properties, of which `required` must be there."""
    schema: dict[str, Any] = {"properties": properties}
    return schema | ({"required": list(required)} if required else {})


def refusal(code: str, message: str, *path: str | int) -> PydanticCustomError:
    """An error with one of our codes; `path` goes on from the value that is being checked."""
    # The template's braces would be filled in from the context, so the message goes through it.
    return PydanticCustomError(code, "{message}", {"message": message, "path": path})


class RequestBody(BaseModel):
    """A JSON object in which every field is known and of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _knows_every_field(cls, data: Any) -> Any:
        # Before the rest, and only the first: a body of a hundred thousand unknown fields costs no more than one.
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    path = (name,) if is_word(name) else ()
                    raise refusal("invalid_parameter", "There is no such field.", *path)
        return data


def is_word(name: str) -> bool:
    """Whether a client's own name of something may stand in an error."""
    return name.isidentifier() and name.isascii() and len(name) <= 64


@dataclass(frozen=True)
class Texts:
    """One text or several, and how to call each in an error."""

    texts: tuple[str, ...]
    name: str = "inputs"
    is_list: bool = True

    def param(self, index: int) -> str:
        return f"{self.name}[{index}]" if self.is_list else self.name

    def copies(self, count: int) -> str | list[str]:
        """Each text so many times, one behind the other, as a request has it: each draw has a seed of its own."""
        if not self.is_list and count == 1:
            return self.texts[0]
        return [text for text in self.texts for _ in range(count)]


def check_text(value: Any, *path: int) -> str:
    """Raises a refusal where it is no string, or blank."""
    if not isinstance(value, str):
        raise refusal("invalid_parameter", "It must be a string.", *path)
    if not value.strip():
        raise refusal("empty_input", "There is nothing but blanks in it.", *path)
    return value


def texts_named(name: str) -> Callable[[Any], Texts]:
    """The check of a field that holds one text or a list of them; `name` is its path in an error."""

    def check(value: Any) -> Texts:
        if isinstance(value, str):
            return Texts((check_text(value),), name, is_list=False)
        if not isinstance(value, list):
            raise refusal("invalid_parameter", "It must be a string or a list of strings.")
        if not value:
            raise refusal("empty_input", "The list is empty.")
        if len(value) > MAX_INPUTS:
            raise refusal("invalid_parameter", f"It has {len(value)} strings; a call takes at most {MAX_INPUTS}.")
        return Texts(tuple(check_text(text, place) for place, text in enumerate(value)), name)

    return check


def texts_without_ids(name: str) -> Callable[[Any], Texts]:
    """The check of texts that other services let be token ids as well."""
    check_texts = texts_named(name)

    def check(value: Any) -> Texts:
        if isinstance(value, list) and value and isinstance(value[0], int | list):
            raise refusal("unsupported_parameter", "Token ids are not taken: send text.")
        return check_texts(value)

    return check


def only(default: Any = None) -> PlainValidator:
    """The check of a field that a client may send where it asks for nothing: null, or its default."""

    def check(value: Any) -> None:
        if value is not None and (value != default or isinstance(value, bool) != isinstance(default, bool)):
            raise refusal("unsupported_parameter", "This service cannot do that: leave it out.")

    # With the type, since Annotated remembers what is equal, as False and 0 are.
    wanted = [] if default is None else [{"type": JSON_TYPES[type(default)], "const": default}]
    schema = WithJsonSchema({"anyOf": [*wanted, NULL]})
    return PlainValidator(check, json_schema_input_type=Annotated[Any, schema])


def described_as(kind: Any) -> BeforeValidator:
    """What the OpenAPI document says of a value whose inside is checked elsewhere."""
    return BeforeValidator(lambda value: value, json_schema_input_type=kind)


def check_word(value: Any) -> str:
    """Raises a refusal where it is no string, blank, or longer than any token."""
    word = check_text(value)
    if len(word) > MAX_WORD_CHARACTERS:
        message = f"It has {len(word)} characters; a token has at most {MAX_WORD_CHARACTERS}."
        raise refusal("invalid_parameter", message)
    return word


_TEXT_SCHEMA = {"type": "string", "pattern": NOT_BLANK}
_TEXTS = [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_INPUTS}]
TEXTS_SCHEMA = WithJsonSchema({"anyOf": _TEXTS})
OPTIONAL_TEXTS_SCHEMA = WithJsonSchema({"anyOf": [*_TEXTS, NULL]})
Text = Annotated[str, PlainValidator(check_text), WithJsonSchema(_TEXT_SCHEMA)]
Word = Annotated[str, PlainValidator(check_word), WithJsonSchema({**_TEXT_SCHEMA, "maxLength": MAX_WORD_CHARACTERS})]
