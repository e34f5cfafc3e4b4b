from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import PREFILL_TOKENS, Manifest
from sightline.service.engine import recorded_maps
from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Event, Generated, GenerateRequest, MapPart, Target
from sightline.service.inference.generate import reason_against_hiding
from sightline.service.parameters import FORCED, GenerateParameters
from tests.service.engine.conftest import ids_of
from tests.support.fake_runner import FakeRunner, fake_classifier_manifest, fake_manifest, fake_slots_manifest

ALL = frozenset({"encoder", "cross", "decoder"})
SOURCES = [(5, 6, 7), (8, 9, 10, 11, 12), (13,), (14, 15, 16, 17)]


def run(requests: list[GenerateRequest], max_rows: int = 3, manifest: Manifest | None = None) -> list[Target]:
    """Return the targets of all requests in order."""
    runner = FakeRunner(manifest or fake_manifest(layers=3, heads=2), max_rows)
    engine, events = Engine(runner), list[list[Event]]()
    for request in requests:
        events.append([])
        engine.submit(request, events[-1].append)
    while engine.has_work:
        engine.step()
    return [target for (event,) in events if isinstance(event, Generated) for target in event.targets]


def request_of(source: tuple[int, ...], kinds: frozenset[str] = ALL, max_new_tokens: int = 24) -> GenerateRequest:
    return GenerateRequest("r", source, 1e12, GenerateParameters(max_new_tokens=max_new_tokens), attention=kinds)


def test_maps_have_the_shape_of_target_and_source_and_rows_that_sum_to_one() -> None:
    for source, generated in zip(SOURCES, run([request_of(source) for source in SOURCES]), strict=True):
        sources, targets = len(source), len(generated.tokens)
        assert {kind: array.shape for kind, array in generated.attention.items()} == {
            "encoder": (3, 2, sources, sources),
            "cross": (3, 2, targets, sources),
            "decoder": (3, 2, targets, targets),
        }
        for array in generated.attention.values():
            assert array.dtype == np.float32
            np.testing.assert_allclose(array.sum(axis=-1), 1, rtol=1e-6)


def test_each_layer_and_head_has_its_own_map() -> None:
    """Maps equal those of the fake runner. Regression: layers and heads could be mixed up."""
    source = SOURCES[1]
    (generated,) = run([request_of(source)])
    read = [1, *(token.id for token in generated.tokens)]
    looked_at = {
        "encoder": [[row + column for column in source] for row in source],
        "cross": [[row + column for column in source] for row in range(len(generated.tokens))],
        "decoder": [read[: row + 1] for row in range(len(generated.tokens))],
    }
    for kind, rows in looked_at.items():
        for layer, head, row in np.ndindex(3, 2, len(rows)):
            weights = np.array([1 + (token + 3 * head + 5 * layer) % 7 for token in rows[row]])
            given = generated.attention[kind][layer, head, row, : len(weights)]
            np.testing.assert_allclose(given, weights / weights.sum(), rtol=1e-6)


def test_a_target_token_attends_to_no_later_token() -> None:
    (generated,) = run([request_of(SOURCES[1])])
    later = np.triu_indices(len(generated.tokens), k=1)
    assert len(later[0]) > 0
    assert not generated.attention["decoder"][:, :, *later].any()


@pytest.mark.parametrize("logged_bytes", [0, 600, recorded_maps.LOGGED_BYTES])
@pytest.mark.parametrize("max_new_tokens", [1, 24])
def test_maps_in_a_batch_equal_those_alone(
    max_new_tokens: int, logged_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a row that moves must not lose the maps that wait in the log."""
    monkeypatch.setattr(recorded_maps, "LOGGED_BYTES", logged_bytes)
    requested = [ALL, frozenset({"cross"}), frozenset[str](), frozenset({"decoder", "encoder"})]
    requests = [request_of(*pair, max_new_tokens) for pair in zip(SOURCES, requested, strict=True)]
    for request, together in zip(requests, run(requests), strict=True):
        (alone,) = run([request])
        assert set(together.attention) == set(alone.attention) == request.attention
        for kind, array in alone.attention.items():
            np.testing.assert_array_equal(together.attention[kind], array)


def scored(source: tuple[int, ...], target: list[int]) -> GenerateRequest:
    return GenerateRequest("r", source, 1e12, FORCED, target_prefix=tuple(target), attention=ALL)


def test_a_scored_target_gets_the_maps_of_the_same_target_generated() -> None:
    (free,) = run([request_of(SOURCES[1])])
    (forced,) = run([scored(SOURCES[1], ids_of(free))])
    for kind, array in free.attention.items():
        np.testing.assert_array_equal(forced.attention[kind], array)


@pytest.mark.parametrize("prefix", [(), (7, 30)])
def test_each_beam_gets_the_maps_of_its_own_target(prefix: tuple[int, ...]) -> None:
    """Maps of a beam equal those of the same target when it is forced."""
    for source in SOURCES:
        parameters = GenerateParameters(num_beams=5, num_return_sequences=5)
        beams = GenerateRequest("r", source, 1e12, parameters, target_prefix=prefix, attention=ALL)
        neighbours = [request_of(SOURCES[0]), request_of(SOURCES[1], frozenset({"cross"}))]
        targets = run([neighbours[0], beams, neighbours[1]], max_rows=7)[1:6]
        assert len({tuple(ids_of(target)) for target in targets}) == 5
        for target in targets:
            assert len(target.tokens) > len(prefix)
            (forced,) = run([scored(source, ids_of(target))])
            assert set(target.attention) == ALL
            for kind, array in target.attention.items():
                np.testing.assert_array_equal(forced.attention[kind], array)


def test_beams_are_the_same_with_and_without_maps() -> None:
    parameters = GenerateParameters(num_beams=4, num_return_sequences=4)
    for source in SOURCES:
        plain, seen = (
            run([GenerateRequest("r", source, 1e12, parameters, attention=kinds)], max_rows=4)
            for kinds in (frozenset[str](), ALL)
        )
        assert [target.tokens for target in plain] == [target.tokens for target in seen]
        assert not any(target.attention for target in plain)


def test_maps_start_with_the_rows_of_the_prefix() -> None:
    source, prefix = SOURCES[3], (9, 41, 5)
    parameters = GenerateParameters(max_new_tokens=3)
    (target,) = run([GenerateRequest("r", source, 1e12, parameters, target_prefix=prefix, attention=ALL)])
    assert target.attention["cross"].shape == (3, 2, 6, len(source))
    assert target.attention["decoder"].shape == (3, 2, 6, 6)
    (forced,) = run([scored(source, list(prefix))])
    np.testing.assert_array_equal(target.attention["cross"][:, :, :3], forced.attention["cross"])
    np.testing.assert_array_equal(target.attention["decoder"][:, :, :3, :3], forced.attention["decoder"])


def run_with_slots(requests: list[GenerateRequest]) -> list[Target]:
    return run(requests, manifest=fake_slots_manifest(layers=3, heads=2, slots=4))


def test_maps_of_projected_keys_have_source_tokens_as_rows_and_the_columns_of_the_manifest() -> None:
    requested = [frozenset({"encoder_slots"}), ALL | {"encoder_slots"}, ALL, frozenset({"encoder_slots", "cross"})]
    requests = [request_of(*pair) for pair in zip(SOURCES, requested, strict=True)]
    for source, request, target in zip(SOURCES, requests, run_with_slots(requests), strict=True):
        assert set(target.attention) == request.attention
        (alone,) = run_with_slots([request])
        for kind, maps in alone.attention.items():
            np.testing.assert_array_equal(target.attention[kind], maps)
        if "encoder_slots" not in request.attention:
            continue
        assert target.attention["encoder_slots"].shape == (3, 2, len(source), 4)
        for layer, head, row, slot in np.ndindex(3, 2, len(source), 4):
            weights = [1 + (source[row] + index + 3 * head + 5 * layer) % 7 for index in range(4)]
            given = target.attention["encoder_slots"][layer, head, row, slot]
            np.testing.assert_allclose(given, weights[slot] / sum(weights), rtol=1e-6)


def test_beams_and_forced_targets_have_maps_of_projected_keys() -> None:
    kinds = frozenset({"encoder_slots", "cross"})
    parameters = GenerateParameters(num_beams=3, num_return_sequences=3)
    targets = run_with_slots([GenerateRequest("r", SOURCES[1], 1e12, parameters, attention=kinds)])
    (alone,) = run_with_slots([request_of(SOURCES[1], frozenset({"encoder_slots"}))])
    assert len(targets) == 3
    for target in targets:
        np.testing.assert_array_equal(target.attention["encoder_slots"], alone.attention["encoder_slots"])


DECODER = frozenset({"decoder"})


def decoder_only() -> Manifest:
    return fake_manifest(layers=3, heads=2, decoder_start="source", max_source_tokens=100, max_target_tokens=120)


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of one token, of one and two chunks."""
    lengths = (1, 2, PREFILL_TOKENS, PREFILL_TOKENS + 1, PREFILL_TOKENS + 2, 2 * PREFILL_TOKENS + 1)
    return [tuple(int(one) for one in np.random.default_rng(length).integers(3, 40, length)) for length in lengths]


def assert_rows_of(read: list[int], maps: np.ndarray[Any, Any]) -> None:
    """Compare a decoder map (L, H, rows, columns) with the one that the fake model computes."""
    assert maps.shape[2:] == (len(read), len(read))
    for layer, head, row in np.ndindex(*maps.shape[:3]):
        weights = np.array([1 + (token + 3 * head + 5 * layer) % 7 for token in read[: row + 1]])
        np.testing.assert_allclose(maps[layer, head, row, : row + 1], weights / weights.sum(), rtol=1e-6)
        assert not maps[layer, head, row, row + 1 :].any()


@pytest.mark.parametrize(
    "parameters",
    [
        GenerateParameters(max_new_tokens=5),
        GenerateParameters(max_new_tokens=5, num_beams=3, num_return_sequences=3),
        GenerateParameters(max_new_tokens=5, do_sample=True, temperature=3.0),
    ],
    ids=["greedy", "beams", "sample"],
)
def test_rows_of_the_prompt_come_first(parameters: GenerateParameters) -> None:
    for prompt in prompts():
        request = GenerateRequest("r", prompt, 1e12, parameters, attention=DECODER, prompt_rows=True)
        for target in run([request], manifest=decoder_only()):
            assert_rows_of([*prompt, *ids_of(target)[:-1]], target.attention["decoder"])


def test_samples_of_one_prompt_share_its_rows() -> None:
    """The prompt is computed once, also when some samples arrive after its first chunk."""
    prompt, runner = prompts()[-1], FakeRunner(decoder_only(), 4)
    engine, events = Engine(runner), list[Event]()
    parameters = GenerateParameters(max_new_tokens=4, do_sample=True, temperature=3.0)
    for seed in range(4):
        request = GenerateRequest("r", prompt, 1e12, parameters, seed, attention=DECODER, prompt_rows=True)
        engine.submit(request, events.append)
    while engine.has_work:
        engine.step()
    assert runner.num_prefills == 2
    targets = [target for event in events if isinstance(event, Generated) for target in event.targets]
    assert len({tuple(ids_of(target)) for target in targets}) > 1
    for target in targets:
        assert_rows_of([*prompt, *ids_of(target)[:-1]], target.attention["decoder"])


def test_requests_with_and_without_rows_of_the_prompt_share_no_prefill() -> None:
    prompt = prompts()[-1]
    requests = [
        GenerateRequest("r", prompt, 1e12, GenerateParameters(max_new_tokens=3), attention=kinds, prompt_rows=has_rows)
        for kinds, has_rows in ((DECODER, True), (DECODER, False), (frozenset[str](), False))
    ]
    with_rows, without, plain = run(requests, manifest=decoder_only())
    assert_rows_of([*prompt, *ids_of(with_rows)[:-1]], with_rows.attention["decoder"])
    np.testing.assert_array_equal(without.attention["decoder"], with_rows.attention["decoder"][:, :, len(prompt) - 1 :])
    assert not plain.attention
    assert plain.tokens == without.tokens == with_rows.tokens


def test_only_the_selected_layers_and_heads_of_a_decoder_map_are_returned() -> None:
    for has_rows in (True, False):
        whole = GenerateRequest("r", SOURCES[1], 1e12, attention=DECODER, prompt_rows=has_rows)
        some = replace(whole, map_parts={"decoder": MapPart(layers=(2, 0), heads=(1,))})
        expected, given = run([whole, some], manifest=decoder_only())
        np.testing.assert_array_equal(given.attention["decoder"], expected.attention["decoder"][[2, 0]][:, [1]])


HIDDEN_TOKENS = [(0,), (4,), (1, 3), (0, 1, 2, 4)]


@pytest.mark.parametrize("hidden", HIDDEN_TOKENS)
def test_a_decoder_reads_a_source_without_its_hidden_tokens(hidden: tuple[int, ...]) -> None:
    """The fake decoder reads source tokens only, so the result is that of a shorter source."""
    source = SOURCES[1]
    visible = tuple(token for index, token in enumerate(source) if index not in hidden)
    neighbours = [request_of(one) for one in SOURCES]
    for parameters in (GenerateParameters(), GenerateParameters(num_beams=3, num_return_sequences=2)):
        request = GenerateRequest("r", source, 1e12, parameters, hidden_source_tokens=hidden, attention=ALL)
        given = run([neighbours[0], request, *neighbours[1:]], max_rows=6)[1 : 1 + request.num_targets]
        expected = run([replace(request, source_ids=visible, hidden_source_tokens=())], max_rows=3)
        whole = run([request_of(source)])[0]
        for target, other in zip(given, expected, strict=True):
            assert target.tokens == other.tokens
            np.testing.assert_array_equal(target.attention["encoder"], whole.attention["encoder"])
            np.testing.assert_array_equal(target.attention["decoder"], other.attention["decoder"])
            np.testing.assert_array_equal(np.delete(target.attention["cross"], hidden, -1), other.attention["cross"])
            assert not target.attention["cross"][..., list(hidden)].any()


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (fake_manifest(decoder_start="source"), "it is a decoder-only model"),
        (fake_classifier_manifest(), "it has no decoder"),
        (fake_manifest().model_copy(update={"states": ()}), "its decoder does not attend to source tokens"),
    ],
)
def test_hidden_tokens_are_rejected_with_the_reason_by_models_without_support(manifest: Manifest, reason: str) -> None:
    found = reason_against_hiding(manifest)
    assert found is not None
    assert found.startswith(reason)
    assert reason_against_hiding(fake_manifest()) is None
