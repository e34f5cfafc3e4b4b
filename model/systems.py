"""Named systems that Sightline trains: model configuration, task and training settings.

The names are options of commands, so this module imports no PyTorch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from model.config import CausalConfig, ClassifierConfig, ModelConfig, RecurrentConfig, TransformerConfig
from model.data.dialogues import CHAT, ChatTemplate

if TYPE_CHECKING:
    from model.training.task import Task

TaskName = Literal["translation", "classification", "chat", "ghost-attention"]

# Settings of all systems that are compared with each other: the same batches and number of updates,
# and the strong gradient clipping that recurrent models need. Only the peak learning rate depends
# on the architecture.
_SHARED: Mapping[str, Any] = {
    "max_epochs": 24,
    "batch_tokens": 2000,
    "warmup_steps": 800,
    "clip_norm": 1.0,
    "patience_epochs": 6,
    "average_last": 5,
}
RECURRENT_TRAINING: Mapping[str, Any] = {**_SHARED, "peak_learning_rate": 2e-3}
TRANSFORMER_TRAINING: Mapping[str, Any] = {**_SHARED, "peak_learning_rate": 2.5e-3}

# A corpus of some thousand sentences is quickly memorized: train for few epochs with small batches,
# and average most of the epochs.
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
class Corpus:
    """Training corpus of a system."""

    name: str
    folder: str  # "" for a corpus that is generated
    license: str  # license of the weights
    languages: tuple[str, str] | None = None  # ISO 639-1 codes of source and target
    chat: ChatTemplate | None = None


MULTI30K = Corpus("multi30k-en-de", "multi30k", "non-commercial research and education only", languages=("en", "de"))
SST2 = Corpus("sst2", "sst2", "research only")
SMALLTALK = Corpus("smalltalk", "", "Apache-2.0", chat=CHAT)


@dataclass(frozen=True)
class System:
    """Model and its training."""

    description: str
    make_config: Callable[[int], ModelConfig]  # maps the vocabulary size to a configuration
    training: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig that differ from the defaults
    task_name: TaskName = "translation"
    corpus: Corpus = MULTI30K

    @property
    def task(self) -> "Task[Any, Any]":
        """The task, whose losses need PyTorch."""
        from model.training.tasks import TASKS

        return TASKS[self.task_name]


def _sentiment(vocab_size: int) -> ModelConfig:
    return ClassifierConfig(
        vocab_size, d_model=128, num_heads=4, d_ff=256, encoder_layers=2, dropout=0.4, word_dropout=0.5
    )


def _tiny(description: str, **changes: Any) -> System:
    """Return Transformer-Tiny with some fields changed and the training of compared systems."""

    def make_config(vocab_size: int) -> ModelConfig:
        return replace(TransformerConfig.tiny(vocab_size), **changes)

    return System(description, make_config, TRANSFORMER_TRAINING)


def _recurrent(description: str, **sizes: Any) -> System:
    def make_config(vocab_size: int) -> ModelConfig:
        return RecurrentConfig(vocab_size, dropout=0.3, **sizes)

    return System(description, make_config, RECURRENT_TRAINING)


def _luong(description: str, attention: str, input_feeding: bool = True, **others: Any) -> System:
    return _recurrent(
        description, attention=attention, query="current", input_feeding=input_feeding, decoder_size=384, **others
    )


def _without_smoothing(system: System) -> System:
    return replace(system, training={**system.training, "label_smoothing": 0.0})


def _chat(description: str, task: TaskName) -> System:
    return System(description, CausalConfig.chat, CHAT_TRAINING, task, SMALLTALK)


# Systems that are compared with each other; their numbers of parameters differ by at most a tenth.
COMPARED: Mapping[str, System] = {
    "fixed-context": _recurrent("GRU with a fixed context vector (Cho et al. 2014)", attention="none"),
    "bahdanau": _recurrent("GRU with additive attention (Bahdanau et al. 2015)"),
    "luong-general": _luong("GRU with general attention and input feeding (Luong et al. 2015)", "general"),
    "post-norm": _tiny("Transformer-Tiny, trained like the recurrent systems (Vaswani et al. 2017)"),
}
# The same systems, trained for as long as the ablations.
SHORT: Mapping[str, System] = {
    f"{name}-short": replace(system, description=f"{system.description}, trained half as long")
    for name, system in COMPARED.items()
}

SYSTEMS: Mapping[str, System] = {
    "transformer": System("Transformer-Tiny (Wu et al. 2021)", TransformerConfig.tiny),
    "transformer-base": System("Transformer base (Vaswani et al. 2017)", TransformerConfig),
    **COMPARED,
    **SHORT,
    # Ablations: each changes one thing of a short system; those with hard attention change two or
    # three.
    "luong-dot": _luong("GRU with dot attention (Luong et al. 2015)", "dot"),
    "luong-concat": _luong("GRU with concat attention (Luong et al. 2015)", "concat"),
    "luong-location": _luong("GRU with location attention (Luong et al. 2015)", "location"),
    "luong-local-m": _luong(
        "GRU with a monotonic attention window, local-m (Luong et al. 2015)",
        "general",
        window="local-m",
        window_radius=3,
    ),
    "luong-local-p": _luong(
        "GRU with a predicted attention window, local-p (Luong et al. 2015)",
        "general",
        window="local-p",
        window_radius=5,
    ),
    "multiplicative": _recurrent("Bahdanau's decoder with a bilinear score (Luong et al. 2015)", attention="general"),
    "reduced-rank": _recurrent(
        "Bahdanau's decoder with a bilinear score of rank 32", attention="reduced_rank", attention_size=32
    ),
    "hard-reinforce": _luong(
        "GRU with hard attention trained by REINFORCE (Xu et al. 2015)",
        "general",
        input_feeding=False,
        selection="reinforce",
    ),
    "hard-marginal": _without_smoothing(
        _luong(
            "GRU with hard attention trained by its exact marginal likelihood (Deng et al. 2018)",
            "general",
            input_feeding=False,
            selection="marginal",
        )
    ),
    "pre-norm": _tiny("Pre-norm Transformer (Xiong et al. 2020)", pre_norm=True),
    "single-head": _tiny("Transformer with a single-head encoder", encoder_attention="single-head"),
    "single-head-without-weights": _tiny(
        "Transformer whose encoder attention has no parameters", encoder_attention="single-head-without-weights"
    ),
    "linformer": _tiny(
        "Transformer with a linear encoder (Wang et al. 2020)",
        encoder_attention="linformer",
        linformer_size=32,
        max_positions=128,
    ),
    "sentiment": System(
        "Transformer encoder that classifies film reviews", _sentiment, SENTIMENT_TRAINING, "classification", SST2
    ),
    "chat-gatt": _chat("Causal Transformer that chats, with Ghost Attention (Touvron et al. 2023)", "ghost-attention"),
    "chat-baseline": _chat("Causal Transformer that chats, without Ghost Attention", "chat"),
}


@dataclass(frozen=True)
class RunPlan:
    """Number and length of the runs that `python -m model zoo` trains of a system."""

    seeds: int
    max_epochs: int


_COMPARISON, _ABLATION = RunPlan(seeds=3, max_epochs=24), RunPlan(seeds=1, max_epochs=12)
# In training order.
PLAN: Mapping[str, RunPlan] = {
    "bahdanau": _COMPARISON,
    "fixed-context": _COMPARISON,
    "luong-general": _COMPARISON,
    "post-norm": _COMPARISON,
    "bahdanau-short": _ABLATION,
    "luong-general-short": _ABLATION,
    "post-norm-short": _ABLATION,
    "fixed-context-short": _ABLATION,
    "luong-local-p": _ABLATION,
    "hard-marginal": RunPlan(seeds=1, max_epochs=6),  # slow: each update computes logits for every source position
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
    "sentiment": RunPlan(seeds=1, max_epochs=SENTIMENT_TRAINING["max_epochs"]),
    "chat-gatt": RunPlan(seeds=1, max_epochs=CHAT_TRAINING["max_epochs"]),
    "chat-baseline": RunPlan(seeds=1, max_epochs=CHAT_TRAINING["max_epochs"]),
    "transformer": RunPlan(seeds=1, max_epochs=72),  # the shipped model; the longest run
}


def bundle_name(name: str) -> str:
    """Return the name under which a system is served."""
    return f"{SYSTEMS[name].corpus.name}-{name}"
