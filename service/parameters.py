"""Generation parameters and the selection of attention maps, from the request to the engine."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema

from sightline.base.bundle import MAX_BEAMS, GenerationDefaults, MapKind
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import MAX_ID, MAX_INPUTS, NULL, RequestBody, TextOrTexts, field_error
from sightline.service.constraints import Constraint

MAX_SEED = 2**53 - 1  # largest integer that every JSON reader keeps exact
MAX_STOP_CHARACTERS = 64
MAX_STOP_STRINGS = 4
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024
MAX_SUPPRESSED_TOKENS = 1024
MAX_TEMPERATURE = 10
MAX_TOKENS = 65536  # bound of lengths and positions, beyond the limits of all models
MAX_TOP_K = 1_000_000
MAX_TOP_LOGPROBS = 5
DEFAULT_NEW_TOKENS = 128
# Descriptions that several APIs share.
DEFAULT_LENGTH = f"The default is {DEFAULT_NEW_TOKENS}, capped at the model's limit."
DECIMAL_ID = r"(0|[1-9][0-9]{0,9})"  # a token id as the key of an object

Encoding = Literal["float", "base64"]
Reduce = Literal["none", "mean", "max"]
Units = Literal["tokens", "words"]
# Measure of attention maps: weights, or contributions (`sightline.service.engine.contributions`).
Method = Literal["weights", "norms", "value_zeroing", "alti"]


def _check_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise field_error("invalid_parameter", "It must be a string or a list of strings.")
    if len(strings) > MAX_STOP_STRINGS:
        raise field_error("invalid_parameter", f"It must have at most {MAX_STOP_STRINGS} strings, got {len(strings)}.")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            message = f"Stop strings must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}."
            raise field_error("invalid_parameter", message)
    return tuple(strings)


def _check_logit_bias(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    if not isinstance(value, dict):
        raise field_error("invalid_parameter", "It must be an object of token ids and their biases.")
    if len(value) > MAX_BIASED_TOKENS:
        message = f"It must have at most {MAX_BIASED_TOKENS} token ids, got {len(value)}."
        raise field_error("invalid_parameter", message)
    for name, bias in value.items():
        if not re.fullmatch(DECIMAL_ID, name):
            raise field_error("invalid_parameter", 'Its keys must be token ids, such as "42".')
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            message = f"It must be a number from {-MAX_BIAS} to {MAX_BIAS}."
            raise field_error("invalid_parameter", message, int(name))
    return tuple((int(name), float(bias)) for name, bias in value.items())


def _check_early_stopping(value: Any) -> Any:
    if not isinstance(value, bool) and value != "never":
        raise field_error("invalid_parameter", 'It must be true, false or "never".')
    return value


def _parse_return_attention(value: Any) -> Any:
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, dict):
        raise field_error("invalid_parameter", "It must be true, false or an object.")
    return value


def _check_duplicates(values: list[Any]) -> list[Any]:
    if len(set(values)) != len(values):
        raise field_error("invalid_parameter", "It must have no duplicate entries.")
    return values


EACH_ONCE: dict[str, Any] = {"uniqueItems": True}
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}, NULL],
            "description": f"Up to {MAX_STOP_STRINGS} strings that end the text and are cut from it.",
        }
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{DECIMAL_ID}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_BIASED_TOKENS,
            "description": f"Biases from {-MAX_BIAS} to {MAX_BIAS} by token id, added to the logits of these tokens, "
            "or with beam search to their log-probabilities.",
        }
    ),
]
EarlyStopping = Annotated[
    bool | Literal["never"],
    PlainValidator(_check_early_stopping),
    WithJsonSchema(
        {
            "anyOf": [{"type": "boolean"}, {"const": "never"}],
            "description": "Condition that ends a beam search, as in Hugging Face's `generate`: true as soon as there "
            'are num_beams finished sequences; false when better ones are unlikely; "never" when they are impossible.',
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
TokenIds = Annotated[tuple[TokenId, ...], Field(strict=False, max_length=MAX_SUPPRESSED_TOKENS, fail_fast=True)]
TopLogprobs = Annotated[
    int,
    Field(
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Number of top alternatives returned for each token. With 1 or more, a model with a shortlist "
        "chooses from its whole vocabulary.",
    ),
]
HeadIndex = Annotated[int, Field(ge=-1024, le=1023)]  # of a layer or head; negative ones count from the end
Indices = Annotated[
    list[HeadIndex],
    Field(min_length=1, max_length=1024, fail_fast=True, json_schema_extra=EACH_ONCE),
    AfterValidator(_check_duplicates),
]
HiddenSourceTokens = Annotated[
    tuple[Annotated[int, Field(ge=-MAX_TOKENS, le=MAX_TOKENS - 1)], ...],
    Field(
        strict=False,
        max_length=1024,
        fail_fast=True,
        json_schema_extra=EACH_ONCE,
        description="Indices of source tokens that the decoder cannot attend to, in each input; -1 is the last token. "
        "The encoder reads them. Only for encoder-decoder models.",
    ),
]
NumNewTokens = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_TOKENS,
        description=f"Maximum number of generated tokens. The end token counts, a prefix does not. {DEFAULT_LENGTH}",
    ),
]
MinNewTokens = Annotated[
    int, Field(ge=0, le=MAX_TOKENS, description="Minimum number of generated tokens before the end token is allowed.")
]
Temperature = Annotated[
    float,
    Field(gt=0, le=MAX_TEMPERATURE, description="Divisor of the logits; values above 1 make samples more diverse."),
]
TopK = Annotated[
    int, Field(ge=0, le=MAX_TOP_K, description="Sample from this many of the most probable tokens; 0 disables it.")
]
TopP = Annotated[
    float,
    Field(gt=0, le=1, description="Sample from the most probable tokens whose probabilities reach this sum (nucleus)."),
]
MinP = Annotated[
    float,
    Field(ge=0, le=1, description="Sample from tokens at least this fraction as probable as the most probable one."),
]
TypicalP = Annotated[
    float, Field(gt=0, le=1, description="Sample from the most typical tokens whose probabilities reach this sum.")
]
Seed = Annotated[
    int,
    Field(
        ge=0, le=MAX_SEED, description="Seed of the sampling; sequence i of the call uses seed + i. Random if absent."
    ),
]
NumBeams = Annotated[int, Field(ge=1, le=MAX_BEAMS, description="Number of beams; values above 1 use beam search.")]
NumSequences = Annotated[
    int,
    Field(
        ge=1, le=MAX_INPUTS, description="Sequences for each input: samples, or the best of at most num_beams beams."
    ),
]
LengthPenalty = Annotated[
    float, Field(ge=-10, le=10, description="Exponent of the length by which a beam's score is divided.")
]
RepetitionPenalty = Annotated[
    float, Field(ge=0.01, le=10, description="Values above 1 make tokens that already occurred less likely.")
]
PresencePenalty = Annotated[
    float, Field(ge=-2, le=2, description="Subtracted from the scores of the tokens that were already generated.")
]
FrequencyPenalty = Annotated[
    float,
    Field(ge=-2, le=2, description="Subtracted from a token's score for each time that it was already generated."),
]
NgramSize = Annotated[
    int, Field(ge=0, le=MAX_TOKENS, description="Token n-grams of this size occur at most once; 0 disables it.")
]

Language = Annotated[
    str,
    Field(
        max_length=64,
        description="BCP 47 tag of a language of a translation model. Without `model`, the languages also select the "
        "model. If absent, the first language of the model.",
    ),
]


class AttentionSelection(RequestBody):
    """Selection of attention maps, and their encoding in the response."""

    kinds: (
        Annotated[
            list[MapKind],
            Field(min_length=1, max_length=4, fail_fast=True, json_schema_extra=EACH_ONCE),
            AfterValidator(_check_duplicates),
        ]
        | None
    ) = Field(default=None, description="Kinds of attention; all kinds of the model if absent.")
    layers: Indices | None = Field(
        default=None, description="Layer indices; -1 is the last layer. All layers if absent."
    )
    heads: Indices | None = Field(default=None, description="Head indices; -1 is the last head. All heads if absent.")
    reduce: Reduce = Field(default="none", description="Reduction over the selected heads.")
    method: Method = Field(
        default="weights",
        description="Measure of the maps: attention weights; or contributions of tokens, for bundles exported with "
        "`--contributions`: norms of transformed vectors, or with all heads as one, the effect of zeroing a value, or "
        "ALTI+, the share of each token in the outputs of a layer.",
    )
    prompt_rows: bool = Field(
        default=False,
        description="Start decoder maps with the rows of the prompt's tokens. Only for decoder-only models.",
    )
    encoding: Encoding = Field(
        default="float", description="Encoding of the maps: numbers, or base64 of little-endian float32."
    )
    units: Units = Field(
        default="tokens",
        description="Rows and columns of the maps: tokens, or words. The weight to a word is the sum over its tokens, "
        "the weight from a word is the mean over its tokens; special tokens are left out.",
    )
    statistics: bool = Field(
        default=False, description="Return statistics of each selected head, computed from its map of tokens."
    )


ReturnAttention = Annotated[
    AttentionSelection | None,
    BeforeValidator(_parse_return_attention, json_schema_input_type=bool | AttentionSelection),
]

# Parameters that have an effect only if tokens are sampled, and only with beam search.
FILTERS = ("top_k", "top_p", "min_p", "typical_p")  # of the tokens that can be sampled
SAMPLING_PARAMETERS = ("temperature", *FILTERS, "seed")
BEAM_PARAMETERS = ("length_penalty", "early_stopping")
# Parameters whose defaults a model can set; the other settings always apply.
MODEL_DEFAULTS = tuple(
    name for name in GenerationDefaults.model_fields if name not in ("suppress_tokens", "bad_words", "force_end")
)


class TextParameters(RequestBody):
    """Generation parameters that decide the text."""

    max_new_tokens: NumNewTokens | None = None
    min_new_tokens: MinNewTokens = 0
    do_sample: Annotated[
        bool,
        Field(
            description="Sample each token instead of taking the most probable. A model may do so by default, see "
            "`generation_defaults` of GET /v1/models."
        ),
    ] = False
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    typical_p: TypicalP = 1.0
    seed: Seed | None = None
    stop: Stop = ()
    num_beams: NumBeams = 1
    num_return_sequences: NumSequences = 1
    length_penalty: LengthPenalty = 1.0
    early_stopping: EarlyStopping = False
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    no_repeat_ngram_size: NgramSize = 0
    logit_bias: LogitBias | None = None
    suppress_tokens: Annotated[TokenIds, Field(description="Tokens that are never generated.")] = ()
    target_prefix: Annotated[
        TextOrTexts | None, Field(description="Beginning of the text: one string for all inputs, or one for each.")
    ] = None
    source_language: Language | None = None
    target_language: Language | None = None
    hidden_source_tokens: HiddenSourceTokens = ()

    @property
    def num_new_tokens(self) -> int:
        """Maximum number of new tokens; a larger minimum raises the default."""
        if self.max_new_tokens is None:
            return max(DEFAULT_NEW_TOKENS, self.min_new_tokens)
        return self.max_new_tokens


ConfirmOmissions = Annotated[
    bool,
    Field(
        description="Look at each word that the text seems to omit once more, without it: fewer marks, of which more "
        "are right. With return_coverage or repair."
    ),
]


class GenerateParameters(TextParameters):
    """Generation parameters, with the names, meanings and defaults of Hugging Face's `generate`."""

    # The bodies of compatible APIs have fields with these names; their aliases are the names of the
    # API.

    top_logprobs: TopLogprobs = 0
    constraint: Annotated[
        Constraint | None, Field(description="JSON Schema, regular expression or grammar that the text must match.")
    ] = None
    return_attention: Annotated[
        ReturnAttention, Field(description="Attention maps of each output; true returns all of them.")
    ] = None
    return_coverage: Annotated[
        bool,
        Field(
            description="Return which words of the input the text omits, and which of its own words are doubtful. For "
            "models whose `coverage` has a threshold, see GET /v1/models."
        ),
    ] = False
    repair: Annotated[
        bool,
        Field(
            description="Translate texts that omit words of the input again: with beam search, continued after an end "
            "that came too early, or sentence by sentence. The others stay as they are."
        ),
    ] = False
    confirm_omissions: ConfirmOmissions = False
    split_sentences: Annotated[
        bool | None,
        Field(
            description="Translate each sentence of the inputs, and join the translations with the spacing and line "
            "breaks of the input. Only for models that translate, without target_prefix and hidden_source_tokens. "
            "Default: true for models that were trained on sentences, unless the request needs the text as a whole."
        ),
    ] = None


PARAMETER_NAMES = tuple(GenerateParameters.model_fields)
NEUTRAL = GenerateParameters()  # each parameter has the value without effect
FORCED = GenerateParameters.model_construct(max_new_tokens=0)  # the whole target is given, nothing is generated


def given_parameters(body: BaseModel) -> dict[str, Any]:
    """Return the generation parameters that a body sets. All others have the defaults of the model.

    `body` may have other fields too. A null equals omitting the field.
    """
    parameters = ((name, getattr(body, name)) for name in PARAMETER_NAMES if name in body.model_fields_set)
    return {name: value for name, value in parameters if value is not None}


def complete_parameters(
    requested: Mapping[str, Any],
    defaults: GenerationDefaults,
    *,
    max_beams: int = MAX_BEAMS,
    max_new_tokens: int | None = None,
    stream: bool = False,
    is_lenient: bool = False,
) -> GenerateParameters:
    """Combine the parameters of a request with the defaults of a model.

    A parameter of the request always wins. Defaults that contradict it are not used: beam search if
    the request samples or streams, sampling if the request uses beam search, and a length that
    contradicts the other length. Of defaults that contradict each other, beam search is used.
    Defaults above `max_beams` and `max_new_tokens` are capped. `is_lenient` ignores sampling
    parameters of the request if no tokens are sampled.
    """
    own = {name: getattr(defaults, name) for name in MODEL_DEFAULTS if name not in requested}
    own = {name: value for name, value in own.items() if value is not None}
    if requested.get("do_sample") or stream:
        own.pop("num_beams", None)
    if "num_beams" in own:
        own["num_beams"] = min(own["num_beams"], max_beams)
    has_beams = (requested.get("num_beams") or own.get("num_beams", 1)) > 1
    if has_beams:
        own.pop("do_sample", None)
    does_sample = requested["do_sample"] if "do_sample" in requested else own.get("do_sample", False)
    unused = (*(() if has_beams else BEAM_PARAMETERS), *(() if does_sample else SAMPLING_PARAMETERS))
    own = {name: value for name, value in own.items() if name not in unused}
    if max_new_tokens is not None:
        own |= {name: min(own[name], max_new_tokens) for name in ("min_new_tokens", "max_new_tokens") if name in own}
    minimum, maximum = (requested.get(name) or own.get(name) for name in ("min_new_tokens", "max_new_tokens"))
    if minimum is not None and maximum is not None and minimum > maximum:
        own.pop("max_new_tokens" if "max_new_tokens" in own else "min_new_tokens", None)
    if is_lenient and not does_sample:
        requested = {name: value for name, value in requested.items() if name not in SAMPLING_PARAMETERS}
    return NEUTRAL.model_copy(update={**own, **requested})


def check_combination(parameters: GenerateParameters, num_inputs: int, *, stream: bool) -> None:
    """Check the rules between parameters that hold for every model.

    Raises `ApiError`: `invalid_parameter` or `unsupported_parameter`.
    """
    count, has_beams = parameters.num_return_sequences, parameters.num_beams > 1
    # What a parameter needs must not lead to the next error.
    samples, beams = "without {sampling}", "without {num_beams} above 1"
    if has_beams:
        samples = "with {num_beams} above 1; leave it out, or set {num_beams} to 1 with {sampling}"
    if stream or parameters.do_sample:
        cause = "in a stream, which has no beam search" if stream else "with {sampling}"
        needs = (*(["without a stream"] if stream else ()), *(["with {no_sampling}"] if parameters.do_sample else ()))
        beams = f"{cause}; leave it out, or set {{num_beams}} above 1 {' and '.join(needs)}"
    for fields, has_effect, need in (
        (SAMPLING_PARAMETERS, parameters.do_sample, samples),
        (BEAM_PARAMETERS, has_beams, beams),
    ):
        for field in () if has_effect else fields:
            if getattr(parameters, field) != getattr(NEUTRAL, field):
                raise ApiError("invalid_parameter", f"{{{field}}} has no effect {need}.", field=field)
    if has_beams and parameters.do_sample:
        message = "{num_beams} above 1 cannot be combined with {sampling}."
        raise ApiError("invalid_parameter", message, field="num_beams")
    if has_beams and stream:
        message = "Beam search cannot be streamed: set {num_beams} to 1, or do not stream."
        raise ApiError("unsupported_parameter", message, field="num_beams")
    if not parameters.do_sample and count > parameters.num_beams:
        condition = "" if has_beams else " without {sampling}"
        message = (
            f"{{num_return_sequences}} must be at most {{num_beams}} ({parameters.num_beams}){condition}, got {count}."
        )
        raise ApiError("invalid_parameter", message, field="num_return_sequences")
    if parameters.max_new_tokens is not None and parameters.min_new_tokens > parameters.max_new_tokens:
        message = (
            f"{{min_new_tokens}} must be at most {{max_new_tokens}} ({parameters.max_new_tokens}), "
            f"got {parameters.min_new_tokens}."
        )
        raise ApiError("invalid_parameter", message, field="min_new_tokens")
    prefix = parameters.target_prefix
    if prefix is not None and prefix.is_list and len(prefix.texts) != num_inputs:
        message = (
            f"{{target_prefix}} must be one string, or a list with a string for each input ({num_inputs}), "
            f"got {len(prefix.texts)}."
        )
        raise ApiError("invalid_parameter", message, field="target_prefix")
