"""Types of request fields: objects that reject unknown fields, texts, and errors with a path."""

import difflib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from sightline.service.api_errors import ERRORS, ApiError, ErrorCode

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
P = ParamSpec("P")

MAX_INPUTS = 2048  # upper bound of SIGHTLINE_MAX_INPUTS, which calls are checked against when they are admitted
MAX_NESTING = 64  # of objects and lists in a JSON value
MAX_ID = 2**31 - 1  # beyond every vocabulary, and still exact in every JSON reader
# A character that `str.strip` keeps, spelled out because languages define `\s` differently.
NOT_BLANK = r"[^\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
UNKNOWN_FIELD = "extra_forbidden"  # type of Pydantic's errors
# Similarity of an unknown field to the field that an error suggests: `inputs` is similar to
# `text_input`, but `text` is not similar to `target`.
MIN_SIMILARITY = 0.61
# Words of Pydantic's messages, as regular expressions, and those of this service.
PYDANTIC_WORDS = (
    (r"^[A-Z][A-Za-z ]* should ", "It must "),
    ("a valid list|a valid tuple", "a list"),
    ("a valid dictionary", "an object"),
    (" after validation, not ", ", got "),
    (", unable to parse string as an? (integer|number)", ", such as 3"),
    (", unable to interpret input", ", true or false"),
    (r"\bTrue\b", "true"),
    (r"\bFalse\b", "false"),
    (r"\bNone\b", "null"),
)
JSON_VALUES = {str: "a string", list: "a list", dict: "an object", NoneType: "null"}
JSON_TYPES = {bool: "boolean", int: "number", str: "string", dict: "object", list: "array"}

NULL: dict[str, Any] = {"type": "null"}  # JSON Schema


def field_error(code: str, message: str, *path: str | int) -> PydanticCustomError:
    """Create an error with a code of `ERRORS`; `path` is relative to the validated value."""
    # Pydantic formats the template with the context, so braces in the message must come from there.
    return PydanticCustomError(code, "{message}", {"message": message, "path": path})


class RequestBody(BaseModel):
    """Base of request bodies: unknown fields and values of another type are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    EXAMPLES: ClassVar[Sequence[Mapping[str, Any]]] = ()  # of the OpenAPI document

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        for field in resolved.get("properties", {}).values():
            for kind in field.get("anyOf", ()):  # where Pydantic leaves the description of an optional type
                if "description" in kind and "description" not in field:
                    field["description"] = kind["description"]
        if cls.EXAMPLES:
            resolved["examples"] = list(cls.EXAMPLES)
        return schema


def is_word(name: str) -> bool:
    """Return True if a name that the client chose is safe to show in an error."""
    return name.isidentifier() and name.isascii() and len(name) <= 64


@dataclass(frozen=True)
class Texts:
    """One text, or a list of them."""

    texts: tuple[str, ...]
    is_list: bool = True  # False for one text that is not in a list
    indices: tuple[int, ...] | None = None  # in the request, if some were left out
    second_texts: tuple[str | None, ...] | None = None  # of inputs that are pairs of texts
    are_prompts: bool = False  # raw prompts, in which names of special tokens stand for them

    @classmethod
    def one(cls, text: str) -> "Texts":
        return cls((text,), is_list=False)

    def index(self, position: int) -> int | None:
        """Return the index of a text for an error; None for a text that is not in a list."""
        if not self.is_list:
            return None
        return position if self.indices is None else self.indices[position]

    def select(self, indices: Sequence[int]) -> "Texts":
        """Return some of the texts; errors still name their indices in the request."""
        second_texts = self.second_texts and tuple(self.second_texts[index] for index in indices)
        texts = tuple(self.texts[index] for index in indices)
        return replace(self, texts=texts, indices=tuple(indices), second_texts=second_texts)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class IdLists:
    """Inputs that are token ids of the model: one list of them, or several."""

    lists: tuple[tuple[int, ...], ...]  # the token ids of each input
    is_list: bool = True  # False for one list of ids that is not in a list

    def index(self, position: int) -> int | None:
        """Return the index of an input for an error; None for one that is not in a list."""
        return position if self.is_list else None

    def __len__(self) -> int:
        return len(self.lists)


@dataclass(frozen=True)
class UploadedFile:
    """A file in a multipart form."""

    name: str  # as the client names it
    data: bytes

    @property
    def extension(self) -> str:
        return self.name.rpartition(".")[2].lower()


def check_file(value: Any) -> UploadedFile:
    if not isinstance(value, UploadedFile):
        raise field_error("invalid_parameter", "It must be a file with a name; send the form as multipart/form-data.")
    return value


def check_text(value: Any, *path: int, allow_blank: bool = False) -> str:
    """Return a string with more than whitespace, or with `allow_blank` any string.

    Raises `PydanticCustomError` for any other value; `path` leads to it.
    """
    if not isinstance(value, str):
        raise field_error("invalid_parameter", "It must be a string.", *path)
    if not allow_blank and not value.strip():
        raise field_error("empty_input", ERRORS["empty_input"].message, *path)
    return value


def check_texts(value: Any, *, allow_blank: bool = False) -> Texts:
    """Check the value of a field that holds one text or a list of them."""
    if isinstance(value, str):
        return Texts((check_text(value, allow_blank=allow_blank),), is_list=False)
    if not isinstance(value, list):
        raise field_error("invalid_parameter", "It must be a string or a list of strings.")
    if not value:
        raise field_error("empty_input", "It is an empty list.")
    if len(value) > MAX_INPUTS:
        message = f"It must have at most {MAX_INPUTS} strings (or fewer, see SIGHTLINE_MAX_INPUTS), got {len(value)}."
        raise field_error("invalid_parameter", message)
    return Texts(tuple([check_text(text, index, allow_blank=allow_blank) for index, text in enumerate(value)]))


def check_texts_or_pairs(value: Any) -> Texts:
    """Check one text, or a list of texts and of pairs of texts, each a list of two."""
    if not isinstance(value, list) or not any(isinstance(pair, list) for pair in value):
        return check_texts(value)
    for index, pair in enumerate(value):
        if isinstance(pair, list) and len(pair) != 2:
            raise field_error("invalid_parameter", f"A pair must have 2 texts, got {len(pair)}.", index)
    firsts = check_texts([pair[0] if isinstance(pair, list) else pair for pair in value]).texts
    others = [check_text(pair[1], index, 1) if isinstance(pair, list) else None for index, pair in enumerate(value)]
    return Texts(firsts, second_texts=tuple(others))


def check_texts_with_blanks(value: Any, info: ValidationInfo) -> Texts:
    """Check texts of which some may be blank if `on_empty`, a field declared before, is `pass`."""
    return check_texts(value, allow_blank=info.data.get("on_empty") == "pass")


def check_texts_without_ids(value: Any) -> Texts:
    """Check texts of an API that also allows token ids, which this service does not support."""
    if isinstance(value, list) and value and isinstance(value[0], int | list):
        message = (
            "It must be text: token ids are not supported, because those of another tokenizer would mean another text. "
            "With LangChain's OpenAIEmbeddings, set check_embedding_ctx_length to False."
        )
        raise field_error("unsupported_parameter", message)
    return check_texts(value)


def check_texts_or_ids(value: Any) -> Texts | IdLists:
    """Check one text or a list of them, or one list of token ids or a list of such lists."""
    if not isinstance(value, list) or not value or not isinstance(value[0], int | float | list):
        return check_texts(value)
    is_list = isinstance(value[0], list)
    lists = value if is_list else [value]
    if len(lists) > MAX_INPUTS:
        raise field_error("invalid_parameter", f"It must have at most {MAX_INPUTS} lists of ids, got {len(lists)}.")
    for index, ids in enumerate(lists):
        path = (index,) if is_list else ()
        if not isinstance(ids, list) or not all(type(token_id) is int and 0 <= token_id <= MAX_ID for token_id in ids):
            raise field_error("invalid_parameter", f"It must be a list of token ids, from 0 to {MAX_ID}.", *path)
        if not ids:
            raise field_error("empty_input", "It is an empty list.", *path)
    return IdLists(tuple(map(tuple, lists)), is_list)


def check_nesting(value: Any, levels: int = MAX_NESTING) -> Any:
    """Return a JSON value; raise `PydanticCustomError` if it is nested too deeply."""
    if not levels:
        raise field_error("invalid_parameter", f"It is nested too deeply; at most {MAX_NESTING} levels are supported.")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_nesting(item, levels - 1)
    return value


def must_equal(default: Any = None, instead: str = "other values are not supported") -> PlainValidator:
    """Return the validator of a field kept for compatibility: it must be null or the default.

    `instead` is the way out in the error.
    """
    values = "null" if default is None else f"{json.dumps(default)} or null"

    def check(value: Any) -> None:
        if value is not None and (value != default or isinstance(value, bool) != isinstance(default, bool)):
            raise field_error("unsupported_parameter", f"It must be {values}: {instead}.")

    # The type is given because Annotated caches by equality, and False equals 0.
    allowed = [] if default is None else [_schema_of(default)]
    description = f"Accepted for compatibility; only {values} is supported."
    schema = WithJsonSchema({"anyOf": [*allowed, NULL], "description": description})
    return PlainValidator(check, json_schema_input_type=Annotated[Any, schema])


def _schema_of(value: Any) -> dict[str, Any]:
    """Return the JSON Schema of one value.

    Generators of clients do not know objects and lists as `const`.
    """
    schema: dict[str, Any] = {"type": JSON_TYPES[type(value)]}
    if isinstance(value, dict):
        only = {"description": "Only this value is supported."}
        properties = {name: _schema_of(field) | only for name, field in value.items()}
        return schema | {"properties": properties, "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        return schema | {"items": _schema_of(value[0]) if value else {}, "minItems": len(value), "maxItems": len(value)}
    return schema | {"const": value}


def described_as(kind: Any) -> BeforeValidator:
    """Return a validator of any value, checked elsewhere, that OpenAPI describes as `kind`."""
    return BeforeValidator(lambda value: value, json_schema_input_type=kind)


TEXT_SCHEMA: dict[str, Any] = {"type": "string", "pattern": NOT_BLANK}
Text = Annotated[str, PlainValidator(check_text), WithJsonSchema(TEXT_SCHEMA)]
ListOfInputs = Annotated[list[T], Field(min_length=1, max_length=MAX_INPUTS)]
TextOrTexts = Annotated[Texts, PlainValidator(check_texts, json_schema_input_type=Text | ListOfInputs[Text])]
TextsWithoutIds = Annotated[
    Texts, PlainValidator(check_texts_without_ids, json_schema_input_type=Text | ListOfInputs[Text])
]
AnyTexts = Annotated[
    Texts,
    PlainValidator(functools.partial(check_texts, allow_blank=True), json_schema_input_type=str | ListOfInputs[str]),
]
# A field `on_empty: OnEmpty` must be declared before a field of this type.
TextsWithBlanks = Annotated[
    Texts, PlainValidator(check_texts_with_blanks, json_schema_input_type=str | ListOfInputs[str])
]
OnEmpty = Annotated[
    Literal["error", "pass"],
    Field(description="`error` rejects the call if an input is blank; `pass` returns an empty output for that input."),
]
Pair = Annotated[list[Text], Field(min_length=2, max_length=2)]
TextsOrPairs = Annotated[
    Texts, PlainValidator(check_texts_or_pairs, json_schema_input_type=Text | ListOfInputs[Text | Pair])
]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_ID)]], Field(min_length=1)]
TextsOrIds = Annotated[
    Texts | IdLists,
    PlainValidator(check_texts_or_ids, json_schema_input_type=Text | ListOfInputs[Text] | Ids | ListOfInputs[Ids]),
]
File = Annotated[
    UploadedFile,
    PlainValidator(check_file),
    WithJsonSchema({"type": "string", "format": "binary"}),
    Field(description="The document; the end of its name decides its format."),
]


def validate(document: dict[str, Any], model: type[Model], *, is_strict: bool = True) -> Model:
    """Validate a JSON object, or with `is_strict=False` the fields of a form, which are texts.

    Raises `ApiError` for the first value that is not allowed.
    """
    try:
        return model.model_validate(document, strict=None if is_strict else False)
    except ValidationError as error:
        raise unknown_field(document, model) or first_error(error, model) from None


def construct(body: Callable[P, T], *args: P.args, **values: P.kwargs) -> T:
    """Return a body of values that another body has validated.

    They are not validated again, but type checkers compare them with the fields of the class
    `body`. Fields that are left out have their defaults.
    """
    kind = cast(Any, body)
    assert values.keys() <= kind.model_fields.keys()  # type checkers do not see names of a mapping
    return cast(T, kind.model_construct(**values))


def unknown_field(document: dict[str, Any], kind: Any, *path: str) -> ApiError | None:
    """Return the error of the first unknown field of an object or of the objects in it; None if
    there is none.

    It is searched before other errors are listed, so that a body of a hundred thousand unknown
    fields costs little.
    """
    known = fields_of(kind)
    for name, value in document.items() if known else ():
        if name not in known:
            return unknown_field_error(name, kind, path)
        if isinstance(value, dict):
            error = unknown_field(value, known[name], *path, name)
            if error is not None:
                return error
    return None


def unknown_field_error(name: str, kind: Any, path: Sequence[str | int]) -> ApiError:
    """Return the error of an unknown field, with the nearest known field.

    `kind` is the type of the object at `path` that has the field; None if it is not known.
    """
    known, owner = fields_of(kind), path_of(path) or "the body"
    shown = path_of((*path, name)) if is_word(name) else None
    message = f"{shown} is not a field of {owner}" if shown else f"{owner[0].upper()}{owner[1:]} has an unknown field"
    inner = next((field for field, type_ in known.items() if name in fields_of(type_)), None)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=MIN_SIMILARITY) if shown else []
    if inner is not None:
        message = f"{shown} belongs in {path_of((*path, inner))}."
    elif nearest:
        message += f" (did you mean {path_of((*path, nearest[0]))}?)."
    else:
        message += f"; its fields are {', '.join(known)}." if known else "."
    return ApiError("invalid_parameter", message, path=shown or path_of(path) or None)


@functools.cache
def paths_of(kind: type[BaseModel]) -> Mapping[str, str]:
    """Return the paths of a body's fields by their canonical names; errors show the paths.

    The canonical name of a field is its name in Python. Its path has the API's own names: the alias
    if there is one. Fields of inner objects are included, unless an outer field has the same name.
    """
    paths = {name: field.alias or name for name, field in kind.model_fields.items()}
    for name, field in kind.model_fields.items():
        is_union = get_origin(field.annotation) in (Union, UnionType)
        for inner in get_args(field.annotation) if is_union else [field.annotation]:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                paths = {inner_name: f"{paths[name]}.{path}" for inner_name, path in paths_of(inner).items()} | paths
    return MappingProxyType(paths)


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of an object type's fields by the API's own names; `kind` may be a union
    with None. Empty for other types.
    """
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return next((fields for member in get_args(kind) if (fields := fields_of(member))), {})


def _type_at(kind: Any, path: Sequence[str | int]) -> Any:
    """Return the type of the value at a path in a value of type `kind`; None if it is not known."""
    for part in path:
        if isinstance(part, str):
            kind = fields_of(kind).get(part)
    return kind


# Ways out that do not follow from a limit, by the type of the error and the name of the field.
HINTS = {
    ("greater_than", "temperature"): "; for the most probable tokens, leave it out or set do_sample to false",
    ("literal_error", "stream"): "; leave it out, because this route always streams",
    **{
        ("less_than_equal", name): "; GET /v1/models has the limits of each model"
        for name in ("max_new_tokens", "max_tokens", "max_completion_tokens", "num_predict")
    },
}


def first_error(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """Return the first error of a validation of a value of type `kind`."""
    errors = error.errors(include_url=False)
    # An unknown field first: a misspelled name also leaves the intended field missing.
    first = next((details for details in errors if details["type"] == UNKNOWN_FIELD), errors[0])
    context, location = first.get("ctx", {}), first["loc"]
    if first["type"] == UNKNOWN_FIELD:
        return unknown_field_error(str(location[-1]), _type_at(kind, location[:-1]), location[:-1])
    code: ErrorCode = "invalid_parameter"
    if first["type"] in ERRORS:  # raised by `field_error`
        code = first["type"]  # type: ignore[assignment]
        message = context["message"]
    elif first["type"] == "missing":
        message = "It is required."
    elif first["type"] in ("model_type", "model_attributes_type"):
        message = "It must be an object."
    else:
        hint = HINTS.get((first["type"], str(location[-1]) if location else ""), "")
        message = f"{reworded(first['msg'])}{_received(first['type'], first['input'])}{hint}."
    return ApiError(code, message, path=path_of((*location, *context.get("path", ()))) or None)


def reworded(message: str) -> str:
    """Return a message of Pydantic in the words of this service."""
    for theirs, ours in PYDANTIC_WORDS:
        message = re.sub(theirs, ours, message)
    return message


def _received(error_type: str, value: Any) -> str:
    """Return the end of a message with the value that was received: a number, a length or a type,
    but never text.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f", got {value}" if abs(value) < 1e20 else ""
    if error_type == "string_too_long":
        return f", got {len(value)}"
    if error_type.endswith("_type") and (isinstance(value, bool) or type(value) in JSON_VALUES):
        return f", got {JSON_VALUES.get(type(value)) or json.dumps(value)}"
    return ""


def path_of(location: Sequence[str | int]) -> str:
    """Return the path of a location: `("parameters", "stop", 1)` becomes `parameters.stop[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
