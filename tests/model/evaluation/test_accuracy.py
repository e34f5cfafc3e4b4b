from pathlib import Path

import pytest
import torch

from model.architectures.classifier import Classifier
from model.checkpoint import load_model
from model.evaluation.accuracy import accuracy


def test_accuracy_counts_what_the_model_chooses(classifier_checkpoint: Path, toy_sentences: list[str]) -> None:
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)
    chosen = []
    for encoding in tokenizer.encode_batch(toy_sentences):
        logprobs = model(torch.tensor([encoding.ids]), torch.tensor([len(encoding.ids)]))
        chosen.append(int(logprobs.argmax()))
    wrong = [(label + 1) % 3 for label in chosen[:2]]
    assert accuracy(model, tokenizer, toy_sentences, chosen).count == len(toy_sentences)
    assert accuracy(model, tokenizer, toy_sentences, wrong + chosen[2:]).count == len(toy_sentences) - 2


def test_a_text_that_is_too_long_is_rejected_with_both_numbers(classifier_checkpoint: Path) -> None:
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)
    with pytest.raises(ValueError, match=r"text 1 must have at most 256 tokens \(max_positions\), got \d+; shorten it"):
        accuracy(model, tokenizer, ["word " * 300], [0])
