"""What answers look like, for OpenAPI alone: routes write them as plain dictionaries, which is many times faster."""

from typing import Literal

from pydantic import BaseModel, Field

from service.bundle import Languages
from service.parameters import Kind


class Error(BaseModel):
    code: str
    type: Literal["invalid_request_error", "overloaded_error", "server_error"]
    message: str
    param: str | None
    request_id: str


class ErrorAnswer(BaseModel):
    error: Error


class Usage(BaseModel):
    input_tokens: int = Field(description="Special tokens count.")
    output_tokens: int = 0


class TimingsMs(BaseModel):
    """Where the time went. Of several sequences the longest, since they run side by side."""

    tokenize: float
    queue: float
    encode: float
    decode: float
    total: float


class Alternative(BaseModel):
    id: int
    text: str
    logprob: float


class OutputToken(Alternative):
    alternatives: list[Alternative] | None = Field(
        default=None, description="The likeliest tokens of its place, best first; with top_logprobs."
    )


class AttentionWindow(BaseModel):
    centre: Literal["monotonic", "predicted"] = Field(
        description="p is the row's own number, from 0 and at most the last column's; or what the model computes."
    )
    radius: int = Field(description="A row looks at the columns from p - radius to p + radius; all others are 0.")


class AttentionMap(BaseModel):
    kind: Kind
    layers: list[int]
    heads: list[int]
    rows: int
    columns: int
    columns_are: Literal["slots"] | None = Field(default=None, description="Only where columns are no tokens.")
    window: AttentionWindow | None = Field(default=None, description="Only where a row looks at a part.")
    shape: tuple[int, int, int, int]
    normalized: bool
    data: list[float] | str


class OutputAttention(BaseModel):
    source_tokens: list[str]
    target_tokens: list[str] = Field(description="Those of the prefix first.")
    decoder_input_tokens: list[str]
    maps: list[AttentionMap]


class Output(BaseModel):
    index: int
    rank: int
    text: str
    tokens: list[OutputToken]
    finish_reason: Literal["eos", "length", "stop"]
    score: float
    seed: int | None = Field(default=None, description="Only with do_sample.")
    attention: OutputAttention | None = Field(default=None, description="Only with return_attention.")


class GenerateAnswer(BaseModel):
    model: str
    outputs: list[Output]
    usage: Usage
    timings_ms: TimingsMs


class ScoredOutput(BaseModel):
    index: int
    score: float
    tokens: list[OutputToken]


class ScoreAnswer(BaseModel):
    model: str
    outputs: list[ScoredOutput]
    usage: Usage
    timings_ms: TimingsMs


class EncodeAnswer(BaseModel):
    model: str
    embeddings: list[list[float]] | list[str]
    shapes: list[tuple[int, int]] | None = Field(
        default=None, description="Rows and columns of each, with pooling none."
    )
    dimensions: int
    usage: Usage
    timings_ms: TimingsMs


class LabelScore(BaseModel):
    label: str
    score: float = Field(description="Its probability; those of all labels sum to 1.")


class Classification(BaseModel):
    index: int
    labels: list[LabelScore] = Field(description="All labels, the likeliest first.")
    source_tokens: list[str] | None = Field(default=None, description="Only with return_attention.")
    maps: list[AttentionMap] | None = Field(default=None, description="Only with return_attention.")


class ClassifyAnswer(BaseModel):
    model: str
    outputs: list[Classification]
    usage: Usage
    timings_ms: TimingsMs


class Neighbour(BaseModel):
    id: int
    text: str
    score: float = Field(description="Cosine similarity, -1 to 1.")


class SimilarAnswer(BaseModel):
    model: str
    neighbours: list[Neighbour] = Field(description="The nearest first.")


class AttentionAnswer(OutputAttention):
    model: str
    text: str
    finish_reason: Literal["eos", "length", "stop", "forced"] | None = Field(
        description="None where the model generates nothing."
    )
    seed: int | None = Field(default=None, description="Only with do_sample.")
    usage: Usage
    timings_ms: TimingsMs


class InputToken(BaseModel):
    id: int
    text: str
    start: int
    end: int
    special: bool


class TokenizeAnswer(BaseModel):
    model: str
    outputs: list[list[InputToken]]


class DetokenizeAnswer(BaseModel):
    model: str
    texts: list[str]


class AttentionKind(BaseModel):
    kind: Kind
    layers: int
    heads: int
    normalized: bool
    columns: int | None = Field(default=None, description="Only where columns are no tokens.")
    window: AttentionWindow | None = Field(default=None, description="Only where a row looks at a part.")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    architecture: str
    description: str
    tasks: list[str]
    chat: bool = Field(description="Whether it has a chat template, as chat completions need it.")
    attention: list[AttentionKind]
    languages: Languages | None = Field(default=None, description="Only of a model that translates.")


class ModelsAnswer(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ModelLimits(BaseModel):
    max_input_tokens: int
    max_output_tokens: int
    vocabulary: int


class ModelDetails(ModelCard):
    license: str
    parameters: int
    dtype: str
    provider: Literal["cpu", "cuda"]
    limits: ModelLimits
    labels: list[str] = Field(description="What the model chooses among; empty where it does not classify.")
    sha256: str


class Health(BaseModel):
    status: Literal["live", "ready", "ok"]
