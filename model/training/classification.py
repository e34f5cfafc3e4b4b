"""Classification as a task: labelled sentences, the cross-entropy of their labels, and accuracy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from model.architectures.classifier import Classifier
from model.config import ClassifierConfig, ModelConfig, TrainConfig
from model.data.batches import bucket, pad, read_lines
from model.data.tokenizer import encode_lines
from model.evaluation.share import Share
from model.training.task import Task

Example = tuple[list[int], int]  # source ids, the end token last, and the number of the label

EVALUATION_TOKENS = 4096  # padded tokens of one batch


def read_labelled(folder: Path, split: str, num_labels: int | None = None) -> tuple[list[str], list[int]]:
    """Read the sentences of `split.tsv` and the numbers of their labels; a line is `label TAB text`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or not UTF-8, a line is not of that form, or its label is not one of `num_labels`.
    """
    path = folder / f"{split}.tsv"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: expected one sentence a line, the label's number and a tab before it")
    texts, labels = [], []
    for number, line in enumerate(read_lines(path), start=1):
        label, tab, text = line.partition("\t")
        if not (tab and text.strip() and label.isascii() and label.isdigit()):
            raise ValueError(f"line {number} of {path} is not a label's number, a tab and a text")
        if num_labels is not None and int(label) >= num_labels:
            raise ValueError(
                f"line {number} of {path}: there is a label {label}; those of the model are 0 to {num_labels - 1}"
            )
        texts.append(text)
        labels.append(int(label))
    if not texts:
        raise ValueError(f"{path} is empty: expected one sentence a line, the label's number and a tab before it")
    return texts, labels


@dataclass(frozen=True)
class LabelledBatch:
    """Padded sources (B, S), their lengths and their labels (B,)."""

    source: Tensor
    source_lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "LabelledBatch":
        return LabelledBatch(self.source.to(device), self.source_lengths.to(device), self.labels.to(device))


def _read_texts(folder: Path, config: TrainConfig) -> list[str]:
    return read_labelled(folder, "train")[0]


def _read_examples(
    folder: Path, split: str, tokenizer: Tokenizer, config: TrainConfig, model_config: ModelConfig
) -> list[Example]:
    assert isinstance(model_config, ClassifierConfig)
    texts, labels = read_labelled(folder, split, len(model_config.labels))
    return list(zip(encode_lines(tokenizer, texts), labels, strict=True))


def _length(example: Example) -> int:
    return len(example[0])


def _batches(examples: Sequence[Example], batch_tokens: int, seed: int, config: ModelConfig) -> Iterator[LabelledBatch]:
    for indices in bucket([(len(source),) for source, _ in examples], batch_tokens, seed):
        sources = [examples[i][0] for i in indices]
        lengths, labels = torch.tensor([len(source) for source in sources]), [examples[i][1] for i in indices]
        yield LabelledBatch(pad(sources, config.pad_id), lengths, torch.tensor(labels))


def _count(batch: LabelledBatch, pad_id: int) -> int:
    return len(batch.labels)


def label_loss(model: Classifier, batch: LabelledBatch, smoothing: float = 0.0) -> Tensor:
    """Sum of the label-smoothed cross-entropies of a batch, in nats."""
    logprobs = model(batch.source, batch.source_lengths)  # (B, C); as logits they give the same
    return functional.cross_entropy(logprobs, batch.labels, label_smoothing=smoothing, reduction="sum")


CLASSIFICATION: Task[Example, LabelledBatch, Classifier] = Task(
    validation_split="dev",
    read_texts=_read_texts,
    read_examples=_read_examples,
    length=_length,
    batches=_batches,
    count=_count,
    training_loss=label_loss,
    validation_loss=label_loss,
)


@torch.inference_mode()
def accuracy(model: Classifier, tokenizer: Tokenizer, texts: Sequence[str], labels: Sequence[int]) -> Share:
    """Classify texts, whole.

    Raises:
        ValueError: a text is too long for the model.
    """
    examples = list(zip(encode_lines(tokenizer, texts), labels, strict=True))
    limit = model.config.max_positions
    for number, example in enumerate(examples, start=1):
        if _length(example) > limit:
            raise ValueError(f"text {number} has {_length(example)} tokens, max_positions is {limit}; shorten it")
    correct = 0
    for batch in _batches(examples, EVALUATION_TOKENS, 0, model.config):
        chosen = model(batch.source, batch.source_lengths).argmax(dim=-1)
        correct += int((chosen == batch.labels).sum())
    return Share(correct, len(examples))


def accuracy_facts(found: Share) -> dict[str, Any]:
    """What is written of an accuracy; percent, with the 95 % interval."""
    return {
        "sentences": found.total,
        "correct": found.count,
        "accuracy": round(100 * found.value, 2),
        "interval_95": [round(100 * end, 2) for end in found.interval],
    }
