"""Types that request fields are made of: objects without unknown fields, texts, and errors with a path."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from service.errors import ERRORS, ApiError, ErrorCode

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

NO_SUCH_FIELD = "There is no such field."
MAX_INPUTS = 32
MAX_WORD_CHARACTERS = 128
MAX_ID = 2**31 - 1  # no tokenizer has more; larger integers are none in every JSON reader
# A character that `str.strip` leaves. Languages differ in what `\s` is.
NOT_BLANK = r"[^\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
JSON_TYPES = {bool: "boolean", int: "number", str: "string", dict: "object", list: "array"}

# In JSON Schema, where it says what holds of several fields together.
NULL: dict[str, Any] = {"type": "null"}


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


def is_word(name: str) -> bool:
    """Return True if a name that a client chose may be shown in an error."""
    return name.isidentifier() and name.isascii() and len(name) <= 64


@dataclass(frozen=True)
class Texts:
    """One text, or a list of them."""

    texts: tuple[str, ...]
    is_list: bool = True

    @classmethod
    def one(cls, text: str) -> "Texts":
        return cls((text,), is_list=False)

    def index(self, place: int) -> int | None:
        """Return the index of a text in an error; None for a text that is not in a list."""
        return place if self.is_list else None

    def __len__(self) -> int:
        return len(self.texts)


def check_text(value: Any, *path: int) -> str:
    """Raises a refusal where it is no string, or blank."""
    if not isinstance(value, str):
        raise refusal("invalid_parameter", "It must be a string.", *path)
    if not value.strip():
        raise refusal("empty_input", "There is nothing but blanks in it.", *path)
    return value


def check_texts(value: Any) -> Texts:
    """Check the value of a field that holds one text or a list of them."""
    if isinstance(value, str) and value.strip():
        return Texts((value,), is_list=False)
    if isinstance(value, str):
        check_text(value)
    if not isinstance(value, list):
        raise refusal("invalid_parameter", "It must be a string or a list of strings.")
    if not value:
        raise refusal("empty_input", "The list is empty.")
    if len(value) > MAX_INPUTS:
        raise refusal("invalid_parameter", f"It has {len(value)} strings; a call takes at most {MAX_INPUTS}.")
    return Texts(tuple([check_text(text, place) for place, text in enumerate(value)]))


def check_texts_without_ids(value: Any) -> Texts:
    """Check texts that other services also accept as token ids."""
    if isinstance(value, list) and value and isinstance(value[0], int | list):
        raise refusal("unsupported_parameter", "Token ids are not taken: send text.")
    return check_texts(value)


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
TextOrTexts = Annotated[Texts, PlainValidator(check_texts), WithJsonSchema({"anyOf": _TEXTS})]
TextsWithoutIds = Annotated[Texts, PlainValidator(check_texts_without_ids), WithJsonSchema({"anyOf": _TEXTS})]
Text = Annotated[str, PlainValidator(check_text), WithJsonSchema(_TEXT_SCHEMA)]
Word = Annotated[str, PlainValidator(check_word), WithJsonSchema({**_TEXT_SCHEMA, "maxLength": MAX_WORD_CHARACTERS})]


def validate(document: dict[str, Any], model: type[Model]) -> Model:
    """Validate a JSON object.

    Raises:
        ApiError: the first value that is not allowed.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise unknown_field(document, model) or first_error(error) from None


def validate_part(part: Any, adapter: TypeAdapter[T], *path: str) -> T:
    """Validate a part of a request; `path` leads to it.

    Raises:
        ApiError: the first value that is not allowed.
    """
    try:
        return adapter.validate_python(part)
    except ValidationError as error:
        raise first_error(error, path) from None


def unknown_field(document: dict[str, Any], kind: Any, *path: str) -> ApiError | None:
    """Return the error of the first field that is not known, in an object or in those that are its fields.

    It is looked for before other errors are listed, so that a body of a hundred thousand unknown fields costs little.
    """
    known: dict[str, Any] = {}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        known = {name: field.annotation for name, field in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind):
        known = {field.name: None for field in dataclasses.fields(kind)}
    for name, value in document.items() if known else ():
        if name not in known:
            location = (*path, name) if is_word(name) else path
            return ApiError("invalid_parameter", NO_SUCH_FIELD, path=path_of(location) or None)
        if isinstance(value, dict):
            error = unknown_field(value, known[name], *path, name)
            if error is not None:
                return error
    return None


def first_error(error: ValidationError, path: Sequence[str] = ()) -> ApiError:
    """Return the first error of a validation, without its value; `path` leads to what was validated."""
    first = error.errors(include_url=False, include_input=False)[0]
    context, location = first.get("ctx", {}), [*path, *first["loc"]]
    code: ErrorCode = "invalid_parameter"
    if first["type"] in ERRORS:  # one of our own
        code = first["type"]  # type: ignore[assignment]
    message = context.get("message") or f"{first['msg']}."
    if first["type"] == "dataclass_type":
        message = "It must be an object."
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        message = NO_SUCH_FIELD
        if not is_word(str(location[-1])):
            location.pop()
    return ApiError(code, message, path=path_of((*location, *context.get("path", ()))) or None)


def path_of(location: Sequence[str | int]) -> str:
    """`("parameters", "stop", 1)` as `parameters.stop[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
