import dataclasses
import gc
import json
import math
import resource
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sightline.base.errors import UsageError
from sightline.model.checkpoint import average, load_metadata, load_model
from sightline.model.config import TransformerConfig
from sightline.model.data.examples import Example, MemoryExamples, TrainingData
from sightline.model.data.tokenizer_training import train_tokenizer
from sightline.model.training.folder import RunFolder, read_log
from sightline.model.training.options import TrainConfig, read_train_config
from sightline.model.training.trainer import Trainer, inverse_sqrt_rate
from sightline.model.training.translation import TRANSLATION
from tests.model.training.toys import CONFIG, TOYS, VOCABULARY, assert_same_run, read_corpus, toy_trainer

MakeConfig = Callable[[int], TransformerConfig]
Train = Callable[..., Trainer]
TOY = TrainConfig(epochs=3, batch_tokens=256, warmup_steps=20, average_last=2)
TINY = 1e-30  # a rate that changes no weight
CPU = torch.device("cpu")


def make_trainer(
    run: Path, corpus: Path, make: MakeConfig, config: TrainConfig = TOY, vocab_size: int = VOCABULARY
) -> Trainer:
    data = read_corpus(run, corpus, "translation", config, vocab_size, source="en", target="de")
    return Trainer(run, config, TRANSLATION, data, make(data.tokenizer.get_vocab_size()), CPU)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, corpus: Path, toy_config: MakeConfig) -> Path:
    """Finished run; copy it before changing a file."""
    run = tmp_path_factory.mktemp("unbroken")
    make_trainer(run, corpus, toy_config).fit()
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def make(run: Path, corpus: Path, toy_config: MakeConfig) -> Train:
    """Return a function that makes the trainer of `run`; its arguments are changes of `TOY`."""
    return lambda **changes: make_trainer(run, corpus, toy_config, TOY.model_copy(update=changes))


@pytest.fixture
def train(make: Train) -> Train:
    """Return a function that does the same and trains to the end."""

    def fit(**changes: Any) -> Trainer:
        trainer = make(**changes)
        trainer.fit()
        return trainer

    return fit


def test_the_rate_rises_to_its_peak_and_falls_with_the_root_of_the_step() -> None:
    assert inverse_sqrt_rate(1, 0.5, 100) == pytest.approx(0.005)
    assert inverse_sqrt_rate(100, 0.5, 100) == pytest.approx(0.5)
    assert inverse_sqrt_rate(400, 0.5, 100) == pytest.approx(0.25)
    # The paper's equation 3, whose peak is (d_model * warmup_steps) ** -0.5.
    for step in (1, 50, 4000, 9999):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert inverse_sqrt_rate(step, (512 * 4000) ** -0.5, 4000) == pytest.approx(expected)


def test_training_lowers_the_loss_and_writes_every_file_and_the_mean_of_the_last_epochs(unbroken: Path) -> None:
    rows = [json.loads(line) for line in (unbroken / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"] < 1.5 * math.log(300)
    assert [path.name for path in sorted((unbroken / "epochs").iterdir())] == ["0002.safetensors", "0003.safetensors"]
    assert load_metadata(unbroken / "averaged" / "weights.safetensors") == {"epochs": [2, 3]}
    for name in ("best", "averaged"):
        load_model(unbroken / name)
    best = min(rows, key=lambda row: row["validation_loss"])
    assert load_metadata(unbroken / "best" / "weights.safetensors")["epoch"] == best["epoch"]
    expected = average(sorted((unbroken / "epochs").iterdir()))
    written = load_file(unbroken / "averaged" / "weights.safetensors")
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_run_in_bfloat16_learns_as_well_and_keeps_float32_weights(train: Train, run: Path, unbroken: Path) -> None:
    trainer = train(precision="bfloat16")
    losses = [json.loads((each / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1]) for each in (run, unbroken)]
    assert losses[0]["train_loss"] == pytest.approx(losses[1]["train_loss"], rel=0.01)
    assert losses[0]["validation_loss"] == pytest.approx(losses[1]["validation_loss"], rel=0.01)
    assert losses[0] != losses[1]
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("is_within_an_epoch", [False, True])
def test_a_resumed_run_gives_the_same_weights(
    train: Train, run: Path, unbroken: Path, is_within_an_epoch: bool
) -> None:
    trainer = train(epochs=2)
    if is_within_an_epoch:
        trainer.train_epoch()  # and nothing of it is written
    train()
    assert_same_run(unbroken, run)


def test_another_seed_gives_other_weights(train: Train, unbroken: Path) -> None:
    other = train(seed=2, epochs=1)
    first = load_file(unbroken / "state.safetensors")["model.embedding.weight"]
    assert not torch.equal(other.model.embedding.weight, first)


def test_training_stops_when_the_validation_loss_no_longer_improves(train: Train) -> None:
    # If weights do not change, nothing improves after the first epoch.
    changes: dict[str, Any] = {"learning_rate": TINY, "patience_epochs": 2, "epochs": 50}
    trainer = train(**changes)
    assert (trainer.progress.best_epoch, trainer.progress.epoch) == (1, 3)
    assert train(**changes).progress.epoch == 3


def test_other_settings_for_an_existing_run_are_rejected_by_name(train: Train, make: Train) -> None:
    train(epochs=1)
    with pytest.raises(ValueError, match="contains a run with other values of --label-smoothing, --seed; choose"):
        make(seed=9, label_smoothing=0.2)


@pytest.mark.parametrize("epochs", [0, 1])
def test_other_data_for_an_existing_run_are_rejected(
    make: Train, run: Path, tmp_path: Path, corpus: Path, toy_config: MakeConfig, epochs: int
) -> None:
    """Test it also for a run that was killed in its first epoch."""
    trainer = make(epochs=1)
    if epochs:
        trainer.fit()
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    path = data / "train.de"
    path.write_text(path.read_text(encoding="utf-8").replace("M", "N"), encoding="utf-8")
    with pytest.raises(ValueError, match="contains a run with other data; choose"):
        make_trainer(run, data, toy_config, TOY.model_copy(update={"epochs": 1}))


def test_a_kill_after_the_log_repeats_the_epoch_and_its_line(
    make: Train, train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    trainer = make(epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save_state", kill)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    train(epochs=1)
    assert len((run / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert list(read_log(run)) == [1]


def test_another_model_for_an_existing_run_is_rejected(make: Train, run: Path, corpus: Path) -> None:
    """A different size must not be ignored in favour of the existing run."""
    make()
    with pytest.raises(ValueError, match="contains a run of another model; choose"):
        make_trainer(run, corpus, lambda vocab_size: TransformerConfig(vocab_size, d_model=16, num_heads=2))


def test_the_loss_of_a_batch_counts_each_real_token_once_with_any_padding(make: Train) -> None:
    trainer = make()
    trainer.model.eval()

    def total(seed: int) -> float:
        batches = trainer.batches(trainer.train_examples, seed)
        return sum(trainer.task.training_loss(trainer.model, batch, 0.1).item() for batch in batches)

    assert total(0) == pytest.approx(total(1), rel=1e-4)


@pytest.mark.parametrize("clip_norm", [1e-3, 1e6], ids=["clipped", "not clipped"])
def test_an_update_uses_the_gradient_of_the_loss_per_token_up_to_the_clipping_norm(
    make: Train, clip_norm: float
) -> None:
    trainer = make(clip_norm=clip_norm, learning_rate=TINY)
    trainer.model.eval()  # without dropout and changes of weights, the loss can be computed again
    batch = next(trainer.batches(trainer.train_examples, epoch=1))
    trainer.progress.step = 1
    trainer.update([batch])
    gradients = [parameter.grad.clone() for parameter in trainer.model.parameters() if parameter.grad is not None]
    loss = trainer.task.training_loss(trainer.model, batch, TOY.label_smoothing)
    per_token = loss / (batch.target_output != 0).sum()
    expected = torch.autograd.grad(per_token, list(trainer.model.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in expected]).norm()
    scale = min(1.0, clip_norm / norm.item())
    assert (scale < 1) == (clip_norm == 1e-3)
    torch.testing.assert_close(gradients, [gradient * scale for gradient in expected], atol=1e-7, rtol=1e-3)


def test_a_trainer_that_measured_updates_is_freed_without_the_garbage_collector(make: Train) -> None:
    """Its weights and gradients were in memory beside those of the training."""
    trainer = make()
    trainer.measure_updates(1)
    model = weakref.ref(trainer.model)
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()


def test_a_run_that_cannot_start_does_not_lock_the_folder(
    train: Train, run: Path, tmp_path: Path, corpus: Path, toy_config: MakeConfig, unbroken: Path
) -> None:
    """A failed command must not leave settings that block the corrected command."""
    with pytest.raises(ValueError, match="vocab_size must be at least 259"):
        make_trainer(run, corpus, toy_config, vocab_size=100)
    with pytest.raises(ValueError, match="missing file train"):
        make_trainer(run, tmp_path, toy_config, TOY.model_copy(update={"precision": "bfloat16"}))
    train()
    assert_same_run(unbroken, run)


def test_epochs_without_their_state_are_not_mixed_with_new_ones(make: Train, run: Path, unbroken: Path) -> None:
    """The average would include epochs of the old run."""
    shutil.copytree(unbroken, run)
    (run / "state.safetensors").unlink()
    with pytest.raises(ValueError, match=r"contains a run without state\.safetensors that cannot be resumed"):
        make()


def test_a_run_that_ended_before_its_first_state_starts_again(
    make: Train, train: Train, run: Path, unbroken: Path
) -> None:
    make(seed=9)
    (run / "state.safetensors").unlink()  # which is written last
    train()
    assert_same_run(unbroken, run)


def test_a_vocabulary_with_other_special_ids_than_the_tokenizers_is_rejected(
    run: Path, corpus: Path, toy_config: MakeConfig
) -> None:
    """Otherwise every token 40 would count as padding."""
    with pytest.raises(ValueError, match="pad_id is 40 in the configuration, but <pad> has the id 0 in the tokenizer"):
        make_trainer(run, corpus, lambda vocab_size: dataclasses.replace(toy_config(vocab_size), pad_id=40))
    assert not (run / "train.json").exists()


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_nan_loss_ends_the_run_which_keeps_its_last_state(make: Train, train: Train, run: Path, epochs: int) -> None:
    """Training must stop instead of writing weights that are NaN."""
    trainer = make(epochs=2)
    if epochs:
        train(epochs=1)
        trainer = make(epochs=2)
    before = (run / "state.safetensors").read_bytes()
    with torch.no_grad():
        trainer.model.embedding.weight[5] = math.nan
    with pytest.raises(ValueError, match=r"loss is nan after update \d+: the training diverged; .* --learning-rate"):
        trainer.fit()
    assert (run / "state.safetensors").read_bytes() == before
    assert len(list((run / "epochs").glob("*"))) == epochs


def test_a_nan_validation_loss_is_not_written(train: Train, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update of an epoch may be the one that ruins the weights."""

    def ruin(trainer: Trainer) -> bool:
        with torch.no_grad():
            trainer.model.embedding.weight.fill_(math.inf)
        return True

    monkeypatch.setattr(Trainer, "train_epoch", ruin)
    with pytest.raises(ValueError, match="the validation loss is nan"):
        train()
    assert not (run / "epochs").exists()


def test_the_record_says_how_long_the_run_is(train: Train, run: Path) -> None:
    """train.json records the current epochs, not the first one."""
    recorded = []
    for epochs in (1, 3, 2):
        train(epochs=epochs)
        recorded.append(read_train_config(run / "train.json"))
    assert [config.epochs for config in recorded] == [1, 3, 3]
    assert recorded[1] == TOY.model_copy(update={"epochs": 3})


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Make writes beyond a size fail in this process, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_a_run_that_resumes_to_the_same_weights(
    train: Train, run: Path, unbroken: Path, limit_file_size: Callable[[int], None]
) -> None:
    train(epochs=1)

    def files() -> dict[Path, bytes]:
        """Return the files without those that the start of a command writes."""
        written = ("train.json", "record.json")
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in written}

    before = files()
    limit_file_size(20_000)  # the tokenizer fits, weights do not
    with pytest.raises(OSError, match=r"cannot write .*0002\.safetensors: .*File too large"):
        train()
    limit_file_size(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert files() == before
    train()
    assert_same_run(unbroken, run)


def test_a_full_disk_leaves_no_part_of_a_line_in_the_log(
    tmp_path: Path, limit_file_size: Callable[[int], None]
) -> None:
    folder = RunFolder(tmp_path)
    folder.add_to_log({"epoch": 1, "train_loss": 2.0})
    limit_file_size(50)
    with pytest.raises(OSError, match="File too large"):
        folder.add_to_log({"epoch": 2, "train_loss": 2.0})
    limit_file_size(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert list(read_log(tmp_path)) == [1]


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_state_is_rejected_with_its_name(make: Train, run: Path, unbroken: Path, kept: float) -> None:
    state = Path(shutil.copytree(unbroken, run)) / "state.safetensors"
    state.write_bytes(state.read_bytes()[: int(kept * state.stat().st_size)])
    message = r"state\.safetensors cannot be resumed \(.* is damaged or truncated: .*\); choose another folder"
    with pytest.raises(ValueError, match=message):
        make()


def test_the_state_of_another_model_is_rejected_with_its_name(make: Train, run: Path, unbroken: Path) -> None:
    shutil.copytree(unbroken, run)
    shutil.copyfile(run / "epochs" / "0003.safetensors", run / "state.safetensors")
    with pytest.raises(ValueError, match=r"state\.safetensors cannot be resumed .*Missing key.*choose"):
        make()


PAIR: Example = ([5, 2], [6, 7, 2])


@pytest.mark.parametrize(
    ("task", "dev", "changes"),
    [
        ("encoder", [PAIR], {}),
        ("encoder", [PAIR, PAIR], {}),
        ("encoder", [PAIR, ([5, 2], [8, 2]), ([5, 2], [9, 2])], {}),  # all with the same source
        ("encoder", [PAIR, ([8, 2], [9] * 11)], {"batch_tokens": 12, "max_length_tokens": 12}),  # two batches
        ("language-model", [([5], [0])], {}),
    ],
)
def test_a_dev_set_whose_loss_is_always_0_is_rejected(
    run: Path, task: str, dev: list[Example], changes: dict[str, Any]
) -> None:
    config, toy = CONFIG.model_copy(update=changes), TOYS[task]
    data = TrainingData(train_tokenizer(["a b c"], VOCABULARY), toy.examples(1, 30), MemoryExamples(dev), digest="toy")
    with pytest.raises(UsageError, match=r"dev has no loss: .* add examples of dev, or increase --batch-tokens"):
        Trainer(run, config, toy.task, data, toy.model, CPU)
    assert not run.exists()


def test_the_newest_epochs_are_kept_and_averaged_after_epoch_9999(tmp_path: Path) -> None:
    trainer = toy_trainer("encoder", tmp_path)
    for epoch in range(9_998, 10_003):
        trainer.folder.write_epoch(
            trainer.model_config, trainer.model.state_dict(), {"epoch": epoch}, kept=3, averaged=2, is_best=False
        )
    assert {path.stem for path in trainer.folder.epochs.iterdir()} == {"10000", "10001", "10002"}
    assert load_metadata(trainer.folder.averaged / "weights.safetensors") == {"epochs": [10_001, 10_002]}
