"""Properties of the graphs; `test_verify.py` and `tests/equality` compare outputs with PyTorch."""

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

SCORES = ["logits", "logprobs", "top_logprobs", "top_ids"]


@torch.inference_mode()
def expected_logits(model: Transformer, source: Sequence[int], target: Sequence[int]) -> NDArray[Any]:
    """Return the logits (T, V) after each target token, without cache and batch."""
    logits = model(torch.tensor([list(source)]), torch.tensor([len(source)]), torch.tensor([list(target)]))
    return np.asarray(logits[0].numpy())


def begin(sessions: Sessions, sources: Sequence[Sequence[int]], slots: int) -> States:
    return initial_states(sessions.manifest, encode(sessions, sources), slots)


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


def test_columns_of_padding_are_zero_in_encoder_maps(sessions: Sessions, sources: list[list[int]]) -> None:
    encoded = encode(sessions, sources)
    for row, source in enumerate(sources):
        for layer in range(2):
            assert not encoded[f"encoder_attention.{layer}"][row, ..., len(source) :].any()


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
