"""Requests and responses of inference by the Open Inference Protocol, without data of tensors."""

from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field, StrictInt, WithJsonSchema, model_validator
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


class InferParameters(parameters.TextParameters):
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
            "parameters": {"max_new_tokens": 16, "num_beams": 2, "reduce": "mean"},
            "inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [["A dog runs."]]}],
            "outputs": [{"name": "text_output"}, {"name": "attention_cross", "parameters": {"binary_data": True}}],
        },
        {
            "inputs": [
                {"name": "query", "shape": [1], "datatype": "BYTES", "data": ["Who runs?"]},
                {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["A dog runs.", "A cat."]},
            ],
            "outputs": [{"name": "relevance_score"}],
        },
    )


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
