"""Runs of every task that are killed or interrupted resume to the same weights."""

import functools
import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from sightline.base.errors import Interrupted, exit_status
from sightline.model.checkpoint import load_metadata
from sightline.model.config import OWN_TASKS
from sightline.model.data.records import TaskName
from sightline.model.data.samples import write_sample
from sightline.model.training.trainer import Trainer
from tests.model.training.toys import TOYS, assert_same_run, toy_trainer, train_toy


def kill_often(context: ForkServerContext, name: str, folder: Path, kills: int, seed: int) -> None:
    """Kill processes that train runs of a task, until all kills are made and the last run ends.

    Most kills are at random moments of the training, and some while the process prepares it.
    """
    rng, whole, killed, positions = random.Random(seed), folder / "whole", 0, set()
    ready = context.Event()
    first = context.Process(target=train_toy, args=(name, whole, {}, ready))
    first.start()
    assert ready.wait(120)
    started = time.monotonic()
    first.join()
    seconds = time.monotonic() - started
    assert first.exitcode == 0
    for number in itertools.count():
        run, exitcode = folder / f"run-{number}", None
        while exitcode is None:
            ready = context.Event()
            process = context.Process(target=train_toy, args=(name, run, {}, ready))
            process.start()
            if rng.random() < 0.8:
                assert ready.wait(120)
            process.join(rng.uniform(0, 0.6 * seconds) if killed < kills else None)
            exitcode = process.exitcode
            if exitcode is None:
                process.kill()
                process.join()
                killed += 1
                state = run / "state.safetensors"
                positions.add(load_metadata(state)["batch"] if state.exists() else None)
        assert exitcode == 0
        assert_same_run(whole, run)
        if killed == kills:
            break
    assert kills < 10 or len(positions - {None, 0}) > 1, "some states are from within an epoch"


@pytest.mark.parametrize("name", TOYS)
def test_a_killed_run_resumes_to_the_same_weights(processes: ForkServerContext, tmp_path: Path, name: str) -> None:
    kill_often(processes, name, tmp_path, kills=2, seed=1)


@pytest.mark.slow  # some minutes on a busy machine
@pytest.mark.parametrize("name", TOYS)
def test_a_run_that_is_killed_twenty_times_gives_the_same_weights(
    processes: ForkServerContext, tmp_path: Path, name: str
) -> None:
    kill_often(processes, name, tmp_path, kills=20, seed=2)


@pytest.mark.slow  # starts some processes, each of which imports PyTorch
@pytest.mark.parametrize("task", OWN_TASKS)
def test_a_command_that_is_killed_three_times_gives_the_same_weights(tmp_path: Path, task: TaskName) -> None:
    """The command also prepares the data again, which a kill may have left half done."""
    write_sample(task, tmp_path / "data", 60)
    options = ("--epochs", "3", "--vocab-size", "300", "--threads", "1", "--checkpoint-steps", "1")
    rng, killed = random.Random(3), 0

    def start(run: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sightline", "train", task, str(tmp_path / "data"), "--run", str(run)]
        return subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)

    started = time.monotonic()
    assert start(tmp_path / "whole").wait(300) == 0
    seconds = time.monotonic() - started
    for number in itertools.count():
        run, status = tmp_path / f"run-{number}", None
        while status is None:
            process = start(run)
            try:
                status = process.wait(rng.uniform(0.3, 1) * seconds if killed < 3 else 300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
        assert status == 0
        assert_same_run(tmp_path / "whole", run)
        if killed == 3:
            break


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns an uninterrupted run of a task, which is trained once."""

    @functools.cache
    def trained(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        toy_trainer(name, folder / "whole").fit()
        return folder / "whole"

    return trained


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_update_and_it_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Callable[[str], Path], name: str, number: signal.Signals
) -> None:
    update, calls = Trainer.update, []

    def interrupted(trainer: Trainer, batches: list[object]) -> tuple[float, int]:
        calls.append(trainer.progress.step)
        if len(calls) == 5:
            signal.raise_signal(number)
        return update(trainer, batches)

    # Processes that a shell starts in the background ignore SIGINT.
    previous = signal.signal(number, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "update", interrupted)
            with pytest.raises(Interrupted, match=r"saved at epoch 1, step 5; run the same command again") as caught:
                toy_trainer(name, tmp_path / "run").fit()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, previous)
    assert exit_status(caught.value) == 128 + number
    assert calls == [1, 2, 3, 4, 5]
    state = load_metadata(tmp_path / "run" / "state.safetensors")
    assert (state["step"], state["batch"], state["epoch"]) == (5, 5, 0)
    toy_trainer(name, tmp_path / "run").fit()
    assert_same_run(whole(name), tmp_path / "run")


def test_a_signal_during_validation_ends_the_run_at_once_and_nothing_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Callable[[str], Path]
) -> None:
    """Metrics may take minutes, and a supervisor waits only some seconds after SIGTERM."""

    def evaluate(trainer: Trainer) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal must end the evaluation")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "evaluate", evaluate)
        with pytest.raises(Interrupted):
            toy_trainer("translation", tmp_path / "run").fit()
    state = load_metadata(tmp_path / "run" / "state.safetensors")
    assert state["epoch"] == 0 and state["batch"] > 0
    steps, update = [], Trainer.update

    def remember(trainer: Trainer, batches: list[object]) -> tuple[float, int]:
        steps.append(trainer.progress.step)
        return update(trainer, batches)

    monkeypatch.setattr(Trainer, "update", remember)
    toy_trainer("translation", tmp_path / "run").fit()
    assert steps[0] == state["step"] + 1
    assert_same_run(whole("translation"), tmp_path / "run")


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(trainer: Trainer, batches: list[object]) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal must end the update")

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Trainer, "update", update)
    try:
        with pytest.raises(KeyboardInterrupt):
            toy_trainer("translation", tmp_path / "run").fit()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ignored_signals_stay_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nohup` and shells start processes that ignore a signal."""
    update = Trainer.update

    def ignoring(trainer: Trainer, batches: list[object]) -> tuple[float, int]:
        signal.raise_signal(signal.SIGINT)
        return update(trainer, batches)

    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(Trainer, "update", ignoring)
    try:
        toy_trainer("translation", tmp_path / "run", epochs=1).fit()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert load_metadata(tmp_path / "run" / "state.safetensors")["epoch"] == 1
