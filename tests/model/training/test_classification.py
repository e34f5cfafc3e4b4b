import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sightline.model.architectures.classifier import Classifier
from sightline.model.checkpoint import load_metadata, load_model
from sightline.model.config import ArchitectureConfig, ClassifierConfig
from sightline.model.data.batches import bucket, make_labelled_batch
from sightline.model.data.corpus import open_held_out
from sightline.model.data.examples import Example, MemoryExamples
from sightline.model.data.formats import Reading
from sightline.model.evaluation.evaluate import evaluate_model
from sightline.model.evaluation.result import Evaluation
from sightline.model.training.classification import CLASSIFICATION, class_weights, label_loss
from sightline.model.training.options import Metric, TrainConfig, goal_of
from sightline.model.training.trainer import Trainer
from tests.model.training.toys import read_corpus

TOY = TrainConfig(epochs=12, batch_tokens=128, warmup_steps=10, learning_rate=5e-3, average_last=3)
CPU = torch.device("cpu")
GOOD, BAD = ("a fine film", "truly moving", "great fun"), ("a dull film", "truly boring", "a waste")


def toy_classifier(vocab_size: int) -> ArchitectureConfig:
    return ClassifierConfig(vocab_size, d_model=16, num_heads=2, d_ff=32, encoder_layers=1, word_dropout=0.1)


def make_trainer(run: Path, data: Path, config: TrainConfig = TOY) -> Trainer:
    prepared = read_corpus(run, data, "classification", config)
    return Trainer(run, config, CLASSIFICATION, prepared, toy_classifier(prepared.tokenizer.get_vocab_size()), CPU)


def train(run: Path, data: Path, config: TrainConfig = TOY) -> Trainer:
    trainer = make_trainer(run, data, config)
    trainer.fit()
    return trainer


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    folder = tmp_path / "reviews"
    folder.mkdir()
    lines = [
        f"{label}\t{start} {text} {end}\n"
        for label, texts in (("negative", BAD), ("positive", GOOD))
        for text in texts
        for start in ("it is", "well ,", "once more")
        for end in (".", "!", "indeed .")
    ]
    for split, chosen in (("train", lines), ("dev", lines[::4])):
        (folder / f"{split}.tsv").write_text("".join(["label\ttext\n", *chosen]), encoding="utf-8")
    return folder


def test_the_trainer_learns_labels_and_its_checkpoints_contain_them(tmp_path: Path, reviews: Path) -> None:
    train(tmp_path / "run", reviews)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["validation_loss"] < 0.8 * rows[0]["validation_loss"]
    model, tokenizer = load_model(tmp_path / "run" / "averaged")
    assert isinstance(model, Classifier)
    assert model.config.labels == ("negative", "positive")
    records = list(open_held_out(reviews / "dev.tsv", Reading("classification")))
    assert evaluate_model(model, tokenizer, records).metrics["accuracy"] == 100


def test_a_run_resumed_after_an_epoch_gives_the_same_weights(tmp_path: Path, reviews: Path) -> None:
    train(tmp_path / "whole", reviews, TOY.model_copy(update={"epochs": 3}))
    train(tmp_path / "broken", reviews, TOY.model_copy(update={"epochs": 1}))
    train(tmp_path / "broken", reviews, TOY.model_copy(update={"epochs": 3}))
    ours, theirs = (load_file(tmp_path / name / "state.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_loss_is_the_same_sum_over_examples_in_any_batches(tmp_path: Path, reviews: Path) -> None:
    trainer = make_trainer(tmp_path / "run", reviews)
    model, examples = trainer.model.eval(), trainer.train_examples
    assert isinstance(model, Classifier)
    sums = []
    for batch_tokens in (128, 20):
        buckets = bucket(CLASSIFICATION.sizes(examples.lengths), batch_tokens, 1)
        batches = [
            make_labelled_batch([examples[index] for index in indices], trainer.model_config) for indices in buckets
        ]
        assert sum(CLASSIFICATION.count(batch, 0) for batch in batches) == len(examples)
        sums.append(sum(label_loss(model, batch, 0.1).item() for batch in batches))
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


def test_smoothing_moves_a_share_of_each_target_to_every_label(tmp_path: Path, reviews: Path) -> None:
    trainer = make_trainer(tmp_path / "run", reviews)
    model = trainer.model.eval()
    assert isinstance(model, Classifier)
    batch = next(trainer.batches(trainer.train_examples, epoch=1))
    logprobs = model(batch.source, batch.source_lengths)
    own = logprobs.gather(1, batch.labels.unsqueeze(1)).sum()
    expected = -(0.8 * own + 0.1 * logprobs.sum())
    torch.testing.assert_close(label_loss(model, batch, 0.2), expected)


def test_with_class_weights_each_label_has_the_same_share_of_the_loss(tmp_path: Path, reviews: Path) -> None:
    trainer = make_trainer(tmp_path / "run", reviews)
    batch = next(trainer.batches(trainer.train_examples, epoch=1))
    texts = torch.bincount(batch.labels, minlength=2)
    weights = class_weights(dict(zip("ab", texts.tolist(), strict=True)), len(batch.labels), multi_label=False)
    torch.testing.assert_close(weights * texts, torch.full((2,), len(batch.labels) / 2))
    model = trainer.model.eval()
    own = model(batch.source, batch.source_lengths).gather(1, batch.labels.unsqueeze(1)).squeeze(1)
    expected = -sum(weights[label] * cost for label, cost in zip(batch.labels, own, strict=True))
    torch.testing.assert_close(label_loss(model, batch, weights=weights), expected)


@pytest.mark.parametrize(
    ("option", "name"), [("macro_f1", "macro F1"), ("accuracy", "accuracy"), ("accuracy", "exact match")]
)
def test_a_metric_determines_the_best_epoch_the_averaged_weights_and_the_end(
    option: Metric,
    name: str,
    tmp_path: Path,
    reviews: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, values = tmp_path / "run", [50.0, 60.0, 55.0, 60.0, 58.0, 70.0]
    monkeypatch.setattr(Trainer, "evaluate", lambda self: Evaluation({name: values[self.progress.epoch], "other": 99}))
    config = TOY.model_copy(update={"epochs": 5, "patience_epochs": 3, "metric": option})
    for epochs in (3, 6):  # the best value is part of the state
        train(run, reviews, config.model_copy(update={"epochs": epochs}))
    assert load_metadata(run / "best" / "weights.safetensors")["epoch"] == 2
    assert load_metadata(run / "averaged" / "weights.safetensors")["epochs"] == [1, 2]
    assert json.loads((run / "record.json").read_text(encoding="utf-8"))["result"]["epoch"] == 5
    printed, goal = capsys.readouterr().err, goal_of(option)
    assert f"finished: the {goal} has not improved for 3 epochs; best {goal} 60.00 in epoch 2" in printed
    assert printed.count("(best)") == 2 and f"{name} 60.00 (best), other" in printed


# Any number of labels

SEVERAL = ClassifierConfig(
    40, d_model=16, num_heads=2, d_ff=32, dropout=0.0, max_positions=16, labels=("a", "b", "c"), multi_label=True
)
WITH_SEVERAL: list[Example] = [([5, 6, 2], [0, 2]), ([7, 8, 9, 10, 2], []), ([11, 2], [1])]


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier(SEVERAL).eval()


def test_several_labels_of_a_text_become_ones() -> None:
    batch = make_labelled_batch(WITH_SEVERAL, SEVERAL)
    assert batch.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert batch.source.tolist() == [[5, 6, 2, 0, 0], [7, 8, 9, 10, 2], [11, 2, 0, 0, 0]]
    assert batch.source_lengths.tolist() == [3, 5, 2]
    assert CLASSIFICATION.count(batch, 0) == 3


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_several_labels_equals_a_loop_over_texts_and_labels(model: Classifier, smoothing: float) -> None:
    expected = 0.0
    for ids, labels in WITH_SEVERAL:
        logits = model(torch.tensor([list(ids)]), torch.tensor([len(ids)]))[0]
        for label, logit in enumerate(logits.tolist()):
            probability = 1 / (1 + math.exp(-logit))
            target = (1 - smoothing / 2) if label in labels else smoothing / 2
            expected -= target * math.log(probability) + (1 - target) * math.log(1 - probability)
    assert label_loss(model, make_labelled_batch(WITH_SEVERAL, SEVERAL), smoothing).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_class_weights_of_several_labels_weight_the_texts_that_have_them(model: Classifier) -> None:
    weights = class_weights({"a": 1, "b": 1, "c": 2}, 3, multi_label=True)
    assert weights.tolist() == [2, 2, 0.5]
    batch, expected = make_labelled_batch(WITH_SEVERAL, SEVERAL), torch.zeros(())
    for row, scores in zip(batch.labels, model(batch.source, batch.source_lengths), strict=True):
        for has, score, weight in zip(row, scores, weights, strict=True):
            expected -= weight * score.sigmoid().log() if has else (-score).sigmoid().log()
    torch.testing.assert_close(label_loss(model, batch, weights=weights), expected)


def test_the_loss_of_several_labels_is_the_sum_over_the_texts_of_a_batch(model: Classifier) -> None:
    alone = [label_loss(model, make_labelled_batch([example], SEVERAL)) for example in WITH_SEVERAL]
    torch.testing.assert_close(label_loss(model, make_labelled_batch(WITH_SEVERAL, SEVERAL)), torch.stack(alone).sum())


def test_the_size_of_an_example_is_the_length_of_its_text() -> None:
    np.testing.assert_array_equal(CLASSIFICATION.sizes(MemoryExamples(WITH_SEVERAL).lengths), [[3], [5], [2]])


def test_a_new_run_starts_with_the_ratios_of_its_training_texts(tmp_path: Path, reviews: Path) -> None:
    trainer = make_trainer(tmp_path / "run", reviews)
    column = trainer.model.embedding.weight[:, -1]
    by_label = {
        label: [column[token].item() for text in texts for token in trainer.tokenizer.encode(text.split()[-1]).ids[:-1]]
        for label, texts in (("good", GOOD), ("bad", ("it is dull", "truly boring", "a waste")))
    }
    assert np.mean(by_label["good"]) * np.mean(by_label["bad"]) < 0
    random = Classifier(trainer.model_config)  # type: ignore[arg-type]
    given = Trainer(
        tmp_path / "given",
        TOY,
        CLASSIFICATION,
        read_corpus(tmp_path / "given", reviews, "classification", TOY),
        trainer.model_config,
        CPU,
        initialise=lambda model: model.load_state_dict(random.state_dict()),
    )
    assert torch.equal(given.model.embedding.weight, random.embedding.weight)
