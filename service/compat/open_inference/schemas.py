"""Requests and responses of the Open Inference Protocol, without the data of tensors."""

from typing import Annotated, Any, Literal, NotRequired, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StrictInt, WithJsonSchema, create_model, model_validator
from typing_extensions import TypedDict

from service.api.types import Truncate
from service.fields import MAX_ID, MAX_INPUTS, NULL, RequestBody, Text, case, described_as, only, refusal
from service.inference.encode import Pooling
from service.parameters import (
    MAX_TOP_LOGPROBS,
    METHODS,
    PARAMETER_NAMES,
    GenerateParameters,
    Indices,
    Reduce,
    TopLogprobs,
)

Version = Literal["1"]  # of every model: a bundle has no other
VERSION: Version = "1"
Datatype = Literal["BYTES", "FP32", "INT64"]
Row = Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)]
Rows = Annotated[list[Row], Field(min_length=1, max_length=MAX_INPUTS)]
# Bounded before a text is looked at: a tensor may say that it has a million rows.
Shape = Annotated[
    list[Annotated[StrictInt, Field(ge=0, le=MAX_INPUTS)]],
    Field(min_length=1, max_length=2),
    WithJsonSchema(
        {
            "type": "array",
            "prefixItems": [{"type": "integer", "minimum": 1, "maximum": MAX_INPUTS}, {"const": 1}],
            "minItems": 1,
            "maxItems": 2,
        }
    ),
]
One = Annotated[int, Field(ge=1, le=1)]


# The generation parameters of a request; the other two are outputs here.
TEXT_PARAMETERS = tuple(name for name in PARAMETER_NAMES if name not in ("top_logprobs", "return_attention"))


def _described_parameters(name: str, doc: str, **others: Any) -> type[BaseModel]:
    """Return a model of generation parameters and others, for OpenAPI: requests are validated elsewhere."""
    hints = get_type_hints(GenerateParameters, include_extras=True)
    fields: dict[str, Any] = {one: (hints[one], getattr(GenerateParameters, one)) for one in TEXT_PARAMETERS}
    config = ConfigDict(extra="forbid", json_schema_extra={"anyOf": METHODS}, protected_namespaces=())
    return create_model(name, __config__=config, __doc__=doc, **(fields | others))


InferParameters = _described_parameters(
    "InferParameters",
    "Parameters of the requested outputs; each needs an output that depends on it.",
    top_logprobs=(TopLogprobs, MAX_TOP_LOGPROBS),
    pooling=(Pooling, "mean"),
    normalize=(bool, False),
    truncate=(Truncate, False),
    layers=(Indices | None, None),
    heads=(Indices | None, None),
    reduce=(Reduce, "none"),
    binary_data_output=(
        Annotated[bool, Field(description="Send outputs that do not say so after the JSON.")],
        False,
    ),
)
WholeTextParameters = _described_parameters(
    "WholeTextParameters",
    "Parameters of the generation of one text.",
    num_return_sequences=(One, 1),
    stream=(Literal[False], False),
)
StreamedTextParameters = _described_parameters(
    "StreamedTextParameters",
    "Parameters of the generation of one text as a stream.",
    num_return_sequences=(One, 1),
    num_beams=(One, 1),
    stream=(Literal[True], True),
)


class TensorParameters(RequestBody):
    shared_memory_region: Annotated[Any, only("")] = None
    shared_memory_byte_size: Annotated[Any, only(0)] = None
    shared_memory_offset: Annotated[Any, only(0)] = None


class InputParameters(TensorParameters):
    binary_data_size: Annotated[StrictInt, Field(ge=0, le=MAX_ID)] | None = Field(
        default=None, description="Bytes of the tensor, which follow the JSON."
    )


class InferInput(RequestBody):
    name: Literal["text_input"]
    shape: Shape = Field(description="[texts] or [texts, 1].")
    datatype: Literal["BYTES"]
    parameters: InputParameters = Field(default_factory=InputParameters)
    data: Annotated[list[Any], Field(max_length=MAX_INPUTS), described_as(Rows)] | None = Field(
        default=None, description="The texts, flat or a list for each; absent where binary."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                case("data", data={"type": "array"}, parameters=case(binary_data_size=NULL)),
                case(
                    "parameters", data=NULL, parameters=case("binary_data_size", binary_data_size={"type": "integer"})
                ),
            ]
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.shape[1:] not in ([], [1]):
            raise refusal("invalid_parameter", "A text is a row: it must be [texts] or [texts, 1].", "shape")
        if (self.data is None) == (self.parameters.binary_data_size is None):
            message = "Give the texts as data, or after the JSON and their bytes as binary_data_size."
            raise refusal("invalid_parameter", message, "data")
        return self


class OutputParameters(TensorParameters):
    binary_data: bool | None = Field(default=None, description="As `binary_data_output`, for this output alone.")
    classification: Annotated[Any, only(0)] = None


class RequestedOutput(RequestBody):
    name: str
    parameters: OutputParameters = Field(default_factory=OutputParameters)


class InferBody(RequestBody):
    id: str | None = Field(default=None, description="Returned in the response.")
    parameters: Annotated[dict[str, Any], described_as(InferParameters)] = Field(default_factory=dict)
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=1, fail_fast=True)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=64, fail_fast=True)] = Field(
        default_factory=list, description="Outputs to compute; those of the model's main task if empty."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "inputs": [
                        {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["A dog runs.", "A cat."]}
                    ]
                },
                {
                    "id": "7",
                    "parameters": {"max_new_tokens": 16, "num_beams": 2, "reduce": "mean", "pooling": "max"},
                    "inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [["A dog runs."]]}],
                    "outputs": [
                        {"name": "text_output"},
                        {"name": "attention_cross", "parameters": {"binary_data": True}},
                        {"name": "embedding"},
                    ],
                },
            ]
        }
    )


class GenerateTextBody(RequestBody):
    id: str | None = Field(default=None, description="Returned in the response.")
    text_input: Text
    parameters: Annotated[dict[str, Any], described_as(WholeTextParameters)] = Field(default_factory=dict)

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"id": "7", "text_input": "A dog runs.", "parameters": {"max_new_tokens": 16, "stop": "."}}]
        }
    )


class StreamTextBody(GenerateTextBody):
    parameters: Annotated[dict[str, Any], described_as(StreamedTextParameters)] = Field(default_factory=dict)


class RepositoryIndexBody(RequestBody):
    ready: bool = Field(default=False, description="Only models that are ready, which all are.")

    model_config = ConfigDict(json_schema_extra={"examples": [{"ready": True}]})


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


class ServerLive(TypedDict):
    live: Literal[True]


class ServerReady(TypedDict):
    ready: Literal[True]


class ModelReady(TypedDict):
    name: str
    ready: Literal[True]


class TensorMetadata(TypedDict):
    name: str
    datatype: Datatype
    shape: Annotated[list[int], Field(description="-1 where it depends on the request.")]


class ModelMetadata(TypedDict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(TypedDict):
    name: str
    data_type: Literal["TYPE_STRING", "TYPE_FP32", "TYPE_INT64"]
    dims: Annotated[list[int], Field(description="The shape without its first axis.")]


class TransactionPolicy(TypedDict):
    decoupled: bool


class ModelConfig(TypedDict):
    name: str
    platform: str
    backend: str
    max_batch_size: Annotated[int, Field(description="The most texts in a call.")]
    input: list[TensorConfig]
    output: list[TensorConfig]
    dynamic_batching: dict[str, Any]
    model_transaction_policy: TransactionPolicy


class Duration(TypedDict):
    count: int
    ns: int


class InferenceStats(TypedDict):
    success: Annotated[Duration, Field(description="Calls, whole.")]
    queue: Annotated[Duration, Field(description="Texts, waiting.")]
    compute_input: Annotated[Duration, Field(description="Not measured: 0 ns.")]
    compute_infer: Annotated[Duration, Field(description="Texts, in the encoder and the decoder.")]
    compute_output: Annotated[Duration, Field(description="Not measured: 0 ns.")]
    cache_hit: Annotated[Duration, Field(description="There is no cache: 0.")]
    cache_miss: Annotated[Duration, Field(description="There is no cache: 0.")]


class ModelStats(TypedDict):
    name: str
    version: str
    inference_count: Annotated[int, Field(description="Texts.")]
    execution_count: Annotated[
        int, Field(description="Runs of a graph: batches of the encoder and steps of the decoder.")
    ]
    inference_stats: InferenceStats


class ModelStatistics(TypedDict):
    model_stats: list[ModelStats]


class RepositoryModel(TypedDict):
    name: str
    version: str
    state: Literal["READY"]
    reason: str


class TensorFacts(TypedDict):
    binary_data_size: NotRequired[Annotated[int, Field(description="Only where its data come behind the JSON.")]]
    normalized: NotRequired[Annotated[bool, Field(description="Only of attention maps: whether their rows sum to 1.")]]


class InferOutput(TypedDict):
    name: str
    datatype: Datatype
    shape: list[int]
    parameters: NotRequired[Annotated[TensorFacts, Field(description="Only where there is something to say.")]]
    data: NotRequired[Annotated[list[float] | list[str], Field(description="Flat, row-major.")]]


class InferResponse(TypedDict):
    id: NotRequired[Annotated[str, Field(description="That of the request.")]]
    model_name: str
    model_version: str
    outputs: list[InferOutput]


class GenerateTextResponse(TypedDict):
    """The generated text; each event of a stream is one of these with the new text."""

    id: NotRequired[Annotated[str, Field(description="That of the request.")]]
    model_name: str
    model_version: str
    text_output: str
    finish_reason: NotRequired[
        Annotated[Literal["eos", "length", "stop"], Field(description="In a stream, only in the last event.")]
    ]
