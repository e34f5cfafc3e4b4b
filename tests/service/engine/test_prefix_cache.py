"""The prefix cache: prompts that begin alike share states, and every result stays the same.

The reference of each test is the engine without a cache, `alone`.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import Manifest
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.prefix_cache import PrefixCache, next_key, scope_key
from sightline.service.engine.request import Cancelled, Encoded, EncodeRequest, Failed, Generated, GenerateRequest
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import BLOCK_TOKENS
from tests.service.engine.conftest import FAR, CheckedRunner, Harness, run_alone
from tests.support.fake_runner import HIDDEN, Faults, fake_manifest

LIMIT = 400
GREEDY = GenerateParameters()
SAMPLED = GenerateParameters(do_sample=True, seed=3, temperature=2.0)
BEAMS = GenerateParameters(num_beams=3, num_return_sequences=2)
DECODER_MAPS = frozenset({"decoder"})
ALONE: dict[str, Generated] = {}  # results of requests that ran alone, by what they depend on


@pytest.fixture
def manifest() -> Manifest:
    return fake_manifest(decoder_start="source", max_source_tokens=LIMIT, max_target_tokens=LIMIT)


def tokens(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(one) for one in np.random.default_rng(seed).integers(3, 48, length))


def request(source: Sequence[int], call: str = "p", **fields: Any) -> GenerateRequest:
    return GenerateRequest(call, tuple(source), FAR, **fields)


def cached(manifest: Manifest, num_blocks: int = 64, **settings: Any) -> Harness:
    """Return an engine with a prefix cache; `CheckedRunner` checks the tokens of each block."""
    return Harness(runner=CheckedRunner(9, manifest, num_prefix_blocks=num_blocks), **settings)


def prefilled(harness: Harness) -> list[int]:
    """Return the tokens that the graph has read since the last call."""
    assert isinstance(harness.runner, CheckedRunner)
    found = harness.runner.prefilled[:]
    harness.runner.prefilled.clear()
    return found


def assert_equals_alone(generated: Generated, one: GenerateRequest, manifest: Manifest) -> None:
    key = repr((replace(one, request_id="", caller=""), manifest))
    expected = ALONE[key] = ALONE.get(key) or run_alone(one, manifest)
    assert [target.tokens for target in generated.targets] == [target.tokens for target in expected.targets]
    for target, other in zip(generated.targets, expected.targets, strict=True):
        assert target.attention.keys() == other.attention.keys()
        for kind in target.attention:
            np.testing.assert_array_equal(target.attention[kind], other.attention[kind])


@pytest.mark.parametrize("parameters", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("attention", [frozenset[str](), DECODER_MAPS], ids=["", "maps"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 10, 11, 65, 100])
def test_a_repeated_prompt_computes_only_its_end(
    length: int, attention: frozenset[str], parameters: GenerateParameters, manifest: Manifest
) -> None:
    """A chunk of at least two tokens returns the scores of the first new token."""
    harness, source = cached(manifest), tokens(length)
    one = request(source, parameters=parameters, attention=attention)
    num_whole = max(0, length - 2) // BLOCK_TOKENS * BLOCK_TOKENS
    for num_cached in (0, num_whole, num_whole):
        active = harness.submit(one)
        harness.run()
        assert prefilled(harness) == list(source[num_cached:])
        assert harness.generated(active).num_cached_tokens == num_cached
        assert_equals_alone(harness.generated(active), one, manifest)


def test_prompts_share_what_they_begin_with(manifest: Manifest) -> None:
    harness, begin = cached(manifest), tokens(70)
    for tail, num_cached in ((tokens(50, 1), 0), (tokens(40, 2), 64), ((), 64), (tokens(50, 1), 112)):
        active = harness.submit(request((*begin, *tail)))
        harness.run()
        assert harness.generated(active).num_cached_tokens == num_cached
        assert_equals_alone(harness.generated(active), request((*begin, *tail)), manifest)


def test_the_next_turn_of_a_conversation_reuses_the_prompt_of_the_last(manifest: Manifest) -> None:
    harness, dialogue = cached(manifest), tokens(50)
    num_tokens = 0  # of the last prompt
    for turn in range(4):
        active = harness.submit(request(dialogue))
        harness.run()
        assert harness.generated(active).num_cached_tokens == num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        num_tokens = len(dialogue)
        dialogue = (*dialogue, *harness.ids(active), *tokens(20, turn))


def test_equal_beginnings_of_prompts_that_arrive_together_are_computed_once(manifest: Manifest) -> None:
    harness, begin = cached(manifest), tokens(200)
    sources = [(*begin, *tokens(10 + 7 * number, number + 1)) for number in range(4)]
    handles = [harness.submit(request(source, f"client {number}")) for number, source in enumerate(sources)]
    harness.run()
    assert len(prefilled(harness)) == 200 + sum(len(source) - 200 for source in sources)
    for active, source in zip(handles, sources, strict=True):
        assert_equals_alone(harness.generated(active), request(source), manifest)


def test_samples_and_beams_of_one_prompt_still_share_one_prefill(manifest: Manifest) -> None:
    harness, source = cached(manifest), tokens(150)
    for num_cached in (0, 144):
        handles = [harness.submit(request(source, parameters=SAMPLED, seed=seed)) for seed in range(3)]
        handles.append(harness.submit(request(source, parameters=BEAMS)))
        harness.run()
        assert prefilled(harness) == list(source[num_cached:])
        for active in handles:
            assert harness.generated(active).num_cached_tokens == num_cached
            assert isinstance(active.request, GenerateRequest)
            assert_equals_alone(harness.generated(active), active.request, manifest)


def test_requests_for_rows_of_the_prompt_or_hidden_states_compute_them_and_fill_the_cache(manifest: Manifest) -> None:
    source = tokens(100)
    mapped = request(source, attention=DECODER_MAPS, prompt_rows=True)
    for first in (mapped, EncodeRequest("e", source, FAR)):
        harness = cached(manifest)
        harness.submit(first)
        harness.run()
        prefilled(harness)
        plain = harness.submit(request(source))
        harness.run()
        assert harness.generated(plain).num_cached_tokens == 96
        again = harness.submit(mapped)
        encoding = harness.submit(EncodeRequest("e", source, FAR))
        harness.run()
        assert len(prefilled(harness)) == 4 + 100 + 100
        assert harness.generated(again).num_cached_tokens == 0
        assert_equals_alone(harness.generated(again), mapped, manifest)
        encoded = harness.final(encoding)
        assert isinstance(encoded, Encoded)
        np.testing.assert_array_equal(encoded.hidden, np.array(source)[:, None] * np.arange(1, HIDDEN + 1))


def test_scopes_share_nothing(manifest: Manifest) -> None:
    harness, source = cached(manifest), tokens(100)
    for scope, num_cached in (("a", 0), ("b", 0), ("a", 96), ("b", 96)):
        active = harness.submit(request(source, caller=scope))
        harness.run()
        assert harness.generated(active).num_cached_tokens == num_cached


def test_a_prompt_that_is_larger_than_the_cache_keeps_its_beginning(manifest: Manifest) -> None:
    harness, source = cached(manifest, num_blocks=3), tokens(200)
    for num_cached in (0, 24, 24):
        active = harness.submit(request(source))
        harness.run()
        assert harness.generated(active).num_cached_tokens == num_cached
        assert harness.engine.num_prefix_blocks_in_use == 3


@pytest.mark.parametrize("num_blocks", [0, 1, 4, 40])
def test_results_are_those_without_a_cache_whatever_is_cached_and_running(num_blocks: int, manifest: Manifest) -> None:
    """Requests arrive, end, fail and are cancelled while others read the same beginnings."""
    rng = Random(0)  # the same requests for each number of blocks
    runner = CheckedRunner(9, manifest, Faults(prefill_calls=frozenset({20, 90})), num_prefix_blocks=num_blocks)
    harness = Harness(runner=runner)
    begins = [tokens(length, length) for length in (31, 64, 65, 150)]
    kinds = (GREEDY, SAMPLED, BEAMS, GenerateParameters(repetition_penalty=1.5, min_new_tokens=9))
    requests = []
    for number in range(150):
        begin = rng.choice(begins)
        source = (*begin[: rng.choice((33, 200))], *tokens(rng.choice((1, 2, 40)), rng.randrange(3)))
        one = request(source, f"c{number // 2}", parameters=rng.choice(kinds), attention=DECODER_MAPS)
        requests.append(replace(one, prompt_rows=rng.random() < 0.2, caller=rng.choice("aab")))
    handles, rng = [], Random(num_blocks)
    for one in requests:
        handles.append(harness.submit(one))
        if rng.random() < 0.2:
            harness.engine.cancel(rng.choice(handles))
        for _ in range(rng.randrange(3)):
            harness.engine.step()
    harness.run()
    num_cached = []
    for one, active in zip(requests, handles, strict=True):
        final = harness.final(active)
        if isinstance(final, Generated):
            assert_equals_alone(final, one, manifest)
            num_cached.append(final.num_cached_tokens)
    assert sum(isinstance(harness.final(active), Failed | Cancelled) for active in handles) < 60
    assert (max(num_cached) > 0) == (num_blocks > 0)


def test_the_observer_is_notified_of_prompts_that_use_the_cache(manifest: Manifest) -> None:
    class Noting(EngineObserver):
        def on_prefix_query(self, tokens: int, cached_tokens: int) -> None:
            queries.append((tokens, cached_tokens))

    queries: list[tuple[int, int]] = []
    for num_blocks in (64, 0):
        harness, source = cached(manifest, num_blocks, observer=Noting()), tokens(100)
        for one in (request(source), request(source), EncodeRequest("e", source, FAR)):
            harness.submit(one)
            harness.run()
    assert queries == [(100, 0), (100, 96)]


def keys(count: int, scope: str = "") -> list[bytes]:
    found = [scope_key(scope)]
    for number in range(count):
        found.append(next_key(found[-1], np.full(BLOCK_TOKENS, number)))
    return found[1:]


def test_the_end_of_the_least_recently_used_prompt_loses_its_blocks_first() -> None:
    cache, old, new = PrefixCache(5), keys(3, "old"), keys(2, "new")
    for prompt in (old, new):
        for number, key in enumerate(prompt):
            assert cache.assign(key, prompt[:number]) is not None
        cache.touch(prompt)
    cache.touch(old[:2])  # used again without its last block
    third = keys(3, "third")
    for number, lost in enumerate((old[2], new[1], new[0])):
        assert cache.find(lost) is not None
        cache.assign(third[number], third[:number])
        assert cache.find(lost) is None
    assert cache.find(old[0]) is not None and cache.find(old[1]) is not None


def test_keys_depend_on_the_scope_and_on_all_tokens_before() -> None:
    assert len({*keys(4), *keys(4, "other")}) == 8
    first, second = np.arange(BLOCK_TOKENS), np.arange(BLOCK_TOKENS) + 1
    assert next_key(next_key(scope_key(""), first), second) != next_key(next_key(scope_key(""), second), second)
