"""Comparison of two decoders: equal tokens, except for a few ties within rounding."""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.model.architectures.factory import TranslationModel
from sightline.model.rounding import Reference, reference
from sightline.service.engine.request import GenerateRequest, Target
from sightline.service.runtime.runner import Runner
from tests.equality.running import BEAMS, GREEDY, MAX_NEW_TOKENS, make_request, run
from tests.rounding import assert_within_rounding
from tests.support.reference_decoding import beam, greedy, log_softmax, processors_of, pytorch_steps

ALLOWED = 1 / 200  # of the requests may part at a tie

Ids = tuple[int, ...]
Targets = list[Ids]  # of one request, the generated ids, best first
Scores = NDArray[Any]  # float32 or float64, as the model is
Forced = Callable[[Any, Ids, Ids], dict[str, NDArray[Any]]]


def generated_ids(request: GenerateRequest, targets: Sequence[Target]) -> Targets:
    """Return the token ids of targets without the requested prefix."""
    return [tuple(token.id for token in target.tokens[len(request.target_prefix) :]) for target in targets]


def assert_same(
    model: TranslationModel, requests: Sequence[GenerateRequest], expected: Sequence[Targets], given: Sequence[Targets]
) -> None:
    """Check that two decoders give equal targets, except for one in 200 at a near tie.

    Near ties are determined by scores that PyTorch computes here in float64: two scores are near if
    rounding (see `sightline.model.rounding`) may change each of them by half of their difference.
    Greedy decoding may differ where both choices after the common tokens are near the best
    processed logit. Beam search may differ if at every rank the scores of both targets (sums of
    processed log-probabilities, divided by length ** length_penalty) are near each other. Sampling
    must not differ at all.
    """
    cases = zip(requests, expected, given, strict=True)
    different = [case for case in cases if case[1] != case[2]]
    models = reference(model) if different else None
    for request, reference_targets, got in different:
        assert models is not None
        assert _is_near_tie(models, request, reference_targets, got), (
            f"{request}: expected {reference_targets}, got {got}"
        )
    assert len(different) <= ALLOWED * len(requests), f"{len(different)} of {len(requests)} part at a near tie"


def assert_searches_equal_pytorch(model: TranslationModel, runner: Runner, sources: Sequence[Ids]) -> None:
    """Check that greedy and beam search of a runner give the targets of PyTorch, in any batch."""
    config = model.config
    requests = [make_request(source, parameters=asked) for source in sources for asked in (GREEDY, BEAMS)]
    expected = []
    for request in requests:
        arguments = pytorch_steps(model, request.source_ids), config.bos_id, config.eos_id, MAX_NEW_TOKENS
        found = [greedy(*arguments)] if request.parameters is GREEDY else beam(*arguments, num_beams=4, num_return=2)
        expected.append([hypothesis.ids for hypothesis in found])
    for shuffle in (None, Random(1)):
        results = run(runner, requests, shuffle)
        given = [generated_ids(request, one.targets) for request, one in zip(requests, results, strict=True)]
        assert_same(model, requests, expected, given)


def assert_decoding_equals_pytorch(
    runner: Runner, requests: Sequence[GenerateRequest], models: Reference[Any], forced: Forced
) -> None:
    """Check the log-probabilities and maps of greedy decoding, in any batch, by a pass of PyTorch.

    Args:
        runner: runner of the exported model.
        requests: requests with the maps that are compared.
        models: the model in PyTorch.
        forced: computes log-probabilities (T,) and maps by name from source and written ids.
    """
    for request, result in zip(requests, run(runner, requests, Random(2)), strict=True):
        (target,) = result.targets
        assert target.attention.keys() == request.attention
        served = {"logprobs": np.array([token.logprob for token in target.tokens]), **target.attention}
        ids = request.source_ids, tuple(token.id for token in target.tokens)

        def compute(
            model: TranslationModel, ids: tuple[Ids, Ids] = ids, names: Collection[str] = served.keys()
        ) -> dict[str, NDArray[Any]]:
            return {name: array for name, array in forced(model, *ids).items() if name in names}

        assert_within_rounding(models, compute, served)


def forced_logits(model: TranslationModel, request: GenerateRequest, ids: Ids) -> Scores:
    """Return the logits (T, V) of PyTorch before each of `ids`, after the prefix of the request."""
    read = [model.config.bos_id, *request.target_prefix, *ids[:-1]]
    memory = _encoded(model, request.source_ids)
    lengths = torch.tensor([len(request.source_ids)])
    with torch.inference_mode():
        decoded, _, _ = model.decode(torch.tensor([read]), memory, lengths)
        logits: Scores = model.logits(decoded)[0].numpy()
    return logits[len(request.target_prefix) :]


@lru_cache(maxsize=500)
def _encoded(model: TranslationModel, source: Ids) -> Any:
    """Encode a source once for all its targets. Each model decodes its own kind of memory."""
    with torch.inference_mode():
        memory, _ = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    return memory


def forced_log_probs(model: TranslationModel, request: GenerateRequest, ids: Ids) -> Scores:
    """Return the log-probabilities (T, V) of PyTorch before each of `ids`."""
    return log_softmax(forced_logits(model, request, ids))


def _is_near_tie(
    models: Reference[TranslationModel], request: GenerateRequest, expected: Targets, given: Targets
) -> bool:
    if request.parameters.do_sample or len(expected) != len(given):
        return False
    if request.parameters.num_beams == 1:
        return _parts_at_near_tie(models, request, expected[0], given[0])

    def compute(model: TranslationModel) -> dict[str, Scores]:
        return {"scores": np.array([[_beam_score(model, request, ids) for ids in each] for each in (expected, given)])}

    if not np.isfinite(compute(models.exact)["scores"]).all():  # one has a token that the processors exclude
        return False
    exact, limits = models.limits(compute)
    return bool(np.abs(np.diff(exact["scores"], axis=0)).max() <= 2 * limits["scores"])


def _parts_at_near_tie(
    models: Reference[TranslationModel], request: GenerateRequest, expected: Ids, given: Ids
) -> bool:
    same = next((i for i, (one, other) in enumerate(zip(expected, given, strict=False)) if one != other), None)
    if same is None:  # one goes on where the other ended
        return False

    def compute(model: TranslationModel) -> dict[str, Scores]:
        logits = forced_logits(model, request, expected[: same + 1])
        scores = _processed(model, request, logits[same], expected[:same])
        return {"best": scores.max(keepdims=True), "chosen": scores[[expected[same], given[same]]]}

    if not np.isfinite(compute(models.exact)["chosen"]).all():  # one is a token that the processors exclude
        return False
    exact, limits = models.limits(compute)
    return bool((exact["best"] - exact["chosen"]).max() <= limits["best"] + limits["chosen"])


def _beam_score(model: TranslationModel, request: GenerateRequest, ids: Ids) -> float:
    rows = forced_log_probs(model, request, ids)
    total = sum(_processed(model, request, row, ids[:position])[ids[position]] for position, row in enumerate(rows))
    return float(total / len(ids) ** request.parameters.length_penalty)


def _processed(model: TranslationModel, request: GenerateRequest, scores: Scores, generated: Ids) -> Scores:
    prompt = [model.config.bos_id, *request.target_prefix]
    return processors_of(request.parameters)(scores, prompt, generated, model.config.eos_id)
