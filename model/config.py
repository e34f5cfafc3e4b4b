"""What a model is and how it is trained: frozen settings, checked once, stored beside the weights."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of an encoder-decoder Transformer (Vaswani et al. 2017, table 3 names in brackets).

    The defaults are the paper's base model; `tiny` is the one of Wu et al. 2021 ("Good for Misconceived Reasons").
    """

    vocab_size: int
    d_model: int = 512  # width of every layer [d_model]
    num_heads: int = 8  # [h]
    d_ff: int = 2048  # inner width of the feed-forward layers [d_ff]
    encoder_layers: int = 6  # [N]
    decoder_layers: int = 6  # [N]
    dropout: float = 0.1  # [P_drop]
    max_positions: int = 256  # longest source or target, special tokens included
    pad_id: int = 0
    bos_id: int = 1  # the decoder's start token
    eos_id: int = 2

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_heads", "d_ff", "encoder_layers", "decoder_layers", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads})")
        if self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}; sinusoidal positions need an even width")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}, it must lie in [0, 1)")

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads

    @classmethod
    def tiny(cls, vocab_size: int) -> "TransformerConfig":
        """Transformer-Tiny: 4 + 4 layers, width 128, for corpora of some ten thousand sentences."""
        return cls(vocab_size, d_model=128, num_heads=4, d_ff=256, encoder_layers=4, decoder_layers=4, dropout=0.3)


@dataclass(frozen=True)
class TrainConfig:
    """How to train. The defaults are the Multi30k recipe of Wu et al. 2021 at half its batch."""

    source: str = "en"  # file ending of the source side: train.en, val.en
    target: str = "de"
    vocab_size: int = 6000
    max_epochs: int = 150
    batch_tokens: int = 4096  # padded tokens of the longer side in one batch
    peak_learning_rate: float = 3.5e-3  # the recipe's 5e-3, over sqrt(2) for half the batch
    warmup_steps: int = 2000
    label_smoothing: float = 0.1
    clip_norm: float = 25.0
    patience_epochs: int = 15  # stop after so many epochs without a better validation loss
    average_last: int = 10  # checkpoints averaged for the final weights
    max_length_tokens: int = 128  # longer training pairs are left out
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_epochs", "batch_tokens", "warmup_steps", "patience_epochs", "average_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, it must lie in [0, 1)")
        if self.max_length_tokens > self.batch_tokens:
            raise ValueError(
                f"max_length_tokens ({self.max_length_tokens}) exceeds batch_tokens ({self.batch_tokens}): "
                "a single pair would not fit a batch"
            )


def to_json(config: TransformerConfig | TrainConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def read_transformer_config(path: Path) -> TransformerConfig:
    """Read what `to_json` wrote.

    Raises:
        TypeError: a field is unknown or missing.
        ValueError: a value is out of range.
    """
    return TransformerConfig(**json.loads(path.read_text(encoding="utf-8")))
