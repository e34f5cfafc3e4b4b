"""Decoder-only models: the encoder graph computes the states of the prompt, on the fake model."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from sightline.base.bundle import Manifest
from sightline.service.engine.request import GenerateRequest, Target, TokenEvent
from sightline.service.parameters import FORCED, GenerateParameters
from tests.service.engine.conftest import FAR, SOURCES, CheckedRunner, Harness, ids_of, run_alone, slow_logits
from tests.support.fake_runner import FakeRunner, fake_manifest

PROMPTS = [(7,), *SOURCES]  # one token, then 2 to 10
LIMIT = 30


@pytest.fixture
def manifest() -> Manifest:
    return fake_manifest(decoder_start="source", max_target_tokens=LIMIT)


def request(source: Sequence[int], **fields: object) -> GenerateRequest:
    return GenerateRequest("p", tuple(source), FAR, **fields)  # type: ignore[arg-type]


def target(given: GenerateRequest, manifest: Manifest) -> Target:
    return run_alone(given, manifest).targets[0]


def test_the_decoder_starts_with_the_start_token_or_the_source(manifest: Manifest) -> None:
    assert manifest.decoder_prompt_ids((5, 6, 7)) == (5, 6, 7)
    assert fake_manifest().decoder_prompt_ids((5, 6, 7)) == (1,)
    assert (manifest.max_new_tokens_for(1), manifest.max_new_tokens_for(LIMIT)) == (LIMIT, 1)
    assert fake_manifest().max_new_tokens_for(20) == 24


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_prompts_of_any_length_are_continued(prompt: tuple[int, ...], manifest: Manifest) -> None:
    expected = FakeRunner(manifest, 1).expected(prompt, LIMIT)
    assert ids_of(target(request(prompt), manifest)) == expected
    assert expected != FakeRunner(fake_manifest(max_target_tokens=LIMIT), 1).expected(prompt, LIMIT)


def test_prompts_of_all_lengths_in_one_batch_have_the_results_that_they_have_alone(manifest: Manifest) -> None:
    """The engine steps, moves and forks rows correctly, and results do not depend on other rows."""
    runner = CheckedRunner(6, manifest)
    harness, rng = Harness(runner=runner), Random(1)
    kinds = [
        GenerateParameters(),
        GenerateParameters(num_beams=3, num_return_sequences=2),
        GenerateParameters(do_sample=True, seed=4),
        GenerateParameters(repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=6),
    ]
    requests = [request(prompt, parameters=kind) for prompt in PROMPTS for kind in kinds]
    rng.shuffle(requests)
    handles = []
    for one in requests:
        handles.append(harness.submit(one))
        if rng.random() < 0.5:
            harness.engine.step()
    harness.run()
    assert runner.num_moved and runner.num_branched
    for one, active in zip(requests, handles, strict=True):
        expected = run_alone(one, manifest).targets
        assert [ids_of(given) for given in harness.generated(active).targets] == [ids_of(given) for given in expected]


@pytest.mark.parametrize("prompt", PROMPTS[::3], ids=len)
@pytest.mark.parametrize("prefix", [(), (9, 4)], ids=["no prefix", "prefix"])
def test_beams_equal_the_reference(prompt: tuple[int, ...], prefix: tuple[int, ...], manifest: Manifest) -> None:
    from tests.support.reference_decoding import beam

    given = run_alone(
        request(
            prompt,
            parameters=GenerateParameters(num_beams=4, num_return_sequences=4, max_new_tokens=12),
            target_prefix=prefix,
        ),
        manifest,
    )
    found = beam(slow_logits(manifest, prompt), prompt[-1], 2, 12, 4, num_return=4, prefix=prefix)
    assert [ids_of(one)[len(prefix) :] for one in given.targets] == [list(one.ids) for one in found]


@pytest.mark.parametrize("start_ids", [(1, 7), (1, 7, 8)])
def test_all_start_tokens_are_read_before_the_first_new_token(start_ids: tuple[int, ...]) -> None:
    from tests.support.reference_decoding import beam

    plain = fake_manifest()
    manifest = plain.model_copy(update={"tokens": plain.tokens.model_copy(update={"start_ids": start_ids})})
    harness = Harness(runner=CheckedRunner(8, manifest))
    greedy = [harness.generate(source, attention=frozenset({"decoder"})) for source in SOURCES[:4]]
    harness.engine.step()
    searches = [harness.search(source, 2, max_new_tokens=9) for source in SOURCES[4:7]]
    harness.run()
    for active, source in zip(greedy, SOURCES, strict=False):
        assert harness.ids(active) == FakeRunner(manifest, 1).expected(source, LIMIT)
        assert harness.ids(active) != FakeRunner(plain, 1).expected(source, LIMIT)
        columns = len(start_ids) - 1 + len(harness.ids(active))
        assert harness.target(active).attention["decoder"].shape[3] == columns
    for active, source in zip(searches, SOURCES[4:7], strict=True):
        found = beam(slow_logits(manifest, source), start_ids[-1], 2, 9, 2, num_return=2)
        assert [ids_of(one) for one in harness.generated(active).targets] == [list(one.ids) for one in found]


def test_penalties_apply_to_the_whole_prompt(manifest: Manifest) -> None:
    """As in Hugging Face Transformers, processors see the prompt of a causal model."""
    prompt = PROMPTS[4]
    free = FakeRunner(manifest, 1).expected(prompt, LIMIT)[0]
    read = (free, *prompt)
    assert ids_of(target(request(read, parameters=GenerateParameters(max_new_tokens=1)), manifest)) != []
    first = ids_of(target(request(read), manifest))[0]
    repeated = (first, *read)
    for parameters in (GenerateParameters(no_repeat_ngram_size=1), GenerateParameters(repetition_penalty=10.0)):
        forbidden = set(repeated)
        assert ids_of(target(request(repeated, parameters=parameters), manifest))[0] not in forbidden


def test_the_prompt_and_new_tokens_share_the_limit(manifest: Manifest) -> None:
    parameters = GenerateParameters(max_new_tokens=100, min_new_tokens=100)
    for prompt in PROMPTS:
        given = target(request(prompt, parameters=parameters), manifest)
        assert len(given.tokens) == LIMIT - len(prompt) + 1  # the last token needs no position
        assert given.finish_reason == "length"


@pytest.mark.parametrize("num_beams", [1, 3])
def test_columns_of_a_decoder_map_are_the_prompt_and_the_generated_tokens(num_beams: int, manifest: Manifest) -> None:
    parameters = GenerateParameters(num_beams=num_beams)
    for prompt in PROMPTS[::4]:
        given = target(request(prompt, parameters=parameters, attention=frozenset({"decoder"})), manifest)
        maps = given.attention["decoder"]
        columns = len(prompt) - 1 + len(given.tokens)
        assert maps.shape == (2, 2, len(given.tokens), columns)
        np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
        later = np.arange(columns) > np.arange(len(given.tokens))[:, None] + len(prompt) - 1
        assert not maps[:, :, later].any()
        assert (maps[:, :, ~later] > 0).all()


def test_a_forced_target_has_the_log_probabilities_and_maps_of_the_generated_one(manifest: Manifest) -> None:
    asked = request(PROMPTS[5], attention=frozenset({"decoder"}))
    generated = target(asked, manifest)
    forced = target(replace(asked, parameters=FORCED, target_prefix=tuple(ids_of(generated))), manifest)
    assert forced.finish_reason == "forced"
    assert [token.logprob for token in forced.tokens] == [token.logprob for token in generated.tokens]
    np.testing.assert_array_equal(forced.attention["decoder"], generated.attention["decoder"])


def test_a_stream_has_only_new_tokens(manifest: Manifest) -> None:
    harness = Harness(runner=FakeRunner(manifest, 2))
    active = harness.submit(request(PROMPTS[6], stream=True))
    harness.run()
    streamed = [event.token.id for event in harness.events[active] if isinstance(event, TokenEvent)]
    assert streamed == ids_of(harness.target(active)) == FakeRunner(manifest, 1).expected(PROMPTS[6], LIMIT)
