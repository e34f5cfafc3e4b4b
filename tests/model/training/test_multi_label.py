import math

import numpy as np
import pytest
import torch

from model.architectures.classifier import Classifier
from model.config import ClassifierConfig
from model.data.examples import Example, MemoryExamples
from model.training.multi_label import MULTI_LABEL, make_batch, multi_label_loss

CONFIG = ClassifierConfig(
    40, d_model=16, num_heads=2, d_ff=32, dropout=0.0, max_positions=16, labels=("a", "b", "c"), multi_label=True
)
EXAMPLES: list[Example] = [([5, 6, 2], [0, 2]), ([7, 8, 9, 10, 2], []), ([11, 2], [1])]


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier(CONFIG).eval()


def test_labels_become_ones() -> None:
    batch = make_batch(EXAMPLES, CONFIG)
    assert batch.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert batch.source.tolist() == [[5, 6, 2, 0, 0], [7, 8, 9, 10, 2], [11, 2, 0, 0, 0]]
    assert batch.source_lengths.tolist() == [3, 5, 2]
    assert MULTI_LABEL.count(batch, 0) == 3


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_equals_a_loop_over_texts_and_labels(model: Classifier, smoothing: float) -> None:
    expected = 0.0
    for ids, labels in EXAMPLES:
        logits = model(torch.tensor([list(ids)]), torch.tensor([len(ids)]))[0]
        for label, logit in enumerate(logits.tolist()):
            probability = 1 / (1 + math.exp(-logit))
            target = (1 - smoothing / 2) if label in labels else smoothing / 2
            expected -= target * math.log(probability) + (1 - target) * math.log(1 - probability)
    assert multi_label_loss(model, make_batch(EXAMPLES, CONFIG), smoothing).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_a_batch_is_the_sum_over_its_texts(model: Classifier) -> None:
    alone = [multi_label_loss(model, make_batch([example], CONFIG)) for example in EXAMPLES]
    torch.testing.assert_close(multi_label_loss(model, make_batch(EXAMPLES, CONFIG)), torch.stack(alone).sum())


def test_the_size_of_an_example_is_the_length_of_its_text() -> None:
    np.testing.assert_array_equal(MULTI_LABEL.sizes(MemoryExamples(EXAMPLES).lengths), [[3], [5], [2]])
