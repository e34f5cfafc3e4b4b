"""Number of rows that fit, and memory of one row."""

from pathlib import Path

import pytest

from service.bundle import MAX_BEAMS, Manifest, read_manifest
from service.runtime.memory import MAX_AUTO_ROWS, row_bytes, rows_within
from tests.support.fake_runner import fake_classifier_manifest

MB = 1_000_000


@pytest.mark.parametrize(
    ("num_bytes", "sizes", "rows"),
    [
        (100 * MB, [MB, MB], 50),
        (100 * MB, [MB, 3 * MB], 25),  # all models get as many rows
        (MB, [MB, MB], MAX_BEAMS),  # one beam search always runs
        (100_000 * MB, [MB, MB], MAX_AUTO_ROWS),
        (100 * MB, [0, 2 * MB], 50),  # a model without a decoder needs no rows
        (100 * MB, [0], MAX_AUTO_ROWS),
    ],
)
def test_rows_of_all_models_fit_together(num_bytes: int, sizes: list[int], rows: int) -> None:
    assert rows_within(num_bytes, sizes) == rows


@pytest.mark.parametrize(
    ("bundle", "state"),
    [
        ("multi30k-en-de", 4 * 4 * (256 + 256) * 128 * 2),  # bytes, layers, source and target, width, key and value
        ("multi30k-en-de-bahdanau", 4 * (256 * (384 + 192) + 256)),  # annotations and keys, and one vector
        ("smalltalk-chat-gatt", 4 * 4 * 1024 * 128 * 2),
    ],
)
def test_a_row_takes_its_longest_state_and_two_rows_of_scores(bundle: str, state: int) -> None:
    manifest: Manifest = read_manifest(Path("bundles") / bundle)
    assert row_bytes(manifest) == state + 2 * 4 * manifest.limits.vocabulary


def test_a_classifier_has_no_rows() -> None:
    assert row_bytes(fake_classifier_manifest("judge")) == 0
