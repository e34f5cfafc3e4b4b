"""GET /v1/models and /v1/models/{model_id}."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field

from sightline.base.bundle import AlignmentStep, LabelKind, LanguageCode, Manifest, MapKind, TrainingUnit, VectorPooling
from sightline.service.api.endpoint import Call, Endpoint, PathModel
from sightline.service.api.types import FailedModels
from sightline.service.inference.maps import AttentionWindow, methods_of, window_of
from sightline.service.inference.service import ModelState
from sightline.service.parameters import Method

T = TypeVar("T")
STATES = (
    "`ready`: the model is loaded. `unloaded`, `loading`, `failed`: the model is lazy. Its first use loads it; "
    "a later call repeats a load that has failed."
)


@dataclass(frozen=True)
class AttentionKind:
    """Attention maps of one kind that a model returns."""

    kind: Annotated[
        MapKind, Field(description="Kind of attention: of the encoder, between decoder and encoder, or of the decoder.")
    ]
    layers: Annotated[int, Field(description="Number of layers.")]
    heads: Annotated[int, Field(description="Number of heads in each layer.")]
    normalized: Annotated[bool, Field(description="True if rows sum to 1.")]
    columns: Annotated[int | None, Field(description="Number of columns if they are not tokens; otherwise null.")]
    window: Annotated[
        AttentionWindow | None, Field(description="Columns that a row attends to; null if a row attends to all.")
    ]


@dataclass(frozen=True)
class ModelAlignment:
    """The cross-attention heads that `POST /v1/align` uses by default."""

    step: Annotated[
        AlignmentStep,
        Field(description="Decoder step of a target token: the one that writes it, or the one that reads it."),
    ]
    layer: Annotated[int, Field(description="Index of the layer.")]
    heads: Annotated[list[int], Field(description="Indices of the heads whose mean weights are used.")]
    criterion: Annotated[
        str | None, Field(description="Measure by which the export chose them; null if they were not chosen.")
    ]
    agreement: Annotated[
        float | None, Field(description="Share of target words whose link is that of the criterion, 0 to 1.")
    ]
    baseline: Annotated[float | None, Field(description="The same share for the mean of all heads of the last layer.")]


@dataclass(frozen=True)
class ModelCoverage:
    """The cross-attention head that shows omitted words, see `return_coverage`."""

    layer: Annotated[int, Field(description="Index of the layer.")]
    head: Annotated[int, Field(description="Index of the head.")]
    auroc: Annotated[float, Field(description="Probability that an omitted word has less coverage than another one.")]
    threshold: Annotated[
        float | None, Field(description="Words with less coverage count as omitted; null if the AUROC is too low.")
    ]
    precision: Annotated[
        float,
        Field(description="Share of omitted words among those that counted as omitted, when the head was chosen."),
    ]
    recall: Annotated[float, Field(description="Share of the omitted words that counted as omitted then.")]


@dataclass(frozen=True)
class ModelLanguages:
    """The languages of a model that translates, as BCP 47 tags."""

    source: Annotated[LanguageCode, Field(description="Language of the inputs of requests that name none.")]
    target: Annotated[LanguageCode, Field(description="Language of the outputs of requests that name none.")]
    sources: Annotated[list[LanguageCode], Field(description="Languages of the inputs.")]
    targets: Annotated[list[LanguageCode], Field(description="Languages of the outputs.")]


@dataclass(frozen=True)
class ParameterDefaults:
    """Defaults of generation parameters that a model sets; null for those that it does not set."""

    num_beams: Annotated[int | None, Field(description="Number of beams.")]
    length_penalty: Annotated[float | None, Field(description="Exponent of the length in the score of a beam.")]
    early_stopping: Annotated[bool | Literal["never"] | None, Field(description="Condition that ends a beam search.")]
    min_new_tokens: Annotated[int | None, Field(description="Minimum number of generated tokens.")]
    max_new_tokens: Annotated[int | None, Field(description="Maximum number of generated tokens.")]
    no_repeat_ngram_size: Annotated[int | None, Field(description="Size of token n-grams that occur at most once.")]
    repetition_penalty: Annotated[float | None, Field(description="Penalty of tokens that already occurred.")]
    do_sample: Annotated[bool | None, Field(description="True if tokens are sampled.")]
    temperature: Annotated[float | None, Field(description="Divisor of the logits.")]
    top_k: Annotated[int | None, Field(description="Number of tokens to sample from.")]
    top_p: Annotated[float | None, Field(description="Probability of the tokens to sample from.")]
    min_p: Annotated[
        float | None, Field(description="Least probability of the tokens to sample from, relative to the largest.")
    ]
    typical_p: Annotated[float | None, Field(description="Probability of the most typical tokens to sample from.")]


@dataclass(frozen=True)
class EmbeddingSettings:
    """The defaults of a model that was trained to embed texts."""

    pooling: Annotated[VectorPooling, Field(description="Reduction of the token vectors to one vector.")]
    normalize: Annotated[bool, Field(description="True if vectors get length 1.")]
    prompts: Annotated[dict[str, str], Field(description="Texts put before an input, by the name of the prompt.")]
    default_prompt: Annotated[
        str | None, Field(description="Name of the prompt of requests that name none; null if there is none.")
    ]
    matryoshka: Annotated[
        list[int] | None,
        Field(description="Smaller values of `dimensions`: null if there are none, empty if all are supported."),
    ]


@dataclass(frozen=True)
class ModelCard:
    """A served model."""

    id: Annotated[str, Field(description="Name of the model, for the field `model` of requests.")]
    object: Annotated[Literal["model"], Field(description="Always `model`.")]
    created: Annotated[int, Field(description="Time of the export, in seconds since 1970.")]
    owned_by: Annotated[str, Field(description="Always `sightline`.")]
    architecture: Annotated[str, Field(description="Architecture of the model.")]
    description: Annotated[str, Field(description="Description of the model.")]
    state: Annotated[ModelState, Field(description=STATES)]
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
    attention_methods: Annotated[list[Method], Field(description="Methods of these maps; empty if it has none.")]
    alignment: Annotated[
        ModelAlignment | None, Field(description="Heads that align words; null if there is no cross-attention.")
    ]
    coverage: Annotated[
        ModelCoverage | None, Field(description="Head that shows omitted words; null if none was chosen.")
    ]
    embedding: Annotated[
        EmbeddingSettings | None, Field(description="Defaults of a model that was trained to embed texts; or null.")
    ]
    languages: Annotated[ModelLanguages | None, Field(description="Languages of a translation model; otherwise null.")]
    training_unit: Annotated[
        TrainingUnit,
        Field(
            description="Unit of the texts that the model was trained on. A model of sentences often leaves out a part "
            "of a longer text; `split_sentences` prevents it."
        ),
    ]
    generation_defaults: Annotated[
        ParameterDefaults | None,
        Field(description="Parameters used by requests that omit them; null if the model generates no text."),
    ]


@dataclass(frozen=True)
class ModelList:
    """All served models."""

    object: Annotated[Literal["list"], Field(description="Always `list`.")]
    data: Annotated[list[ModelCard], Field(description="Served models, sorted by name.")]
    failed_models: FailedModels


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model, in tokens."""

    max_input_tokens: Annotated[int, Field(description="Maximum tokens of an input, special tokens included.")]
    max_output_tokens: Annotated[int, Field(description="Maximum tokens of an output.")]
    vocabulary: Annotated[int, Field(description="Number of tokens in the vocabulary.")]
    shortlist: Annotated[
        int | None,
        Field(
            description="Greedy and beam search choose from at most this number of tokens, which the input makes "
            "likely, and log-probabilities are relative to these. All tokens count for inputs with more likely "
            "tokens, and for requests with top_logprobs, target_prefix, do_sample or parameters that change scores; "
            "null: always."
        ),
    ]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a model in bytes; 0 if it is not loaded. A row is the slot of one sequence, or of
    one beam.

    Decoder state uses memory only for the tokens that a sequence has; these numbers are of
    sequences with the maximum length.
    """

    weight_bytes: Annotated[int, Field(description="Size of the graphs and weights on disk in bytes.")]
    max_rows: Annotated[int, Field(description="Number of sequences, or beams, that the model decodes at once.")]
    state_bytes_per_row: Annotated[int, Field(description="Maximum decoder state of one row in bytes.")]
    max_state_bytes: Annotated[int, Field(description="Maximum decoder state of all slots in bytes.")]
    state_bytes: Annotated[
        int,
        Field(description="Decoder state reserved by running sequences in bytes, as if they had the maximum length."),
    ]
    max_prefix_cache_bytes: Annotated[int, Field(description="Maximum size of the prefix cache in bytes.")]
    prefix_cache_bytes: Annotated[int, Field(description="Size of the states in the prefix cache in bytes.")]


NO_MEMORY = MemoryUse(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class ModelDetails(ModelCard):
    """A served model with its limits and its memory."""

    license: Annotated[str, Field(description="License of the weights.")]
    parameters: Annotated[int, Field(description="Number of weights.")]
    dtype: Annotated[str, Field(description="Data type of the weights.")]
    provider: Annotated[
        Literal["cpu", "cuda"] | None, Field(description="Device that runs the graphs; null if it is not loaded.")
    ]
    limits: Annotated[ModelLimits, Field(description="Limits of the model.")]
    memory: Annotated[MemoryUse, Field(description="Memory of the model.")]
    labels: Annotated[list[str], Field(description="Labels of a classifier; empty for other models.")]
    label_kind: Annotated[
        LabelKind | None,
        Field(
            description="Meaning of the scores: of labels that exclude each other, of independent labels, of the "
            "relevance of a document, or of the label of each token; null if the model has no labels."
        ),
    ]
    sha256: Annotated[str, Field(description="Digest of the bundle's files.")]


async def list_models(call: Call) -> ModelList:
    """List the models."""
    service = call.service
    cards = [card_of(manifest, service.state_of(manifest.name)) for manifest in service.require_manifests()]
    return ModelList("list", cards, service.failed_models)


async def show_model(call: Call, model_id: PathModel) -> ModelDetails:
    """Describe one model: its limits, its attention, its memory, and the provider that runs it."""
    manifest = call.service.find_manifest(model_id)
    model, limits, memory = call.service.models[manifest.name], manifest.limits, NO_MEMORY
    shortlist = None if manifest.shortlist is None else manifest.shortlist.size
    if model.loaded is not None:
        used = model.loaded.memory()
        state = used.state_per_row, used.max_state, used.state_in_use
        memory = MemoryUse(used.weights, model.max_rows, *state, used.max_prefix_cache, used.prefix_cache_in_use)
    return ModelDetails(
        **vars(card_of(manifest, call.service.state_of(manifest.name))),
        license=manifest.license,
        parameters=manifest.parameters,
        dtype=manifest.dtype,
        provider=None if model.loaded is None else model.loaded.model.provider,
        limits=ModelLimits(limits.max_source_tokens, limits.max_target_tokens, limits.vocabulary, shortlist),
        memory=memory,
        labels=list(manifest.labels),
        label_kind=manifest.label_kind if manifest.labels else None,
        sha256=manifest.digest,
    )


def tasks_of(manifest: Manifest) -> list[str]:
    """Return the tasks of a model, named after the native routes. Every model has a tokenizer."""
    scores = ("score",) if "generate" in manifest.tasks else ()
    return [*manifest.tasks, *scores, "tokenize"]


def card_of(manifest: Manifest, state: ModelState) -> ModelCard:
    return ModelCard(
        id=manifest.name,
        object="model",
        created=manifest.created,
        owned_by="sightline",
        architecture=manifest.architecture,
        description=manifest.description,
        state=state,
        tasks=tasks_of(manifest),
        sentence_similarity=manifest.embedding is not None,
        chat=manifest.chat is not None,
        attention=[
            AttentionKind(maps.kind, maps.layers, maps.heads, maps.normalized, maps.columns, window_of(maps))
            for maps in manifest.attention
        ],
        attention_methods=[*methods_of(manifest)] if manifest.attention else [],
        alignment=_alignment_of(manifest),
        coverage=_copied(ModelCoverage, manifest.coverage),
        embedding=_copied(EmbeddingSettings, manifest.embedding),
        languages=_copied(ModelLanguages, manifest.languages),
        training_unit=manifest.training_unit,
        generation_defaults=_copied(ParameterDefaults, manifest.generation if "generate" in manifest.tasks else None),
    )


def _copied(kind: Callable[..., T], part: Any) -> T | None:
    """Return those fields of a part of a manifest that `kind`, a dataclass, has too."""
    if part is None:
        return None
    return kind(**{field.name: getattr(part, field.name) for field in fields(cast(Any, kind))})


def _alignment_of(manifest: Manifest) -> ModelAlignment | None:
    if manifest.alignment is None and manifest.cross_attention is not None:
        step, layer, heads = manifest.alignment_heads
        return ModelAlignment(step, layer, list(heads), None, None, None)
    return _copied(ModelAlignment, manifest.alignment)


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, ModelList, errors=("loading",)),
    Endpoint("GET", "/v1/models/{model_id}", show_model, ModelDetails, errors=("model_not_found", "loading")),
)
