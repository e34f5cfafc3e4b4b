"""Generation parameters and the selection of attention maps, from the request to the engine."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from service.bundle import MAX_BEAMS
from service.fields import MAX_ID, MAX_INPUTS, NULL, RequestBody, TextOrTexts, case, refusal

MAX_SEED = 2**53 - 1  # the largest integer that every JSON reader keeps exact
MAX_STOP_CHARACTERS = 64
MAX_STOP_STRINGS = 4
MAX_SUPPRESSED_TOKENS = 1024
MAX_TOP_LOGPROBS = 5
DEFAULT_NEW_TOKENS = 128

Encoding = Literal["float", "base64"]
Kind = Literal["encoder", "encoder_slots", "cross", "decoder"]
Reduce = Literal["none", "mean", "max"]


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
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_ID)]
TokenIds = Annotated[tuple[TokenId, ...], Field(strict=False, max_length=MAX_SUPPRESSED_TOKENS, fail_fast=True)]
TopLogprobs = Annotated[
    Int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="Number of top alternatives returned for each token.")
]
Indices = Annotated[
    list[Annotated[StrictInt, Field(ge=0, le=1023)]],
    Field(min_length=1, max_length=1024, fail_fast=True, json_schema_extra=EACH_ONCE),
]


NumNewTokens = Annotated[Int, Field(ge=1, le=65536)]
MinNewTokens = Annotated[Int, Field(ge=0, le=65536)]
Temperature = Annotated[Float, Field(gt=0, le=10)]
TopK = Annotated[Int, Field(ge=0, le=1_000_000)]
TopP = Annotated[Float, Field(gt=0, le=1)]
MinP = Annotated[Float, Field(ge=0, le=1)]
TypicalP = Annotated[Float, Field(gt=0, le=1)]
Seed = Annotated[Int, Field(ge=0, le=MAX_SEED)]
NumBeams = Annotated[Int, Field(ge=1, le=MAX_BEAMS)]
NumSequences = Annotated[Int, Field(ge=1, le=MAX_INPUTS)]
LengthPenalty = Annotated[Float, Field(ge=-10, le=10)]
RepetitionPenalty = Annotated[Float, Field(ge=0.01, le=10)]
NgramSize = Annotated[Int, Field(ge=0, le=65536)]


class AttentionSelection(RequestBody):
    """Selects attention maps, and the form in which they are returned."""

    kinds: (
        Annotated[list[Kind], Field(min_length=1, max_length=4, fail_fast=True, json_schema_extra=EACH_ONCE)] | None
    ) = None
    layers: Indices | None = Field(default=None, description="Counted from 0; all layers if absent.")
    heads: Indices | None = Field(default=None, description="Counted from 0; all heads if absent.")
    reduce: Reduce = Field(default="none", description="Reduction over the selected heads.")
    encoding: Encoding = "float"

    @model_validator(mode="after")
    def _has_no_duplicates(self) -> Self:
        for name in ("kinds", "layers", "heads"):
            values = getattr(self, name)
            if values is not None and len(set(values)) != len(values):
                raise refusal("invalid_parameter", "Duplicate entries are not allowed.", name)
        return self


ReturnAttention = Annotated[
    AttentionSelection | None,
    BeforeValidator(_read_return_attention, json_schema_input_type=bool | AttentionSelection),
]

# Parameters that have an effect only with `do_sample`, and only with `num_beams` above 1.
SAMPLING_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
BEAM_PARAMETERS = ("length_penalty", "early_stopping")


@dataclass(frozen=True)
class GenerateParameters:
    """Generation parameters, with the names, meanings and defaults of Hugging Face's `generate`."""

    max_new_tokens: Annotated[
        NumNewTokens | None,
        Field(
            description=f"The end token counts, a prefix does not. {DEFAULT_NEW_TOKENS}, or the model's limit if that "
            "is less."
        ),
    ] = None
    min_new_tokens: MinNewTokens = 0
    do_sample: StrictBool = False
    temperature: Temperature = 1.0
    top_k: Annotated[TopK, Field(description="0 is off.")] = 0
    top_p: TopP = 1.0
    min_p: Annotated[
        MinP, Field(description="Keeps tokens that are at least this share as probable as the most probable one.")
    ] = 0.0
    typical_p: Annotated[
        TypicalP, Field(description="Keeps the most typical tokens that hold this probability together; 1 is off.")
    ] = 1.0
    seed: Annotated[
        Seed | None, Field(description="Sequence i of the call is sampled with seed + i. Random if absent.")
    ] = None
    stop: Annotated[
        Stop, Field(description=f"Up to {MAX_STOP_STRINGS} strings that end the text and are cut from it.")
    ] = ()
    num_beams: Annotated[NumBeams, Field(description="Above 1 is beam search.")] = 1
    num_return_sequences: Annotated[
        NumSequences, Field(description="Sequences of each input: samples, or the best of at most num_beams beams.")
    ] = 1
    length_penalty: Annotated[
        LengthPenalty, Field(description="A beam's score is divided by its number of tokens to this power.")
    ] = 1.0
    early_stopping: Annotated[EarlyStopping, Field(description="When a beam search ends.")] = False
    repetition_penalty: Annotated[
        RepetitionPenalty, Field(description="Values above 1 make tokens less likely that were there before.")
    ] = 1.0
    no_repeat_ngram_size: Annotated[
        NgramSize, Field(description="No sequence of this many tokens occurs twice; 0 is off.")
    ] = 0
    suppress_tokens: Annotated[TokenIds, Field(description="Tokens that are never generated.")] = ()
    target_prefix: Annotated[
        TextOrTexts | None, Field(description="Beginning of the text: one for all inputs, or one for each.")
    ] = None
    top_logprobs: TopLogprobs = 0
    return_attention: Annotated[
        ReturnAttention, Field(description="Attention maps of each output; true returns all of them.")
    ] = None

    @property
    def num_new_tokens(self) -> int:
        """Maximum number of new tokens; the default gives way to a larger minimum."""
        if self.max_new_tokens is None:
            return max(DEFAULT_NEW_TOKENS, self.min_new_tokens)
        return self.max_new_tokens


PARAMETER_NAMES = tuple(one.name for one in fields(GenerateParameters))
AT_MOST_ONE: dict[str, Any] = {"maximum": 1}


def _neutral(*names: str) -> dict[str, dict[str, Any]]:
    """JSON Schema of parameters that have their default."""
    defaults = {name: getattr(GenerateParameters, name) for name in names}
    # FastAPI leaves out a key whose value is None.
    return {name: NULL if default is None else {"const": default} for name, default in defaults.items()}


# JSON Schema of the three decoding methods: greedy, sampling, beam search.
METHODS: list[Any] = [
    case(
        do_sample={"const": False},
        num_beams=AT_MOST_ONE,
        num_return_sequences=AT_MOST_ONE,
        **_neutral(*SAMPLING_PARAMETERS, *BEAM_PARAMETERS),
    ),
    case("do_sample", do_sample={"const": True}, num_beams=AT_MOST_ONE, **_neutral(*BEAM_PARAMETERS)),
    case(
        "num_beams",
        do_sample={"const": False},
        num_beams={"minimum": 2},
        num_return_sequences={"maximum": MAX_BEAMS},
        **_neutral(*SAMPLING_PARAMETERS),
    ),
]
GenerateParameters.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
    strict=False, extra="forbid", json_schema_extra={"anyOf": METHODS}
)
