"""Training runs with scores, as the study collects them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from sightline.model.evaluation.bleu import read_test_set, score
from sightline.model.training.options import TrainConfig

TEST = "test_2016_flickr"


def write_scores(run: Path, data: Path, outputs: Sequence[str]) -> None:
    """Write the scores of a run whose last epoch was trained after them."""
    run.mkdir(parents=True, exist_ok=True)
    scores = dataclasses.asdict(score(outputs, read_test_set(data, TEST, "en", "de"), "de"))
    facts = {"split": TEST, "num_beams": 5, "length_penalty": 1.0, "checkpoint": {"epochs": [2, 3]}}
    (run / "scores.json").write_text(json.dumps({**facts, **scores, "outputs": outputs}), encoding="utf-8")
    (run / "train.json").write_text(TrainConfig(batch_tokens=2000).model_dump_json(), encoding="utf-8")
    log = [{"epoch": epoch, "step": 10 * epoch, "seconds": 9.0} for epoch in range(1, 5)]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in log), encoding="utf-8")
