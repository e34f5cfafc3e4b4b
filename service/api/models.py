"""GET /v1/models and /v1/models/{model_id}."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.api.endpoint import Endpoint
from service.bundle import Manifest
from service.inference.call import Call
from service.inference.maps import AttentionWindow, window_of
from service.inference.service import ServedModel
from service.parameters import Kind


@dataclass(frozen=True)
class AttentionKind:
    """Attention maps of one kind that a model returns."""

    kind: Annotated[
        Kind, Field(description="Kind of attention: of the encoder, between decoder and encoder, or of the decoder.")
    ]
    layers: Annotated[int, Field(description="Number of layers.")]
    heads: Annotated[int, Field(description="Number of heads in each layer.")]
    normalized: Annotated[bool, Field(description="True if rows sum to 1.")]
    columns: Annotated[int | None, Field(description="Number of columns if they are not tokens; otherwise null.")]
    window: Annotated[
        AttentionWindow | None, Field(description="Columns that a row attends to; null if a row attends to all.")
    ]


LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2}$", description="ISO 639-1 code.")]


@dataclass(frozen=True)
class LanguagePair:
    """The languages of a model that translates."""

    source: Annotated[LanguageCode, Field(description="Language of the inputs.")]
    target: Annotated[LanguageCode, Field(description="Language of the outputs.")]


@dataclass(frozen=True)
class ModelCard:
    """A served model."""

    id: Annotated[str, Field(description="Name of the model, for the field `model` of requests.")]
    object: Annotated[Literal["model"], Field(description="Always `model`.")]
    created: Annotated[int, Field(description="Time of the export, in seconds since 1970.")]
    owned_by: Annotated[str, Field(description="Always `sightline`.")]
    architecture: Annotated[str, Field(description="Architecture of the model.")]
    description: Annotated[str, Field(description="Description of the model.")]
    tasks: Annotated[list[str], Field(description="Tasks that the model can do, named after the routes.")]
    sentence_similarity: Annotated[
        bool,
        Field(
            description="True if the model was trained for sentence similarity. If false, `encode` returns pooled "
            "hidden states, whose cosines say little about meaning."
        ),
    ]
    chat: Annotated[bool, Field(description="True if the model has a chat template, which chat completions need.")]
    attention: Annotated[
        list[AttentionKind], Field(description="Kinds of attention maps that the model returns; empty if it has none.")
    ]
    languages: Annotated[LanguagePair | None, Field(description="Languages of a translation model; otherwise null.")]


@dataclass(frozen=True)
class ModelList:
    """All served models."""

    object: Annotated[Literal["list"], Field(description="Always `list`.")]
    data: Annotated[list[ModelCard], Field(description="Served models, sorted by name.")]


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model, in tokens."""

    max_input_tokens: Annotated[int, Field(description="Maximum tokens of an input, special tokens included.")]
    max_output_tokens: Annotated[int, Field(description="Maximum tokens of an output.")]
    vocabulary: Annotated[int, Field(description="Number of tokens in the vocabulary.")]


@dataclass(frozen=True)
class ModelDetails(ModelCard):
    """A served model with its limits."""

    license: Annotated[str, Field(description="License of the weights.")]
    parameters: Annotated[int, Field(description="Number of weights.")]
    dtype: Annotated[str, Field(description="Data type of the weights.")]
    provider: Annotated[Literal["cpu", "cuda"], Field(description="Device that runs the graphs.")]
    limits: Annotated[ModelLimits, Field(description="Limits of the model.")]
    labels: Annotated[list[str], Field(description="Labels of a classifier; empty for other models.")]
    sha256: Annotated[str, Field(description="Digest of the bundle's files.")]


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


def tasks_of(manifest: Manifest) -> list[str]:
    """Return the tasks of a model, named after the native routes. Every model has a tokenizer."""
    scores = ("score",) if "generate" in manifest.tasks else ()
    return [*manifest.tasks, *scores, "tokenize"]


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
        tasks=tasks_of(manifest),
        sentence_similarity=False,  # a bundle cannot say otherwise: no model of this project is trained for it
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
