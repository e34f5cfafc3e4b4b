"""PyTorch, ONNX Runtime and the engine agree for a decoder-only model."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.base.bundle import PREFILL_TOKENS, BundleError, QuantScheme
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import open_sessions
from sightline.export.convert.calibrate import MAX_NEW_TOKENS as MAX_STEPS
from sightline.export.convert.calibrate import measure_ranges
from sightline.export.convert.conversions import half_bundle, quantize_bundle
from sightline.export.convert.quality import ParallelText, compare
from sightline.export.import_errors import VerificationError
from sightline.export.options import BundleMetadata, QuantizationRecipe
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model, save_checkpoint
from sightline.model.config import CausalConfig
from sightline.model.data.tokenizer_training import decode_ids, encode_lines, prompt_tokenizer, read_tokenizer
from sightline.model.evaluation import bleu
from sightline.model.rounding import Reference, reference
from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Encoded, EncodeRequest, Event, Generated, Target
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.ort import OnnxRunner, _ArrayGroup
from sightline.service.runtime.state_memory import prefix_block_bytes
from tests.equality.neighbours import assert_bits_do_not_depend_on_batch
from tests.equality.running import BEAMS, FAR, GREEDY, MAX_NEW_TOKENS, make_request, run, run_events
from tests.equality.serving import client_of
from tests.equality.systems import random_models, small_systems
from tests.rounding import assert_within_rounding
from tests.support.reference_decoding import beam, greedy, log_softmax, pytorch_steps
from tests.support.training_runs import export_bundle, verify_bundle

MAX_POSITIONS = 200
SYSTEMS = small_systems(CausalConfig, max_positions=MAX_POSITIONS)

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


def test_sources_of_the_bundle_have_a_start_token_and_no_end_token(runner: OnnxRunner, prompts: list[Ids]) -> None:
    assert runner.manifest.decoder_start == "source"
    assert runner.manifest.source_tokenizer != runner.manifest.target_tokenizer
    assert all(prompt[0] == 1 and 2 not in prompt for prompt in prompts[:-1])


@pytest.mark.parametrize("parameters", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("prefix", [(), (20, 301)], ids=["no prefix", "prefix"])
def test_served_outputs_equal_pytorch(
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
    assert_bits_do_not_depend_on_batch(runner)


def test_served_log_probabilities_and_maps_equal_pytorch(
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


def test_bleu_is_measured_on_the_continuation_of_the_prompt(
    folder: Path, model: CausalModel, toy_sentences: list[str]
) -> None:
    bundle = folder / "bundle"
    tokenizer = prompt_tokenizer(read_tokenizer(folder / "checkpoint" / "tokenizer.json"))
    expected = []
    for prompt in encode_lines(tokenizer, toy_sentences[:3]):
        room = min(bleu.MAX_NEW_TOKENS, MAX_POSITIONS + 1 - len(prompt))
        expected.append(decode_ids(tokenizer, greedy(pytorch_steps(model, prompt), prompt[-1], 2, room).ids))
    text = ParallelText("toy", "de", bleu.EvaluationSet(toy_sentences[:3], expected, None))
    sessions = open_sessions(bundle, read_bundle(bundle))
    assert compare(sessions, sessions, tokenizer, text).bleu[0].float32 == pytest.approx(100)


def test_static_scales_are_measured_after_the_prompt(
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
        value.max() == pytest.approx(float(expected["range"]), rel=0, abs=limits["range"])
        for value in ranges["step"].values()
    )


def test_float16_is_rejected_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is a decoder-only model; float16 is only for encoder-decoder models"):
        half_bundle(folder / "bundle", tmp_path / "half", None)


@pytest.mark.anyio
async def test_http_gives_pytorchs_tokens_and_maps(
    folder: Path, model: CausalModel, models: Reference[CausalModel], toy_sentences: list[str], prompts: list[Ids]
) -> None:
    parameters = {"max_new_tokens": MAX_NEW_TOKENS, "return_attention": True}
    async with client_of(folder) as client:
        response = await client.post("/v1/generate", json={"inputs": toy_sentences, "parameters": parameters})
    assert response.status_code == 200, response.text
    for prompt, output in zip(prompts[1:-1], response.json()["outputs"], strict=True):
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


def test_streamed_equals_complete_output(runner: OnnxRunner, prompts: list[Ids]) -> None:
    whole = run(runner, [make_request(prompt, parameters=GREEDY) for prompt in prompts])
    streams = run_events(runner, [make_request(prompt, parameters=GREEDY, stream=True) for prompt in prompts])
    for result, events in zip(whole, streams, strict=True):
        assert events[-1].targets == result.targets  # type: ignore[union-attr]
        assert tuple(event.token for event in events[:-1]) == result.targets[0].tokens  # type: ignore[union-attr]


def test_generation_continues_to_the_last_position(models: Reference[CausalModel], runner: OnnxRunner) -> None:
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


@pytest.mark.parametrize("length", [1, PREFILL_TOKENS, PREFILL_TOKENS + 1, MAX_POSITIONS])
def test_prefill_gives_pytorchs_hidden_states_and_maps_of_the_prompt(
    length: int, models: Reference[CausalModel], runner: OnnxRunner
) -> None:
    prompt = np.random.default_rng(length).integers(3, 300, length)
    outputs = [
        runner.prefill(2, prompt[first : first + PREFILL_TOKENS], first, ("hidden", "decoder_attention"))
        for first in range(0, length, PREFILL_TOKENS)
    ]
    maps = np.zeros((*outputs[0]["decoder_attention"].shape[:2], length, length), np.float32)  # (H, L, T, T)
    for number, given in enumerate(outputs):
        chunk = given["decoder_attention"]  # (H, L, S, columns)
        first = number * PREFILL_TOKENS
        maps[:, :, first : first + chunk.shape[2], : chunk.shape[3]] = chunk

    def compute(model: CausalModel) -> dict[str, NDArray[Any]]:
        with torch.inference_mode():
            hidden, weights = model.hidden_states(torch.tensor(prompt[None]), need_weights=True)
        assert weights is not None
        return {"hidden": hidden[0].numpy(), "maps": weights[:, 0].transpose(0, 1).numpy()}

    found = {"hidden": np.concatenate([given["hidden"] for given in outputs]), "maps": np.tril(maps)}
    assert_within_rounding(models, compute, found)


def bits_of(result: Generated) -> list[tuple[Any, ...]]:
    """Return the tokens with their log-probabilities, and the maps, as raw bits."""
    return [
        (target.tokens, {kind: array.tobytes() for kind, array in target.attention.items()})
        for target in result.targets
    ]


def test_prompts_in_prefill_have_the_same_bits_alone_and_beside_running_rows(
    runner: OnnxRunner, prompts: list[Ids]
) -> None:
    random = np.random.default_rng(4)
    lengths = (2, PREFILL_TOKENS, PREFILL_TOKENS + 1, PREFILL_TOKENS + 2, 100, 180)
    sources = [*prompts[:3], *(tuple(int(one) for one in random.integers(3, 300, length)) for length in lengths)]
    kinds = frozenset({"decoder"})
    sampled = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS, do_sample=True, seed=1)
    requests = [
        make_request(source, parameters=parameters, attention=kinds)
        for source in sources
        for parameters in (GREEDY, BEAMS, sampled)
    ]
    alone = [bits_of(run(runner, [request])[0]) for request in requests]
    for results in (run(runner, requests), run(runner, requests, Random(3))):
        assert [bits_of(result) for result in results] == alone


def test_prompts_with_cached_prefixes_have_the_same_bits_as_without_a_cache(folder: Path, runner: OnnxRunner) -> None:
    """One prompt after another, together, and in a cache that is too small for all of them."""
    random = np.random.default_rng(8)

    def draw(length: int) -> Ids:
        return tuple(int(one) for one in random.integers(3, 300, length))

    begin = draw(150)
    whole = PREFILL_TOKENS + 2  # the last two tokens are computed
    sources = [begin, *((*begin[:length], *draw(30)) for length in (20, whole, 64, 65, 100)), begin[:whole], begin]
    sampled = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS, do_sample=True, seed=1)
    kinds = frozenset({"decoder"})
    requests = [
        make_request(source, parameters=parameters, attention=kinds, prompt_rows=prompt_rows)
        for parameters in (GREEDY, BEAMS, sampled)
        for source in sources
        for prompt_rows in (False, True)
    ]
    expected = [bits_of(run(runner, [request])[0]) for request in requests]
    assert not runner.num_prefix_blocks
    block = prefix_block_bytes(runner.manifest)
    for num_blocks in (3, 160):
        bundle = folder / "bundle"
        caching = OnnxRunner(
            bundle, read_bundle(bundle), num_threads=1, max_rows=12, prefix_cache_bytes=num_blocks * block
        )
        for shuffle in (None, Random(num_blocks)):
            results = run(caching, requests, shuffle)
            assert [bits_of(result) for result in results] == expected
            assert any(result.num_cached_tokens for result in results)


def test_prompt_rows_equal_pytorch_alone_and_in_any_batch(
    models: Reference[CausalModel], runner: OnnxRunner, prompts: list[Ids]
) -> None:
    """The rows of the prompt precede those of the target, for samples and beams too."""
    random = np.random.default_rng(7)
    lengths = (2, PREFILL_TOKENS, PREFILL_TOKENS + 1, PREFILL_TOKENS + 2, 100)
    sources = [*prompts[:3], *(tuple(int(one) for one in random.integers(3, 300, length)) for length in lengths)]
    sampled = GenerateParameters(max_new_tokens=4, do_sample=True)
    kinds = frozenset({"decoder"})
    requests = [
        make_request(source, parameters=parameters, attention=kinds, prompt_rows=True, seed=seed)
        for source in sources
        for parameters, seed in ((GREEDY, 0), (BEAMS, 0), (sampled, 1), (sampled, 2))
    ]
    alone = [run(runner, [request])[0] for request in requests]
    for results in (run(runner, requests), run(runner, requests, Random(3))):
        assert [bits_of(result) for result in results] == [bits_of(result) for result in alone]
    for request, result in zip(requests, alone, strict=True):
        for target in result.targets:
            ids = (*request.source_ids, *(token.id for token in target.tokens[:-1]))

            def compute(model: CausalModel, ids: Ids = ids) -> dict[str, NDArray[Any]]:
                with torch.inference_mode():
                    maps = model.hidden_states(torch.tensor([ids]), need_weights=True)[1]
                assert maps is not None
                return {"decoder": maps[:, 0].numpy()}

            assert target.attention["decoder"].shape[2:] == (len(ids), len(ids))
            assert_within_rounding(models, compute, dict(target.attention))
        plain = replace(request, prompt_rows=False)
        for target, other in zip(result.targets, run(runner, [plain])[0].targets, strict=True):
            first = len(request.source_ids) - 1
            np.testing.assert_array_equal(target.attention["decoder"][:, :, first:], other.attention["decoder"])


def test_swapped_rows_continue_with_each_others_states(runner: OnnxRunner) -> None:
    random = np.random.default_rng(6)
    prompts = [random.integers(3, 300, length) for length in (5, 30)]

    def scores(rows: tuple[int, int]) -> list[NDArray[Any]]:
        found = []
        for row, prompt in zip(rows, prompts, strict=True):
            lengths = np.array([len(prompt)], np.int32)
            found.append(runner.step(prompt[:1], lengths, lengths, ("logits",), first=row)["logits"].copy())
        return found

    def fill() -> None:
        for row, prompt in zip((1, 4), prompts, strict=True):
            runner.prefill(row, prompt, 0)

    fill()
    expected = scores((1, 4))
    fill()
    runner.swap(1, 4, 30)
    np.testing.assert_array_equal(scores((4, 1)), expected)


def test_a_prompt_after_values_that_are_not_finite_is_rejected(folder: Path) -> None:
    runner = OnnxRunner(folder / "bundle", read_bundle(folder / "bundle"), num_threads=1, max_rows=4)
    runner.prefill(1, np.arange(3, 35), 0)
    (group,) = runner._groups
    assert isinstance(group, _ArrayGroup)
    group._rows[0, 1, 0, 7] = np.nan  # of the first layer, which the second layer reads
    with pytest.raises(FloatingPointError):
        runner.prefill(1, np.arange(3, 8), 32)
    runner.prefill(2, np.arange(3, 8), 0)


@pytest.mark.parametrize("scheme", ["group-wise", "per-token", "per-tensor"])
def test_a_quantized_bundle_reads_prompts_row_by_row(
    scheme: QuantScheme, folder: Path, tmp_path: Path, toy_sentences: list[str], prompts: list[Ids]
) -> None:
    recipe = QuantizationRecipe(8, layers=scheme)
    record = quantize_bundle(folder / "bundle", tmp_path / "small", recipe, None, calibration=toy_sentences)
    assert record.schemes == {"layers": scheme, "projection": "group-wise"}
    runner = OnnxRunner(tmp_path / "small", read_bundle(tmp_path / "small"), num_threads=1, max_rows=12)
    assert_bits_do_not_depend_on_batch(runner, (3, PREFILL_TOKENS + 1))
    requests = [make_request(prompt, parameters=GREEDY) for prompt in prompts]
    alone = [bits_of(run(runner, [request])[0]) for request in requests]
    assert [bits_of(result) for result in run(runner, requests, Random(3))] == alone


@pytest.mark.parametrize("name", ["layers.0.self_attention.key.weight", "layers.1.feed_forward.outer.bias"])
def test_a_changed_weight_is_found(
    name: str, folder: Path, model: CausalModel, toy_sentences: list[str], tmp_path: Path
) -> None:
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    weights[name][3] += 0.3
    save_checkpoint(tmp_path, model.config, weights, folder / "checkpoint" / "tokenizer.json", {})
    verify_bundle(folder / "bundle", folder / "checkpoint", toy_sentences[:2])
    with pytest.raises(VerificationError, match="differ"):
        verify_bundle(folder / "bundle", tmp_path, toy_sentences[:2])
