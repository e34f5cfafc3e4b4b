import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sightline.model.architectures.encoder import TextEncoder
from sightline.model.config import EncoderConfig
from sightline.model.data.examples import Example, MemoryExamples
from sightline.model.data.similar_texts import MARK, SCORE_UNIT, decode_similar
from sightline.model.training.similarity import ENCODER, SCALE, make_batch, ranking_loss
from tests.model.training.toys import toy_trainer

CONFIG = EncoderConfig(40, d_model=16, num_heads=2, d_ff=32, dropout=0.0, max_positions=16)
PAIRS: list[Example] = [
    ([5, 6, 2], [7, 8, 9, 2]),
    ([10, 2], [11, 12, 2]),
    ([13, 14, 15, 16, 2], [17, 2]),
    ([18, 2], [19, 20, 21, 2]),
]
DUPLICATES: list[Example] = [
    *PAIRS,
    ([5, 6, 2], [22, 2]),  # the source of the first pair
    ([23, 2], [17, 2]),  # the target of the third pair
    ([24, 2], [10, 2]),  # its target is the source of the second pair
]


@pytest.fixture
def model() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(CONFIG).eval()


def vector(model: TextEncoder, ids: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([list(ids)]), torch.tensor([len(ids)]))[0].detach().double()
    return found


def slow_loss(model: TextEncoder, pairs: list[Example]) -> float:
    """Return the loss by loops over texts in float64."""
    sources, targets = ([vector(model, list(pair[side])) for pair in pairs] for side in (0, 1))
    total = 0.0
    for i, (source, target) in enumerate(pairs):
        by_target, by_source = [], []
        for j, (other_source, other_target) in enumerate(pairs):
            is_false_negative = source == other_source or target == other_target
            if j == i or not (is_false_negative or source == other_target):
                by_target.append(math.exp(SCALE * float(sources[i] @ targets[j])))
            if j == i or not (is_false_negative or other_source == target):
                by_source.append(math.exp(SCALE * float(sources[j] @ targets[i])))
        right = math.exp(SCALE * float(sources[i] @ targets[i]))
        total -= (math.log(right / sum(by_target)) + math.log(right / sum(by_source))) / 2
    return total


TRIPLETS: list[Example] = [
    (PAIRS[0][0], [*PAIRS[0][1], MARK, 25, 26, 2, MARK, 5, 6, 2]),  # a negative that is the source is left out
    (PAIRS[1][0], [*PAIRS[1][1], MARK, 27, 2]),
    (PAIRS[2][0], [*PAIRS[2][1], MARK, 11, 12, 2]),  # the target of the pair before
    PAIRS[3],
]


def slow_loss_of_triplets(model: TextEncoder, examples: list[Example]) -> float:
    """Return the loss by loops, in which negatives are targets without a source."""
    decoded = [decode_similar(example)[0] for example in examples]
    sources, targets = [texts[0] for texts in decoded], [texts[1] for texts in decoded]
    negatives = [text for texts in decoded for text in texts[2:]]
    total = slow_loss(model, [*zip(sources, targets, strict=True)])
    for source, target in zip(sources, targets, strict=True):
        right = math.exp(SCALE * float(vector(model, source) @ vector(model, target)))
        others = [text for text in targets if text != target]
        before = right + sum(math.exp(SCALE * float(vector(model, source) @ vector(model, text))) for text in others)
        wrong = [text for text in negatives if text not in (source, target)]
        after = before + sum(math.exp(SCALE * float(vector(model, source) @ vector(model, text))) for text in wrong)
        total += math.log(after / before) / 2
    return total


def test_negatives_are_compared_with_all_sources(model: TextEncoder) -> None:
    batch = make_batch(TRIPLETS, CONFIG)
    assert batch.target.shape[0] == 8 and batch.is_negative.shape == (4, 8)
    assert ranking_loss(model, batch).item() == pytest.approx(slow_loss_of_triplets(model, TRIPLETS), rel=1e-4)
    alone = make_batch([([5, 2], [6, 2, MARK, 7, 2])], CONFIG)
    assert ENCODER.count(alone, 0) == 1 and ranking_loss(model, alone).item() > 0


def test_the_loss_of_scores_equals_loops(model: TextEncoder) -> None:
    scores = [0.2, 0.9, 0.5, 0.5]
    marked: list[Example] = [
        (source, [*target, MARK + 1 + round(SCORE_UNIT * score)])
        for (source, target), score in zip(PAIRS, scores, strict=True)
    ]
    batch = make_batch(marked, CONFIG)
    assert batch.scores.tolist() == pytest.approx(scores)
    cosines = [float(vector(model, list(source)) @ vector(model, list(target))) for source, target in PAIRS]
    terms = [
        math.exp(SCALE * (lower - higher))
        for higher, better in zip(cosines, scores, strict=True)
        for lower, worse in zip(cosines, scores, strict=True)
        if better > worse
    ]
    assert len(terms) == 5
    assert ranking_loss(model, batch).item() == pytest.approx(4 * math.log(1 + sum(terms)), rel=1e-4)
    assert (ENCODER.count(batch, 0), ENCODER.count(make_batch(marked[2:], CONFIG), 0)) == (4, 0)


@pytest.mark.parametrize("pairs", [PAIRS, DUPLICATES])
def test_the_loss_equals_loops_over_all_texts(model: TextEncoder, pairs: list[Example]) -> None:
    assert ranking_loss(model, make_batch(pairs, CONFIG)).item() == pytest.approx(slow_loss(model, pairs), rel=1e-4)


def test_equal_texts_are_no_negatives() -> None:
    is_negative = make_batch(DUPLICATES, CONFIG).is_negative
    expected = torch.ones(7, 7, dtype=torch.bool)
    for row, column in (*((index, index) for index in range(7)), (0, 4), (4, 0), (2, 5), (5, 2), (1, 6)):
        expected[row, column] = False
    assert torch.equal(is_negative, expected)


def test_a_false_negative_gets_no_gradient(model: TextEncoder) -> None:
    """Two pairs that share their source are not pushed apart: the loss of only these two is 0."""
    batch = make_batch([PAIRS[0], DUPLICATES[4]], CONFIG)
    loss = ranking_loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_accumulated_batches_have_the_negatives_of_each_batch_and_not_those_of_a_larger_one(tmp_path: Path) -> None:
    parts, whole = [make_batch(PAIRS[:2], CONFIG), make_batch(PAIRS[2:], CONFIG)], make_batch(PAIRS, CONFIG)
    trainer = toy_trainer("encoder", tmp_path, dropout=0.0, clip_norm=1e9)
    model = trainer.model
    losses = [ranking_loss(model, part) for part in parts]
    (sum(losses) / len(PAIRS)).backward()  # type: ignore[union-attr]
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    trainer.progress.step = 1
    loss, count = trainer.update(parts)
    assert loss == pytest.approx(sum(one.item() for one in losses)) and count == len(PAIRS)
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    assert whole.is_negative.sum() == 12 and sum(int(part.is_negative.sum()) for part in parts) == 4
    larger = toy_trainer("encoder", tmp_path / "larger", dropout=0.0).model
    assert ranking_loss(larger, whole).item() > sum(ranking_loss(larger, part).item() for part in parts)


def test_padding_does_not_change_the_loss(model: TextEncoder) -> None:
    batch = make_batch(PAIRS, CONFIG)
    wide = [torch.nn.functional.pad(side, (0, 4), value=33) for side in (batch.source, batch.target)]
    wider = type(batch)(wide[0], batch.source_lengths, wide[1], batch.target_lengths, batch.is_negative)
    torch.testing.assert_close(ranking_loss(model, wider), ranking_loss(model, batch))


def test_training_brings_pairs_together(model: TextEncoder) -> None:
    batch = make_batch(PAIRS, CONFIG)
    before = ranking_loss(model, batch).item()
    for _ in range(20):
        model.zero_grad()
        ranking_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.02 * parameter.grad / len(PAIRS))
    assert ranking_loss(model, batch).item() < 0.5 * before


def test_bfloat16_does_not_round_the_scaled_cosines(model: TextEncoder) -> None:
    batch = make_batch(PAIRS, CONFIG)
    exact = ranking_loss(model, batch)
    vectors = [model(batch.source, batch.source_lengths), model(batch.target, batch.target_lengths)]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = SCALE * vectors[0] @ vectors[1].T
        inside = ranking_loss(_Fixed(vectors), batch)  # type: ignore[arg-type]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(inside, exact)


class _Fixed:
    """Model that returns given vectors in turn."""

    def __init__(self, vectors: list[Tensor]) -> None:
        self._vectors = iter(vectors)

    def __call__(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        return next(self._vectors)


def test_the_sizes_of_an_example_are_the_lengths_of_both_sides() -> None:
    np.testing.assert_array_equal(ENCODER.sizes(MemoryExamples(PAIRS).lengths), [[3, 4], [2, 3], [5, 2], [2, 4]])
    assert ENCODER.count(make_batch(PAIRS, CONFIG), 0) == 4
