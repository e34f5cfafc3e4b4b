"""Bitwise comparison of a runner's outputs for a sequence alone and in a batch."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import PREFILL_TOKENS, TOP_OUTPUTS, VOCABULARY_OUTPUTS, Manifest
from sightline.service.runtime.runner import Runner

Array = NDArray[Any]
Outputs = list[dict[str, Array]]  # of the encoder, then of each step

FIRST_ID = 3  # smaller ones mark padding, beginning and end
STEPS = 3
SHORT_LENGTHS = (1, 3, 7, 17)
BATCH_SIZES = (2, 3, 5)
LONG_PROMPT = 150
CHUNKS = (2, 3, 8, 33, 48, LONG_PROMPT)  # without a single token, see `Runner.prefill`


def assert_bits_do_not_depend_on_batch(runner: Runner, lengths: Sequence[int] = SHORT_LENGTHS) -> None:
    """Compare sources alone and in batches with longer ones of each length modulo 8."""
    random, manifest = np.random.default_rng(5), runner.manifest
    longest = manifest.limits.max_source_tokens - STEPS
    if manifest.is_decoder_only:
        assert_bits_do_not_depend_on_cuts(runner, random, min(LONG_PROMPT, longest))
    for length in lengths:
        own = draw(random, manifest, length), draw(random, manifest, STEPS)
        alone = run_rows(runner, [own], 0)
        for number, mate_length in enumerate([1, *range(length + 1, min(length + 9, longest + 1))]):
            size = BATCH_SIZES[number % len(BATCH_SIZES)]
            mates = [(draw(random, manifest, mate_length), draw(random, manifest, STEPS)) for _ in range(size - 1)]
            row = number % size
            together = run_rows(runner, [*mates[:row], own, *mates[row:]], row)
            assert_same_bits(together, alone, f"{length} tokens in row {row} of {size}, the others of {mate_length}")


def assert_bits_do_not_depend_on_cuts(runner: Runner, random: np.random.Generator, length: int) -> None:
    """Compare a prompt in chunks of different sizes, and the steps after it."""
    prompt, targets = draw(random, runner.manifest, length), draw(random, runner.manifest, STEPS)
    kept = {state.output for state in runner.manifest.states}
    names = [name for name in runner.manifest.decoder_graph.outputs if name not in kept]
    found = list[Outputs]()
    for size in CHUNKS:
        runner.init_rows(0, {}, [0])
        cuts = [*range(0, length - 1, size), length]
        chunks = [runner.prefill(0, prompt[first:last], first, names) for first, last in pairwise(cuts)]
        hidden = np.concatenate([chunk["hidden"] for chunk in chunks])
        last = {name: array if array.ndim == 1 else array[..., -1, :] for name, array in chunks[-1].items()}
        found.append([{**last, "hidden": hidden}, *steps(runner, [(np.append(prompt, 0), targets)], 0)])
        assert_same_bits(found[-1], found[0], f"{length} tokens in chunks of {size}")


def assert_same_bits(given: Outputs, expected: Outputs, message: str) -> None:
    for index, (some, others) in enumerate(zip(given, expected, strict=True)):
        assert some.keys() == others.keys()
        for name, array in others.items():
            assert np.isfinite(array).all()
            np.testing.assert_array_equal(some[name], array, f"{name} of call {index}: {message}")


def draw(random: np.random.Generator, manifest: Manifest, length: int) -> NDArray[np.int64]:
    return random.integers(FIRST_ID, manifest.limits.vocabulary, length)


Sequences = Sequence[tuple[Array, Array]]  # sources, and the targets that are read after them


def run_rows(runner: Runner, sequences: Sequences, row: int) -> Outputs:
    """Read sources and run steps; return the outputs of one row without padding."""
    encoded = encode(runner, sequences)
    runner.init_rows(0, encoded, [0] * len(sequences) if runner.manifest.is_decoder_only else range(len(sequences)))
    if not runner.manifest.is_decoder_only:
        return [own_encoded(runner, encoded, sequences, row), *steps(runner, sequences, row)]
    prefilled = [prefill(runner, number, source[:-1]) for number, (source, _) in enumerate(sequences)]
    return [*prefilled[row], *steps(runner, sequences, row)]


def prefill(runner: Runner, row: int, prompt: Array) -> Outputs:
    """Read a prompt into a row as the engine does; return the outputs of each chunk but scores."""
    kept = {state.output for state in runner.manifest.states} | TOP_OUTPUTS | VOCABULARY_OUTPUTS
    names = [name for name in runner.manifest.decoder_graph.outputs if name not in kept]
    return [
        dict(runner.prefill(row, prompt[first : first + PREFILL_TOKENS], first, names))
        for first in range(0, len(prompt), PREFILL_TOKENS)
    ]


def encode(runner: Runner, sequences: Sequences) -> Mapping[str, Array]:
    """Return the outputs of the encoder for a batch; a decoder-only model has none."""
    if runner.manifest.is_decoder_only:
        return {}
    lengths = lengths_of(sequences)
    ids = np.full((len(sequences), lengths.max()), runner.manifest.tokens.pad_id, np.int64)
    for index, (source, _) in enumerate(sequences):
        ids[index, : len(source)] = source
    return runner.run_encoder(ids, lengths, runner.manifest.encoder_graph.outputs)


def lengths_of(sequences: Sequences) -> NDArray[np.int32]:
    return np.array([len(source) for source, _ in sequences], np.int32)


def own_encoded(runner: Runner, encoded: Mapping[str, Array], sequences: Sequences, row: int) -> dict[str, Array]:
    return dict(own_parts(runner.manifest, encoded, row, len(sequences[row][0]), 0))


def steps(runner: Runner, sequences: Sequences, row: int, *, first: int = 0) -> Outputs:
    """Run decoder steps and return the outputs of one row; nothing without a decoder.

    The sequences are in the rows from `first` on, and `row` counts from there.
    """
    manifest = runner.manifest
    if manifest.decoder is None:
        return []
    lengths, outputs = lengths_of(sequences), Outputs()
    kept = {state.output for state in manifest.states}
    names = [name for name in manifest.decoder.outputs if name not in kept]
    filled = lengths - 1 if manifest.is_decoder_only else np.zeros_like(lengths)
    for age in range(STEPS):
        tokens = np.array([target[age] for _, target in sequences])
        given = runner.step(tokens, filled + np.int32(age), lengths, names, first=first)
        outputs.append(dict(own_parts(manifest, given, row, int(lengths[row]), int(filled[row]) + age + 1)))
    return outputs


def own_parts(
    manifest: Manifest, given: Mapping[str, Array], row: int, source_tokens: int, target_tokens: int
) -> Iterator[tuple[str, Array]]:
    """Copy the part of each output that is not padding."""
    source, target = slice(source_tokens), slice(target_tokens)
    map_columns = {"encoder": (source, source), "encoder_slots": (source,), "cross": (slice(None), source)}
    map_columns["decoder"] = (slice(None), target)
    parts: dict[str, tuple[slice, ...]] = {} if manifest.is_decoder_only else {"hidden": (source,)}
    for attention in manifest.attention:
        columns = map_columns[attention.kind]
        parts |= dict.fromkeys(attention.outputs, (slice(None), *columns))
    for state in manifest.states:
        if state.encoder_output is not None:
            parts[state.encoder_output] = tuple(
                source if isinstance(axis, str) else slice(None) for axis in state.shape
            )
    for name, array in given.items():
        yield name, array[row][parts.get(name, ())].copy()
