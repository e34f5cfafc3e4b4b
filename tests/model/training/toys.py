"""Toy runs of every task, which tests train in this process and in others."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from sightline.model.checkpoint import load_metadata
from sightline.model.config import (
    ArchitectureConfig,
    CausalConfig,
    ClassifierConfig,
    EncoderConfig,
    TaggerConfig,
    TransformerConfig,
)
from sightline.model.data.corpus import open_corpus
from sightline.model.data.encoding import encode
from sightline.model.data.examples import Example, MemoryExamples, TrainingData
from sightline.model.data.facts import check_corpus
from sightline.model.data.formats import Reading
from sightline.model.data.learnt_texts import read_texts
from sightline.model.data.preparation import prepare
from sightline.model.data.records import PairRecord, Record, TaskName
from sightline.model.data.tags import NO_TAG
from sightline.model.data.tokenizer_training import read_tokenizer, train_tokenizer
from sightline.model.training.classification import CLASSIFICATION, TAGGING
from sightline.model.training.language_model import LANGUAGE_MODEL
from sightline.model.training.options import TrainConfig
from sightline.model.training.similarity import ENCODER
from sightline.model.training.task import Evaluation, Task
from sightline.model.training.trainer import Trainer
from sightline.model.training.translation import TRANSLATION

VOCABULARY, LONGEST = 300, 12
CONFIG = TrainConfig(
    epochs=2, batch_tokens=64, max_length_tokens=32, warmup_steps=10, average_last=2, checkpoint_steps=1, threads=1
)


@dataclass(frozen=True)
class Toy:
    """A task with a small model and a function that makes the second list of an example."""

    task: Task[Any, Any]
    model: ArchitectureConfig
    second: Callable[[np.random.Generator, list[int]], list[int]]

    def examples(self, seed: int, count: int) -> MemoryExamples:
        rng, examples = np.random.default_rng(seed), list[Example]()
        for _ in range(count):
            ids = _ids(rng)
            examples.append((ids, self.second(rng, ids)))
        return MemoryExamples(examples)


def _ids(rng: np.random.Generator) -> list[int]:
    return [*rng.integers(3, 30, rng.integers(1, LONGEST)).tolist(), 2]


SIZES: Mapping[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 16, "max_positions": 32}
# By task. A new task needs an entry here; the tests of killed runs use all entries.
TOYS: Mapping[str, Toy] = {
    "translation": Toy(
        TRANSLATION,
        TransformerConfig(VOCABULARY, encoder_layers=1, decoder_layers=1, **SIZES),
        lambda rng, ids: _ids(rng),
    ),
    "classification": Toy(
        CLASSIFICATION,
        ClassifierConfig(VOCABULARY, encoder_layers=1, word_dropout=0.2, **SIZES),
        lambda rng, ids: [int(ids[0] > 15)],
    ),
    "language-model": Toy(
        LANGUAGE_MODEL, CausalConfig(VOCABULARY, layers=1, **SIZES), lambda rng, ids: [0] + [1] * (len(ids) - 1)
    ),
    "tagging": Toy(
        TAGGING,
        TaggerConfig(VOCABULARY, encoder_layers=1, word_dropout=0.2, **SIZES),
        lambda rng, ids: [1 + (id_ > 15) for id_ in ids[:-1]] + [NO_TAG],
    ),
    "encoder": Toy(ENCODER, EncoderConfig(VOCABULARY, encoder_layers=1, **SIZES), lambda rng, ids: _ids(rng)),
}


def toy_trainer(
    name: str, run: Path, metric: Callable[[], Evaluation] | None = None, dropout: float = 0.1, **changes: Any
) -> Trainer:
    """Return the trainer of a toy run.

    Args:
        name: name of the task.
        run: folder of the run.
        metric: returns the evaluation of an epoch.
        dropout: dropout of the model; with 0, a classifier drops no words either.
        changes: settings that differ from `CONFIG`.
    """
    toy, config = TOYS[name], CONFIG.model_copy(update=changes)
    records: Sequence[Record] = [PairRecord("a", "b")] if metric else []
    task = dataclasses.replace(toy.task, evaluate=(lambda *_: metric()) if metric else None)
    tokenizer = train_tokenizer(["a b c"], VOCABULARY)
    data = TrainingData(tokenizer, toy.examples(1, 30), toy.examples(2, 6), digest="toy", dev_records=records)
    model = dataclasses.replace(toy.model, dropout=dropout)
    if dropout == 0 and isinstance(model, ClassifierConfig):
        model = dataclasses.replace(model, word_dropout=0.0)
    return Trainer(run, config, task, data, model, torch.device("cpu"))


def read_corpus(
    run: Path, data: Path, task: TaskName, config: TrainConfig, vocab_size: int = VOCABULARY, **languages: Any
) -> TrainingData:
    """Return a corpus as `sightline train` encodes it, without records for metrics."""
    corpus, tokenizer = open_corpus(data, Reading(task, **languages)), run / "tokenizer.json"
    facts = check_corpus(corpus)
    trained = read_tokenizer(tokenizer) if tokenizer.exists() else train_tokenizer(read_texts(corpus.train), vocab_size)
    encoder = partial(encode, labels=facts.outputs)
    return dataclasses.replace(prepare(run, corpus, facts, trained, encoder, config.max_length_tokens), dev_records=())


def train_toy(
    name: str, run: Path, environment: Mapping[str, str] | None = None, ready: Event | None = None, **changes: Any
) -> None:
    """Train a toy run to its end; tests run this in other processes, without output.

    Args:
        name: name of the task.
        run: folder of the run.
        environment: environment variables to set.
        ready: is set when the training starts.
        changes: see `toy_trainer`.
    """
    os.environ.update(environment or {})
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):
        trainer = toy_trainer(name, run, **changes)
        if ready is not None:
            ready.set()
        trainer.fit()


def without_times(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if not name.endswith("seconds")}


def assert_same_run(first: Path, second: Path) -> None:
    """Check that all tensors of two runs are bitwise equal: weights, optimizer, averages."""
    files = sorted(path.relative_to(first) for path in first.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(second) for path in second.rglob("*.safetensors"))
    for file in files:
        ours, theirs = load_file(first / file), load_file(second / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
        assert without_times(load_metadata(first / file)) == without_times(load_metadata(second / file))
