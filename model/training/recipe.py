"""Settings of a training that fit the data. This module needs no PyTorch.

The rules come from the experiments in docs/research/training.md. They have two parts: the size of
the vocabulary, which is needed before the data are encoded, and everything else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from sightline.model.config import (
    ArchitectureConfig,
    CausalConfig,
    ClassifierConfig,
    EncoderConfig,
    PretrainedConfig,
    TaggerConfig,
    TransformerConfig,
)
from sightline.model.data.records import TRUNCATED_TASKS, TaskName
from sightline.model.training.options import LABEL_SMOOTHING, Size, TrainConfig, goal_of, make_config

if TYPE_CHECKING:
    from sightline.model.data.facts import Facts

SIZES: tuple[Size, ...] = get_args(Size)
# Initial weights: random, of a run, of a third-party checkpoint.
Start: TypeAlias = Literal["random", "run", "checkpoint"]

MIN_POSITIONS = 128
_POSITIONS_STEP = 64  # positions of a model are a multiple of it

# Rules for the vocabulary: tokens for the square root of the characters of train.
_TOKENS_PER_ROOT = 3.7
_VOCABULARY = (500, 16_000)

# Numbers of examples up to which a size is chosen.
_TINY_EXAMPLES, _SMALL_EXAMPLES = 50_000, 1_000_000
_MOST_EXAMPLES: Mapping[Size, float] = {"tiny": _TINY_EXAMPLES, "small": _SMALL_EXAMPLES, "base": math.inf}
_WIDTHS: Mapping[Size, int] = {"tiny": 128, "small": 256, "base": 512}
_HEADS: Mapping[Size, int] = {"tiny": 4, "small": 4, "base": 8}
_LEARNING_RATES: Mapping[Size, float] = {"tiny": 3e-3, "small": 1.5e-3, "base": 7e-4}
# Layers of the encoder and of the decoder, or of the only stack.
_LAYERS: Mapping[TaskName, Mapping[Size, int]] = {
    "translation": {"tiny": 2, "small": 4, "base": 6},
    "classification": {"tiny": 1, "small": 4, "base": 6},
    "tagging": {"tiny": 2, "small": 4, "base": 6},
    "encoder": {"tiny": 2, "small": 4, "base": 6},
    "language-model": {"tiny": 4, "small": 6, "base": 8},
}

# Rules for the updates. Batches are so small that an epoch has some updates, within limits.
_UPDATES_PER_EPOCH = 60
_BATCH_TOKENS = (512, 4096)
# Total updates of 300 examples; they grow with the power of the number of examples.
_UPDATES: Mapping[TaskName, float] = {"translation": 900, "language-model": 900}  # other tasks: 600
_UPDATES_POWER = 0.25
_EPOCHS = (3, 100)
_WARMUP_SHARE = 0.1  # of all updates
_WARMUP_STEPS = (10, 1_000)
_UPDATES_PER_VALIDATION, _VALIDATIONS = 200, 10  # validations of a run, if an epoch has no more updates
_PATIENCE_VALIDATIONS = 5
_AVERAGED_SHARE = 0.1  # of all epochs
_AVERAGED = (1, 10)

# A new classifier has one target for each text, and starts with log-count ratios, so that it is
# soon good and soon overfits: batches of at most some texts of mean length, small steps, and the
# mean of most epochs.
_CLASSIFIER_TEXTS = 32
_CLASSIFIER_RATE = 1 / 3  # of the learning rates of other tasks
_CLASSIFIER_AVERAGED_SHARE = 0.7

# Weights of a run or of a third-party checkpoint need smaller steps, and fewer. How many a
# checkpoint needs depends on how far the data are from those that it has read: the dev loss decides
# it, within a maximum.
_START_LEARNING_RATES: Mapping[TaskName, float] = {
    "classification": 5e-5,
    "encoder": 3e-5,
    "reranking": 5e-5,
    "language-model": 3e-5,
    "translation": 5e-5,
    "tagging": 1e-4,
}
_LORA_RATE = 10  # times the learning rate of all weights
_START_UPDATES: Mapping[Start, float] = {"random": 1.0, "run": 0.3, "checkpoint": 0.9}  # of those from random weights
_CHECKPOINT_EPOCHS, _CHECKPOINT_PATIENCE_VALIDATIONS = (2, 30), 3


@dataclass(frozen=True)
class Recipe:
    """Settings of a run, its model, and why they were chosen."""

    config: TrainConfig
    model: ArchitectureConfig
    reasons: tuple[str, ...]  # one line for each choice


def choose_vocabulary(facts: "Facts") -> tuple[int, str]:
    """Return the number of tokens of the tokenizer to train, and why."""
    characters = num_characters(facts)
    size = _within(_VOCABULARY, round(_TOKENS_PER_ROOT * math.sqrt(characters), -2))
    return size, f"vocabulary of {size:,} tokens, for {characters:,} characters of train"


def num_characters(facts: "Facts") -> int:
    """Return the number of characters of train, or of pairs a slightly larger number."""
    sides = 2 if facts.task in ("translation", "encoder", "reranking") else 1
    return sides * facts.characters["train"].total


def choose(
    facts: "Facts",
    vocabulary: Mapping[str, int],
    given: Mapping[str, Any],
    model: ArchitectureConfig | None = None,
    updates_in_time: int | None = None,
) -> Recipe:
    """Choose the settings of a run and its model.

    Args:
        vocabulary: fields of the model that the tokenizer determines, see
            `sightline.model.data.tokenizer_training.token_fields`.
        given: options of the user by their names, without those that the data decide.
        model: the model of the checkpoint that the run starts from, if there is one.
        updates_in_time: updates after which the time of the run ends, if it is limited. A shorter
            run has a shorter warm-up and more frequent validations; its epochs are not limited.

    Raises:
        UsageError: given values contradict each other; the message names them.
    """
    reasons = list[str]()
    start: Start = "random"
    if given.get("from_"):
        start = "checkpoint" if isinstance(model, PretrainedConfig) else "run"
    if model is None:
        model = _choose_model(facts, vocabulary, given, reasons)
    config = _choose_training(facts, model, given, start, updates_in_time, reasons)
    return Recipe(config, model, tuple(reasons))


def dropout_of(task: TaskName, num_examples: int) -> float:
    """Return the dropout of a model for a number of examples of train."""
    if task == "language-model":
        return 0.1 if num_examples <= _SMALL_EXAMPLES else 0.0
    if num_examples <= 2 * _TINY_EXAMPLES:
        return 0.4 if task == "classification" else 0.3
    return 0.2 if num_examples <= _SMALL_EXAMPLES else 0.1


def _longest(facts: "Facts") -> int:
    return max(lengths.longest for lengths in facts.tokens.values())


def _needed_positions(facts: "Facts") -> int:
    return max(MIN_POSITIONS, math.ceil(_longest(facts) / _POSITIONS_STEP) * _POSITIONS_STEP)


def _choose_model(
    facts: "Facts",
    vocabulary: Mapping[str, int],
    given: Mapping[str, Any],
    reasons: list[str],
) -> ArchitectureConfig:
    task, num_examples = facts.task, facts.examples["train"]
    size, dropout = given.get("size"), given.get("dropout")
    if task in TRUNCATED_TASKS:
        positions, reason = facts.max_length_tokens, "longer texts are truncated, in the service too"
    else:
        positions, reason = _needed_positions(facts), f"the longest example has {_longest(facts)} tokens"
    if size is None:
        size = next(size for size, most in _MOST_EXAMPLES.items() if num_examples <= most)
        reasons.append(f"model size {size}, for {num_examples:,} examples of train")
    if dropout is None:
        dropout = dropout_of(task, num_examples)
        reasons.append(f"dropout {dropout:g}, for {num_examples:,} examples of train")
    reasons.append(f"{positions} positions, because {reason}")
    width, layers = _WIDTHS[size], _LAYERS[task][size]
    shared: dict[str, Any] = {
        **vocabulary,
        "dropout": dropout,
        "max_positions": positions,
        "d_model": width,
        "num_heads": _HEADS[size],
        "d_ff": (4 if size == "base" else 2) * width,
    }
    if task == "translation":
        decoder = given.get("decoder", "transformer")
        decoder_layers = min(2, layers // 2) if decoder == "ssru" else layers
        return TransformerConfig(**shared, encoder_layers=layers, decoder=decoder, decoder_layers=decoder_layers)
    if task == "language-model":
        return CausalConfig(**shared, layers=layers)
    shared |= {"encoder_layers": layers, "word_dropout": dropout}
    if task == "encoder":
        return EncoderConfig(**shared)
    if task == "tagging":
        return TaggerConfig(**shared, labels=facts.outputs)
    reasons.append("token embeddings that start with the log-count ratios of the labels")
    return ClassifierConfig(**shared, labels=tuple(facts.labels), multi_label=given.get("multi_label", False))


def _choose_training(
    facts: "Facts",
    model: ArchitectureConfig,
    given: Mapping[str, Any],
    start: Start,
    updates_in_time: int | None,
    reasons: list[str],
) -> TrainConfig:
    task, tokens, num_examples = facts.task, facts.tokens["train"], facts.examples["train"]
    chosen, is_new_classifier = dict[str, Any](given), task == "classification" and start == "random"

    def choose_value(name: str, value: Any, reason: str) -> Any:
        if name not in chosen:
            chosen[name] = value
            reasons.append(reason)
        return chosen[name]

    positions = min(model.max_positions, _needed_positions(facts))
    chosen.setdefault("max_length_tokens", min(facts.max_length_tokens, positions))
    batch = tokens.total / _UPDATES_PER_EPOCH
    if is_new_classifier:
        batch = min(batch, _CLASSIFIER_TEXTS * tokens.total / num_examples)
    batch = max(_within(_BATCH_TOKENS, batch), chosen["max_length_tokens"])
    batch = choose_value("batch_tokens", batch, f"batches of {batch:,} tokens, for {tokens.total:,} tokens of train")
    updates_per_epoch = max(1, math.ceil(tokens.total / batch / chosen.get("accumulate", 1)))
    updates = _UPDATES.get(task, 600) * max(1.0, num_examples / 300) ** _UPDATES_POWER
    updates *= _START_UPDATES[start]
    limits = _CHECKPOINT_EPOCHS if start == "checkpoint" else _EPOCHS
    epochs = _within(limits, math.ceil(updates / updates_per_epoch))
    epochs = choose_value("epochs", epochs, f"{epochs} epochs of about {updates_per_epoch:,} updates")
    total = updates_per_epoch * epochs
    if updates_in_time is not None and updates_in_time < total:
        total = max(1, updates_in_time)
        reasons.append(
            f"a schedule for about {total:,} updates: a measurement shows that more do not fit into "
            f"{chosen['minutes']:g} minutes"
        )
    warmup = min(_within(_WARMUP_STEPS, _WARMUP_SHARE * total), math.ceil(total / 2))
    choose_value("warmup_steps", warmup, f"{warmup:,} updates of warm-up, for about {total:,} updates in all")
    width = getattr(model, "d_model", 128)
    if start == "random":
        rate = next(_LEARNING_RATES[size] for size in reversed(SIZES) if width >= _WIDTHS[size] or size == "tiny")
        rate *= _CLASSIFIER_RATE if is_new_classifier else 1
        choose_value("learning_rate", rate, f"learning rate {rate:g}, for a model of width {width}")
    else:
        rate = _START_LEARNING_RATES[task] if start == "checkpoint" else 3e-4
        reason = "the weights are trained already"
        if chosen.get("lora"):
            rate, reason = _LORA_RATE * rate, "only low-rank updates of the weights are trained"
        choose_value("learning_rate", rate, f"learning rate {rate:g}, because {reason}")
    fits = total // updates_per_epoch // _VALIDATIONS
    evaluate = max(1, min(fits, round(_UPDATES_PER_VALIDATION / updates_per_epoch)))
    evaluate = choose_value("evaluate_epochs", evaluate, f"a validation every {_count(evaluate, 'epoch')}")
    patience = max(_PATIENCE_VALIDATIONS * evaluate, math.ceil(epochs / 2))
    if start == "checkpoint":
        patience = _CHECKPOINT_PATIENCE_VALIDATIONS * evaluate
    goal = goal_of(chosen.get("metric", "loss"))
    choose_value("patience_epochs", patience, f"an end after {patience} epochs without a better {goal}")
    averaged = _within(_AVERAGED, (_CLASSIFIER_AVERAGED_SHARE if is_new_classifier else _AVERAGED_SHARE) * epochs)
    choose_value("average_last", averaged, f"averaged weights of the last {_count(averaged, 'epoch')}")
    smoothing = LABEL_SMOOTHING.get(task, 0.0)
    choose_value("label_smoothing", smoothing, f"label smoothing {smoothing:g}, for {task}")
    return make_config(chosen)


def _within(limits: tuple[int, int], value: float) -> int:
    low, high = limits
    return max(low, min(high, math.ceil(value)))


def _count(number: int, unit: str) -> str:
    return unit if number == 1 else f"{number} {unit}s"
