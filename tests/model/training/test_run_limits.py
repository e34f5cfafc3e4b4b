"""Limits of time, validations and checkpoints within a run, and gradient accumulation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sightline.base.errors import Interrupted, UsageError
from sightline.base.options import flag_name
from sightline.model.checkpoint import load_metadata, load_model
from sightline.model.data.examples import TrainingData
from sightline.model.training.folder import locked, read_log, save_state
from sightline.model.training.trainer import Trainer
from tests.model.training.toys import TOYS, assert_same_run, toy_trainer

MOMENT = 1e-9  # minutes; over after the first update


def assert_same_weights(first: Path, second: Path, name: str) -> None:
    ours, theirs = (load_file(run / name) for run in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", TOYS)
def test_a_limit_of_time_leaves_validated_checkpoints_of_a_run_that_can_be_extended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    toy_trainer(name, run, minutes=MOMENT).fit()
    (row,) = read_log(run).values()
    assert (row["epoch"], row["step"], row["is_whole"]) == (1, 1, False)
    for checkpoint in ("averaged", "best"):
        load_model(run / checkpoint)
    assert "finished: 1e-09 minutes used; best dev loss" in capsys.readouterr().err
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    toy_trainer(name, run, minutes=MOMENT).fit()
    assert "has already finished: 1e-09 minutes used" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    toy_trainer(name, run).fit()
    assert "\nresuming at epoch 1, step 1\nnote: --minutes is 0.0 instead of 1e-09\n" in capsys.readouterr().err
    toy_trainer(name, whole).fit()
    for file in ("state.safetensors", "averaged/weights.safetensors"):
        assert_same_weights(whole, run, file)


def test_the_time_of_a_run_is_that_of_all_its_parts(tmp_path: Path) -> None:
    toy_trainer("classification", tmp_path, epochs=1).fit()
    first = load_metadata(tmp_path / "state.safetensors")["seconds"]
    assert first > 0
    toy_trainer("classification", tmp_path).fit()
    assert load_metadata(tmp_path / "state.safetensors")["seconds"] > first
    toy_trainer("classification", tmp_path, epochs=9, minutes=first / 60).fit()
    assert load_metadata(tmp_path / "state.safetensors")["epoch"] == 2


def test_a_run_that_ends_early_averages_the_same_share_of_its_epochs(tmp_path: Path) -> None:
    trainer = toy_trainer("classification", tmp_path, epochs=8, average_last=4)
    for averaged in ([1], [2], [2, 3]):
        trainer.train_epoch()
        trainer._finish_epoch(is_whole=True)
        assert load_metadata(tmp_path / "averaged" / "weights.safetensors") == {"epochs": averaged}
    assert len(list((tmp_path / "epochs").iterdir())) == 3


def test_a_run_with_fewer_epochs_than_it_has_done_ends_with_its_best_one_or_says_what_to_do(tmp_path: Path) -> None:
    for run, evaluate_epochs in ((tmp_path / "validated", 1), (tmp_path / "new", 3)):
        trainer = toy_trainer("classification", run, epochs=9, average_last=3, evaluate_epochs=evaluate_epochs)
        for _ in range(2):
            trainer.train_epoch()
            trainer._finish_epoch(is_whole=True)
    trainer = toy_trainer("classification", tmp_path / "validated", epochs=9, average_last=3)
    trainer.train_epoch()
    trainer._save_state()  # as if it were killed within the epoch
    toy_trainer("classification", tmp_path / "validated", epochs=1, average_last=1).fit()
    assert load_metadata(tmp_path / "validated" / "averaged" / "weights.safetensors") == {"epochs": [3]}
    with pytest.raises(
        UsageError, match=r"new has no validated checkpoint .* after 2 epochs; set --epochs to at least 3"
    ):
        toy_trainer("classification", tmp_path / "new", epochs=1).fit()
    toy_trainer("classification", tmp_path / "new", epochs=3).fit()
    load_model(tmp_path / "new" / "best")


def test_a_kill_during_the_last_validation_does_not_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the repeated command would state that the run has ended, without a checkpoint."""
    run, whole = tmp_path / "run", tmp_path / "whole"

    def kill(trainer: Trainer) -> float:
        trainer._save_state()  # as a checkpoint that was due after the last update
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "validate", kill)
        with pytest.raises(KeyboardInterrupt):
            toy_trainer("classification", run, minutes=MOMENT).fit()
    assert not (run / "averaged").exists()
    toy_trainer("classification", run, minutes=MOMENT).fit()
    load_model(run / "averaged")
    toy_trainer("classification", run).fit()
    toy_trainer("classification", whole).fit()
    assert_same_weights(whole, run, "state.safetensors")


def test_validations_may_be_some_epochs_apart(tmp_path: Path) -> None:
    toy_trainer("classification", tmp_path, evaluate_epochs=2, epochs=5).fit()
    rows = read_log(tmp_path)
    assert [epoch for epoch, row in rows.items() if "validation_loss" in row] == [2, 4, 5]
    assert load_metadata(tmp_path / "best" / "weights.safetensors")["epoch"] in (2, 4, 5)
    assert load_metadata(tmp_path / "epochs" / "0005.safetensors").keys() == {"epoch", "validation_loss"}
    assert load_metadata(tmp_path / "averaged" / "weights.safetensors") == {"epochs": [4, 5]}


def test_patience_is_compared_after_validations_only(tmp_path: Path) -> None:
    """Nothing improves after the first validation, because the weights do not change."""
    changes: dict[str, Any] = {"learning_rate": 1e-30, "patience_epochs": 3, "epochs": 50}
    trainer = toy_trainer("classification", tmp_path, evaluate_epochs=2, **changes)
    trainer.fit()
    assert (trainer.progress.best_epoch, trainer.progress.epoch) == (2, 6)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Epoch and batch of each saved state."""
    found = []

    def remember(path: Path, model: Any, optimizer: Any, progress: Any, *others: Any) -> None:
        found.append((progress.epoch, progress.batch))
        save_state(path, model, optimizer, progress, *others)

    monkeypatch.setattr("sightline.model.training.trainer.save_state", remember)
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpoint_steps": 0, "checkpoint_minutes": 0.0}, [(0, 0), (1, 0)]),
        ({"checkpoint_steps": 0, "checkpoint_minutes": 60.0}, [(0, 0), (1, 0)]),
        ({"checkpoint_steps": 2}, [(0, 0), (0, 2), (0, 4), (1, 0)]),
        (
            {"checkpoint_steps": 0, "checkpoint_minutes": MOMENT},
            [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)],
        ),
    ],
    ids=["none", "an hour", "two steps", "a moment"],
)
def test_checkpoints_are_saved_within_an_epoch_by_steps_or_minutes(
    tmp_path: Path, saves: list[tuple[int, int]], changes: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    toy_trainer("classification", tmp_path, epochs=1, **changes).fit()
    assert saves == expected


@pytest.mark.parametrize("name", TOYS)
def test_an_update_divides_the_gradient_of_several_batches_by_all_their_terms(tmp_path: Path, name: str) -> None:
    trainer = toy_trainer(name, tmp_path, accumulate=3, learning_rate=1e-30, clip_norm=1e6)
    trainer.model.eval()  # without dropout and changes of weights, the loss can be computed again
    batches = list(trainer.batches(trainer.train_examples, epoch=1))[:3]
    trainer.progress.step = 1
    total, count = trainer.update(batches)
    found = [parameter.grad for parameter in trainer.model.parameters()]
    losses = [trainer.task.training_loss(trainer.model, batch, trainer.config.label_smoothing) for batch in batches]
    assert count == sum(trainer.task.count(batch, 0) for batch in batches)
    assert total == pytest.approx(sum(loss.item() for loss in losses))
    expected = torch.autograd.grad(sum(losses, torch.zeros(())) / count, list(trainer.model.parameters()))
    torch.testing.assert_close(found, list(expected), atol=1e-7, rtol=1e-3)


def test_an_epoch_of_accumulated_batches_has_fewer_updates_and_resumes(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    trainer = toy_trainer("classification", whole, accumulate=2)
    trainer.fit()
    assert trainer.progress.step == 2 * 3  # of 5 batches an epoch
    toy_trainer("classification", run, accumulate=2, minutes=MOMENT).fit()
    assert load_metadata(run / "state.safetensors")["batch"] == 2
    toy_trainer("classification", run, accumulate=2).fit()
    assert_same_weights(whole, run, "state.safetensors")


@pytest.mark.parametrize(
    "change", [{"accumulate": 2}, {"batch_tokens": 32}, {"precision": "bfloat16"}, {"label_smoothing": 0.2}]
)
def test_settings_that_change_the_updates_stay_those_of_the_run(tmp_path: Path, change: dict[str, Any]) -> None:
    toy_trainer("classification", tmp_path)
    with pytest.raises(ValueError, match=f"with other values of {flag_name(next(iter(change)))}; choose another"):
        toy_trainer("classification", tmp_path, **change)


def test_settings_that_only_change_when_something_is_written_give_the_same_run(tmp_path: Path) -> None:
    toy_trainer("translation", tmp_path / "whole").fit()
    toy_trainer("translation", tmp_path / "run", epochs=1, checkpoint_steps=0, checkpoint_minutes=0.0).fit()
    toy_trainer("translation", tmp_path / "run", checkpoint_minutes=9.0, patience_epochs=99, minutes=60.0).fit()
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))
    assert record["starts"][1]["changes"] == {
        "epochs": [1, 2],
        "patience_epochs": [15, 99],
        "minutes": [0.0, 60.0],
        "checkpoint_minutes": [0.0, 9.0],
        "checkpoint_steps": [0, 1],
    }


def test_weights_of_others_are_the_first_weights_of_a_new_run_only(tmp_path: Path) -> None:
    called = []

    def initialise(model: nn.Module) -> None:
        called.append(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)

    first = toy_trainer("classification", tmp_path / "first")
    data = TrainingData(first.tokenizer, first.train_examples, first.dev_examples, "toy")
    arguments = (first.config, first.task, data, first.model_config, torch.device("cpu"))
    run = tmp_path / "run"
    trainer = Trainer(run, *arguments, initialise=initialise)
    assert all(torch.all(parameter == 0.5) for parameter in trainer.model.parameters())
    trainer.fit()
    again = Trainer(run, *arguments, initialise=initialise)
    assert len(called) == 1
    for ours, theirs in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_new_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a checkpoint within the epoch could have weights that are not finite."""
    trainer = toy_trainer("classification", tmp_path)
    calls = []

    def ruin(*arguments: Any) -> torch.Tensor:
        calls.append(trainer.progress.step)
        return torch.tensor(float("inf") if len(calls) == 3 else 1.0)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", ruin)
    with pytest.raises(ValueError, match="the norm of the gradient is inf after update 3: the training diverged; "):
        trainer.fit()
    assert load_metadata(tmp_path / "state.safetensors")["step"] == 2
    weights = load_file(tmp_path / "state.safetensors")
    assert all(torch.isfinite(tensor).all() for name, tensor in weights.items() if name.startswith("model."))


def test_a_trainer_that_was_interrupted_can_go_on_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, trainer = Trainer.update, toy_trainer("classification", tmp_path / "run", checkpoint_steps=0)

    def interrupted(trainer: Trainer, batches: list[object]) -> tuple[float, int]:
        trainer._interrupts.received = 15
        return update(trainer, batches)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "update", interrupted)
        with pytest.raises(Interrupted):
            trainer.fit()
    torch.rand(5)
    trainer.fit()
    toy_trainer("classification", tmp_path / "whole", checkpoint_steps=0).fit()
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_run_that_is_killed_in_its_validation_loses_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def killed(trainer: Trainer) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("sightline.model.training.trainer.SAVED_BEFORE_VALIDATION_S", 0.0)
    trainer = toy_trainer("classification", run, checkpoint_steps=0)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "validate", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    assert load_metadata(run / "state.safetensors")["step"] == trainer.progress.step > 0
    resumed = toy_trainer("classification", run, checkpoint_steps=0)
    assert resumed.progress.step == trainer.progress.step
    resumed.fit()
    toy_trainer("classification", tmp_path / "whole", checkpoint_steps=0).fit()
    assert_same_run(tmp_path / "whole", run)
