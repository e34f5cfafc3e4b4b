"""Every recurrent system: PyTorch, ONNX Runtime and the engine agree, alone and in one batch with the others' kinds."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from export.bundle import Label, export_bundle
from model.checkpoint import save_checkpoint
from model.config import RecurrentConfig
from model.recurrent import RecurrentModel
from model.reference import beam, greedy, pytorch_steps
from model.tokenizer import read_tokenizer
from service.bundle import read_bundle
from service.engine.request import DecodingParameters
from service.runtime.ort import OnnxRunner
from tests.equality.comparing import assert_same, generated_ids
from tests.equality.running import make_request, run

SYSTEMS: dict[str, dict[str, Any]] = {
    "fixed-context": {"attention": "none"},
    "fixed-context-lstm": {"attention": "none", "cell": "lstm", "bidirectional": False},
    "bahdanau": {"attention": "additive"},
    "bahdanau-lstm": {"attention": "additive", "cell": "lstm"},
    "multiplicative": {"attention": "general"},
    "reduced-rank": {"attention": "reduced_rank", "attention_size": 3},
    "luong-dot": {"attention": "dot", "query": "current", "input_feeding": True},
    "luong-general": {"attention": "general", "query": "current", "input_feeding": True, "cell": "lstm"},
    "luong-concat": {"attention": "concat", "query": "current", "input_feeding": True},
    "luong-location": {"attention": "location", "query": "current", "input_feeding": True},
    "local-m": {"attention": "general", "query": "current", "window": "local-m", "window_radius": 1},
    "local-p": {"attention": "general", "query": "current", "window": "local-p", "window_radius": 2},
    "hard-reinforce": {"attention": "additive", "selection": "reinforce"},
    "hard-marginal": {"attention": "general", "query": "current", "selection": "marginal"},
}
MAX_NEW_TOKENS = 12
GREEDY = DecodingParameters(max_new_tokens=MAX_NEW_TOKENS)
BEAMS = DecodingParameters(max_new_tokens=MAX_NEW_TOKENS, num_beams=4, num_return_sequences=2)


@pytest.fixture(scope="module", params=SYSTEMS)
def system(
    request: pytest.FixtureRequest, checkpoint: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RecurrentModel, OnnxRunner, list[tuple[int, ...]]]:
    """A model of random weights, its bundle in ONNX Runtime (the export has compared them), and sources."""
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    settings = {"embedding_size": 12, "encoder_size": 8, "decoder_size": 16, **SYSTEMS[request.param]}
    config = RecurrentConfig(tokenizer.get_vocab_size(), **settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        model = RecurrentModel(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("recurrent")
    save_checkpoint(folder / "checkpoint", config, model.state_dict(), checkpoint / "tokenizer.json", {})
    export_bundle(folder / "checkpoint", folder / "bundle", Label(request.param), toy_sentences)
    runner = OnnxRunner(folder / "bundle", read_bundle(folder / "bundle"), num_threads=1, max_rows=12)
    return model, runner, [tuple(encoding.ids) for encoding in tokenizer.encode_batch(toy_sentences)]


def test_served_outputs_are_pytorchs(system: tuple[RecurrentModel, OnnxRunner, list[tuple[int, ...]]]) -> None:
    model, runner, sources = system
    config = model.config
    requests = [make_request(source, parameters=asked) for source in sources for asked in (GREEDY, BEAMS)]
    expected = []
    for request in requests:
        steps = pytorch_steps(model, request.source_ids)
        arguments = steps, config.bos_id, config.eos_id, MAX_NEW_TOKENS
        found = [greedy(*arguments)] if request.parameters is GREEDY else beam(*arguments, num_beams=4, num_return=2)
        expected.append([hypothesis.ids for hypothesis in found])
    for shuffle in (None, Random(1)):
        results = run(runner, requests, shuffle)
        given = [generated_ids(request, one.targets) for request, one in zip(requests, results, strict=True)]
        assert_same(model, requests, expected, given)


def test_served_maps_are_pytorchs(system: tuple[RecurrentModel, OnnxRunner, list[tuple[int, ...]]]) -> None:
    model, runner, sources = system
    if model.config.attention == "none":
        assert not runner.manifest.attention
        assert "attention" not in runner.manifest.tasks
        return
    requests = [make_request(source, parameters=GREEDY, attention=frozenset({"cross"})) for source in sources]
    for request, result in zip(requests, run(runner, requests, Random(2)), strict=True):
        (target,) = result.targets
        source, read = torch.tensor([request.source_ids]), [model.config.bos_id, *(token.id for token in target.tokens)]
        lengths = torch.tensor([source.size(1)])
        with torch.inference_mode():
            memory, _ = model.encode(source, lengths)
            _, _, maps = model.decode(torch.tensor([read[:-1]]), memory, lengths, need_weights=True)
        assert maps is not None
        np.testing.assert_allclose(target.attention["cross"], maps[:, 0].numpy(), atol=1e-5)
    is_normalized = model.config.window != "local-p"
    assert runner.manifest.attention_of("cross").normalized == is_normalized
