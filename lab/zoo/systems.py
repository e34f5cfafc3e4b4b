"""Named systems of the study: model configuration, data and training settings.

The names are options of commands, so this module imports no PyTorch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from lab.zoo.derived import Derived
from lab.zoo.dialogues import CHAT, ChatTemplate
from sightline.model.config import (
    ArchitectureConfig,
    CausalConfig,
    ClassifierConfig,
    RecurrentConfig,
    TransformerConfig,
)
from sightline.model.data.records import TaskName
from sightline.model.training.options import read_options

Settings: TypeAlias = Mapping[str, Any]  # by their names in a configuration file
SETTINGS = Path(__file__).parent / "settings"  # configuration files of `sightline train`


def _settings(name: str, task: TaskName = "translation", **changes: Any) -> Settings:
    """Return the settings in a file, with some changes."""
    return {**read_options(SETTINGS / f"{name}.toml", task).model_dump(exclude_unset=True), **changes}


@dataclass(frozen=True)
class Corpus:
    """Training corpus of a system."""

    name: str
    folder: str  # "" for a corpus that is generated
    license: str  # license of the weights
    limits: str  # of what a model knows, and a model that knows more
    languages: tuple[str, str] | None = None  # ISO 639-1 codes of source and target
    chat: ChatTemplate | None = None
    derived: Derived | None = None  # the corpus is derived from the folder, see `lab.zoo.derived`

    @property
    def data_name(self) -> str:
        """Name of the folder with the data; "" for a corpus that is generated."""
        return f"{self.folder}-{self.derived}" if self.derived else self.folder


MORE = "To get a model that knows more: sightline models get"
CAPTIONS = f"Trained on {{}} of pictures; other sentences come out wrong. {MORE} Helsinki-NLP/opus-mt-en-de".format
MULTI30K_LICENSE = "non-commercial research and education only"
MULTI30K = Corpus("multi30k-en-de", "multi30k", MULTI30K_LICENSE, CAPTIONS("29,000 captions"), ("en", "de"))
SMALL = replace(MULTI30K, derived="small", limits=CAPTIONS("10,000 captions"))
JOINED = replace(MULTI30K, derived="joined", limits=CAPTIONS("5,000 joined captions"))
REVIEWS = "Trained on 6,920 sentences of film reviews; labels of other texts are often wrong."
REVIEWS += f" {MORE} cardiffnlp/twitter-roberta-base-sentiment-latest"
SST2 = Corpus("sst2", "sst2", "research only", REVIEWS, derived="labelled")
PHRASES = "Trained on a few hundred phrases of small talk; replies to other messages are nonsense."
SMALLTALK = Corpus("smalltalk", "", "Apache-2.0", f"{PHRASES} {MORE} smollm2", chat=CHAT)


@dataclass(frozen=True)
class System:
    """Model and its training."""

    description: str
    make_config: Callable[[int], ArchitectureConfig]  # maps the vocabulary size to a configuration
    settings: Settings
    task: TaskName = "translation"
    corpus: Corpus = MULTI30K
    has_ghost_attention: bool = False  # of the dialogues of a chat system
    all_answers: bool = False  # the loss of a chat system includes earlier answers
    num_beams: int = 5  # of the evaluation of translations
    has_diagnostics: bool = False  # the run records sizes of scores and gradients


def _sentiment(vocab_size: int) -> ArchitectureConfig:
    return ClassifierConfig(
        vocab_size,
        positions="none",
        d_model=128,
        num_heads=4,
        d_ff=256,
        encoder_layers=1,
        dropout=0.4,
        word_dropout=0.5,
    )


def _transformer_tiny(vocab_size: int) -> ArchitectureConfig:
    """Model of Wu et al. 2021 ("Good for Misconceived Reasons") for some ten thousand sentences."""
    return TransformerConfig(
        vocab_size, d_model=128, num_heads=4, d_ff=256, encoder_layers=4, decoder_layers=4, dropout=0.3
    )


def _chat_transformer(vocab_size: int) -> ArchitectureConfig:
    """Return a model that is small enough to train on small talk with one thread."""
    return CausalConfig(vocab_size, d_model=128, num_heads=4, d_ff=256, layers=4, dropout=0.0, positions="rotary")


def _tiny(description: str, **changes: Any) -> System:
    """Return Transformer-Tiny with some fields changed and the training of compared systems."""

    def make_config(vocab_size: int) -> ArchitectureConfig:
        return replace(_transformer_tiny(vocab_size), **changes)

    return System(description, make_config, _settings("compared", learning_rate=2.5e-3))


def _recurrent(description: str, **sizes: Any) -> System:
    def make_config(vocab_size: int) -> ArchitectureConfig:
        return RecurrentConfig(vocab_size, dropout=0.3, **sizes)

    return System(description, make_config, _settings("compared"))


def _luong(description: str, attention: str, input_feeding: bool = True, **others: Any) -> System:
    return _recurrent(
        description, attention=attention, query="current", input_feeding=input_feeding, decoder_size=384, **others
    )


def _without_smoothing(system: System) -> System:
    return replace(system, settings={**system.settings, "label_smoothing": 0.0})


def _chat(description: str, **dialogues: bool) -> System:
    settings = _settings("chat", "language-model")
    return System(description, _chat_transformer, settings, "language-model", SMALLTALK, **dialogues)


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


def _small(system: System, corpus: Corpus = SMALL, **changes: Any) -> System:
    """Return a system in the small setting, with some fields of its model changed. A Transformer
    has two layers in encoder and decoder. The states of a recurrent system are smaller.
    """

    def make_config(vocab_size: int) -> ArchitectureConfig:
        config = system.make_config(vocab_size)
        if isinstance(config, TransformerConfig):
            sizes = {"encoder_layers": 2, "decoder_layers": 2}
        else:
            sizes = {"encoder_size": 128, "decoder_size": 256}
        return replace(config, **{**sizes, **changes})

    settings = dict(_settings("small" if corpus is SMALL else "joined"))
    settings |= {name: system.settings[name] for name in ("learning_rate", "label_smoothing")}
    return replace(
        system,
        make_config=make_config,
        settings=settings,
        corpus=corpus,
        num_beams=1,  # beams would take as long as a third of the training
        has_diagnostics=True,
    )


_INITIAL_STATE = _recurrent(
    "GRU whose initial state is all that it knows of the source (Sutskever et al. 2014)",
    attention="none",
    feeds_context=False,
)
# So that it has as many parameters as with the context vector as an input of every step.
_INITIAL_STATE_SIZE = 336
_LOCAL_P = _luong(
    "GRU with a predicted attention window, local-p (Luong et al. 2015)", "general", window="local-p", window_radius=5
)
_LINFORMER = _tiny(
    "Transformer with a linear encoder (Wang et al. 2020)",
    encoder_attention="linformer",
    linformer_size=32,
    max_positions=128,
)
_WITHOUT_FEEDING = _luong("GRU with general attention without input feeding", "general", input_feeding=False)


def _with(description: str, system: System, **changes: Any) -> System:
    return _small(replace(system, description=description), **changes)


CHATS: Mapping[str, System] = {
    "chat-gatt": _chat(
        "Causal Transformer that chats, with Ghost Attention (Touvron et al. 2023)", has_ghost_attention=True
    ),
    "chat-baseline": _chat("Causal Transformer that chats, without Ghost Attention"),
    "chat-gatt-all-answers": _chat(
        "Causal Transformer that chats, with Ghost Attention, whose loss includes earlier answers",
        has_ghost_attention=True,
        all_answers=True,
    ),
}
SYSTEMS: Mapping[str, System] = {
    "transformer": System("Transformer-Tiny (Wu et al. 2021)", _transformer_tiny, _settings("transformer")),
    "transformer-base": System("Transformer base (Vaswani et al. 2017)", TransformerConfig, _settings("transformer")),
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
    "luong-local-p": _LOCAL_P,
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
    "linformer": _LINFORMER,
    "sentiment": System(
        "Transformer encoder that classifies film reviews",
        _sentiment,
        _settings("sentiment", "classification"),
        "classification",
        SST2,
    ),
    **CHATS,
}


# Systems of the small setting by group. Each group answers one question of the study.
SMALL_GROUPS: Mapping[str, Mapping[str, System]] = {
    "context": {
        "small-bahdanau": _small(COMPARED["bahdanau"]),
        "small-fixed-context": _small(COMPARED["fixed-context"]),
        "small-initial-state": _small(_INITIAL_STATE, decoder_size=_INITIAL_STATE_SIZE),
    },
    "order": {
        f"small-positions-{kind}": _with(f"Transformer, positions: {kind}", COMPARED["post-norm"], positions=kind)
        for kind in ("none", "sinusoidal", "learned", "relative", "alibi", "rotary")
    },
    "scale": {
        "small-unscaled": _with(
            "Transformer whose scores are not divided by the root of the width", COMPARED["post-norm"], scaled=False
        ),
        "small-dot": _small(SYSTEMS["luong-dot"]),
        "small-dot-scaled": _small(SYSTEMS["luong-dot"], scaled=True),
        "small-general": _small(COMPARED["luong-general"]),
        "small-general-scaled": _small(COMPARED["luong-general"], scaled=True),
    },
    "depth": {
        f"small-depth-{depth}{suffix}": _with(
            f"Transformer with {depth} layers{' without residual connections' if suffix else ''}",
            COMPARED["post-norm"],
            encoder_layers=depth,
            decoder_layers=depth,
            residual=not suffix,
        )
        for depth in (1, 2, 4, 6)
        for suffix in ("", "-no-residual")
        if (depth, suffix) != (2, "")  # small-positions-sinusoidal
    },
    "long": {
        "joined-fixed-context": _small(COMPARED["fixed-context"], JOINED),
        "joined-initial-state": _small(_INITIAL_STATE, JOINED, decoder_size=_INITIAL_STATE_SIZE),
        "joined-bahdanau": _small(COMPARED["bahdanau"], JOINED),
        "joined-luong-local-p": _small(_LOCAL_P, JOINED),
        "joined-post-norm": _small(COMPARED["post-norm"], JOINED),
        "joined-linformer": _small(_LINFORMER, JOINED, max_positions=160),
    },
    "controls": {
        "small-without-feeding": _small(_WITHOUT_FEEDING),
        "small-hard-reinforce": _small(SYSTEMS["hard-reinforce"]),
        "small-hard-marginal": _small(SYSTEMS["hard-marginal"]),
        "small-without-feeding-smoothing": _small(_without_smoothing(_WITHOUT_FEEDING)),
        "small-luong-local-p": _small(_LOCAL_P),
        "small-luong-local-m": _small(SYSTEMS["luong-local-m"]),
        "small-luong-location": _small(SYSTEMS["luong-location"]),
        "small-luong-concat": _small(SYSTEMS["luong-concat"]),
        "small-multiplicative": _small(SYSTEMS["multiplicative"]),
        "small-reduced-rank": _small(SYSTEMS["reduced-rank"]),
        "small-causal-encoder": _with(
            "Transformer whose source tokens attend to no later ones", COMPARED["post-norm"], causal_encoder=True
        ),
        "small-pre-norm": _small(SYSTEMS["pre-norm"]),
        "small-single-head": _small(SYSTEMS["single-head"]),
        "small-single-head-without-weights": _small(SYSTEMS["single-head-without-weights"]),
        "small-linformer": _small(_LINFORMER),
    },
}
SYSTEMS = {**SYSTEMS, **{name: system for group in SMALL_GROUPS.values() for name, system in group.items()}}


@dataclass(frozen=True)
class RunPlan:
    """Number and length of the runs that `python -m lab.zoo train` trains of a system."""

    seeds: int
    epochs: int
    group: str = "zoo"


def _plan(name: str, seeds: int, group: str = "zoo") -> RunPlan:
    """Return a plan with the number of epochs in the settings of a system."""
    return RunPlan(seeds, int(SYSTEMS[name].settings["epochs"]), group)


_COMPARISON, _ABLATION = RunPlan(seeds=3, epochs=24), RunPlan(seeds=1, epochs=12)
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
    "hard-marginal": RunPlan(seeds=1, epochs=6),  # slow: each update computes logits for every source position
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
    "sentiment": _plan("sentiment", seeds=1),
    "transformer": RunPlan(seeds=1, epochs=72),  # the shipped model; the longest run
    **{name: _plan(name, seeds=3, group="ghost-attention") for name in CHATS},
    **{name: _plan(name, seeds=3, group=group) for group, systems in SMALL_GROUPS.items() for name in systems},
}
GROUPS = tuple(dict.fromkeys(plan.group for plan in PLAN.values()))


def bundle_name(name: str) -> str:
    """Return the name under which a system is served."""
    return f"{SYSTEMS[name].corpus.name}-{name}"
