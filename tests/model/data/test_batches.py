from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.model.config import ArchitectureConfig
from sightline.model.data.batches import bucket as bucket_arrays
from sightline.model.data.batches import make_batch, pad

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


def bucket(lengths: Sequence[tuple[int, ...]], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return the batches of the function under test as lists."""
    return [indices.tolist() for indices in bucket_arrays(np.array(lengths, np.int32), batch_tokens, seed)]


def slow_bucket(lengths: Sequence[tuple[int, ...]], batch_tokens: int, seed: int) -> list[list[int]]:
    """Group examples as the function under test does; old runs depend on the order."""
    rng = np.random.default_rng(seed)
    order = sorted(rng.permutation(len(lengths)), key=lambda i: lengths[i])
    batches: list[list[int]] = [[]]
    longest = 0
    for index in order:
        longest = max(longest, max(lengths[index]))
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = max(lengths[index])
        batches[-1].append(int(index))
    rng.shuffle(batches)
    return batches


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 200), st.integers(0, 5))
def test_buckets_equal_those_of_the_slow_function_in_their_order(
    lengths: list[tuple[int, int]], batch_tokens: int, seed: int
) -> None:
    assert bucket(lengths, batch_tokens, seed) == slow_bucket(lengths, batch_tokens, seed)
    sources = [(source,) for source, _ in lengths]
    assert bucket(sources, batch_tokens, seed) == slow_bucket(sources, batch_tokens, seed)


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 200), st.integers(0, 5))
def test_buckets_contain_every_example_once_within_the_budget_and_are_reproducible(
    lengths: list[tuple[int, int]], batch_tokens: int, seed: int
) -> None:
    batches = bucket(lengths, batch_tokens, seed)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert max(max(lengths[i]) for i in batch) * len(batch) <= batch_tokens
    assert batches == bucket(lengths, batch_tokens, seed)


def test_another_seed_gives_another_order() -> None:
    lengths = [(3, 1 + i % 4) for i in range(40)]
    assert bucket(lengths, 24, seed=1) != bucket(lengths, 24, seed=2)


def test_another_seed_gives_other_batches_of_examples_of_equal_length() -> None:
    first, second = ({frozenset(batch) for batch in bucket([(3, 4)] * 40, 24, seed)} for seed in (1, 2))
    assert first != second


def test_batches_come_in_an_order_that_is_not_by_length() -> None:
    first_of_each = [batch[0] for batch in bucket([(length,) for length in range(1, 31)], 30, seed=1)]
    assert first_of_each != sorted(first_of_each)


def test_examples_of_similar_length_share_a_batch() -> None:
    lengths = [(length, length) for length in [2, 20, 2, 20, 2, 20]]
    assert sorted(sorted(batch) for batch in bucket(lengths, 60, seed=0)) == [[0, 2, 4], [1, 3, 5]]


def test_a_batch_is_padded_on_the_right_and_its_target_shifted() -> None:
    batch = make_batch([([5, 6, 2], [7, 2]), ([5, 2], [8, 9, 2])], ArchitectureConfig(10))
    assert batch.source.tolist() == [[5, 6, 2], [5, 2, 0]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target_input.tolist() == [[1, 7, 0], [1, 8, 9]]
    assert batch.target_output.tolist() == [[7, 2, 0], [8, 9, 2]]
    assert batch.to(torch.device("cpu")).source.dtype == torch.int64


def test_lists_and_arrays_are_padded_to_the_longest() -> None:
    assert pad([[5, 6], [], [7]], 9).tolist() == [[5, 6], [9, 9], [7, 9]]
    assert pad([np.array([5, 6], np.int32), np.array([7], np.int32)], 0).tolist() == [[5, 6], [7, 0]]
