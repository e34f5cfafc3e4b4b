"""Classification task: labelled sentences, and the cross-entropy of their labels."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from model.architectures.classifier import Classifier
from model.config import ClassifierConfig, ModelConfig
from model.data.batches import LabelledBatch, LabelledExample, iterate_labelled
from model.data.text import read_labelled
from model.data.tokenizer import encode_lines
from model.training.config import TrainConfig
from model.training.task import Task


def _read_texts(folder: Path, config: TrainConfig) -> list[str]:
    return read_labelled(folder, "train")[0]


def _read_examples(
    folder: Path, split: str, tokenizer: Tokenizer, config: TrainConfig, model_config: ModelConfig
) -> list[LabelledExample]:
    assert isinstance(model_config, ClassifierConfig)
    texts, labels = read_labelled(folder, split, len(model_config.labels))
    return list(zip(encode_lines(tokenizer, texts), labels, strict=True))


def _length(example: LabelledExample) -> int:
    return len(example[0])


def _batches(
    examples: Sequence[LabelledExample], batch_tokens: int, seed: int, config: ModelConfig
) -> Iterator[LabelledBatch]:
    return iterate_labelled(examples, batch_tokens, seed, config.pad_id)


def _count(batch: LabelledBatch, pad_id: int) -> int:
    return len(batch.labels)


def label_loss(model: Classifier, batch: LabelledBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the label-smoothed cross-entropies of a batch, in nats."""
    logprobs = model(batch.source, batch.source_lengths)  # (B, C); softmax does not change log-probabilities
    return functional.cross_entropy(logprobs, batch.labels, label_smoothing=smoothing, reduction="sum")


CLASSIFICATION: Task[LabelledExample, LabelledBatch, Classifier] = Task(
    validation_split="dev",
    read_texts=_read_texts,
    read_examples=_read_examples,
    length=_length,
    batches=_batches,
    count=_count,
    training_loss=label_loss,
    validation_loss=label_loss,
)
