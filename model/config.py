"""Model configurations: immutable, validated on construction, and stored beside the weights; and
types and limits of their fields, which settings of a training have too.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError

TaskName = Literal["translation", "classification", "language-model", "encoder", "reranking", "tagging"]
Size: TypeAlias = Annotated[int, Ge(1), Le(2**20)]
Count: TypeAlias = Annotated[int, Ge(1)]
Limit: TypeAlias = Annotated[int, Ge(0)]  # 0 means no limit, or a default
Minutes: TypeAlias = Annotated[float, Ge(0)]
TokenId: TypeAlias = Annotated[int, Ge(0)]
Seed: TypeAlias = Annotated[int, Ge(0), Le(2**32 - 1)]
# A dropout near 1 would leave nothing to learn from.
Probability: TypeAlias = Annotated[float, Ge(0), Le(0.9)]
LearningRate: TypeAlias = Annotated[float, Gt(0), Le(1)]
Norm: TypeAlias = Annotated[float, Gt(0)]

# Fields that must match the tokenizer, see `sightline.model.data.tokenizer_training`.
SPECIAL_IDS = ("pad_id", "bos_id", "eos_id")


@cache
def _validators(kind: type) -> dict[str, TypeAdapter[Any]]:
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    hints = get_type_hints(kind, include_extras=True)
    return {name: TypeAdapter(hint, config=strict) for name, hint in hints.items()}


def check_fields(config: Any) -> None:
    """Check each field of a dataclass against its type and its limits. Raises `ValueError` with the
    field, the limit and the value.
    """
    for name, validator in _validators(config.__class__).items():
        value = getattr(config, name)
        try:
            validator.validate_python(value)
        except ValidationError as error:
            limit = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ValueError(f"{name} must be {limit}, got {value!r}") from None


def to_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"


def read_fields(path: Path) -> dict[str, Any]:
    """Read the JSON object of a configuration. Raises `ValueError` if the file has none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; the file may be truncated") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return fields


@dataclass(frozen=True)
class ArchitectureConfig:
    """Configuration fields of every model."""

    vocab_size: Size
    dropout: Probability = 0.1
    max_positions: Size = 256  # longest source or target, special tokens included
    pad_id: TokenId = 0
    bos_id: TokenId = 1  # the decoder's start token
    eos_id: TokenId = 2

    def __post_init__(self) -> None:
        check_fields(self)
        ids = [getattr(self, name) for name in SPECIAL_IDS]
        if len(set(ids)) < len(ids) or max(ids) >= self.vocab_size:
            raise ValueError(
                f"{', '.join(SPECIAL_IDS)} must be different and less than vocab_size ({self.vocab_size}), got "
                f"{', '.join(map(str, ids))}"
            )


# How self-attention knows the order of the tokens, see `sightline.model.layers.positions`.
Positions = Literal["sinusoidal", "none", "learned", "relative", "alibi", "rotary"]
MAX_DISTANCE = 16  # k of Shaw et al. 2018: distances beyond it share a vector
ROTARY_BASE = 10_000.0


def guided_layer(layers: int) -> int:
    """Return the layer of a decoder whose first head is trained to align words: the one before the
    last (Garg et al. 2019, section 4.1), or the only one.
    """
    return max(layers - 2, 0)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes 2^(-8 / H), 2^(-16 / H), ..., 2^-8 of the heads (Press et al. 2022)."""
    return tuple(2 ** (-8 * head / num_heads) for head in range(1, num_heads + 1))


@dataclass(frozen=True)
class StackConfig(ArchitectureConfig):
    """Sizes of self-attention layers; names of Vaswani et al. 2017, table 3, are in brackets."""

    d_model: Size = 512  # width of every layer [d_model]
    num_heads: Size = 8  # [h]
    d_ff: Size = 2048  # inner width of the feed-forward layers [d_ff]
    positions: Positions = "sinusoidal"
    scaled: bool = True  # attention scores are divided by the square root of the width of a head
    residual: bool = True  # the input of a sublayer is added to its output

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({self.num_heads}), got {self.d_model}")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even for sinusoidal positions, got {self.d_model}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f'positions "rotary" needs an even d_model / num_heads, got {self.d_model} / {self.num_heads}'
            )

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads


EncoderAttention = Literal["multi-head", "single-head", "single-head-without-weights", "linformer"]
Sharing = Literal["headwise", "key-value", "layerwise"]
# First sublayer of a decoder layer: self-attention, or a simpler simple recurrent unit (Kim et al.
# 2019), see `sightline.model.layers.recurrent_unit`.
Decoder = Literal["transformer", "ssru"]


@dataclass(frozen=True)
class TransformerConfig(StackConfig):
    """Encoder-decoder Transformer; the defaults are the base model of Vaswani et al. 2017."""

    encoder_layers: Size = 6  # [N]
    decoder_layers: Size = 6  # [N]
    pre_norm: bool = False  # x + Sublayer(LayerNorm(x)) instead of LayerNorm(x + Sublayer(x))
    encoder_attention: EncoderAttention = "multi-head"  # the decoder's attention is always multi-head
    linformer_size: Size = 128  # number of projected keys [k of Wang et al. 2020]
    linformer_sharing: Sharing = "layerwise"  # which projections are shared, see `sightline.model.layers.linformer`
    causal_encoder: bool = False  # source tokens attend to no later ones, as target tokens do
    decoder: Decoder = "transformer"
    guided_alignment: bool = False  # the first head of `guided_layer` was trained to align words

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder_attention == "linformer" and self.linformer_size > self.max_positions:
            raise ValueError(
                f"linformer_size must be at most max_positions ({self.max_positions}), got {self.linformer_size}"
            )
        is_plain = self.scaled and self.positions in ("sinusoidal", "none", "learned")
        if self.encoder_attention in ("linformer", "single-head-without-weights") and not is_plain:
            raise ValueError(
                f'encoder_attention "{self.encoder_attention}" needs scaled true and positions "sinusoidal", "none" or '
                f'"learned", got {str(self.scaled).lower()} and "{self.positions}"'
            )
        if self.causal_encoder and self.encoder_attention not in ("multi-head", "single-head"):
            raise ValueError(
                f'causal_encoder needs encoder_attention "multi-head" or "single-head", got "{self.encoder_attention}"'
            )

    @property
    def encoder_heads(self) -> int:
        return self.num_heads if self.encoder_attention in ("multi-head", "linformer") else 1


@dataclass(frozen=True)
class EncoderOnlyConfig(StackConfig):
    """Configuration fields of a Transformer encoder without a decoder."""

    encoder_layers: Size = 2
    word_dropout: Probability = 0.0  # probability that a token is dropped in training


@dataclass(frozen=True)
class EncoderConfig(EncoderOnlyConfig):
    """Configuration of a Transformer encoder that computes one vector for a text."""


@dataclass(frozen=True)
class ClassifierConfig(EncoderOnlyConfig):
    """Configuration of a Transformer encoder that classifies text."""

    labels: tuple[str, ...] = ("negative", "positive")
    multi_label: bool = False  # a text has any number of labels, also none; otherwise exactly one

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError(f"labels must be two or more different strings, got {self.labels}")


@dataclass(frozen=True)
class TaggerConfig(ClassifierConfig):
    """Configuration of a Transformer encoder that labels each token."""


@dataclass(frozen=True)
class CausalConfig(StackConfig):
    """Configuration of a decoder-only Transformer, which continues a text."""

    layers: Size = 4
    max_positions: Size = 1024  # prompt and generated tokens together


Score = Literal["none", "additive", "dot", "general", "concat", "location", "reduced_rank"]


@dataclass(frozen=True)
class RecurrentConfig(ArchitectureConfig):
    """Recurrent encoder-decoder. With `query` "previous", the decoder attends before it updates its
    state (Bahdanau et al. 2015); with "current", it attends afterwards (Luong et al. 2015).
    """

    cell: Literal["gru", "lstm"] = "gru"
    embedding_size: Size = 128
    encoder_size: Size = 192  # of each direction
    bidirectional: bool = True
    decoder_size: Size = 256
    attention: Score = "additive"  # score function; "none" means a fixed context vector
    scaled: bool = False  # "dot", "general" and "reduced_rank" scores are divided by the square root of the key width
    # A fixed context vector is an input of every step (Cho et al. 2014). False: it only determines
    # the initial state of the decoder (Sutskever et al. 2014).
    feeds_context: bool = True
    attention_size: Size = 192  # inner width of the "additive" and "concat" scores, rank of "reduced_rank"
    query: Literal["previous", "current"] = "previous"
    input_feeding: bool = False  # the previous attentional vector is an input; needs query "current"
    window: Literal["global", "local-m", "local-p"] = "global"
    window_radius: Size = 10  # D of Luong et al. 2015; ignored without a window
    # "reinforce" and "marginal" are hard attention, trained by REINFORCE or by the exact marginal
    # likelihood.
    selection: Literal["soft", "reinforce", "marginal"] = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention == "dot" and self.decoder_size != self.annotation_size:
            raise ValueError(
                f'attention "dot" needs decoder_size ({self.decoder_size}) to equal the annotation size '
                f"({self.annotation_size}), which is encoder_size, doubled if bidirectional"
            )
        if self.attention == "none" and (self.window, self.selection, self.query) != ("global", "soft", "previous"):
            raise ValueError('attention "none" needs window "global", selection "soft" and query "previous"')
        if self.attention != "none" and not self.feeds_context:
            raise ValueError(f'feeds_context false needs attention "none", got "{self.attention}"')
        if self.scaled and self.attention not in ("dot", "general", "reduced_rank"):
            raise ValueError(f'scaled true needs attention "dot", "general" or "reduced_rank", got "{self.attention}"')
        if self.query == "previous" and (self.input_feeding or self.window != "global"):
            raise ValueError('input_feeding and a window other than "global" need query "current"')
        if self.selection != "soft" and self.window == "local-p":
            raise ValueError(
                'window "local-p" needs selection "soft": its weights sum to less than 1, so no position can be sampled'
            )
        if self.selection == "marginal" and (self.query == "previous" or self.input_feeding):
            raise ValueError(
                'selection "marginal" needs query "current" and no input_feeding: no later state may depend on the '
                "selected position"
            )

    @property
    def annotation_size(self) -> int:
        """Width of an annotation, the encoder's state of one token."""
        return self.encoder_size * (2 if self.bidirectional else 1)

    @property
    def context_size(self) -> int:
        """Width of the context vector that each step of the decoder reads."""
        return self.annotation_size if self.feeds_context else 0


RELEVANCE = "relevance"  # label of a reranker
Pooling = Literal["mean", "first", "last", "max"]


@dataclass(frozen=True)
class PretrainedConfig(ArchitectureConfig):
    """Configuration of a model of transformers, which others trained first.

    The import of its checkpoint determines all fields. `dropout` is that of hidden states, or of
    attention weights if the family has no other. It and the labels may then be changed.
    """

    task: TaskName = "encoder"
    fields: dict[str, Any] = field(default_factory=dict)  # content of config.json
    # Of a classifier, or the only one of a reranker; before a training, empty if the checkpoint is
    # none.
    labels: tuple[str, ...] = ()
    multi_label: bool = False  # a text has any number of labels
    pooling: Pooling = "mean"  # of an encoder: how hidden states become a vector
    chat: dict[str, Any] = field(default_factory=dict)  # fields of the chat template, empty without one
    # Of a translation: the first tokens of each target, such as its language, and the tokenizer of
    # targets, if it differs from that of sources, as the text of its file.
    target_prefix: tuple[int, ...] = ()
    target_tokenizer: str = ""
    type_separators: tuple[int, ...] = ()  # of a reranker with token types: the token that ends type 0

    def __post_init__(self) -> None:
        check_fields(self)
        if max(self.pad_id, self.bos_id, self.eos_id) >= self.vocab_size:
            raise ValueError(
                f"{', '.join(SPECIAL_IDS)} must be less than vocab_size ({self.vocab_size}), got "
                f"{self.pad_id}, {self.bos_id}, {self.eos_id}"
            )
        fewest = 1 if self.task == "reranking" else 2
        if self.labels and len(set(self.labels)) < max(fewest, len(self.labels)):
            raise ValueError(f"labels must be two or more different strings, got {self.labels}")

    @property
    def family(self) -> str:
        """`model_type` of config.json, such as "bert"."""
        return str(self.fields.get("model_type", ""))


def matrix_indices(sharing: str, layer: int) -> tuple[int, int]:
    """Return the indices of a layer's E and F in `Projections.matrices`."""
    first = {"headwise": 2 * layer, "key-value": layer, "layerwise": 0}[sharing]
    return first, first + 1 if sharing == "headwise" else first


# Architectures with their tasks; a third-party model has its own one.
MODELS: Mapping[str, tuple[type[ArchitectureConfig], TaskName | None]] = {
    "transformer": (TransformerConfig, "translation"),
    "recurrent": (RecurrentConfig, "translation"),
    "classifier": (ClassifierConfig, "classification"),
    "tagger": (TaggerConfig, "tagging"),
    "causal": (CausalConfig, "language-model"),
    "encoder": (EncoderConfig, "encoder"),
    "pretrained": (PretrainedConfig, None),
}
OWN_TASKS = tuple(dict.fromkeys(task for _, task in MODELS.values() if task is not None))


def architecture_of(config: ArchitectureConfig) -> str:
    return next(name for name, (kind, _) in MODELS.items() if type(config) is kind)


def task_of(config: ArchitectureConfig) -> TaskName:
    own = MODELS[architecture_of(config)][1]
    return own or cast(PretrainedConfig, config).task


def model_config_to_json(config: ArchitectureConfig) -> str:
    return to_json({"architecture": architecture_of(config), **dataclasses.asdict(config)})


def read_model_config(path: Path) -> ArchitectureConfig:
    """Read what `model_config_to_json` wrote; a `ValueError` names the file and the field."""
    fields = read_fields(path)
    architecture = fields.pop("architecture", "transformer")  # older checkpoints have no such field
    if architecture not in MODELS:
        raise ValueError(f"{path}: architecture must be one of {', '.join(MODELS)}, got {architecture}")
    kind, _ = MODELS[architecture]
    if unknown := fields.keys() - {known.name for known in dataclasses.fields(kind)}:
        raise ValueError(
            f"{path} has unknown fields: {', '.join(sorted(unknown))}; remove them, or use the version of Sightline "
            "that wrote the file"
        )
    if "vocab_size" not in fields:
        raise ValueError(f"{path} lacks the required field vocab_size")
    # JSON has no tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
