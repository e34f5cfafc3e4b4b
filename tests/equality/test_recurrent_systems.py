"""PyTorch, ONNX Runtime, the engine and HTTP agree for every recurrent system."""

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.export.graphs.nodes import SOURCE_BLOCK
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.checkpoint import load_model
from sightline.model.config import RecurrentConfig
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.comparing import assert_decoding_equals_pytorch, assert_searches_equal_pytorch
from tests.equality.neighbours import assert_bits_do_not_depend_on_batch
from tests.equality.running import GREEDY, make_request
from tests.equality.serving import client_of, load_reference, load_system
from tests.equality.systems import MakeConfig, small, small_systems
from tests.rounding import assert_within_rounding, rows_sum_to_one
from tests.support.reference_decoding import log_softmax

SYSTEMS: dict[str, MakeConfig] = {
    # Combinations that the zoo does not have.
    "fixed-context-lstm": small("fixed-context", cell="lstm", bidirectional=False),
    "bahdanau-lstm": small("bahdanau", cell="lstm"),
    "luong-general-lstm": small("luong-general", cell="lstm"),
    "luong-local-m-without-feeding": small("luong-local-m", input_feeding=False),
    "luong-local-p-without-feeding": small("luong-local-p", input_feeding=False),
    "hard-reinforce-previous": small("hard-reinforce", attention="additive", query="previous"),
    **small_systems(RecurrentConfig),
}
NOISE = 0.2  # of the weights of the fixture `folder`
System = tuple[RecurrentModel, OnnxRunner, list[tuple[int, ...]]]


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request: pytest.FixtureRequest, folder: Path, toy_sentences: list[str]) -> System:
    model, runner, sources = load_system(folder, request.param, toy_sentences[:3])
    assert isinstance(model, RecurrentModel)
    return model, runner, sources


def kinds_of(model: RecurrentModel) -> frozenset[str]:
    return frozenset() if model.config.attention == "none" else frozenset({"cross"})


@lru_cache(maxsize=500)
def forced(model: RecurrentModel, source: tuple[int, ...], written: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Return log-probabilities (T,) and attention weights (1, 1, T, S) or None in PyTorch."""
    ids, lengths = torch.tensor([source]), torch.tensor([len(source)])
    with torch.inference_mode():
        memory, _ = model.encode(ids, lengths)
        read = torch.tensor([[model.config.bos_id, *written[:-1]]])
        features, _, maps = model.decode(read, memory, lengths, need_weights=True)
        logprobs = log_softmax(model.logits(features[0]).numpy())[range(len(written)), written]
    return {"logprobs": logprobs} if maps is None else {"logprobs": logprobs, "cross": maps[:, 0].numpy()}


def test_served_outputs_equal_pytorch(system: System) -> None:
    assert_searches_equal_pytorch(*system)


def test_served_log_probabilities_and_maps_equal_pytorch_in_any_batch(system: System, folder: Path) -> None:
    model, runner, sources = system
    kinds = kinds_of(model)
    assert {one.kind for one in runner.manifest.attention} == kinds
    assert ("attention" in runner.manifest.tasks) == bool(kinds)
    requests = [
        make_request(source, parameters=GREEDY, attention=requested)
        for source in sources
        for requested in {kinds, frozenset()}
    ]
    assert_decoding_equals_pytorch(runner, requests, load_reference(folder, runner.manifest.name), forced)


def test_a_step_reads_the_source_up_to_the_block_of_the_longest_in_the_batch(system: System) -> None:
    model, runner, sources = system
    if not kinds_of(model):
        assert not any("source" in state.shape for state in runner.manifest.states)  # there is nothing to read
        return
    lengths = np.array([3, 5], np.int32)
    ids = np.array([[*source[:2], 2, *source[:2]] for source in sources[:2]], np.int64)
    runner.init_rows(0, runner.run_encoder(ids, lengths, runner.manifest.encoder_graph.outputs), [0, 1])
    given = runner.step(np.array([1, 1]), np.array([0, 0], np.int32), lengths, ["cross_attention"])
    assert given["cross_attention"].shape == (2, 1, 1, SOURCE_BLOCK)
    assert not given["cross_attention"][0, :, :, 3:].any() and not given["cross_attention"][1, :, :, 5:].any()
    assert runner.manifest.limits.max_source_tokens > SOURCE_BLOCK  # for which the buffers have room


def test_every_output_has_the_same_bits_alone_and_in_any_batch(system: System) -> None:
    _, runner, _ = system
    assert_bits_do_not_depend_on_batch(runner)


TARGET = "A man sleeps."


@pytest.mark.anyio
async def test_http_gives_every_systems_scores_and_maps(folder: Path, toy_sentences: list[str]) -> None:
    """Run all models in one service, with the sentences of each model in one batch."""
    loaded = {name: load_model(folder / "checkpoints" / name) for name in SYSTEMS}
    async with client_of(folder / "bundles") as client:

        async def ask(name: str, sentence: str) -> None:
            model, tokenizer = loaded[name]
            assert isinstance(model, RecurrentModel)
            source, written = (tuple(tokenizer.encode(text).ids) for text in (sentence, TARGET))
            body = {"model": name, "inputs": sentence, "targets": TARGET}
            response = await client.post("/v1/score", json=body)
            assert response.status_code == 200, response.text
            tokens = response.json()["outputs"][0]["tokens"]
            assert tuple(token["id"] for token in tokens) == written
            found = {"logprobs": np.array([token["logprob"] for token in tokens])}
            response = await client.post("/v1/attention", json=body)
            if kinds_of(model):
                (given,) = response.json()["outputs"][0]["maps"]
                found["cross"] = np.reshape(given["data"], given["shape"])
                assert_map_says_what_it_is(model.config, given, found["cross"][0, 0])
            else:
                assert response.json()["error"]["code"] == "unsupported_task"
            assert_within_rounding(load_reference(folder, name), lambda one: forced(one, source, written), found)

        await asyncio.gather(*(ask(name, sentence) for name in SYSTEMS for sentence in toy_sentences[:3]))


def assert_map_says_what_it_is(config: RecurrentConfig, given: Any, weights: NDArray[Any]) -> None:
    """Check attention weights (T, S)."""
    assert given["normalized"] == (config.window != "local-p")
    assert given["normalized"] == rows_sum_to_one(weights)
    if config.selection != "soft":
        assert set(np.unique(weights)) == {0, 1}
    if config.window == "global":
        assert given["window"] is None
        return
    centre = {"local-m": "monotonic", "local-p": "predicted"}[config.window]
    assert given["window"] == {"centre": centre, "radius": config.window_radius}
    columns = weights.shape[1]
    for row, one in enumerate(weights):
        (inside,) = one.nonzero()
        assert inside.max() - inside.min() <= 2 * config.window_radius
        if centre == "monotonic":
            assert np.abs(inside - min(row, columns - 1)).max() <= config.window_radius
