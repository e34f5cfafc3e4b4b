"""Configurations of models: frozen, checked when they are made, and stored beside the weights."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from model.fields import Probability, Size, TokenId, check_fields, from_fields, read_fields, to_json

# Fields that the tokenizer decides, see `model.data.tokenizer`.
SPECIAL_IDS = ("pad_id", "bos_id", "eos_id")


@dataclass(frozen=True)
class ModelConfig:
    """What every model has."""

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
                f"{', '.join(SPECIAL_IDS)} are {', '.join(map(str, ids))}, they must differ and lie below vocab_size "
                f"({self.vocab_size})"
            )


@dataclass(frozen=True)
class StackConfig(ModelConfig):
    """Sizes of layers of self-attention (Vaswani et al. 2017, table 3 names in brackets)."""

    d_model: Size = 512  # width of every layer [d_model]
    num_heads: Size = 8  # [h]
    d_ff: Size = 2048  # inner width of the feed-forward layers [d_ff]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads})")
        if self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}; sinusoidal positions need an even width")

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads


EncoderAttention = Literal["multi-head", "single-head", "single-head-without-weights", "linformer"]
Sharing = Literal["headwise", "key-value", "layerwise"]


@dataclass(frozen=True)
class TransformerConfig(StackConfig):
    """Sizes of an encoder-decoder Transformer.

    The defaults are the paper's base model; `tiny` is the one of Wu et al. 2021 ("Good for Misconceived Reasons").
    """

    encoder_layers: Size = 6  # [N]
    decoder_layers: Size = 6  # [N]
    pre_norm: bool = False  # x + Sublayer(LayerNorm(x)) instead of LayerNorm(x + Sublayer(x))
    encoder_attention: EncoderAttention = "multi-head"  # the decoder's is always multi-head
    linformer_size: Size = 128  # slots that the source is projected to [k of Wang et al. 2020]
    linformer_sharing: Sharing = "layerwise"  # of the projections, see `model.layers.linformer`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder_attention == "linformer" and self.linformer_size > self.max_positions:
            raise ValueError(
                f"linformer_size ({self.linformer_size}) exceeds max_positions ({self.max_positions}): "
                "there would be more slots than tokens"
            )

    @property
    def encoder_heads(self) -> int:
        return self.num_heads if self.encoder_attention in ("multi-head", "linformer") else 1

    @classmethod
    def tiny(cls, vocab_size: int) -> "TransformerConfig":
        """Transformer-Tiny: 4 + 4 layers, width 128, for corpora of some ten thousand sentences."""
        return cls(vocab_size, d_model=128, num_heads=4, d_ff=256, encoder_layers=4, decoder_layers=4, dropout=0.3)


@dataclass(frozen=True)
class ClassifierConfig(StackConfig):
    """A Transformer encoder that chooses one of several labels."""

    encoder_layers: Size = 2
    word_dropout: Probability = 0.0  # probability that a token is left out in training
    labels: tuple[str, ...] = ("negative", "positive")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError(f"labels are {self.labels}; a classifier needs two or more that differ")


@dataclass(frozen=True)
class CausalConfig(StackConfig):
    """A decoder alone, which reads a text and goes on with it."""

    layers: Size = 4
    max_positions: Size = 1024  # of what is read and what is written together

    @classmethod
    def chat(cls, vocab_size: int) -> "CausalConfig":
        """Small enough to learn small talk on one thread."""
        return cls(vocab_size, d_model=128, num_heads=4, d_ff=256, layers=4, dropout=0.0)


Score = Literal["none", "additive", "dot", "general", "concat", "location", "reduced_rank"]


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """A recurrent encoder-decoder: with a fixed context vector, or with one of the classic attentions.

    With `query` "previous" the decoder attends before its state changes (Bahdanau et al. 2015), with "current" after
    (Luong et al. 2015).
    """

    cell: Literal["gru", "lstm"] = "gru"
    embedding_size: Size = 128
    encoder_size: Size = 192  # of each direction
    bidirectional: bool = True
    decoder_size: Size = 256
    attention: Score = "additive"  # the score; "none" is the fixed context vector
    attention_size: Size = 192  # inner width of the scores that have one; the rank of "reduced_rank"
    query: Literal["previous", "current"] = "previous"
    input_feeding: bool = False  # the last attentional vector is part of the next input; with "current"
    window: Literal["global", "local-m", "local-p"] = "global"
    window_radius: Size = 10  # D; read only with a window
    selection: Literal["soft", "reinforce", "marginal"] = (
        "soft"  # the last two are hard attention, by how it is trained
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention == "dot" and self.decoder_size != self.annotation_size:
            raise ValueError(f"dot needs states as wide as annotations: {self.decoder_size} and {self.annotation_size}")
        if self.attention == "none" and (self.window, self.selection, self.query) != ("global", "soft", "previous"):
            raise ValueError("a fixed context vector has no query, no window and nothing to select")
        if self.query == "previous" and (self.input_feeding or self.window != "global"):
            raise ValueError("input feeding and windows go with the current state as the query")
        if self.selection != "soft" and self.window == "local-p":
            raise ValueError("the weights of local-p sum to less than 1: no position can be drawn from them")
        if self.selection == "marginal" and (self.query == "previous" or self.input_feeding):
            raise ValueError("only where no later state depends on what was selected can a step be marginalised alone")

    @property
    def annotation_size(self) -> int:
        """Width of what the encoder says of each token."""
        return self.encoder_size * (2 if self.bidirectional else 1)


Config = TypeVar("Config", bound=ModelConfig)


def with_fields(config: Config, changes: Mapping[str, str]) -> Config:
    """A configuration with some fields changed, which are given as text.

    Raises:
        ValueError: there is no such field, or it cannot have that value.
    """
    # The tokenizer decides the vocabulary's size and the special tokens' ids, the data decides the labels.
    fields = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in ("vocab_size", *SPECIAL_IDS) and not isinstance(value, tuple)
    }
    return dataclasses.replace(config, **{name: _read(name, text, fields) for name, text in changes.items()})


def _read(name: str, text: str, fields: Mapping[str, Any]) -> Any:
    """A field's value, of the type that it has now."""
    if name not in fields:
        raise ValueError(f"this model has no field {name} to set; it has {', '.join(fields)}")
    kind = type(fields[name])
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {text}, it must be {'true or false' if kind is bool else kind.__name__}") from None


MODELS: dict[str, type[ModelConfig]] = {
    "transformer": TransformerConfig,
    "recurrent": RecurrentConfig,
    "classifier": ClassifierConfig,
    "causal": CausalConfig,
}


def architecture_of(config: ModelConfig) -> str:
    return next(name for name, kind in MODELS.items() if type(config) is kind)


def model_config_to_json(config: ModelConfig) -> str:
    return to_json({"architecture": architecture_of(config), **dataclasses.asdict(config)})


def read_model_config(path: Path) -> ModelConfig:
    """Read what `model_config_to_json` wrote.

    Raises:
        ValueError: the file is not such a record, a field is unknown or missing, a value is not allowed, or there is no
            such architecture; the message names the file and the field.
    """
    fields = read_fields(path)
    architecture = fields.pop("architecture", "transformer")  # checkpoints of old say nothing
    if architecture not in MODELS:
        raise ValueError(f"{path}: there is no architecture {architecture}; there are {', '.join(MODELS)}")
    # JSON has lists alone.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return from_fields(MODELS[architecture], values, path)
