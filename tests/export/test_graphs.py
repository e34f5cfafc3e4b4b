"""Parts of the graphs equal PyTorch; `test_verify.py` tests whole graphs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from sightline.base.bundle import TOP_TOKENS
from sightline.export.check.sessions import Sessions, States, encode, initial_states, run_step
from sightline.model.architectures.transformer import Transformer
from sightline.model.rounding import Reference
from tests.rounding import assert_within_rounding, rows_sum_to_one
from tests.support.reference_decoding import log_softmax

TARGET = [1, 17, 42, 5, 300, 299, 8, 77, 12]
SCORES = ["logits", "logprobs", "top_logprobs", "top_ids"]


@torch.inference_mode()
def expected_hidden(model: Transformer, source: Sequence[int]) -> NDArray[Any]:
    """Return the output of the encoder (S, M) for one source."""
    encoded, _ = model.encode(torch.tensor([list(source)]), torch.tensor([len(source)]))
    return np.asarray(encoded[0].numpy())


@torch.inference_mode()
def expected_logits(model: Transformer, source: Sequence[int], target: Sequence[int]) -> NDArray[Any]:
    """Return the logits (T, V) after each target token, without cache and batch."""
    logits = model(torch.tensor([list(source)]), torch.tensor([len(source)]), torch.tensor([list(target)]))
    return np.asarray(logits[0].numpy())


@torch.inference_mode()
def expected_maps(model: Transformer, source: Sequence[int], target: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return the attention weights of one row, (L, H, rows, columns), by kind."""
    maps = model.attention_maps(torch.tensor([list(source)]), torch.tensor([len(source)]), torch.tensor([list(target)]))
    return {kind: part[:, 0].numpy() for kind, part in maps.items()}


def begin(sessions: Sessions, sources: Sequence[Sequence[int]], slots: int) -> States:
    return initial_states(sessions.manifest, encode(sessions, sources), slots)


def test_encoder_equals_pytorch_on_ragged_rows(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    hidden = encode(sessions, sources)["hidden"]
    for row, source in enumerate(sources):

        def compute(model: Transformer, source: list[int] = source) -> dict[str, NDArray[Any]]:
            return {"hidden": expected_hidden(model, source)}

        assert_within_rounding(models, compute, {"hidden": hidden[row, : len(source)]})


def test_padding_of_a_source_does_not_affect_results(sessions: Sessions, sources: list[list[int]]) -> None:
    lengths = np.array([5], np.int32)
    names = list(sessions.manifest.encoder_graph.outputs)
    whole = np.array([sources[0]])
    other = np.concatenate([whole[:, :5], whole[:, :4:-1]], axis=1)
    given = [
        dict(zip(names, sessions.encoder.run(names, {"source_ids": ids, "source_lengths": lengths}), strict=True))
        for ids in (whole, other)
    ]
    assert_array_equal(given[0]["hidden"][:, :5], given[1]["hidden"][:, :5])


def test_encoder_maps_equal_pytorch_and_columns_of_padding_are_zero(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    encoded = encode(sessions, sources)
    for row, source in enumerate(sources):
        size = len(source)
        given = np.stack([encoded[f"encoder_attention.{layer}"][row] for layer in range(2)])  # (L, H, S, S)
        assert not given[..., size:].any()

        def compute(model: Transformer, source: list[int] = source) -> dict[str, NDArray[Any]]:
            return {"encoder": expected_maps(model, source, TARGET)["encoder"]}

        assert_within_rounding(models, compute, {"encoder": given[:, :, :size, :size]})


def test_rows_of_different_ages_in_one_batch_equal_pytorch(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    ages = [0, 8, 3, 0, 5, 8]
    lengths = [len(source) for source in sources]
    states = begin(sessions, sources, slots=16)
    for tick in range(max(ages) + 1):  # a row that has its age reads the same token again
        now = [min(tick, age) for age in ages]
        given = run_step(sessions, states, [TARGET[age] for age in now], now, lengths, SCORES)
    for row, (source, age) in enumerate(zip(sources, ages, strict=True)):

        def compute(model: Transformer, source: list[int] = source, age: int = age) -> dict[str, NDArray[Any]]:
            logits = expected_logits(model, source, TARGET)[age]
            return {"logits": logits, "logprobs": log_softmax(logits)}

        assert_within_rounding(models, compute, {name: given[name][row] for name in ("logits", "logprobs")})


def test_step_maps_equal_pytorch_within_a_rows_own_length(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    ages = [0, 8, 3, 0, 5, 8]
    lengths = [len(source) for source in sources]
    states = begin(sessions, sources, slots=16)
    for state in states.values():
        state += 0.0  # own memory for each, as a service has
    names = ["cross_attention", "decoder_attention"]
    for tick in range(max(ages) + 1):
        now = [min(tick, age) for age in ages]
        given = run_step(sessions, states, [TARGET[age] for age in now], now, lengths, names)
    for row, (source, age) in enumerate(zip(sources, ages, strict=True)):
        sizes = {"cross": len(source), "decoder": age + 1}

        def compute(
            model: Transformer, source: list[int] = source, age: int = age, sizes: dict[str, int] = sizes
        ) -> dict[str, NDArray[Any]]:
            maps = expected_maps(model, source, TARGET)
            return {
                kind: maps[kind][:, :, age, :size].swapaxes(0, 1) for kind, size in sizes.items()
            }  # (H, L, columns)

        own = {kind: given[f"{kind}_attention"][row, ..., :size] for kind, size in sizes.items()}
        assert_within_rounding(models, compute, own)


def test_a_shorter_row_has_a_complete_map_with_any_content_of_memory(
    sessions: Sessions, sources: list[list[int]]
) -> None:
    states = begin(sessions, sources, slots=16)
    full = max(len(source) for source in sources)
    for lengths in ([full] * len(sources), [full, *[1] * (len(sources) - 1)]):
        given = run_step(sessions, states, [1] * len(sources), [0] * len(sources), lengths, ["cross_attention"])
    assert rows_sum_to_one(given["cross_attention"][0])
    assert rows_sum_to_one(given["cross_attention"][1:, :, :, :1])


@pytest.mark.parametrize("ages", [[0, 0, 0], [0, 7, 2], [7, 7, 7]], ids=["first", "mixed", "last"])
def test_a_step_writes_exactly_one_position_of_each_row(
    sessions: Sessions, sources: list[list[int]], ages: list[int]
) -> None:
    rows, slots = 3, 8
    fresh = begin(sessions, sources[:rows], slots)
    # Guard values fill a row before and after the batch, and every cache position.
    buffers = {name: np.full((rows + 2, *state.shape[1:]), 7.0, np.float32) for name, state in fresh.items()}
    states = {name: buffer[1:-1] for name, buffer in buffers.items()}
    for name, state in states.items():
        if name.startswith("cross"):
            state[:] = fresh[name]
    before = {name: buffer.copy() for name, buffer in buffers.items()}
    lengths = [len(source) for source in sources[:rows]]
    run_step(sessions, states, [1] * rows, ages, lengths, ["logits"])
    for name, buffer in buffers.items():
        written = np.zeros(buffer.shape, bool)
        if name.startswith("self"):
            for row, age in enumerate(ages):
                written[row + 1, :, age] = True
        assert_array_equal(buffer[~written], before[name][~written])
        assert (buffer[written] != before[name][written]).all()


def test_steps_up_to_the_buffers_end_equal_pytorch(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    slots = sessions.manifest.limits.max_target_tokens
    target = [1, *(np.arange(slots - 1) % 399 + 1)]
    states = begin(sessions, sources[:1], slots)
    given = [
        run_step(sessions, states, [token], [age], [len(sources[0])], ["logits"])["logits"][0]
        for age, token in enumerate(target)
    ]
    assert_within_rounding(
        models, lambda model: {"logits": expected_logits(model, sources[0], target)}, {"logits": np.array(given)}
    )


def test_a_sequence_does_not_depend_on_earlier_content_of_its_row(sessions: Sessions, sources: list[list[int]]) -> None:
    lengths = [len(source) for source in sources]
    clean, used = (begin(sessions, sources, slots=16) for _ in range(2))
    for name, state in used.items():
        if name.startswith("self"):
            state[:] = 1e3
    given = [run_step(sessions, states, [1] * 6, [0] * 6, lengths, ["logits"]) for states in (clean, used)]
    assert_array_equal(given[0]["logits"], given[1]["logits"])


def test_the_top_tokens_are_the_best_of_the_log_probabilities_in_falling_order(
    sessions: Sessions, sources: list[list[int]]
) -> None:
    lengths = [len(source) for source in sources]
    given = run_step(sessions, begin(sessions, sources, 4), [1] * 6, [0] * 6, lengths, SCORES)
    order = np.argsort(-given["logprobs"], axis=-1, kind="stable")[:, :TOP_TOKENS]
    assert_array_equal(given["top_ids"], order)
    assert_array_equal(given["top_logprobs"], np.take_along_axis(given["logprobs"], order, axis=-1))


def test_each_axis_of_the_graphs_is_free_or_has_the_size_that_the_manifest_says(sessions: Sessions) -> None:
    limits = sessions.manifest.limits
    decoder = sessions.decoder.session
    shapes = {value.name: value.shape for value in (*decoder.get_inputs(), *decoder.get_outputs())}
    assert shapes["logits"] == shapes["logprobs"] == ["batch", limits.vocabulary]
    assert shapes["top_logprobs"] == shapes["top_ids"] == ["batch", TOP_TOKENS]
    for state in sessions.manifest.states:
        assert shapes[state.input] == ["batch", *state.shape]


def test_both_graphs_share_the_embedding(sessions: Sessions, model: Transformer) -> None:
    stored = sessions.manifest.files["weights.bin"].bytes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert stored < 4 * (parameters + model.positions.numel()) + 64 * 100  # padding of fewer than 100 tensors
