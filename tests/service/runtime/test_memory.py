"""Number of rows that fit, and memory of one row."""

import gc
from pathlib import Path

import pytest

from sightline.base.bundle import MAX_BEAMS, Manifest, State
from sightline.base.bundle_files import read_manifest
from sightline.service.runtime.runner import BLOCK_TOKENS
from sightline.service.runtime.state_memory import MAX_AUTO_ROWS, prefix_block_bytes, row_bytes, rows_within, trim_heap
from tests.support.fake_runner import fake_classifier_manifest, fake_manifest

MB = 1_000_000


@pytest.mark.parametrize(
    ("num_bytes", "sizes", "rows"),
    [
        (40 * MB, [MB, MB], 20),
        (100 * MB, [MB, 3 * MB], 25),  # all models get as many rows
        (MB, [MB, MB], MAX_BEAMS),  # one beam search always runs
        (100_000 * MB, [MB, MB], MAX_AUTO_ROWS["cpu"]),
        (40 * MB, [0, 2 * MB], 20),  # a model without a decoder needs no rows
        (100 * MB, [0], MAX_AUTO_ROWS["cpu"]),
    ],
)
def test_rows_of_all_models_fit_together(num_bytes: int, sizes: list[int], rows: int) -> None:
    assert rows_within(num_bytes, sizes, "cpu") == rows


@pytest.mark.parametrize(
    ("bundle", "state"),
    [
        ("multi30k-en-de", 1 * 4 * (256 + 256) * 128 * 2),  # bytes, layers, source and target, width, key and value
        ("multi30k-en-de-bahdanau", 4 * (256 * (384 + 192) + 256)),  # annotations and keys, and one vector
        ("smalltalk-chat-gatt", 4 * 4 * 1024 * 128 * 2),
    ],
)
def test_a_row_takes_its_longest_state_and_two_rows_of_scores(bundle: str, state: int) -> None:
    manifest: Manifest = read_manifest(Path("bundles") / bundle)
    assert row_bytes(manifest) == state + 2 * 4 * manifest.limits.vocabulary


def test_a_classifier_has_no_rows() -> None:
    assert row_bytes(fake_classifier_manifest("judge")) == 0


@pytest.mark.parametrize(
    ("bundle", "size"),
    [
        ("smalltalk-chat-gatt", 4 * 4 * BLOCK_TOKENS * 128 * 2),  # bytes, layers, tokens, width, key and value
        ("multi30k-en-de", 0),  # its states depend on a source
    ],
)
def test_a_block_of_prefixes_takes_the_states_of_its_tokens(bundle: str, size: int) -> None:
    assert prefix_block_bytes(read_manifest(Path("bundles") / bundle)) == size


def test_a_model_with_a_state_of_fixed_size_has_no_prefix_cache() -> None:
    manifest = fake_manifest(decoder_start="source")
    assert manifest.has_prefix_states
    fixed = State(input="sum", output="sum_next", init="zeros", shape=(1,))
    assert not manifest.model_copy(update={"states": (*manifest.states, fixed)}).has_prefix_states


def test_trimming_the_heap_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    trim_heap()
    assert gc.collect() == 0
