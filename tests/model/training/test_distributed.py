"""Data-parallel training: two processes give the weights of one with twice the batches."""

import json
import os
import re
import signal
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lab.bench.server import free_port
from sightline.model.__main__ import main
from sightline.model.checkpoint import load_metadata
from sightline.model.data.samples import write_sample
from sightline.model.training.distributed import World, default_device
from tests.model.training.toys import toy_trainer, train_toy

# Largest difference of a weight after two epochs: sums of gradients have another order.
TOLERANCE = 1e-6


def start_two(context: ForkServerContext, name: str, run: Path, **changes: Any) -> list[Any]:
    """Start two processes of one run, with the variables that torchrun sets."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in ("0", "1"):
        environment = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        one = context.Process(target=train_toy, args=(name, run, environment), kwargs=changes)
        one.start()
        started.append(one)
    return started


def train_in_two(context: ForkServerContext, name: str, run: Path, **changes: Any) -> None:
    started = start_two(context, name, run, **changes)
    for one in started:
        one.join(120)
    assert [one.exitcode for one in started] == [0, 0]


def assert_close(first: Path, second: Path) -> None:
    """Compare the weights of two runs.

    No output depends on a bias of keys, which adds the same to all scores of a query. Its gradient
    is rounding alone, which Adam scales to whole steps.
    """
    for name in ("state", "averaged/weights", "best/weights"):
        ours, theirs = (load_file(run / f"{name}.safetensors") for run in (first, second))
        assert ours.keys() == theirs.keys()
        for key in ours:
            if not key.startswith("adam") and not key.endswith("attention.key.bias"):
                torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "accumulate"), [("translation", 1), ("classification", 1), ("language-model", 1), ("encoder", 2)]
)
def test_two_processes_give_the_weights_of_one_with_twice_the_batches(
    processes: ForkServerContext, tmp_path: Path, name: str, accumulate: int
) -> None:
    """In the task encoder, both compare texts within the same batches."""
    settings: dict[str, Any] = {"dropout": 0.0, "checkpoint_steps": 0}
    train_in_two(processes, name, tmp_path / "two", **settings, accumulate=accumulate)
    trainer = toy_trainer(name, tmp_path / "one", **settings, accumulate=2 * accumulate)
    trainer.fit()
    assert_close(tmp_path / "one", tmp_path / "two")
    assert load_metadata(tmp_path / "two" / "state.safetensors")["step"] == trainer.progress.step
    ours, theirs = (json.loads((tmp_path / run / "log.jsonl").read_text().splitlines()[-1]) for run in ("one", "two"))
    for field in ("train_loss", "validation_loss"):
        assert ours[field] == pytest.approx(theirs[field], abs=2e-4)
    record = json.loads((tmp_path / "two" / "record.json").read_text(encoding="utf-8"))
    assert [start["processes"] for start in record["starts"]] == [2]


def test_two_processes_resume_from_a_state_within_an_epoch(processes: ForkServerContext, tmp_path: Path) -> None:
    """With dropout: each process continues with its own random numbers."""
    train_in_two(processes, "translation", tmp_path / "whole")
    # The first epoch ends after a limit of time that is over at once.
    train_in_two(processes, "translation", tmp_path / "run", max_minutes=1e-9)
    assert load_metadata(tmp_path / "run" / "state.safetensors")["batch"] == 2
    train_in_two(processes, "translation", tmp_path / "run")
    ours, theirs = (load_file(tmp_path / run / "state.safetensors") for run in ("whole", "run"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_signal_to_one_process_ends_both_after_the_same_update(processes: ForkServerContext, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = start_two(processes, "translation", run, max_epochs=10_000, patience_epochs=10_000)
    log = run / "log.jsonl"
    while not log.exists():
        started[0].join(0.05)
        assert started[0].exitcode is None
    os.kill(started[1].pid, signal.SIGTERM)
    for one in started:
        one.join(120)
        assert one.exitcode == 1  # of the exception Interrupted, which commands map to 143
    assert load_metadata(run / "state.safetensors")["step"] > 0


def test_one_process_needs_no_group() -> None:
    world = World.join(torch.device("cpu"))
    assert (world.rank, world.size, world.is_first) == (0, 1, True)
    assert world.sum([1.5, 2.0]) == [1.5, 2.0]
    assert (world.max(3), world.first("a"), world.gather("a")) == (3, "a", ["a"])


def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert default_device() == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device() == torch.device("cpu")


@pytest.mark.slow  # torchrun and its processes import PyTorch
def test_torchrun_starts_the_processes(tmp_path: Path) -> None:
    """Run the command of docs/research/training.md, and one process with twice the batches."""
    write_sample("translation", tmp_path / "pairs", 60)
    text = Path("docs/research/training.md").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"^\.venv/bin/torchrun (.+)$", text, re.MULTILINE)
    options = [*command.split(), "--epochs", "1", "--threads", "1", "--dropout", "0"]
    places = {"data/pairs": tmp_path / "pairs", "runs/pairs": tmp_path / "run"}
    words = [str(places.get(word, word)) for word in options]
    response = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert response.returncode == 0, response.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))
    assert [start["processes"] for start in record["starts"]] == [2]
    alone = [*words[words.index("sightline") + 1 :], "--accumulate", "2", "--run", str(tmp_path / "one")]
    assert main(alone) == 0
    assert_close(tmp_path / "one", tmp_path / "run")
