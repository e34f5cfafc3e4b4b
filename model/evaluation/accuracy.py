"""Accuracy of a classifier."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from model.architectures.classifier import Classifier
from model.data.batches import iterate_labelled
from model.data.tokenizer import encode_lines
from model.evaluation.share import Share

EVALUATION_TOKENS = 4096  # padded tokens in a batch


@torch.inference_mode()
def accuracy(model: Classifier, tokenizer: Tokenizer, texts: Sequence[str], labels: Sequence[int]) -> Share:
    """Classify texts and return the share of correct labels.

    Raises:
        ValueError: a text is too long for the model.
    """
    examples = list(zip(encode_lines(tokenizer, texts), labels, strict=True))
    limit = model.config.max_positions
    for number, example in enumerate(examples, start=1):
        if len(example[0]) > limit:
            raise ValueError(
                f"text {number} must have at most {limit} tokens (max_positions), got {len(example[0])}; shorten it"
            )
    correct = 0
    for batch in iterate_labelled(examples, EVALUATION_TOKENS, 0, model.config.pad_id):
        chosen = model(batch.source, batch.source_lengths).argmax(dim=-1)
        correct += int((chosen == batch.labels).sum())
    return Share(correct, len(examples))


def accuracy_fields(found: Share) -> dict[str, Any]:
    """Return an accuracy and its 95 % confidence interval, in percent, as fields of a report."""
    return {
        "sentences": found.total,
        "correct": found.count,
        "accuracy": round(100 * found.value, 2),
        "interval_95": [round(100 * end, 2) for end in found.interval],
    }
