"""PyTorch, ONNX Runtime and the engine agree for a decoder-only model."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from export.bundle import BundleMetadata, export_bundle, half_bundle, verify_bundle
from export.calibrate import MAX_NEW_TOKENS as MAX_STEPS
from export.calibrate import measure_ranges
from export.quality import ParallelText, compare
from export.sessions import open_sessions
from export.verify import VerificationError
from model.architectures.causal import CausalModel
from model.checkpoint import load_model, save_checkpoint
from model.config import CausalConfig
from model.data.tokenizer import decode_ids, encode_lines, prompt_tokenizer, read_tokenizer
from model.decoding.reference import beam, greedy, log_softmax, pytorch_steps
from model.evaluation import bleu
from model.rounding import Reference, reference
from service.bundle import BundleError, read_bundle
from service.engine.engine import Engine
from service.engine.request import Encoded, EncodeRequest, Event, Target
from service.parameters import GenerateParameters
from service.runtime.ort import OnnxRunner
from tests.equality.company import assert_bits_do_not_depend_on_company
from tests.equality.running import FAR, make_request, run, run_events
from tests.equality.serving import client_of
from tests.equality.systems import random_models, small_systems
from tests.rounding import assert_within_rounding

MAX_POSITIONS = 200
SYSTEMS = small_systems(CausalConfig, max_positions=MAX_POSITIONS)
MAX_NEW_TOKENS = 12
GREEDY = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS)
BEAMS = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS, num_beams=4, num_return_sequences=2)

Ids = tuple[int, ...]


@pytest.fixture(scope="module", params=SYSTEMS)
def folder(
    request: pytest.FixtureRequest, checkpoint: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Checkpoint with random weights and its verified bundle."""
    tokenizer = checkpoint / "tokenizer.json"
    model = random_models(SYSTEMS, tokenizer, noise=0.1)[request.param]
    folder = tmp_path_factory.mktemp("causal")
    save_checkpoint(folder / "checkpoint", model.config, model.state_dict(), tokenizer, {})
    export_bundle(folder / "checkpoint", folder / "bundle", BundleMetadata("causal"), toy_sentences)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    loaded, _ = load_model(folder / "checkpoint")
    assert isinstance(loaded, CausalModel)
    return loaded


@pytest.fixture(scope="module")
def models(model: CausalModel) -> Reference[CausalModel]:
    return reference(model)


@pytest.fixture(scope="module")
def runner(folder: Path) -> OnnxRunner:
    return OnnxRunner(folder / "bundle", read_bundle(folder / "bundle"), num_threads=1, max_rows=12)


@pytest.fixture(scope="module")
def prompts(folder: Path, toy_sentences: list[str]) -> list[Ids]:
    """Prompts of one token, of sentences, and of almost max_positions tokens."""
    tokenizer = prompt_tokenizer(read_tokenizer(folder / "checkpoint" / "tokenizer.json"))
    sentences = [tuple(ids) for ids in encode_lines(tokenizer, toy_sentences)]
    long = tuple(int(one) for one in np.random.default_rng(1).integers(3, 300, MAX_POSITIONS - MAX_NEW_TOKENS))
    return [(1,), *sentences, long]


def forced(model: CausalModel, prompt: Ids, ids: Ids) -> dict[str, NDArray[Any]]:
    """Return log-probabilities (T,) and attention weights (L, H, T, columns) in PyTorch."""
    first = len(prompt) - 1
    with torch.inference_mode():
        features, maps = model.hidden_states(torch.tensor([[*prompt, *ids[:-1]]]), need_weights=True)
        logits = model.logits(features[0, first:]).numpy()
    assert maps is not None
    return {"logprobs": log_softmax(logits)[range(len(ids)), ids], "decoder": maps[:, 0, :, first:].numpy()}


def test_the_bundles_sources_have_a_start_and_no_end(runner: OnnxRunner, prompts: list[Ids]) -> None:
    assert runner.manifest.decoder_start == "source"
    assert runner.manifest.source_tokenizer != runner.manifest.target_tokenizer
    assert all(prompt[0] == 1 and 2 not in prompt for prompt in prompts[:-1])


@pytest.mark.parametrize("parameters", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("prefix", [(), (20, 301)], ids=["no prefix", "prefix"])
def test_served_outputs_are_pytorchs(
    parameters: GenerateParameters, prefix: Ids, model: CausalModel, runner: OnnxRunner, prompts: list[Ids]
) -> None:
    requests = [make_request(prompt, parameters=parameters, target_prefix=prefix) for prompt in prompts]
    expected = []
    for prompt in prompts:
        length = min(MAX_NEW_TOKENS, MAX_POSITIONS + 1 - len(prompt) - len(prefix))
        arguments = pytorch_steps(model, prompt), prompt[-1], 2, length
        if parameters is GREEDY:
            found = [greedy(*arguments, prefix=prefix)]
        else:
            found = beam(*arguments, num_beams=4, num_return=2, prefix=prefix)
        expected.append([(*prefix, *hypothesis.ids) for hypothesis in found])
    alone = [run(runner, [request])[0] for request in requests]
    for results in (alone, run(runner, requests), run(runner, requests, Random(1))):
        given = [[tuple(token.id for token in target.tokens) for target in one.targets] for one in results]
        assert given == expected


def test_every_output_has_the_same_bits_alone_and_in_any_batch(runner: OnnxRunner) -> None:
    """One length is 17, because attention over a prompt processes 16 queries at a time."""
    assert_bits_do_not_depend_on_company(runner)


def test_served_log_probabilities_and_maps_are_pytorchs(
    models: Reference[CausalModel], runner: OnnxRunner, prompts: list[Ids]
) -> None:
    kinds = frozenset({"decoder"})
    requests = [make_request(prompt, parameters=GREEDY, attention=kinds) for prompt in prompts]
    for prompt, result in zip(prompts, run(runner, requests, Random(2)), strict=True):
        (target,) = result.targets
        assert_forced(models, prompt, tuple(token.id for token in target.tokens), target)


def assert_forced(models: Reference[CausalModel], prompt: Ids, ids: Ids, target: Target) -> None:
    found = {"logprobs": np.array([token.logprob for token in target.tokens]), **target.attention}
    assert_within_rounding(models, lambda model: forced(model, prompt, ids), found)


def test_bleu_is_of_what_goes_on_from_the_prompt(folder: Path, model: CausalModel, toy_sentences: list[str]) -> None:
    bundle = folder / "bundle"
    tokenizer = prompt_tokenizer(read_tokenizer(folder / "checkpoint" / "tokenizer.json"))
    expected = []
    for prompt in encode_lines(tokenizer, toy_sentences):
        room = min(bleu.MAX_NEW_TOKENS, MAX_POSITIONS + 1 - len(prompt))
        expected.append(decode_ids(tokenizer, greedy(pytorch_steps(model, prompt), prompt[-1], 2, room).ids))
    text = ParallelText("toy", "de", bleu.EvaluationSet(toy_sentences, expected, None))
    sessions = open_sessions(bundle, read_bundle(bundle))
    assert compare(sessions, sessions, tokenizer, text).bleu[0].float32 == pytest.approx(100)


def test_static_scales_are_measured_behind_the_prompt(
    folder: Path, model: CausalModel, models: Reference[CausalModel], prompts: list[Ids]
) -> None:
    """Compare the input of the output projection with PyTorch."""
    prompt = prompts[1]
    written = greedy(pytorch_steps(model, prompt), prompt[-1], 2, MAX_STEPS).ids

    def largest(model: CausalModel) -> dict[str, NDArray[Any]]:
        with torch.inference_mode():
            features, _ = model.hidden_states(torch.tensor([[*prompt, *written[:-1]]]))  # (1, T, M)
        return {"range": features[0, len(prompt) - 1 :].abs().max().numpy()}

    expected, limits = models.limits(largest)
    ranges = measure_ranges(folder / "bundle", read_bundle(folder / "bundle"), [prompt])
    assert any(
        value == pytest.approx(float(expected["range"]), rel=0, abs=limits["range"])
        for value in ranges["step"].values()
    )


def test_float16_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match="is a decoder-only model; float16 bundles support only encoder-decoder models"
    ):
        half_bundle(folder / "bundle", tmp_path / "half", None)


@pytest.mark.anyio
async def test_http_gives_pytorchs_tokens_and_maps(
    folder: Path,
    model: CausalModel,
    models: Reference[CausalModel],
    toy_sentences: list[str],
    prompts: list[Ids],
) -> None:
    parameters = {"max_new_tokens": MAX_NEW_TOKENS, "return_attention": True}
    async with client_of(folder) as client:
        answer = await client.post("/v1/generate", json={"inputs": toy_sentences, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    for prompt, output in zip(prompts[1:-1], answer.json()["outputs"], strict=True):
        expected = greedy(pytorch_steps(model, prompt), prompt[-1], 2, MAX_NEW_TOKENS).ids
        assert tuple(token["id"] for token in output["tokens"]) == expected
        (given,) = output["attention"]["maps"]
        found = {
            "logprobs": np.array([token["logprob"] for token in output["tokens"]]),
            "decoder": np.reshape(given["data"], given["shape"]),
        }
        assert_within_rounding(
            models,
            lambda model, prompt=prompt, ids=expected: forced(model, prompt, ids),  # type: ignore[misc]
            found,
        )


def test_streamed_is_whole(runner: OnnxRunner, prompts: list[Ids]) -> None:
    whole = run(runner, [make_request(prompt, parameters=GREEDY) for prompt in prompts])
    streams = run_events(runner, [make_request(prompt, parameters=GREEDY, stream=True) for prompt in prompts])
    for result, events in zip(whole, streams, strict=True):
        assert events[-1].targets == result.targets  # type: ignore[union-attr]
        assert tuple(event.token for event in events[:-1]) == result.targets[0].tokens  # type: ignore[union-attr]


def test_generation_goes_on_to_the_last_position(models: Reference[CausalModel], runner: OnnxRunner) -> None:
    prompt = tuple(range(3, 63))
    parameters = GenerateParameters(max_new_tokens=10_000, suppress_tokens=(2,))
    (result,) = run(runner, [make_request(prompt, parameters=parameters)])
    (target,) = result.targets
    ids = [token.id for token in target.tokens]
    assert len(ids) == MAX_POSITIONS + 1 - len(prompt)

    def compute(model: CausalModel) -> dict[str, NDArray[Any]]:
        with torch.inference_mode():
            return {"logits": model(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :].numpy()}

    expected, limits = models.limits(compute)
    logits = np.array(expected["logits"])
    logits[:, 2] = -np.inf
    picked = logits[np.arange(len(ids)), ids]
    # Rounding may increase the logit of the selected token and decrease that of the best one.
    assert (logits.max(axis=1) - picked).max() <= 2 * limits["logits"]


def test_encode_gives_the_last_layer_over_the_prompt(
    models: Reference[CausalModel], runner: OnnxRunner, prompts: list[Ids]
) -> None:
    engine, events = Engine(runner), list[Event]()
    for prompt in prompts[1:4]:
        engine.submit(EncodeRequest("e", prompt, FAR), events.append)
    while engine.has_work:
        engine.step()
    found = {len(event.hidden): event.hidden for event in events if isinstance(event, Encoded)}
    for prompt in prompts[1:4]:

        def compute(model: CausalModel, prompt: Ids = prompt) -> dict[str, NDArray[Any]]:
            with torch.inference_mode():
                return {"hidden": model.hidden_states(torch.tensor([prompt]))[0][0].numpy()}

        assert_within_rounding(models, compute, {"hidden": found[len(prompt)]})


@pytest.mark.parametrize("name", ["layers.0.self_attention.key.weight", "layers.1.feed_forward.outer.bias"])
def test_a_weight_that_is_not_the_bundles_is_found(
    name: str, folder: Path, model: CausalModel, toy_sentences: list[str], tmp_path: Path
) -> None:
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    weights[name][3] += 0.3
    save_checkpoint(tmp_path, model.config, weights, folder / "checkpoint" / "tokenizer.json", {})
    verify_bundle(folder / "bundle", folder / "checkpoint", toy_sentences[:2])
    with pytest.raises(VerificationError, match="differ"):
        verify_bundle(folder / "bundle", tmp_path, toy_sentences[:2])
