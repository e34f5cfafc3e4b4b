"""Graphs and reference of imported decoder-only models compute the same as transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from sightline.export.check.reference_decoder import ReferenceDecoder
from sightline.export.check.verify import Texts, rounding_limits
from sightline.model.float32 import max_abs
from tests.export.decoder_models import (
    LLAMA3,
    MODELS,
    POSITIONS,
    Array,
    Imported,
    Rows,
    graph_outputs,
    hf_model,
    hf_outputs,
    import_model,
    random_ids,
)

TEXTS = [random_ids(length) for length in (1, 2, 17, POSITIONS)]
CHUNK = 7
STEPS = 6
OUTPUTS = ("logits", "logprobs", "top_logprobs", "top_ids", "hidden", "decoder_attention")


@pytest.fixture(scope="module", params=MODELS)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    with import_model(hf_model(MODELS[request.param]), tmp_path_factory.mktemp(request.param)) as imported:
        yield imported


@pytest.fixture(scope="module")
def expected(imported: Imported) -> Mapping[str, Array]:
    return hf_outputs(imported.hf, TEXTS)


@pytest.fixture(scope="module")
def limits(imported: Imported) -> Mapping[str, float]:
    texts = Texts(tuple(map(tuple, TEXTS)), tuple(map(tuple, TEXTS)))
    return rounding_limits(imported.model, imported.weights, texts)[1]


def assert_close(given: Mapping[str, Array], expected: Mapping[str, Array], limits: Mapping[str, float]) -> None:
    """Compare two float32 results, each of which may have the rounding error of the limits."""
    assert given.keys() == expected.keys()
    for name, array in given.items():
        assert array.shape == expected[name].shape
        computed = ~np.isnan(array) if name.startswith("logits") else np.full(array.shape, True)
        assert computed.any()
        difference = max_abs((array - expected[name])[computed])
        assert difference <= 2 * limits[name], name
        assert difference <= 1e-4 * max(1, max_abs(expected[name])), name


@pytest.mark.parametrize("chunk", [CHUNK, POSITIONS])
def test_prefill_in_chunks_equals_transformers(
    imported: Imported, expected: Mapping[str, Array], limits: Mapping[str, float], chunk: int
) -> None:
    assert_close(graph_outputs(imported.session(), TEXTS, chunk), expected, limits)


def test_the_reference_equals_transformers(
    imported: Imported, expected: Mapping[str, Array], limits: Mapping[str, float]
) -> None:
    given: dict[str, Array] = {}
    for number, ids in enumerate(TEXTS):
        decoded = ReferenceDecoder(imported.model, imported.weights).decode(ids)
        given |= {
            f"hidden.{number}": decoded.hidden,
            f"logits.{number}": decoded.logits,
            f"decoder.{number}": decoded.maps,
        }
    assert_close(given, expected, limits)


def prefill(session: Rows, row: int, ids: list[int], chunk: int = CHUNK) -> dict[str, Array]:
    given: dict[str, Array] = {}
    for start in range(0, len(ids), chunk):
        given = session.run(row, np.array([ids[start : start + chunk]]), [start], OUTPUTS)
    return given


def test_ragged_steps_after_prefill_equal_transformers(imported: Imported, limits: Mapping[str, float]) -> None:
    texts = [random_ids(length, seed=1) for length in (POSITIONS - STEPS, 11, 3)]
    following = [random_ids(STEPS, seed=row) for row in range(len(texts))]
    complete = [text + after for text, after in zip(texts, following, strict=True)]
    expected, session = hf_outputs(imported.hf, complete), imported.session(rows=len(texts))
    for row, text in enumerate(texts):
        prefill(session, row, text)
    for step in range(STEPS):
        lengths = [len(text) + step for text in texts]
        given = session.run(0, np.array([[one[step]] for one in following]), lengths, OUTPUTS)
        assert given["decoder_attention"].shape[-1] == max(lengths) + 1
        for row, length in enumerate(lengths):
            maps = given["decoder_attention"][row, :, :, 0, : length + 1].swapaxes(0, 1)
            row_of = {"logits": given["logits"][row], "hidden": given["hidden"][row, 0], "decoder": maps}
            at = {
                "logits": expected[f"logits.{row}"][length],
                "hidden": expected[f"hidden.{row}"][length],
                "decoder": expected[f"decoder.{row}"][:, :, length, : length + 1],
            }
            assert_close(row_of, at, {name: limits[f"{name}.3"] for name in row_of})
            logprobs = given["logprobs"][row]
            np.testing.assert_array_equal(
                given["top_logprobs"][row], np.sort(logprobs)[::-1][: len(given["top_ids"][row])]
            )
            np.testing.assert_array_equal(logprobs[given["top_ids"][row]], given["top_logprobs"][row])


def row_of(given: Mapping[str, Array], row: int, length: int) -> dict[str, bytes]:
    """Return the defined bytes of a row's outputs after reading `length` tokens."""
    return {
        name: (array[row][..., :length] if name == "decoder_attention" else array[row]).tobytes()
        for name, array in given.items()
    }


def test_a_row_has_the_same_bits_alone_and_in_a_batch(imported: Imported) -> None:
    texts = [random_ids(length, seed=2) for length in (13, 1, 30, 8, 21)]
    together = imported.session(rows=len(texts), fill=np.nan)
    # Rows are prefilled with the same cuts, next to other rows and in another order.
    prefilled = {row: prefill(together, row, texts[row]) for row in (3, 0, 4, 2, 1)}
    steps = [
        together.run(0, np.full((len(texts), 1), 3 + step), [len(text) + step for text in texts], OUTPUTS)
        for step in range(2)
    ]
    for row, text in enumerate(texts):
        alone = imported.session(positions=len(text) + 2)
        assert row_of(prefill(alone, 0, text), 0, len(text)) == row_of(prefilled[row], 0, len(text))
        for step, given in enumerate(steps):
            length = len(text) + step
            single = alone.run(0, np.array([[3 + step]]), [length], OUTPUTS)
            assert row_of(single, 0, length + 1) == row_of(given, row, length + 1)


def test_greedy_generation_equals_transformers(imported: Imported) -> None:
    for ids in ([5], random_ids(12, seed=3)):
        session, tokens = imported.session(), list(ids)
        token = int(prefill(session, 0, ids)["top_ids"][0, 0])
        for _ in range(15):
            tokens.append(token)
            token = int(session.run(0, np.array([[token]]), [len(tokens) - 1], ("top_ids",))["top_ids"][0, 0])
        # The cache of transformers 5.23 does not shorten windows of one token.
        generated = imported.hf.generate(
            torch.tensor([ids]), max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=[], use_cache=False
        )
        assert tokens == generated[0].tolist()


REALISTIC = {
    "gpt2": GPT2Config(vocab_size=50257),
    "llama-3.2": LlamaConfig(
        vocab_size=32003,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 1024},
    ),
    "qwen3": Qwen3Config(
        vocab_size=20011,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "mistral": MistralConfig(
        vocab_size=20011,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        sliding_window=128,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_shapes_equal_transformers(name: str, tmp_path: Path) -> None:
    config = REALISTIC[name]
    length = min(1500, config.max_position_embeddings)
    with import_model(hf_model(config, scale=0.03), tmp_path) as imported:
        texts = [random_ids(length, vocabulary=config.vocab_size), random_ids(3)]
        expected = hf_outputs(imported.hf, texts)
        given = graph_outputs(imported.session(positions=length), texts, 128, config.vocab_size)
        for part in given:
            computed = ~np.isnan(given[part])
            difference = max_abs((given[part] - expected[part])[computed])
            assert difference <= 1e-4 * max(1, max_abs(expected[part])), part
