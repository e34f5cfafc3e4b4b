"""How a client wants its text to be generated, and which attention maps it wants to see."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, StrictInt, WithJsonSchema, model_validator

from service.bundle import MAX_BEAMS
from service.fields import (
    AT_MOST_ONE,
    MAX_ID,
    NULL,
    OPTIONAL_TEXTS_SCHEMA,
    RequestBody,
    Texts,
    case,
    refusal,
    texts_named,
)

MAX_SEED = 2**53 - 1  # the largest integer that every JSON reader keeps exact
MAX_STOP_CHARACTERS = 64
MAX_STOP_STRINGS = 4
MAX_SUPPRESSED_TOKENS = 1024
MAX_TOP_LOGPROBS = 5

Encoding = Literal["float", "base64"]
Kind = Literal["encoder", "encoder_slots", "cross", "decoder"]
Reduce = Literal["none", "mean", "max"]

SAMPLING_PARAMETERS = ("temperature", "top_k", "top_p", "seed")
BEAM_PARAMETERS = ("length_penalty", "early_stopping")


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


def _check_early_stopping(value: Any) -> Any:
    if not isinstance(value, bool) and value != "never":
        raise refusal("invalid_parameter", 'It must be true, false or "never".')
    return value


def _check_prefix(value: Any) -> Texts | None:
    return None if value is None else texts_named("parameters.target_prefix")(value)


def _read_return_attention(value: Any) -> Any:
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, dict):
        raise refusal("invalid_parameter", "It must be true, false or an object.")
    return value


EACH_ONCE: dict[str, Any] = {"uniqueItems": True}
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema(
        {"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}, NULL]}
    ),
]
EarlyStopping = Annotated[
    bool | Literal["never"],
    PlainValidator(_check_early_stopping),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}]}),
]
Prefix = Annotated[Texts | None, PlainValidator(_check_prefix), OPTIONAL_TEXTS_SCHEMA]
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_ID)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_SUPPRESSED_TOKENS, fail_fast=True)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="So many alternatives of each token.")]
Indices = Annotated[
    list[Annotated[StrictInt, Field(ge=0, le=1023)]],
    Field(min_length=1, max_length=1024, fail_fast=True, json_schema_extra=EACH_ONCE),
]


NumNewTokens = Annotated[int, Field(ge=1, le=65536)]
MinNewTokens = Annotated[int, Field(ge=0, le=65536)]
Temperature = Annotated[float, Field(gt=0, le=10)]
TopK = Annotated[int, Field(ge=0, le=1_000_000, description="0 is off.")]
TopP = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
NumBeams = Annotated[int, Field(ge=1, le=MAX_BEAMS)]
LengthPenalty = Annotated[float, Field(ge=-10, le=10)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
NgramSize = Annotated[int, Field(ge=0, le=65536)]


class MapSelection(RequestBody):
    """Which attention maps are wanted, and how they are written."""

    kinds: (
        Annotated[list[Kind], Field(min_length=1, max_length=4, fail_fast=True, json_schema_extra=EACH_ONCE)] | None
    ) = None
    layers: Indices | None = Field(default=None, description="From 0; all where it is absent.")
    heads: Indices | None = Field(default=None, description="From 0; all where it is absent.")
    reduce: Reduce = Field(default="none", description="Over the selected heads.")
    encoding: Encoding = "float"

    @model_validator(mode="after")
    def _names_nothing_twice(self) -> Self:
        for name in ("kinds", "layers", "heads"):
            values = getattr(self, name)
            if values is not None and len(set(values)) != len(values):
                raise refusal("invalid_parameter", "It names something twice.", name)
        return self


ReturnAttention = Annotated[
    MapSelection | None, BeforeValidator(_read_return_attention, json_schema_input_type=bool | MapSelection)
]


# In JSON Schema, the three ways to decode.
WAYS: list[Any] = [
    case(
        do_sample={"const": False},
        num_beams=AT_MOST_ONE,
        num_return_sequences=AT_MOST_ONE,
        **dict.fromkeys((*SAMPLING_PARAMETERS, *BEAM_PARAMETERS), NULL),
    ),
    case(
        "do_sample",
        do_sample={"const": True},
        num_beams=AT_MOST_ONE,
        num_return_sequences=AT_MOST_ONE,
        **dict.fromkeys(BEAM_PARAMETERS, NULL),
    ),
    case(
        "num_beams",
        do_sample={"const": False},
        num_beams={"minimum": 2},
        **dict.fromkeys(SAMPLING_PARAMETERS, NULL),
    ),
]


class TextParameters(RequestBody):
    """How a text is generated; the names are Hugging Face's."""

    max_new_tokens: NumNewTokens = Field(default=128, description="The end token counts, a prefix does not.")
    min_new_tokens: MinNewTokens = 0
    do_sample: bool = False
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Seed | None = Field(default=None, description="Input i is sampled with seed + i. Drawn where it is absent.")
    stop: Stop = Field(default=(), description="Up to 4 strings that end the text and are cut from it.")
    num_beams: NumBeams = Field(default=1, description="Above 1 is beam search.")
    num_return_sequences: NumBeams = Field(default=1, description="At most num_beams.")
    length_penalty: LengthPenalty = Field(
        default=1.0, description="A beam's score is over its number of tokens to this power."
    )
    early_stopping: EarlyStopping = Field(default=False, description="When a beam search ends.")
    repetition_penalty: RepetitionPenalty = Field(
        default=1.0, description="Above 1 holds back tokens that were there before."
    )
    no_repeat_ngram_size: NgramSize = Field(default=0, description="No run of so many tokens comes twice; 0 is off.")
    suppress_tokens: TokenIds = Field(default_factory=list, description="Tokens that are never generated.")
    target_prefix: Prefix = Field(
        default=None, description="How the text begins: one string for all inputs, or one for each."
    )

    model_config = ConfigDict(json_schema_extra={"anyOf": WAYS})

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.num_beams > 1 and self.do_sample:
            raise refusal("invalid_parameter", "num_beams above 1 does not go with do_sample: true.", "num_beams")
        self._refuse_without(self.do_sample, "do_sample: true", SAMPLING_PARAMETERS)
        self._refuse_without(self.num_beams > 1, "num_beams above 1", BEAM_PARAMETERS)
        if self.num_return_sequences > self.num_beams:
            message = f"num_return_sequences ({self.num_return_sequences}) exceeds num_beams ({self.num_beams})."
            raise refusal("invalid_parameter", message, "num_return_sequences")
        if "max_new_tokens" in self.model_fields_set and self.min_new_tokens > self.max_new_tokens:
            message = f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens ({self.max_new_tokens})."
            raise refusal("invalid_parameter", message, "min_new_tokens")
        return self

    def _refuse_without(self, is_given: bool, needed: str, names: tuple[str, ...]) -> None:
        """Refuse parameters that would have no effect."""
        for name in names:
            if not is_given and name in self.model_fields_set and getattr(self, name) is not None:
                raise refusal("invalid_parameter", f"{name} needs {needed}.", name)

    def check_prefixes(self, num_inputs: int) -> None:
        """Refuse a list of prefixes that has not one for each input; for the body that these parameters stand in."""
        prefix = self.target_prefix
        if prefix is not None and prefix.is_list and len(prefix.texts) != num_inputs:
            message = f"There are {len(prefix.texts)} prefixes for {num_inputs} inputs."
            raise refusal("invalid_parameter", message, "parameters", "target_prefix")


class Parameters(TextParameters):
    """How a text is generated, and what is told of it besides."""

    top_logprobs: TopLogprobs = 0
    return_attention: ReturnAttention = Field(
        default=None, description="Attention maps of each output; true is all of them."
    )
