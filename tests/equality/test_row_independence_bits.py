"""All outputs of all bundles have the same bits for a sequence alone and in a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle_files import read_bundle
from sightline.base.text.tokenizer import read_tokenizer
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.ort import OnnxRunner, _ArrayGroup
from tests.equality.neighbours import (
    SHORT_LENGTHS,
    STEPS,
    Outputs,
    assert_bits_do_not_depend_on_batch,
    assert_same_bits,
    draw,
    encode,
    prefill,
    run_rows,
    steps,
)
from tests.equality.running import make_request, run

BUNDLES = sorted(path.parent for path in Path("bundles").glob("*/manifest.json"))
# Attention over a prompt processes 16 queries at a time, so test 17; test twice the head size too.
LENGTHS = (*SHORT_LENGTHS, 65)
SAMPLED_BUNDLE = Path("bundles/multi30k-en-de-luong-local-p")


def load(bundle: Path, num_threads: int = 1) -> OnnxRunner:
    return OnnxRunner(bundle, read_bundle(bundle), num_threads=num_threads, max_rows=8)


@pytest.mark.parametrize(("num_threads", "lengths"), [(1, LENGTHS), (2, (3, 65))])
@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_every_output_has_the_same_bits_alone_and_in_any_batch(
    bundle: Path, num_threads: int, lengths: tuple[int, ...]
) -> None:
    assert_bits_do_not_depend_on_batch(load(bundle, num_threads), lengths)


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_every_output_has_the_same_bits_with_any_number_of_threads(bundle: Path) -> None:
    """A seed must give the same text with any number of threads, which the service measures."""
    manifest, random = read_bundle(bundle), np.random.default_rng(8)
    batches = [
        [(draw(random, manifest, length), draw(random, manifest, STEPS)) for length in lengths]
        for lengths in (SHORT_LENGTHS, range(60, 67))
    ]
    one_thread = load(bundle)
    rows = [(batch, row) for batch in batches for row in (0, len(batch) - 1)]
    expected = [run_rows(one_thread, batch, row) for batch, row in rows]
    for num_threads in (2, 3):
        runner = load(bundle, num_threads)
        for (batch, row), outputs in zip(rows, expected, strict=True):
            message = f"{num_threads} threads, row {row} of {len(batch)}"
            assert_same_bits(run_rows(runner, batch, row), outputs, message)


def test_a_row_beyond_the_first_hundred_has_the_bits_of_the_first() -> None:
    """Check steps over all rows and steps over a single row."""
    bundle, count = BUNDLES[0], 101
    runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=1, max_rows=count)
    random, manifest = np.random.default_rng(7), runner.manifest
    sequences = [(draw(random, manifest, 1 + row % 40), draw(random, manifest, STEPS)) for row in range(count)]
    runner.init_rows(0, encode(runner, sequences), range(count))
    together = steps(runner, sequences, count - 1)
    encoded = encode(runner, sequences[-1:])
    runner.init_rows(0, encoded, [0])
    expected = steps(runner, sequences[-1:], 0)
    assert_same_bits(together, expected, "the last row of 101")
    runner.init_rows(count - 1, encoded, [0])
    assert_same_bits(steps(runner, sequences[-1:], 0, first=count - 1), expected, "the last row of 101 by itself")


def not_numbers(runner: OnnxRunner, rows: int, length: int) -> dict[str, NDArray[Any]]:
    """Return encoder outputs for sources of a given length: only NaN, or the largest integer."""
    made = {}
    for state in runner.manifest.states:
        if state.encoder_output is not None:
            shape = [length if isinstance(axis, str) else axis for axis in state.shape]
            largest = 127 if state.dtype == "int8" else np.nan
            made[state.encoder_output] = np.full((rows, *shape), largest, state.dtype)
    return made


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_the_state_of_an_earlier_sequence_is_never_read(bundle: Path) -> None:
    runner = load(bundle)
    if runner.manifest.decoder is None:
        return
    random = np.random.default_rng(6)
    sequences = [(draw(random, runner.manifest, length), draw(random, runner.manifest, STEPS)) for length in (3, 21)]

    def outputs() -> list[Outputs]:
        """Initialize rows from sources that are encoded one at a time, without padding."""
        made = []
        for row in range(2):
            for index in range(2):
                runner.init_rows(index, encode(runner, sequences[index : index + 1]), [0])
                if runner.manifest.is_decoder_only:
                    prefill(runner, index, sequences[index][0][:-1])
            made.append(steps(runner, sequences, row))
        return made

    expected = outputs()
    if runner.manifest.is_decoder_only:
        for group in runner._groups:
            assert isinstance(group, _ArrayGroup)
            group._rows.fill(np.nan)
    else:
        runner.init_rows(0, not_numbers(runner, 2, 60), [0, 1])
    for given, row_expected in zip(outputs(), expected, strict=True):
        assert_same_bits(given, row_expected, "after sequences of NaN")


def test_a_sampled_text_is_the_same_alone_and_beside_the_longest_sentence(sentences: list[str]) -> None:
    runner = load(SAMPLED_BUNDLE)
    tokenizer = read_tokenizer(SAMPLED_BUNDLE / runner.manifest.source_tokenizer)
    rider, longest = (tuple(tokenizer.encode(text)) for text in ("rider", max(sentences, key=len)))
    sampled = make_request(rider, parameters=GenerateParameters(do_sample=True, seed=1737, max_new_tokens=8))
    (alone,) = run(runner, [sampled])
    together, _ = run(runner, [sampled, make_request(longest, parameters=GenerateParameters(max_new_tokens=20))])
    assert together.targets == alone.targets
