"""The reference decoder and the engine give the same tokens as Hugging Face `generate`."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sightline.base.bundle import GenerationDefaults
from sightline.model.architectures.transformer import Transformer
from sightline.model.decoding import one_thread
from sightline.service.engine.request import GenerateRequest
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.comparing import Targets, assert_same, generated_ids
from tests.equality.marian import generate
from tests.equality.running import make_request, pairs, run
from tests.support.reference_decoding import beam, greedy, processors_of, pytorch_steps

SHORT = 12  # sentences, for the many settings; with 4 beams, one batch of transformers
REFERENCE = 2  # sentences, for the slow decoder

GREEDY = GenerateParameters(max_new_tokens=80)
BEAMS = GREEDY.model_copy(update={"num_beams": 4, "num_return_sequences": 2})

SEARCHES = {
    "greedy": GREEDY,
    "5 beams": GREEDY.model_copy(update={"num_beams": 5}),
    "early": GREEDY.model_copy(
        update={"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "num_return_sequences": 3}
    ),
    "never": GREEDY.model_copy(
        update={"num_beams": 3, "length_penalty": 1.2, "early_stopping": "never", "num_return_sequences": 3}
    ),
    "shortest first": GREEDY.model_copy(update={"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never"}),
    "cut off": GREEDY.model_copy(update={"num_beams": 4, "max_new_tokens": 7, "num_return_sequences": 4}),
}
WHOLE = ("greedy",)
SLOW = ("5 beams", "early", "never")  # all sentences only in the slow tests
PROCESSORS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.3},
    "ngrams": {"no_repeat_ngram_size": 2},
    "words": {"no_repeat_ngram_size": 1},
    "longer": {"min_new_tokens": 25},
    "biases": {"logit_bias": ((2, -4.0), (268, 3.1)), "repetition_penalty": 1.2},
    "all": {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "min_new_tokens": 12},
}
# Pairs only in the slow tests: `all` combines the same processors with both searches.
SLOW_PROCESSORS = {("penalty", "beams"), ("ngrams", "greedy"), ("words", "beams"), ("longer", "greedy")}
# A prefix must not count for the bound of "never" and for the smallest length.
LONGEST = GenerateParameters(
    num_beams=3, max_new_tokens=12, length_penalty=4.0, early_stopping="never", num_return_sequences=3
)
PREFIXED: dict[str, dict[str, Any]] = {
    "plain": {},
    "longer": {"min_new_tokens": 11},
    "all": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 9},
}
SLOW_PREFIXED = {("plain", "greedy"), ("plain", "beams"), ("longer", "beams"), ("all", "longest")}


@pytest.fixture(scope="module")
def plain(marian: Any, sources: list[tuple[int, ...]]) -> dict[GenerateParameters, list[Targets]]:
    """Outputs of transformers for the first sentences, without processors and prefix."""
    return {
        parameters: generate(marian, [make_request(source, parameters=parameters) for source in sources[:SHORT]])
        for parameters in (GREEDY, BEAMS)
    }


@pytest.fixture(scope="module")
def frequent(plain: dict[GenerateParameters, list[Targets]], model: Transformer) -> tuple[int, ...]:
    """Return the tokens that the model generates most often, without the end token."""
    counts = Counter(token for (ids,) in plain[GREEDY] for token in ids if token != model.config.eos_id)
    return tuple(token for token, _ in counts.most_common(5))


@dataclass(frozen=True)
class StopAt:
    """Stopping criterion: the last token is one of a set."""

    ids: tuple[int, ...]

    def update(self, token_id: int) -> bool:
        return token_id in self.ids

    def copy(self) -> "StopAt":
        return self

    def ends(self, generated: Sequence[int]) -> bool:
        """Return the same criterion for the reference decoder."""
        return bool(generated) and generated[-1] in self.ids


def by_reference(model: Transformer, request: GenerateRequest) -> Targets:
    """Return the targets of the reference decoder."""
    parameters, config, step = request.parameters, model.config, pytorch_steps(model, request.source_ids)
    shape: Any = {"prefix": request.target_prefix, "processors": processors_of(parameters)}
    if isinstance(request.stop, StopAt):
        shape["stop"] = request.stop.ends
    if parameters.num_beams == 1:
        return [greedy(step, config.bos_id, config.eos_id, parameters.num_new_tokens, **shape).ids]
    hypotheses = beam(
        step,
        config.bos_id,
        config.eos_id,
        parameters.num_new_tokens,
        parameters.num_beams,
        parameters.length_penalty,
        parameters.early_stopping,
        parameters.num_return_sequences,
        **shape,
    )
    return [hypothesis.ids for hypothesis in hypotheses]


Agree = Callable[[Sequence[GenerateRequest], Sequence[Targets]], None]


@pytest.fixture
def agree(model: Transformer, runner: OnnxRunner) -> Agree:
    """Compare engine and reference with transformers; the reference on a few sentences only."""

    def assert_all_agree(requests: Sequence[GenerateRequest], expected: Sequence[Targets]) -> None:
        results = zip(requests, run(runner, requests), strict=True)
        given = [generated_ids(request, result.targets) for request, result in results]
        assert_same(model, requests, expected, given)
        with one_thread():
            few = [by_reference(model, request) for request in requests[:REFERENCE]]
        assert_same(model, requests[:REFERENCE], expected[:REFERENCE], few)

    return assert_all_agree


@pytest.mark.parametrize(
    ("search", "is_whole"),
    [(search, search in WHOLE) for search in SEARCHES]
    + [pytest.param(search, True, marks=pytest.mark.slow) for search in SLOW],
)
def test_searches_agree(search: str, is_whole: bool, agree: Agree, marian: Any, sources: list[tuple[int, ...]]) -> None:
    count = len(sources) if is_whole else SHORT
    requests = [make_request(source, parameters=SEARCHES[search]) for source in sources[:count]]
    agree(requests, generate(marian, requests))


@pytest.mark.parametrize(
    ("processors", "parameters"), pairs(PROCESSORS, {"greedy": GREEDY, "beams": BEAMS}, SLOW_PROCESSORS)
)
def test_processors_agree(
    processors: str,
    parameters: GenerateParameters,
    agree: Agree,
    marian: Any,
    sources: list[tuple[int, ...]],
    plain: dict[GenerateParameters, list[Targets]],
) -> None:
    shaped = parameters.model_copy(update=PROCESSORS[processors])
    requests = [make_request(source, parameters=shaped) for source in sources[:SHORT]]
    expected = generate(marian, requests)
    assert expected != plain[parameters], "processors that change nothing prove nothing"
    agree(requests, expected)


@pytest.mark.parametrize("parameters", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_suppressed_tokens_agree(
    parameters: GenerateParameters, agree: Agree, marian: Any, sources: list[tuple[int, ...]], frequent: tuple[int, ...]
) -> None:
    shaped = parameters.model_copy(update={"suppress_tokens": frequent, "max_new_tokens": 30})
    requests = [make_request(source, parameters=shaped) for source in sources[:SHORT]]
    expected = generate(marian, requests)
    assert not any(set(frequent) & set(ids) for targets in expected for ids in targets)
    agree(requests, expected)


@pytest.mark.parametrize("parameters", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_stops_agree(
    parameters: GenerateParameters, agree: Agree, marian: Any, sources: list[tuple[int, ...]], frequent: tuple[int, ...]
) -> None:
    """A stopping criterion ends a beam like the end token."""
    stop = StopAt(frequent[1:4])  # the first is the full stop
    requests = [make_request(source, parameters=parameters, stop=stop) for source in sources[:SHORT]]
    expected = generate(marian, requests, stop.ids)
    assert sum(stop.ends(ids) for targets in expected for ids in targets) > len(requests) / 2
    agree(requests, expected)


@pytest.mark.parametrize(
    ("num_beams", "min_new_tokens"),
    [(1, 4), (3, 0), (8, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 0), (3, 4), (8, 0)))],
)
def test_end_ids_suppressed_tokens_and_a_forced_end_agree(
    num_beams: int,
    min_new_tokens: int,
    model: Transformer,
    runner: OnnxRunner,
    marian: Any,
    sources: list[tuple[int, ...]],
    frequent: tuple[int, ...],
) -> None:
    """Eight beams and three end tokens need more candidates than the graph's top tokens."""
    parameters = GenerateParameters(max_new_tokens=12, min_new_tokens=min_new_tokens, num_beams=num_beams)
    end_ids, suppressed = (model.config.eos_id, *frequent[1:3]), frequent[3:5]
    requests = [make_request(source, parameters=parameters) for source in sources[:SHORT]]
    settings = {"eos_token_id": list(end_ids), "suppress_tokens": list(suppressed)}
    expected = generate(marian, requests, **settings, forced_eos_token_id=end_ids[0])
    lasts = Counter(ids[-1] for (ids,) in expected)
    assert {end_ids[0]} < set(lasts) <= set(end_ids), "several end tokens must end a sequence"
    assert any(len(ids) == 12 for (ids,) in expected), "an end must be forced"
    assert not any(set(suppressed) & set(ids) for (ids,) in expected)
    changed = copy(runner)
    changed.manifest = runner.manifest.model_copy(
        update={
            "tokens": runner.manifest.tokens.model_copy(update={"end_ids": end_ids}),
            "generation": GenerationDefaults(suppress_tokens=suppressed, force_end=True),
        }
    )
    given = [tuple(token.id for token in result.targets[0].tokens) for result in run(changed, requests)]
    assert given == [ids for (ids,) in expected]
    processors = replace(processors_of(parameters), suppress_tokens=suppressed, forced_end_at=12)
    with one_thread():
        for request, (ids,) in zip(requests[:REFERENCE], expected, strict=False):
            step, first_id = pytorch_steps(model, request.source_ids), model.config.bos_id
            if num_beams == 1:
                found = greedy(step, first_id, end_ids, 12, processors=processors)
            else:
                (found,) = beam(step, first_id, end_ids, 12, num_beams, processors=processors)
            assert found.ids == ids


@pytest.mark.parametrize("num_beams", [1, 4])
def test_bad_words_and_the_scores_of_forced_ends_agree(
    num_beams: int,
    runner: OnnxRunner,
    marian: Any,
    sources: list[tuple[int, ...]],
    plain: dict[GenerateParameters, list[Targets]],
) -> None:
    """The bad words are parts of the outputs without them."""
    bad_words = tuple({ids[start : start + 2 + start % 2] for (ids,) in plain[GREEDY][:20] for start in (1, 2)})
    parameters = GenerateParameters(max_new_tokens=8, num_beams=num_beams, num_return_sequences=num_beams)
    requests = [make_request(source, parameters=parameters) for source in sources[:SHORT]]
    settings = {"bad_words_ids": [list(word) for word in bad_words], "forced_eos_token_id": marian.config.eos_token_id}
    expected = generate(marian, requests, **settings)
    assert [ids[:8] for (ids, *_) in expected] != [ids[:8] for (ids,) in plain[GREEDY]]
    changed = copy(runner)
    generation = GenerationDefaults(bad_words=bad_words, force_end=True)
    changed.manifest = runner.manifest.model_copy(update={"generation": generation})
    for request, result, targets in zip(requests, run(changed, requests), expected, strict=True):
        assert generated_ids(request, result.targets) == targets
        scores = [target.score for target in result.targets]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("shape", "parameters"), pairs(PREFIXED, {"greedy": GREEDY, "beams": BEAMS, "longest": LONGEST}, SLOW_PREFIXED)
)
def test_forced_prefixes_agree(
    shape: str,
    parameters: GenerateParameters,
    agree: Agree,
    marian: Any,
    sources: list[tuple[int, ...]],
    plain: dict[GenerateParameters, list[Targets]],
) -> None:
    """The prefix of each sentence is the beginning of another sentence's translation."""
    beginnings = [ids[:5] for (ids,) in plain[GREEDY]]
    requests = [
        make_request(source, parameters=parameters.model_copy(update=PREFIXED[shape]), target_prefix=prefix)
        for source, prefix in zip(sources, beginnings[1:], strict=False)
    ]
    agree(requests, generate(marian, requests))
