"""Settings that the data decide."""

from dataclasses import replace
from typing import Any

import pytest

from sightline.model.config import (
    ArchitectureConfig,
    CausalConfig,
    ClassifierConfig,
    EncoderConfig,
    PretrainedConfig,
    TaggerConfig,
    TransformerConfig,
)
from sightline.model.data.facts import Facts, Lengths
from sightline.model.data.records import TaskName
from sightline.model.training.recipe import Recipe, choose, choose_vocabulary

MODELS: dict[TaskName, type[ArchitectureConfig]] = {
    "translation": TransformerConfig,
    "classification": ClassifierConfig,
    "language-model": CausalConfig,
    "encoder": EncoderConfig,
    "tagging": TaggerConfig,
}


def make_facts(task: TaskName, num_examples: int, mean_tokens: int = 15, longest: int = 60) -> Facts:
    tokens = Lengths(num_examples * mean_tokens, mean_tokens, 2 * mean_tokens, longest)
    characters = Lengths(4 * tokens.total, 60, 120, 240)
    return Facts(
        task,
        examples={"train": num_examples, "dev": 100},
        dropped={"train": {}, "dev": {}},
        repeated={},
        overlap={},
        source_overlap={},
        labels={"a": 1, "b": 1, "c": 1} if task in ("classification", "tagging") else {},
        labels_missing_in_dev=(),
        num_contradictions=0,
        has_dialogues=False,
        characters={"train": characters, "dev": characters},
        tokens={"train": tokens, "dev": tokens},
        max_length_tokens=512,
    )


def chosen(task: TaskName, num_examples: int, given: dict[str, Any] | None = None, **others: Any) -> Recipe:
    return choose(make_facts(task, num_examples), {"vocab_size": 1000}, given or {}, **others)


@pytest.mark.parametrize("task", MODELS)
@pytest.mark.parametrize("num_examples", [2, 300, 5_000, 29_000, 320_000, 5_000_000])
def test_the_warm_up_is_a_small_part_of_the_training_and_dev_is_validated(task: TaskName, num_examples: int) -> None:
    facts = make_facts(task, num_examples)
    recipe = choose(facts, {"vocab_size": 1000}, {})
    config = recipe.config
    updates = config.epochs * max(1, -(-facts.tokens["train"].total // config.batch_tokens))
    assert config.warmup_steps <= max(10, 0.11 * updates)
    assert config.evaluate_epochs <= max(1, config.epochs / 10)
    assert config.average_last <= max(1, config.epochs * (1 if task == "classification" else 0.25))
    assert config.patience_epochs >= config.evaluate_epochs
    assert config.max_length_tokens <= config.batch_tokens
    assert recipe.model.max_positions >= config.max_length_tokens
    assert type(recipe.model) is MODELS[task]


def test_more_data_have_larger_vocabularies_models_and_batches_and_fewer_epochs() -> None:
    sizes = [300, 5_000, 29_000, 320_000]
    vocabularies = [choose_vocabulary(make_facts("translation", size))[0] for size in sizes]
    assert vocabularies == sorted(set(vocabularies))
    recipes = [chosen("translation", size) for size in sizes]
    epochs = [recipe.config.epochs for recipe in recipes]
    assert epochs == sorted(epochs, reverse=True)
    widths = [recipe.model.d_model for recipe in recipes if isinstance(recipe.model, TransformerConfig)]
    assert widths == [128, 128, 128, 256]


def test_a_run_of_few_epochs_or_minutes_has_a_schedule_that_fits() -> None:
    whole, one_epoch = chosen("translation", 5_000).config, chosen("translation", 5_000, {"epochs": 1}).config
    limited = chosen("translation", 5_000, {"minutes": 5.0}, updates_in_time=200)
    assert (whole.warmup_steps, one_epoch.warmup_steps, limited.config.warmup_steps) == (186, 10, 20)
    assert (whole.evaluate_epochs, limited.config.evaluate_epochs) == (3, 1)
    assert limited.config.epochs == whole.epochs
    assert (
        "a schedule for about 200 updates: a measurement shows that more do not fit into 5 minutes" in limited.reasons
    )
    assert "20 updates of warm-up, for about 200 updates in all" in limited.reasons
    unlimited = chosen("translation", 5_000, {"minutes": 5.0}, updates_in_time=9_999)
    assert unlimited.config == whole.model_copy(update={"minutes": 5.0})
    assert chosen("translation", 2, {"epochs": 3}).config.warmup_steps == 2  # of 3 updates


def test_accumulated_batches_make_fewer_updates() -> None:
    accumulated = chosen("translation", 300, {"accumulate": 2}).config
    assert accumulated.warmup_steps < chosen("translation", 300).config.warmup_steps


def test_new_classifiers_have_small_batches_and_steps_and_average_most_epochs() -> None:
    few, many, long = (
        choose(make_facts("classification", *facts), {"vocab_size": 1000}, {"max_length_tokens": 128})
        for facts in ((500, 36), (7_000, 25), (7_000, 400))
    )
    assert [one.config.batch_tokens for one in (few, many, long)] == [512, 800, 4096]
    assert [one.config.epochs for one in (few, many, long)] == [19, 7, 3]
    assert [one.config.average_last for one in (few, many, long)] == [10, 5, 3]
    assert {one.config.learning_rate for one in (few, many, long)} == {1e-3}
    assert many.model == replace(few.model, max_positions=many.model.max_positions)
    assert isinstance(many.model, ClassifierConfig)
    assert (many.model.encoder_layers, many.model.dropout, many.model.word_dropout) == (1, 0.4, 0.4)
    started = chosen("classification", 7_000, {"from_": "runs/few"}, model=many.model).config
    assert (started.batch_tokens, started.average_last) == (1750, 1)


def test_given_values_are_kept_and_need_no_reason() -> None:
    given = {"epochs": 7, "batch_tokens": 600, "warmup_steps": 5, "learning_rate": 0.01}
    recipe = chosen("classification", 1_000, {**given, "size": "base", "dropout": 0.0, "multi_label": True})
    assert {name: getattr(recipe.config, name) for name in given} == given
    assert isinstance(recipe.model, ClassifierConfig)
    assert (recipe.model.d_model, recipe.model.dropout, recipe.model.multi_label) == (512, 0.0, True)
    assert recipe.model.labels == ("a", "b", "c")
    text = "\n".join(recipe.reasons)
    assert "learning rate" not in text and "warm-up" not in text and "dropout" not in text


def test_each_choice_has_a_reason() -> None:
    text = "\n".join(chosen("translation", 300).reasons)
    for part in ("model size tiny, for 300 examples", "dropout 0.3", "batches of", "epochs of", "warm-up", "learning"):
        assert part in text


def test_trained_weights_get_small_steps_until_the_dev_loss_stops_falling() -> None:
    fresh = chosen("classification", 1_000).config
    given = {"from_": "checkpoint"}
    started = chosen("classification", 1_000, given, model=PretrainedConfig(1000)).config
    continued = chosen("classification", 1_000, given, model=ClassifierConfig(1000)).config
    assert 2e-5 <= started.learning_rate <= 5e-5 < continued.learning_rate < fresh.learning_rate
    assert started.epochs <= 30 and started.patience_epochs == 3 * started.evaluate_epochs
    assert started.evaluate_epochs == 2 and started.label_smoothing == 0
    updates = started.epochs * -(-1_000 * 15 // started.batch_tokens)
    assert started.warmup_steps == pytest.approx(updates / 10, abs=1)
    assert continued.epochs < fresh.epochs


def test_values_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="--max-length-tokens: must be at most --batch-tokens"):
        chosen("translation", 300, {"batch_tokens": 4, "max_length_tokens": 5})
