"""GET /v1/models and /v1/models/{model_id}."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.api.endpoint import Endpoint
from service.inference.call import Call
from service.inference.maps import AttentionWindow, window_of
from service.inference.service import ServedModel
from service.parameters import Kind


@dataclass(frozen=True)
class AttentionKind:
    """Attention maps that a model has."""

    kind: Kind
    layers: int
    heads: int
    normalized: Annotated[bool, Field(description="True if rows sum to 1.")]
    columns: Annotated[int | None, Field(description="Only if columns are not tokens.")]
    window: Annotated[AttentionWindow | None, Field(description="Only if a row attends to a part of the columns.")]


LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2}$", description="ISO 639-1.")]


@dataclass(frozen=True)
class LanguagePair:
    """The languages of a model that translates."""

    source: LanguageCode
    target: LanguageCode


@dataclass(frozen=True)
class ModelCard:
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    architecture: str
    description: str
    tasks: list[str]
    chat: Annotated[bool, Field(description="True if it has a chat template, which chat completions need.")]
    attention: list[AttentionKind]
    languages: Annotated[LanguagePair | None, Field(description="Only of a model that translates.")]


@dataclass(frozen=True)
class ModelList:
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model, in tokens."""

    max_input_tokens: int
    max_output_tokens: int
    vocabulary: int


@dataclass(frozen=True)
class ModelDetails(ModelCard):
    """A served model with its limits."""

    license: str
    parameters: int
    dtype: str
    provider: Literal["cpu", "cuda"]
    limits: ModelLimits
    labels: Annotated[list[str], Field(description="Labels of a classifier; empty for other models.")]
    sha256: str


async def list_models(call: Call) -> ModelList:
    """List the models."""
    return ModelList("list", [card_of(model) for model in call.models])


async def show_model(call: Call, model_id: str) -> ModelDetails:
    """Describe one model: its limits, its attention, and the provider that runs it."""
    model = call.model(model_id)
    manifest = model.manifest
    limits = manifest.limits
    return ModelDetails(
        **vars(card_of(model)),
        license=manifest.license,
        parameters=manifest.parameters,
        dtype=manifest.dtype,
        provider=model.provider,
        limits=ModelLimits(limits.max_source_tokens, limits.max_target_tokens, limits.vocabulary),
        labels=list(manifest.labels),
        sha256=manifest.digest,
    )


def card_of(model: ServedModel) -> ModelCard:
    manifest = model.manifest
    languages = manifest.languages
    return ModelCard(
        id=model.name,
        object="model",
        created=manifest.created,
        owned_by="sightline",
        architecture=manifest.architecture,
        description=manifest.description,
        tasks=list(manifest.tasks),
        chat=manifest.chat is not None,
        attention=[
            AttentionKind(one.kind, one.layers, one.heads, one.normalized, one.columns, window_of(one))
            for one in manifest.attention
        ],
        languages=LanguagePair(languages.source, languages.target) if languages else None,
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, ModelList, errors=("loading",)),
    Endpoint("GET", "/v1/models/{model_id}", show_model, ModelDetails, errors=("model_not_found", "loading")),
)
