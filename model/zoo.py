"""Every system that Sightline trains, by name: one configuration and what its training does otherwise than the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model.chat import chat_task
from model.classification import CLASSIFICATION
from model.config import CausalConfig, ClassifierConfig, ModelConfig, RecurrentConfig, TransformerConfig
from model.task import Task
from model.translation import TRANSLATION

# What compared systems share: as many updates an epoch, over the same batches, gradients clipped hard as recurrent ones
# need it. Only the peak rate is each family's own.
_COMPARED: Mapping[str, Any] = {
    "max_epochs": 20,
    "batch_tokens": 2000,
    "warmup_steps": 800,
    "clip_norm": 1.0,
    "patience_epochs": 6,
    "average_last": 5,
}
RECURRENT_TRAINING: Mapping[str, Any] = {**_COMPARED, "peak_learning_rate": 2e-3}
SHORT_TRAINING: Mapping[str, Any] = {**_COMPARED, "peak_learning_rate": 2.5e-3}  # of Transformers


# Some thousand sentences are soon learnt by heart: few epochs of small batches, and the mean of most of them.
SENTIMENT_TRAINING: Mapping[str, Any] = {
    "vocab_size": 8000,
    "max_epochs": 12,
    "batch_tokens": 700,
    "peak_learning_rate": 1e-3,
    "warmup_steps": 400,
    "clip_norm": 1.0,
    "patience_epochs": 12,
    "average_last": 8,
}


CHAT_TRAINING: Mapping[str, Any] = {
    "vocab_size": 1500,
    "max_epochs": 4,
    "batch_tokens": 2048,
    "peak_learning_rate": 2e-3,
    "warmup_steps": 300,
    "label_smoothing": 0.0,
    "clip_norm": 1.0,
    "patience_epochs": 4,
    "average_last": 3,
    "max_length_tokens": 768,
}


@dataclass(frozen=True)
class System:
    """A model and its training."""

    make_config: Callable[[int], ModelConfig]  # from the size of the vocabulary
    training: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig that differ from its defaults
    task: Task[Any, Any, Any] = TRANSLATION


def _sentiment(vocab_size: int) -> ModelConfig:
    return ClassifierConfig(
        vocab_size, d_model=128, num_heads=4, d_ff=256, encoder_layers=2, dropout=0.4, word_dropout=0.5
    )


def _tiny(**changes: Any) -> System:
    """Transformer-Tiny with some of its fields changed, trained as briefly as the recurrent systems."""
    return System(lambda vocab_size: replace(TransformerConfig.tiny(vocab_size), **changes), SHORT_TRAINING)


def _recurrent(**sizes: Any) -> System:
    def make_config(vocab_size: int) -> ModelConfig:
        return RecurrentConfig(vocab_size, dropout=0.3, **sizes)

    return System(make_config, RECURRENT_TRAINING)


def _bahdanau(attention: str = "additive", **sizes: Any) -> System:
    return _recurrent(attention=attention, **sizes)


def _luong(attention: str, input_feeding: bool = True, **sizes: Any) -> System:
    sizes = {"decoder_size": 384, **sizes}
    return _recurrent(attention=attention, query="current", input_feeding=input_feeding, **sizes)


SYSTEMS: Mapping[str, System] = {
    "transformer": System(TransformerConfig.tiny),
    "transformer-base": System(TransformerConfig),
    # Compared with one another: their parameters are within a tenth.
    "post-norm": _tiny(),
    "fixed-context": _recurrent(attention="none"),
    "bahdanau": _bahdanau(),
    "luong-general": _luong("general"),
    # One change each.
    "luong-dot": _luong("dot"),
    "luong-concat": _luong("concat"),
    "luong-location": _luong("location"),
    "luong-local-m": _luong("general", window="local-m", window_radius=3),
    "luong-local-p": _luong("general", window="local-p", window_radius=3),
    "multiplicative": _bahdanau("general"),
    "reduced-rank": _bahdanau("reduced_rank", attention_size=32),
    "hard-reinforce": _luong("general", input_feeding=False, selection="reinforce"),
    "hard-marginal": _luong("general", input_feeding=False, selection="marginal"),
    "pre-norm": _tiny(pre_norm=True),
    "single-head": _tiny(encoder_attention="single-head"),
    "single-head-without-weights": _tiny(encoder_attention="single-head-without-weights"),
    "linformer": _tiny(encoder_attention="linformer", linformer_size=32, max_positions=128),
    "sentiment": System(_sentiment, SENTIMENT_TRAINING, CLASSIFICATION),
    "chat-gatt": System(CausalConfig.chat, CHAT_TRAINING, chat_task(has_ghost_attention=True)),
    "chat-baseline": System(CausalConfig.chat, CHAT_TRAINING, chat_task(has_ghost_attention=False)),
}


@dataclass(frozen=True)
class Planned:
    """How often and how long `python -m model zoo` trains a system."""

    seeds: int
    max_epochs: int


_COMPARISON, _ABLATION = Planned(seeds=3, max_epochs=20), Planned(seeds=1, max_epochs=12)
# In the order in which they are trained.
PLAN: Mapping[str, Planned] = {
    "bahdanau": _COMPARISON,
    "fixed-context": _COMPARISON,
    "luong-general": _COMPARISON,
    "post-norm": _COMPARISON,
    "luong-local-p": _ABLATION,
    "hard-marginal": _ABLATION,
    "linformer": _ABLATION,
    "single-head": _ABLATION,
    "pre-norm": _ABLATION,
    "single-head-without-weights": _ABLATION,
    "hard-reinforce": _ABLATION,
    "multiplicative": _ABLATION,
    "reduced-rank": _ABLATION,
    "luong-dot": _ABLATION,
    "luong-concat": _ABLATION,
    "luong-location": _ABLATION,
    "luong-local-m": _ABLATION,
}
