"""Messages, log, record and curve of a run."""

import dataclasses
import json
import re
import xml.etree.ElementTree
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sightline.model.config import TransformerConfig
from sightline.model.training.curve import draw_curve
from sightline.model.training.folder import read_log
from sightline.model.training.options import read_train_config
from sightline.model.training.run_report import MEASURED_STEPS, differences, duration, peak_memory
from sightline.model.training.task import Evaluation
from tests.model.training.toys import TOYS, toy_trainer

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_every_few_seconds_has_the_speed_and_the_time_that_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = toy_trainer("translation", tmp_path, epochs=24, minutes=1.5)._report
    for _ in range(20):  # at two steps a second
        report.step(num_steps=512, tokens=400, rate=1.5e-3, seconds=0.5)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("expected: ")]
    assert lines == ["epoch 1 of 24, step 0: loss 0.000, rate 1.5e-03, 800 tokens/s, 90 s left"] * 2


def test_the_time_left_follows_from_measured_steps_and_validations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = toy_trainer("translation", tmp_path, epochs=1)._report
    report.step(100, 400, 1e-3, seconds=100.0)  # the first step prepares much that the others use
    for number in range(MEASURED_STEPS):
        assert "expected" not in capsys.readouterr().err
        report.step(100, 400, 1e-3, seconds=1.0 + number % 2)
    assert "expected: 2 min for at most 100 more steps of 1.4 s\n" in capsys.readouterr().err
    report.epoch(None, None, seconds=6.0, is_whole=False)
    report.step(100, 400, 1e-3, seconds=1.4)
    report.step(100, 400, 1e-3, seconds=5.0)
    printed = capsys.readouterr().err
    assert "5 min left" in printed and "expected" not in printed


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (720, "12 min"), (12_000, "3 h 20 min")])
def test_durations_are_written_for_readers(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_says_what_it_does_and_how_good_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = iter([{"BLEU": 20.5, "chrF": 40.0}, {"BLEU": 31.25, "chrF": 50.0}])
    toy_trainer("translation", tmp_path, lambda: Evaluation(next(values), ("a → b",))).fit()
    first, *lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("expected: ")]
    assert re.fullmatch(
        r"training translation on 30 examples, with 6 for validation: transformer model with 9,312 parameters; at most "
        r"2 epochs of \d steps; float32 on cpu, threads: 1; about [\d,]+ MB of memory",
        first,
    )
    assert re.fullmatch(
        r"epoch 1 of 2: train loss \d\.\d{4}, dev loss \d\.\d{4} \(best\), BLEU 20.50, chrF 40.00; \d+ s", lines[0]
    )
    assert lines[1] == "  a → b"
    assert "BLEU 31.25" in lines[2]
    assert lines[-1].startswith("finished: 2 epochs done, but the dev loss was still improving: train longer; best ")
    assert lines[-1].endswith(f"checkpoints: {tmp_path / 'averaged'} and {tmp_path / 'best'}")
    rows = read_log(tmp_path)
    assert rows[2]["metrics"] == {"BLEU": 31.25, "chrF": 50.0}
    assert list(rows[1])[:5] == ["epoch", "step", "train_loss", "validation_loss", "seconds"]


def test_the_minutes_of_the_run_are_estimated_after_some_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, batch_tokens in (("many", 32), ("few", 96)):
        toy_trainer("translation", tmp_path / name, batch_tokens=batch_tokens).fit()
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("expected: ")]
        assert re.fullmatch(
            r"expected: \d+ s for at most \d+ more steps? of [\d.e-]+ s",
            line,
        )
    capsys.readouterr()
    toy_trainer("translation", tmp_path / "tiny", batch_tokens=10_000).fit()
    assert "expected" not in capsys.readouterr().err


def measure_memory(run: Path, results: "SimpleQueue[float]") -> None:
    """Return the memory of this process before a run, as the run announces it, and at its end."""
    config = TransformerConfig(60_000, d_model=256, d_ff=256, encoder_layers=1, decoder_layers=1, max_positions=32)
    large = {"translation": dataclasses.replace(TOYS["translation"], model=config)}
    with patch.dict(TOYS, large):
        trainer = toy_trainer("translation", run, epochs=1, checkpoint_steps=0, batch_tokens=256)
        results.put(peak_memory(trainer.device))
        results.put(trainer.needed_memory())
        trainer.fit()
        results.put(peak_memory(trainer.device))


def test_the_memory_is_announced_before_the_first_update(processes: ForkServerContext, tmp_path: Path) -> None:
    results = processes.SimpleQueue()
    process = processes.Process(target=measure_memory, args=(tmp_path, results))
    process.start()
    before, announced, needed = (results.get() for _ in range(3))
    process.join()
    assert announced - before > 12 * 60_000 * 256  # gradients and moments of the embeddings
    assert announced == pytest.approx(needed, rel=0.25)


def test_a_run_that_resumes_or_has_finished_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_trainer("translation", tmp_path, epochs=1).fit()
    capsys.readouterr()
    trainer = toy_trainer("translation", tmp_path, patience_epochs=7)
    step = trainer.progress.step
    trainer.fit()
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:3] == [
        f"resuming at epoch 2, step {step:,}",
        "note: --epochs is 2 instead of 1, --patience-epochs is 7 instead of 15",
    ]
    toy_trainer("translation", tmp_path).fit()
    assert capsys.readouterr().err == (
        f"{tmp_path} has already finished: 2 epochs done; to train longer, increase --epochs, "
        "--patience-epochs, --minutes\n"
    )


def test_the_record_has_data_versions_commands_and_results(tmp_path: Path) -> None:
    trainer = toy_trainer("classification", tmp_path, epochs=1)
    assert not (tmp_path / "record.json").exists()
    trainer._report._record["data"] = {"train.tsv": "1f"}
    trainer.fit()
    path = tmp_path / "record.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(fields | {"config": {}, "seed": 1}), encoding="utf-8")  # of an earlier version
    toy_trainer("classification", tmp_path, epochs=2).fit()
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert (record["task"], record["data_digest"]) == ("classification", "toy")
    assert record["data"] == {"train.tsv": "1f"}
    assert record["examples"] == {"train": 30, "dev": 6}
    assert read_train_config(tmp_path / "train.json").epochs == 2
    assert record.keys().isdisjoint({"training", "config", "model", "seed"})  # which have files of their own
    first, second = record["starts"]
    assert first["versions"]["torch"] == str(torch.__version__)
    assert first["versions"].keys() == {"python", "sightline", "torch", "tokenizers", "numpy"}
    assert (first["threads"], first["device"]) == (1, "cpu")
    assert "python" in first["command"]
    assert first["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", first["commit"])
    assert (first["epoch"], first["end"]) == (1, "1 epoch done")
    assert second["changes"] == {"epochs": [1, 2]}
    assert first["time"] <= first["end_time"] <= second["time"] <= second["end_time"]
    assert record["result"]["epoch"] == 2
    assert record["result"]["last_epoch"] == read_log(tmp_path)[2]


def test_a_run_that_continues_on_other_threads_says_that_its_bits_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_trainer("classification", tmp_path, epochs=1).fit()
    try:
        toy_trainer("classification", tmp_path, threads=2).fit()
    finally:
        torch.set_num_threads(1)
    assert (
        "note: the run continues with threads 2 instead of 1; its weights will differ in their last bits from those of "
        "a run without this change\n"
    ) in capsys.readouterr().err


def test_differences_of_environments_are_named() -> None:
    now: dict[str, Any] = {"threads": 2, "device": "cpu", "versions": {"torch": "2.13.0"}}
    assert differences(now, now) == differences({}, now) == []
    earlier = {"threads": 4, "device": "H100", "versions": {"torch": "2.12.0"}}
    assert differences(earlier, now) == [
        "threads 2 instead of 4",
        "device cpu instead of H100",
        "PyTorch 2.13.0 instead of 2.12.0",
    ]


def test_a_damaged_record_is_an_error_before_the_training(tmp_path: Path) -> None:
    toy_trainer("classification", tmp_path, epochs=1).fit()
    (tmp_path / "record.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"record\.json is not valid JSON"):
        toy_trainer("classification", tmp_path)


def rows_of(*losses: tuple[float, float | None]) -> list[dict[str, Any]]:
    rows = [{"epoch": number, "train_loss": train} for number, (train, _) in enumerate(losses, start=1)]
    return [row | ({} if dev is None else {"validation_loss": dev}) for row, (_, dev) in zip(rows, losses, strict=True)]


def test_the_curve_has_both_losses_with_labelled_axes() -> None:
    root = xml.etree.ElementTree.fromstring(draw_curve(rows_of((6.0, 5.5), (5.0, None), (4.0, 4.5))))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"epoch", "loss (nats)", "train 4", "dev 4.5", "1", "2", "3"} <= set(texts)
    train, dev = (
        [tuple(map(float, one.split(","))) for one in line.get("points", "").split()]
        for line in root.iter(f"{SVG}polyline")
    )
    assert (len(train), len(dev)) == (3, 2)
    assert [x for x, _ in train][::2] == [x for x, _ in dev]
    # Lower losses are further down, and the scale is the same for both lines.
    (top, middle, bottom), (first, last) = [y for _, y in train], [y for _, y in dev]
    assert top < first < middle < last < bottom
    assert first - top == pytest.approx((bottom - top) / 4, abs=0.2)


@pytest.mark.parametrize("losses", [[(3.0, None)], [(0.5, 0.5)], [(7.0, 1e-4)] * 200, [(-12.5, -3.0), (4.0, 1.0)]])
def test_a_curve_of_any_run_stays_within_its_picture(losses: list[tuple[float, float | None]]) -> None:
    root = xml.etree.ElementTree.fromstring(draw_curve(rows_of(*losses)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for line in root.iter(f"{SVG}polyline"):
        for point in line.get("points", "").split():
            x, y = map(float, point.split(","))
            assert 0 < x < width
            assert 0 < y < height


def test_the_curve_is_in_the_run_folder(tmp_path: Path) -> None:
    toy_trainer("classification", tmp_path).fit()
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8") == draw_curve(list(read_log(tmp_path).values()))
