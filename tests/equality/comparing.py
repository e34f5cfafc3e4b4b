"""The rule by which two decoders must agree: token for token, but for ties within rounding, and few of those."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.factory import TranslationModel
from model.processors import Processors
from model.reference import log_softmax
from service.engine.request import DecodingParameters, GenerateRequest, Target

CLOSE = 1e-4  # scores nearer than this may change places by rounding
ALLOWED = 1 / 200  # of the requests may part at a tie

Ids = tuple[int, ...]
Targets = list[Ids]  # of one request, the generated ids, best first


def generated_ids(request: GenerateRequest, targets: Sequence[Target]) -> Targets:
    """The ids of an engine's targets without the prefix that was asked for."""
    return [tuple(token.id for token in target.tokens[len(request.target_prefix) :]) for target in targets]


def assert_same(
    model: TranslationModel, requests: Sequence[GenerateRequest], expected: Sequence[Targets], given: Sequence[Targets]
) -> None:
    """Fail unless every request has the same targets, but for one in 200 that parts at a near tie.

    What is near is measured on scores that PyTorch computes here, neither decoder's own. Greedy decoding parts at a
    near tie where, after the tokens that both have, both choices lie within 1e-4 of the best score (the logits as the
    processors leave them). Beam search does where at every rank the two targets' scores (the sums of log-probabilities
    as the processors leave them, divided by length ** length_penalty) lie within 1e-4 of each other: whatever tie lay
    on the way, both have found equally good targets. Sampling may not part at all.
    """
    cases = zip(requests, expected, given, strict=True)
    different = [case for case in cases if case[1] != case[2]]
    for request, wanted, got in different:
        assert _is_near_tie(model, request, wanted, got), f"{request}: expected {wanted}, got {got}"
    assert len(different) <= ALLOWED * len(requests), f"{len(different)} of {len(requests)} part at a near tie"


def forced_logits(model: TranslationModel, request: GenerateRequest, ids: Ids) -> NDArray[np.float32]:
    """The logits (T, V) from which PyTorch would pick each of `ids`, after the request's prefix."""
    read = [model.config.bos_id, *request.target_prefix, *ids[:-1]]
    source = torch.tensor([request.source_ids])
    lengths = torch.tensor([source.size(1)])
    memory: Any  # each model decodes its own
    with torch.inference_mode():
        memory, _ = model.encode(source, lengths)
        decoded, _, _ = model.decode(torch.tensor([read]), memory, lengths)
        logits: NDArray[np.float32] = model.logits(decoded)[0].numpy()
    return logits[len(request.target_prefix) :]


def forced_log_probs(model: TranslationModel, request: GenerateRequest, ids: Ids) -> NDArray[np.float32]:
    """The logarithms (T, V) of the probabilities from which PyTorch would pick each of `ids`."""
    return log_softmax(forced_logits(model, request, ids))


def _is_near_tie(model: TranslationModel, request: GenerateRequest, expected: Targets, given: Targets) -> bool:
    if request.parameters.do_sample or len(expected) != len(given):
        return False
    if request.parameters.num_beams == 1:
        return _parts_at_near_tie(model, request, expected[0], given[0])
    return all(
        abs(_beam_score(model, request, one) - _beam_score(model, request, other)) < CLOSE
        for one, other in zip(expected, given, strict=True)
    )


def _parts_at_near_tie(model: TranslationModel, request: GenerateRequest, expected: Ids, given: Ids) -> bool:
    same = next((i for i, (one, other) in enumerate(zip(expected, given, strict=False)) if one != other), None)
    if same is None:  # one goes on where the other ended
        return False
    logits = forced_logits(model, request, expected[: same + 1])
    scores = _processed(model, request, logits[same], expected[:same])
    return bool(scores.max() - min(scores[expected[same]], scores[given[same]]) < CLOSE)


def _beam_score(model: TranslationModel, request: GenerateRequest, ids: Ids) -> float:
    rows = forced_log_probs(model, request, ids)
    total = sum(_processed(model, request, row, ids[:place])[ids[place]] for place, row in enumerate(rows))
    return float(total / len(ids) ** request.parameters.length_penalty)


def _processed(
    model: TranslationModel, request: GenerateRequest, scores: NDArray[np.float32], generated: Ids
) -> NDArray[np.float32]:
    prompt = [model.config.bos_id, *request.target_prefix]
    return processors_of(request.parameters)(scores, prompt, generated, model.config.eos_id)


def processors_of(parameters: DecodingParameters) -> Processors:
    """The reference's processors that a request asks for."""
    return Processors(
        repetition_penalty=parameters.repetition_penalty,
        no_repeat_ngram_size=parameters.no_repeat_ngram_size,
        min_new_tokens=parameters.min_new_tokens,
        suppress_tokens=parameters.suppress_tokens,
    )
