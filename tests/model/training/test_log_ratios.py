import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from sightline.model.architectures.classifier import Classifier
from sightline.model.config import ClassifierConfig
from sightline.model.data.examples import Example, MemoryExamples
from sightline.model.training.classification import RATIO_SCALE, embed_log_ratios, log_ratios

# Token 5 is in both texts of label 1 and twice in one of the two of label 0, 6 in one of label 1,
# and 7 in none.
TEXTS: list[Example] = [([5, 5, 2], [0]), ([2], [0]), ([5, 2], [1]), ([5, 6, 2], [1])]
CONFIG = ClassifierConfig(8, d_model=16, num_heads=2, d_ff=32, encoder_layers=1)


def test_ratios_compare_the_shares_of_texts_that_have_a_token() -> None:
    ratios = log_ratios(MemoryExamples(TEXTS), 8, 2)
    expected = [math.log((3 / 4) / (2 / 4)), math.log((2 / 4) / (1 / 4)), 0.0]
    assert_close(ratios[5:8, 1], torch.tensor(expected))
    assert_close(ratios[:, 0], -ratios[:, 1])


def test_a_text_counts_for_each_of_its_labels_and_against_the_others() -> None:
    texts: list[Example] = [([5], [0, 1]), ([6], []), ([6], [1])]
    ratios = log_ratios(MemoryExamples(texts), 8, 2)
    assert_close(ratios[5], torch.tensor([math.log((2 / 3) / (1 / 4)), math.log((2 / 4) / (1 / 3))]))
    assert_close(ratios[6], torch.tensor([math.log((1 / 3) / (3 / 4)), math.log((2 / 4) / (2 / 3))]))


def test_two_labels_take_one_column_with_the_ratio_of_one_of_them() -> None:
    model = Classifier(CONFIG)
    before = model.embedding.weight.detach().clone()
    embed_log_ratios(model, MemoryExamples(TEXTS))
    after = model.embedding.weight.detach()
    assert_close(after[:, :-1], before[:, :-1])
    features = after[:, -1] * CONFIG.d_model**0.5 / RATIO_SCALE
    ratios = log_ratios(MemoryExamples(TEXTS), 8, 2)[:, 1]
    assert_close(features * features[6].sign(), ratios)


@pytest.mark.parametrize(("labels", "multi_label", "columns"), [(3, False, 2), (3, True, 3), (40, True, 4)])
def test_columns_keep_the_ratios_of_all_labels_as_well_as_their_number_allows(
    labels: int, multi_label: bool, columns: int
) -> None:
    config = replace(CONFIG, vocab_size=60, labels=tuple(map(str, range(labels))), multi_label=multi_label)
    rng = torch.Generator().manual_seed(1)
    texts: list[Example] = [
        (torch.randint(3, 60, (8,), generator=rng).tolist(), [index % labels]) for index in range(200)
    ]
    model = Classifier(config)
    before = model.embedding.weight.detach().clone()
    embed_log_ratios(model, MemoryExamples(texts))
    after = model.embedding.weight.detach()
    assert_close(after[:, :-columns], before[:, :-columns])
    features = after[:, -columns:] * config.d_model**0.5 / RATIO_SCALE * (labels / columns) ** 0.5
    ratios = log_ratios(MemoryExamples(texts), 60, labels)
    # The best approximation of a rank has the error of the other singular values.
    rest = torch.linalg.svdvals(ratios)[columns:].square().sum()
    assert_close(ratios.square().sum() - features.square().sum(), rest, rtol=1e-3, atol=1e-2)
