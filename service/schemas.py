"""What requests look like: every field known, every value of its own type and in its bounds."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictInt,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_INPUTS = 32
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 64
MAX_SEED = 2**53 - 1  # the largest integer that every JSON reader keeps exact

Kind = Literal["encoder", "cross", "decoder"]
Encoding = Literal["float", "base64"]
Pooling = Literal["mean", "first", "last", "max", "none"]
Reduce = Literal["none", "mean", "max"]
Side = Literal["source", "target"]

# In the contract, and not in this release: refused by name, never ignored.
COMING_PARAMETERS = frozenset(
    {
        "num_return_sequences",
        "length_penalty",
        "early_stopping",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "suppress_tokens",
        "target_prefix",
        "top_logprobs",
        "return_attention",
    }
)
SAMPLING_PARAMETERS = ("temperature", "top_k", "top_p", "seed")


def refusal(code: str, message: str, *path: str | int) -> PydanticCustomError:
    """An error with one of our codes; `path` goes on from the value that is being checked."""
    # The template's braces would be filled in from the context, so the message goes through it.
    return PydanticCustomError(code, "{message}", {"message": message, "path": path})


@dataclass(frozen=True)
class Texts:
    """One text or several, and how to call each in an error."""

    texts: tuple[str, ...]
    name: str = "inputs"
    is_list: bool = True

    def param(self, index: int) -> str:
        return f"{self.name}[{index}]" if self.is_list else self.name


def _check_text(value: Any, *path: int) -> str:
    if not isinstance(value, str):
        raise refusal("invalid_parameter", "It must be a string.", *path)
    if not value.strip():
        raise refusal("empty_input", "There is nothing but blanks in it.", *path)
    return value


def _check_texts(value: Any) -> Texts:
    if isinstance(value, str):
        return Texts((_check_text(value),), is_list=False)
    if not isinstance(value, list):
        raise refusal("invalid_parameter", "It must be a string or a list of strings.")
    if not value:
        raise refusal("empty_input", "The list is empty.")
    if len(value) > MAX_INPUTS:
        raise refusal("invalid_parameter", f"There are {len(value)} inputs; a call takes at most {MAX_INPUTS}.")
    return Texts(tuple(_check_text(text, place) for place, text in enumerate(value)))


def _check_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise refusal("invalid_parameter", "It must be a string or a list of strings.")
    if len(strings) > MAX_STOP_STRINGS:
        raise refusal("invalid_parameter", f"There are {len(strings)} stop strings; at most {MAX_STOP_STRINGS} may be.")
    if not all(1 <= len(string) <= MAX_STOP_CHARACTERS for string in strings):
        raise refusal("invalid_parameter", f"A stop string has 1 to {MAX_STOP_CHARACTERS} characters.")
    return tuple(strings)


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
Text = Annotated[str, PlainValidator(_check_text), WithJsonSchema(_TEXT_SCHEMA)]
Inputs = Annotated[
    Texts,
    PlainValidator(_check_texts),
    WithJsonSchema(
        {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_INPUTS}]}
    ),
]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}]}),
]
Indices = Annotated[
    list[Annotated[StrictInt, Field(ge=0, le=1023)]], Field(min_length=1, max_length=1024, fail_fast=True)
]


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
                    raise cls._unknown_field(name)
        return data

    @classmethod
    def _unknown_field(cls, name: str) -> PydanticCustomError:
        path = (name,) if name.isidentifier() and name.isascii() and len(name) <= 64 else ()
        return refusal("invalid_parameter", "There is no such field.", *path)


Model = Annotated[str | None, Field(max_length=128, description="Which model; the default model where it is absent.")]


class Parameters(RequestBody):
    """How to generate; the names are Hugging Face's."""

    max_new_tokens: int = Field(default=128, ge=1, le=65536, description="The end token counts.")
    min_new_tokens: int = Field(default=0, ge=0, le=65536)
    do_sample: bool = False
    temperature: float = Field(default=1.0, gt=0, le=10)
    top_k: int = Field(default=0, ge=0, le=1_000_000, description="0 is off.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(
        default=None, ge=0, le=MAX_SEED, description="Input i is sampled with seed + i. Drawn where it is absent."
    )
    stop: Stop = Field(default=(), description="Up to 4 strings that end the text and are cut from it.")
    num_beams: int = Field(default=1, ge=1, le=8, description="Only 1 in this release.")

    @classmethod
    def _unknown_field(cls, name: str) -> PydanticCustomError:
        if name in COMING_PARAMETERS:
            return refusal("unsupported_parameter", f"{name} is not in this release.", name)
        return super()._unknown_field(name)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.num_beams > 1:
            raise refusal("unsupported_parameter", "num_beams above 1 is not in this release.", "num_beams")
        for name in SAMPLING_PARAMETERS:
            if name in self.model_fields_set and getattr(self, name) is not None and not self.do_sample:
                raise refusal("invalid_parameter", f"{name} needs do_sample: true.", name)
        if "max_new_tokens" in self.model_fields_set and self.min_new_tokens > self.max_new_tokens:
            message = f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens ({self.max_new_tokens})."
            raise refusal("invalid_parameter", message, "min_new_tokens")
        return self


class GenerateBody(RequestBody):
    model: Model = None
    inputs: Inputs
    parameters: Parameters = Field(default_factory=Parameters)
    stream: bool = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A man is riding a bicycle."},
                {
                    "inputs": ["A dog runs.", "Two children are playing."],
                    "parameters": {"max_new_tokens": 16, "do_sample": True, "top_p": 0.9, "seed": 7, "stop": "."},
                },
            ]
        }
    )


class EncodeBody(RequestBody):
    model: Model = None
    inputs: Inputs
    pooling: Pooling = "mean"
    normalize: bool = Field(default=False, description="Give each vector length 1.")
    encoding: Encoding = "float"
    truncate: bool = Field(
        default=False, description="Cut what is too long instead of refusing it; the end token stays."
    )

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": ["A dog runs."], "pooling": "mean", "normalize": True}]}
    )


class AttentionBody(RequestBody):
    model: Model = None
    input: Text
    target: Annotated[Text | None, Field(description="Explain this text instead of what the model generates.")] = None
    parameters: Parameters | None = None
    kinds: Annotated[list[Kind], Field(min_length=1, max_length=3, fail_fast=True)] | None = None
    layers: Indices | None = Field(default=None, description="From 0; all where it is absent.")
    heads: Indices | None = Field(default=None, description="From 0; all where it is absent.")
    reduce: Reduce = Field(default="none", description="Over the selected heads.")
    encoding: Encoding = "float"

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"input": "A dog runs.", "kinds": ["cross"], "reduce": "mean"},
                {"input": "A dog runs.", "target": "Ein Hund rennt.", "layers": [0], "encoding": "base64"},
            ]
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.target is not None and self.parameters is not None:
            raise refusal(
                "invalid_parameter", "With a target nothing is generated: leave parameters out.", "parameters"
            )
        for name in ("kinds", "layers", "heads"):
            values = getattr(self, name)
            if values is not None and len(set(values)) != len(values):
                raise refusal("invalid_parameter", "It names something twice.", name)
        return self


class TokenizeBody(RequestBody):
    model: Model = None
    inputs: Inputs
    side: Side = "source"
    add_special_tokens: bool = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs.", "side": "source"}]})


class DetokenizeBody(RequestBody):
    model: Model = None
    ids: Annotated[
        list[Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]],
        Field(max_length=MAX_INPUTS, fail_fast=True),
    ]
    side: Side = "target"
    skip_special_tokens: bool = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [[5, 6, 2]], "side": "target"}]})
