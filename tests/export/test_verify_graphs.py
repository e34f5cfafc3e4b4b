"""The verification of imported bundles accepts correct graphs, and finds damaged ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sightline.base.bundle import PREFILL_TOKENS, Verification
from sightline.export.check.numpy_reference import EXACT, Rounded
from sightline.export.check.sessions import DecoderSession, States
from sightline.export.check.verify import (
    LEAST_LONG,
    LONG_SCORES,
    LONG_TARGET,
    MAX_ROWS,
    NEW_TOKENS,
    SENTENCE_TOKENS,
    ComparedTexts,
    compared_rows,
    differences_of,
    long_length,
    reference_outputs,
    rounding_limits,
    verify,
)
from sightline.export.families.description import RelativeBias, Stack
from sightline.export.families.table import describe, find_family
from sightline.export.graphs import relative
from sightline.export.import_errors import VerificationError
from sightline.export.sources.opened_checkpoint import Folder
from sightline.model.float32 import UNIT_ROUNDOFF, max_abs
from tests.export.graph_bundles import write_bundle
from tests.zoo.models import MODELS

SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 60, "max_position_embeddings": 40},
    "t5": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "n_positions": 512},
}
NAMES = ("gpt2-scales", "llama-biases", "qwen3-windows", "smollm3", "bert", "t5")


class Bundle:
    """A bundle without tokenizer, whose checkpoint stays open."""

    def __init__(self, folder: Path, opened: Folder, positions: int) -> None:
        family = find_family(opened.config)
        self.folder = folder
        self.model, self.weights = describe(family, opened.config, opened.tensors, input_names=())
        self.manifest = write_bundle(folder, self.model, self.weights, positions)

    def change_weights(self, name: str, row: int, change: float) -> None:
        """Add a number to a weight of the bundle.

        Args:
            name: name of a matrix of the model.
            row: row of the stored matrix, whose first element changes.
            change: the number.
        """
        path = self.folder / "weights.bin"
        stored = np.fromfile(path, np.float32)
        values = self.weights.read(name)
        values = (values if "positions" in name else values.T)[row].ravel()[:8]
        windows = np.lib.stride_tricks.sliding_window_view(stored, len(values))
        (start,) = np.flatnonzero((windows == values).all(axis=1))
        stored[start] += change
        stored.tofile(path)

    def verify(self) -> Verification:
        return verify(self.folder, self.manifest, self.model, self.weights)


MakeBundle = Callable[..., Bundle]


@pytest.fixture
def bundle_of(tmp_path: Path) -> MakeBundle:
    def create(name: str, positions: int = 40, **options: Any) -> Bundle:
        MODELS[name].save(tmp_path, **(SIZES.get(name, {}) | options))
        return Bundle(tmp_path, Folder(tmp_path), positions)

    return create


@pytest.mark.parametrize("name", NAMES)
def test_correct_graphs_are_accepted(bundle_of: MakeBundle, name: str) -> None:
    bundle = bundle_of(name)
    record = bundle.verify()
    assert record.sentences == 4
    assert record.longest == 40 - (NEW_TOKENS if bundle.model.is_decoder_only else 0)
    assert 0 < record.max_logit_difference < record.tolerance
    assert 0 < record.max_attention_difference < 1e-3
    assert record.different_generations == 0


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gpt2", "t5", "bart"])
def test_graphs_with_large_weights_are_accepted(bundle_of: MakeBundle, name: str) -> None:
    bundle_of(name, scale=1.0).verify()


def test_a_t5_of_odd_sizes_is_accepted(bundle_of: MakeBundle) -> None:
    """Large weights saturate the softmax, and limits from errors of the weights would reject it."""
    sizes = {"d_model": 80, "d_kv": 24, "d_ff": 144, "num_layers": 2, "num_decoder_layers": 3, "vocab_size": 701}
    bundle_of("flan-t5", scale=0.5, **sizes).verify()


def _with_attention(stack: Stack, **changes: Any) -> Stack:
    return replace(stack, attention=(*stack.attention[:-1], replace(stack.attention[-1], **changes)))


def _with_other_base(stack: Stack) -> Stack:
    rotary = stack.attention[-1].rotary
    assert rotary is not None
    return _with_attention(stack, rotary=replace(rotary, frequencies=tuple(x**1.02 for x in rotary.frequencies)))


WRONG: Mapping[str, tuple[str, Callable[[Stack], Stack]]] = {
    "scale": ("bart", lambda stack: _with_attention(stack, scale=1.001 * stack.attention[-1].scale)),
    "rope base": ("llama", _with_other_base),
    "gelu": ("bert", lambda stack: replace(stack, feed_forward=replace(stack.feed_forward, activation="gelu_tanh"))),
    "epsilon": ("llama", lambda stack: replace(stack, norm=replace(stack.norm, epsilon=100 * stack.norm.epsilon))),
}


@pytest.mark.parametrize("error", WRONG)
def test_an_error_in_the_last_stack_is_found(bundle_of: MakeBundle, error: str) -> None:
    name, change = WRONG[error]
    bundle = bundle_of(name)
    last = "encoder" if bundle.model.decoder is None else "decoder"
    stacks: dict[str, Any] = {last: change(getattr(bundle.model, last))}
    bundle.manifest = write_bundle(bundle.folder, replace(bundle.model, **stacks), bundle.weights, 40)
    with pytest.raises(VerificationError, match="differ by"):
        bundle.verify()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e-2, np.nan])
def test_a_changed_weight_is_found(bundle_of: MakeBundle, name: str, value: float) -> None:
    bundle = bundle_of(name)
    stack = "decoder" if bundle.model.decoder else "encoder"
    bundle.change_weights(f"{stack}.0.feed_forward.outer.weight", 0, value)
    with pytest.raises(VerificationError, match=r"differ by .* from the reference; float32 rounding explains at most"):
        bundle.verify()


def test_a_wrong_last_position_is_found(bundle_of: MakeBundle) -> None:
    bundle = bundle_of("bert")
    bundle.change_weights("encoder.positions.weight", 39, 1e-2)
    with pytest.raises(VerificationError, match="differ by"):
        bundle.verify()


@pytest.mark.parametrize("is_bidirectional", [True, False], ids=["encoder", "decoder"])
def test_a_wrong_bucket_of_large_distances_is_found(
    bundle_of: MakeBundle, monkeypatch: pytest.MonkeyPatch, is_bidirectional: bool
) -> None:
    """Distances from 128 on have the last bucket of T5."""
    correct = relative.bias_of_distances

    def wrong(options: RelativeBias, table: Any, reach: int) -> Any:
        biases = correct(options, table, reach)
        if options.bidirectional == is_bidirectional:
            biases[:, : reach - 128] += 0.1  # keys at least 128 positions before the query
        return biases

    monkeypatch.setattr(relative, "bias_of_distances", wrong)
    bundle = bundle_of("t5", positions=200)
    with pytest.raises(VerificationError, match="differ by"):
        bundle.verify()


def test_a_long_prompt_is_read_in_the_chunks_of_the_service(
    bundle_of: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, sizes = bundle_of("llama", positions=40), list[int]()
    run = DecoderSession.run

    def note(session: DecoderSession, states: States, token_ids: Any, *rest: Any) -> Any:
        sizes.append(np.shape(token_ids)[1])
        return run(session, states, token_ids, *rest)

    monkeypatch.setattr(DecoderSession, "run", note)
    monkeypatch.setattr("sightline.export.check.verify.LEAST_LONG", 35)
    assert bundle.verify().longest == 35
    assert max(sizes) == PREFILL_TOKENS


def test_the_long_text_is_as_long_as_time_and_memory_allow(bundle_of: MakeBundle) -> None:
    bundle = bundle_of("llama")  # six heads

    def length(parameters: int) -> int:
        return long_length(bundle.manifest.model_copy(update={"parameters": parameters}), bundle.model)

    # The memory limits small models, and the time large ones.
    assert 6 * length(10**6) ** 2 <= LONG_SCORES < 6 * (length(10**6) + 1) ** 2
    assert length(10**6) > length(10**8) > length(10**10) == LEAST_LONG


def test_compared_rows_include_the_generated_tokens() -> None:
    np.testing.assert_array_equal(compared_rows(MAX_ROWS), np.arange(MAX_ROWS))
    rows = compared_rows(LONG_TARGET)
    new_tokens = max(NEW_TOKENS, SENTENCE_TOKENS)
    assert len(rows) <= MAX_ROWS + new_tokens
    assert rows[0] == 0 and list(rows[-new_tokens:]) == list(range(LONG_TARGET - new_tokens, LONG_TARGET))


@pytest.mark.parametrize("name", ["smollm3", "bert", "t5"])
def test_texts_have_the_same_results_together_and_alone(bundle_of: MakeBundle, name: str) -> None:
    bundle = bundle_of(name)
    model, weights = bundle.model, bundle.weights
    texts = ComparedTexts(((3, 9, 4, 7, 7), (5,), (8, 2, 1)), ((6, 5), (4, 4, 4, 3), (9,)))
    if model.is_decoder_only:
        texts = ComparedTexts(texts.sources, texts.sources)
    together = reference_outputs(model, weights, texts)
    # The rounding error of float64 is 2**29 times smaller than that of float32.
    limits = {key: limit * 2.0**-20 for key, limit in rounding_limits(model, weights, texts)[1].items()}
    for number, source in enumerate(texts.sources):
        alone = reference_outputs(model, weights, ComparedTexts((source,), (texts.targets[number],)))
        for name, array in alone.items():
            key = f"{name.removesuffix('.0')}.{number}"
            assert max_abs(array - together[key]) <= limits[key], key


def test_a_missing_scale_is_found(bundle_of: MakeBundle) -> None:
    bundle = bundle_of("gpt2-scales")
    path = bundle.folder / "step.onnx"
    graph = onnx.load(path, load_external_data=False)
    node = [one for one in graph.graph.node if one.op_type == "GroupQueryAttention"][1]
    (scale,) = (one for one in node.attribute if one.name == "scale")
    scale.f *= 2
    onnx.save_model(graph, path)
    with pytest.raises(VerificationError, match="differ by"):
        bundle.verify()


def test_missing_outputs_and_other_shapes_are_errors() -> None:
    array = np.zeros((2, 3))
    assert differences_of({"logits.0": np.full((2, 3), np.nan)}, {"logits.0": array}) == {"logits.0": 0}
    assert np.isnan(differences_of({"hidden.0": array * np.nan}, {"hidden.0": array})["hidden.0"])
    with pytest.raises(ValueError, match="the graphs return"):
        differences_of({"logits.0": array}, {"logits.0": array, "hidden.0": array})
    with pytest.raises(ValueError, match="has the shape"):
        differences_of({"logits.0": array[:1]}, {"logits.0": array})


def test_rounded_products_have_the_errors_of_float32_sums() -> None:
    """The estimate is at least the error of a sum in any order, and not much more."""
    generator = np.random.default_rng(0)
    for offset in (0.0, 3.0):  # terms of random signs, and of the same sign
        left = (generator.normal(size=(40, 300)) + offset).astype(np.float32)
        right = (generator.normal(size=(300, 50)) + offset).astype(np.float32)
        exact = left.astype(np.float64) @ right.astype(np.float64)
        one_after_another = np.zeros(exact.shape, np.float32)
        for index in range(300):
            one_after_another += left[:, index, None] * right[index]
        found = np.abs(one_after_another - exact).mean()
        estimated = np.abs(Rounded(0).product(left.astype(np.float64), right.astype(np.float64)) - exact).mean()
        assert found < estimated < 12 * found


def test_rounded_results_have_independent_errors_of_the_stated_size() -> None:
    x = np.full((50, 40), 3.0)
    errors = Rounded(0).round(x, 9) / x - 1
    np.testing.assert_allclose(np.abs(errors), 7 * UNIT_ROUNDOFF, rtol=1e-6)
    assert abs(np.sign(errors).mean()) < 0.1
    assert not np.array_equal(Rounded(1).round(x, 9), Rounded(0).round(x, 9))
    assert EXACT.round(x, 9) is x
