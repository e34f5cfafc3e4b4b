"""Requests and responses of the Open Inference Protocol, without the data of tensors."""

from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import BeforeValidator, Field, StrictInt, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from sightline.service import parameters
from sightline.service.api.types import PromptName, Truncate
from sightline.service.body_fields import MAX_ID, MAX_INPUTS, RequestBody, Text, described_as, field_error, must_equal
from sightline.service.tasks.encode import Pooling
from sightline.service.tasks.tag import OUTSIDE, AggregationName, IgnoreLabels

Version = Literal["1"]  # of every model: a bundle has no other
VERSION: Version = "1"
Datatype = Literal["BYTES", "FP32", "INT64"]
Row = Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)]
Rows = Annotated[list[Row], Field(min_length=1, max_length=MAX_INPUTS)]
# Bounded before a text is looked at: a tensor may declare a million rows.
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


def _reject(value: Any) -> None:
    raise field_error("unsupported_parameter", "It is not supported; leave it out.")


def _check_one(value: Any) -> Any:
    if value != 1:
        message = "It must be 1: this endpoint returns one text. Use infer for several."
        raise field_error("unsupported_parameter", message)
    return value


def _check_stream(value: Any, *, expected: bool) -> Any:
    if value is not expected:
        message = "It must be false for generate and true for generate_stream."
        raise field_error("unsupported_parameter", message)
    return value


# A parameter of the protocol that is not supported, and is not in the OpenAPI document.
Reserved = SkipJsonSchema[Annotated[None, BeforeValidator(_reject)]]


class ProtocolParameters(parameters.TextParameters):
    """Generation parameters, and the parameters of the protocol that are not supported."""

    sequence_id: Reserved = None
    sequence_start: Reserved = None
    sequence_end: Reserved = None
    priority: Reserved = None
    timeout: Reserved = None


class InferParameters(ProtocolParameters):
    """Parameters of the requested outputs; each needs an output that depends on it."""

    top_logprobs: parameters.TopLogprobs = parameters.MAX_TOP_LOGPROBS
    pooling: Annotated[
        Pooling | None, Field(description="Reduction of the token vectors to one vector; the model's own.")
    ] = None
    normalize: Annotated[bool | None, Field(description="Give each vector length 1; the model's own setting.")] = None
    prompt_name: PromptName = None
    truncate: Truncate = False
    raw_scores: Annotated[bool, Field(description="Return the logits of a reranker instead of their sigmoid.")] = False
    aggregation: AggregationName = "simple"
    ignore_labels: IgnoreLabels = Field(default=list(OUTSIDE))
    layers: Annotated[
        parameters.Indices | None, Field(description="Layer indices; -1 is the last layer. All layers if absent.")
    ] = None
    heads: Annotated[
        parameters.Indices | None, Field(description="Head indices; -1 is the last head. All heads if absent.")
    ] = None
    reduce: Annotated[parameters.Reduce, Field(description="Reduction over the selected heads.")] = "none"
    binary_data_output: Annotated[
        bool, Field(description="Send outputs as bytes after the JSON unless they set `binary_data`.")
    ] = False


One = Annotated[int, Field(ge=1, le=1, description="Only 1 is supported here.")]


class OneTextParameters(ProtocolParameters):
    """Parameters of the generation of one text."""

    num_return_sequences: Annotated[One, BeforeValidator(_check_one)] = 1
    max_tokens: parameters.NumNewTokens | None = Field(
        default=None, description="Name of `max_new_tokens` in Triton's backends of language models."
    )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_new_tokens is not None and self.max_tokens not in (None, self.max_new_tokens):
            message = "It is the same parameter as max_new_tokens; send only one of them."
            raise field_error("invalid_parameter", message, "max_tokens")
        return self


# Clients send `stream` beside the parameters or in them.
NotStreamed = Annotated[
    Literal[False],
    BeforeValidator(partial(_check_stream, expected=False)),
    Field(description="Only false is supported here."),
]
Streamed = Annotated[
    Literal[True],
    BeforeValidator(partial(_check_stream, expected=True)),
    Field(description="Only true is supported here."),
]


class WholeTextParameters(OneTextParameters):
    """Parameters of the generation of one text."""

    stream: NotStreamed = False


class StreamedTextParameters(OneTextParameters):
    """Parameters of the generation of one text as a stream."""

    # Larger numbers are rejected with the other parameters that cannot be streamed.
    num_beams: Annotated[parameters.NumBeams, described_as(One), Field(description="Only 1 is supported here.")] = 1
    stream: Streamed = True


class TensorParameters(RequestBody):
    shared_memory_region: Annotated[Any, must_equal("")] = None
    shared_memory_byte_size: Annotated[Any, must_equal(0)] = None
    shared_memory_offset: Annotated[Any, must_equal(0)] = None


class InputParameters(TensorParameters):
    binary_data_size: Annotated[StrictInt, Field(ge=0, le=MAX_ID)] | None = Field(
        default=None, description="Length in bytes of the tensor, which follows the JSON."
    )


InputName = Literal["text_input", "query"]


class InferInput(RequestBody):
    name: Annotated[InputName, Field(description="`text_input`, or `query` for models with the task rerank.")]
    shape: Shape = Field(description="Shape: [texts] or [texts, 1].")
    datatype: Annotated[Literal["BYTES"], Field(description="Always `BYTES`.")]
    parameters: Annotated[InputParameters, Field(description="Parameters of the input tensor.")] = Field(
        default_factory=InputParameters
    )
    data: Annotated[list[Any], Field(max_length=MAX_INPUTS), described_as(Rows)] | None = Field(
        default=None, description="The texts, flat or one list for each; absent if the tensor is binary."
    )

    @model_validator(mode="after")
    def _check_shape_and_data(self) -> Self:
        if self.shape[1:] not in ([], [1]):
            raise field_error(
                "invalid_parameter", "It must be [texts] or [texts, 1], because each text is a row.", "shape"
            )
        if (self.data is None) == (self.parameters.binary_data_size is None):
            message = (
                "Give the texts either here, or as bytes after the JSON with their length in "
                "parameters.binary_data_size."
            )
            raise field_error("invalid_parameter", message, "data")
        return self


class OutputParameters(TensorParameters):
    binary_data: bool | None = Field(
        default=None, description="The same as `binary_data_output`, for this output only."
    )
    classification: Annotated[Any, must_equal(0)] = None


class RequestedOutput(RequestBody):
    name: Annotated[str, Field(description="Name of an output of the model.")]
    parameters: Annotated[OutputParameters, Field(description="Parameters of the output tensor.")] = Field(
        default_factory=OutputParameters
    )


class InferBody(RequestBody):
    id: str | None = Field(default=None, description="Id that is returned in the response.")
    parameters: InferParameters = Field(
        default_factory=InferParameters, title="Parameters", description="Parameters of the call."
    )
    inputs: Annotated[
        Annotated[list[InferInput], Field(min_length=1, max_length=2, fail_fast=True)],
        Field(
            description="The input tensor `text_input`. Relevance scores also need `query`: one text for all documents "
            "in `text_input`, or one for each."
        ),
    ]
    outputs: Annotated[list[RequestedOutput], Field(max_length=64, fail_fast=True)] = Field(
        default_factory=list, description="Outputs to compute; if empty, the outputs of the model's main task."
    )

    EXAMPLES = (
        {"inputs": [{"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["A dog runs.", "A cat."]}]},
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
        {
            "inputs": [
                {"name": "query", "shape": [1], "datatype": "BYTES", "data": ["Who runs?"]},
                {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["A dog runs.", "A cat."]},
            ],
            "outputs": [{"name": "relevance_score"}],
        },
    )


class _TextBody(RequestBody):
    id: str | None = Field(default=None, description="Id that is returned in the response.")
    inputs: Annotated[Text, Field(alias="text_input", description="Prompt.")]

    EXAMPLES = ({"id": "7", "text_input": "A dog runs.", "parameters": {"max_new_tokens": 16, "stop": "."}},)


class GenerateTextBody(_TextBody):
    stream: NotStreamed = False
    parameters: WholeTextParameters = Field(
        default_factory=WholeTextParameters, title="Parameters", description="Generation parameters."
    )


class StreamTextBody(_TextBody):
    stream: Streamed = True
    parameters: StreamedTextParameters = Field(
        default_factory=StreamedTextParameters, title="Parameters", description="Generation parameters."
    )


class RepositoryIndexBody(RequestBody):
    ready: bool = Field(default=False, description="Return only models that are ready.")

    EXAMPLES = ({"ready": True},)


class LoadParameters(RequestBody):
    """Parameters of a load request: none. Triton's `config` and `file:...` are rejected."""


class UnloadParameters(RequestBody):
    unload_dependents: bool = Field(default=False, description="Accepted for compatibility; ignored.")


class LoadBody(RequestBody):
    parameters: LoadParameters = Field(
        default=LoadParameters(), description="Must be empty: models are loaded by name from the bundles folder only."
    )

    EXAMPLES = ({},)


class UnloadBody(RequestBody):
    parameters: UnloadParameters = Field(default=UnloadParameters(), description="Parameters of the protocol.")

    EXAMPLES = ({"parameters": {"unload_dependents": False}},)


class ServerMetadata(TypedDict):
    name: Annotated[str, Field(description="Always `sightline`.")]
    version: Annotated[str, Field(description="Version of the service.")]
    extensions: Annotated[list[str], Field(description="Supported extensions of the protocol.")]


class ServerLive(TypedDict):
    live: Annotated[Literal[True], Field(description="Always true.")]


class ServerReady(TypedDict):
    ready: Annotated[Literal[True], Field(description="Always true.")]


class ModelReady(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    ready: Annotated[Literal[True], Field(description="Always true.")]


class TensorMetadata(TypedDict):
    name: Annotated[str, Field(description="Name of the tensor.")]
    datatype: Annotated[Datatype, Field(description="Data type of its elements.")]
    shape: Annotated[list[int], Field(description="Shape; -1 for sizes that depend on the request.")]


class ModelMetadata(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    versions: Annotated[list[str], Field(description="Always `1`.")]
    platform: Annotated[str, Field(description="Always `onnx_onnxv1`.")]
    inputs: Annotated[list[TensorMetadata], Field(description="Input tensors.")]
    outputs: Annotated[list[TensorMetadata], Field(description="Output tensors.")]


class TensorConfig(TypedDict):
    name: Annotated[str, Field(description="Name of the tensor.")]
    data_type: Annotated[
        Literal["TYPE_STRING", "TYPE_FP32", "TYPE_INT64"], Field(description="Data type of its elements.")
    ]
    dims: Annotated[list[int], Field(description="Shape without its first axis.")]


class TransactionPolicy(TypedDict):
    decoupled: Annotated[bool, Field(description="Always false: one response for each request.")]


class ModelConfig(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    platform: Annotated[str, Field(description="Always `onnxruntime_onnx`.")]
    backend: Annotated[str, Field(description="Always `onnxruntime`.")]
    max_batch_size: Annotated[int, Field(description="Maximum texts of a call.")]
    input: Annotated[list[TensorConfig], Field(description="Input tensors.")]
    output: Annotated[list[TensorConfig], Field(description="Output tensors.")]
    dynamic_batching: Annotated[dict[str, Any], Field(description="Always empty: batching needs no configuration.")]
    model_transaction_policy: Annotated[TransactionPolicy, Field(description="Transaction policy.")]


class Duration(TypedDict):
    count: Annotated[int, Field(description="Number of events.")]
    ns: Annotated[int, Field(description="Total time in nanoseconds.")]


class InferenceStats(TypedDict):
    success: Annotated[Duration, Field(description="Successful calls.")]
    queue: Annotated[Duration, Field(description="Time of the texts in the queue.")]
    compute_input: Annotated[Duration, Field(description="Not measured; always 0 ns.")]
    compute_infer: Annotated[Duration, Field(description="Time of the texts in the encoder and the decoder.")]
    compute_output: Annotated[Duration, Field(description="Not measured; always 0 ns.")]
    cache_hit: Annotated[Duration, Field(description="Always 0: there is no cache.")]
    cache_miss: Annotated[Duration, Field(description="Always 0: there is no cache.")]


class ModelStats(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    version: Annotated[str, Field(description="Version of the model.")]
    inference_count: Annotated[int, Field(description="Number of texts.")]
    execution_count: Annotated[
        int, Field(description="Number of graph runs: batches of the encoder and steps of the decoder.")
    ]
    inference_stats: Annotated[InferenceStats, Field(description="Counts and times by stage.")]


class ModelStatistics(TypedDict):
    model_stats: Annotated[list[ModelStats], Field(description="Statistics, one entry for each model.")]


class RepositoryModel(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    version: Annotated[str, Field(description="Version of the model.")]
    state: Annotated[
        Literal["READY", "LOADING", "UNAVAILABLE"],
        Field(description="READY if the model is loaded. Models of `lazy_models` are served in each of these states."),
    ]
    reason: Annotated[
        str,
        Field(
            description="`loading`, `unloaded`, or `failed to load; the log has the reason`; empty for a model that is "
            "ready."
        ),
    ]


class TensorFacts(TypedDict):
    binary_data_size: NotRequired[
        Annotated[int, Field(description="Length in bytes of the tensor after the JSON; only for binary tensors.")]
    ]
    normalized: NotRequired[Annotated[bool, Field(description="True if rows sum to 1; only for attention maps.")]]


class InferOutput(TypedDict):
    name: Annotated[str, Field(description="Name of the tensor.")]
    datatype: Annotated[Datatype, Field(description="Data type of its elements.")]
    shape: Annotated[list[int], Field(description="Shape of the tensor.")]
    parameters: NotRequired[Annotated[TensorFacts, Field(description="Facts about the tensor, if there are any.")]]
    data: NotRequired[
        Annotated[list[float] | list[str], Field(description="Values, flat and row-major; absent for binary tensors.")]
    ]


class InferResponse(TypedDict):
    id: NotRequired[Annotated[str, Field(description="Id of the request.")]]
    model_name: Annotated[str, Field(description="Name of the model.")]
    model_version: Annotated[str, Field(description="Version of the model.")]
    outputs: Annotated[list[InferOutput], Field(description="Requested tensors, in the requested order.")]


class GenerateTextResponse(TypedDict):
    """The generated text; each event of a stream is one of these with the new text."""

    id: NotRequired[Annotated[str, Field(description="Id of the request.")]]
    model_name: Annotated[str, Field(description="Name of the model.")]
    model_version: Annotated[str, Field(description="Version of the model.")]
    text_output: Annotated[str, Field(description="Generated text.")]
    finish_reason: NotRequired[
        Annotated[
            Literal["eos", "length", "stop"],
            Field(description="Reason for the end; in a stream, only in the last event."),
        ]
    ]
