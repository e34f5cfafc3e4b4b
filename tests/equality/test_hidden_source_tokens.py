"""Source tokens that are hidden from the decoder, compared with masked attention in PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.model.architectures import transformer
from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.rounding import reference
from sightline.service.inference.generate import reason_against_hiding
from sightline.service.parameters import FORCED, GenerateParameters
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.running import assert_same_targets, make_request, run
from tests.equality.serving import load_system
from tests.equality.systems import small
from tests.rounding import assert_within_rounding
from tests.support.reference_decoding import log_softmax

Ids = tuple[int, ...]
HIDING = ("transformer", "linformer", "bahdanau", "luong-dot", "hard-marginal")
REJECTED = {
    "fixed-context": "its decoder does not attend to source tokens",
    "luong-location": "its attention depends on the positions of source tokens",
    "luong-local-p": "its attention depends on the positions of source tokens",
}
SYSTEMS = {name: small(name) for name in (*HIDING, *REJECTED)}
NOISE = 0.2  # of the weights of the fixture `folder`
GREEDY = GenerateParameters(max_new_tokens=8)
BEAMS = GenerateParameters(max_new_tokens=8, num_beams=3, num_return_sequences=2)


System = tuple[TranslationModel, OnnxRunner, list[Ids]]


@pytest.fixture(scope="module", params=HIDING)
def system(request: pytest.FixtureRequest, folder: Path, toy_sentences: list[str]) -> System:
    return load_system(folder, request.param, toy_sentences)


def hidden_sets(source: Ids) -> list[Ids]:
    """Return no token, the first, the last, two, and all but one."""
    last = len(source) - 1
    return [(), (0,), (last,), (1, last), tuple(index for index in range(last + 1) if index != 1)]


@contextmanager
def masked(model: TranslationModel, mask: torch.Tensor) -> Iterator[None]:
    """Give the decoder of a model a mask (S,) of the source tokens that it can attend to."""
    if isinstance(model, RecurrentModel):
        assert model.score is not None
        handle = model.score.register_forward_hook(
            lambda module, inputs, scores: scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        )
        yield
        handle.remove()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "length_mask", lambda lengths, size: mask[None])
        yield


def forced(model: TranslationModel, source: Ids, hidden: Ids, written: list[int]) -> dict[str, NDArray[Any]]:
    """Return log-probabilities (T,) and cross-attention weights (L, H, T, S) in PyTorch."""
    ids, lengths = torch.tensor([source]), torch.tensor([len(source)])
    read = torch.tensor([[model.config.bos_id, *written[:-1]]])
    mask = torch.tensor([index not in hidden for index in range(len(source))])
    with torch.inference_mode():
        memory, _ = model.encode(ids, lengths)
        with masked(model, mask):
            features, _, maps = model.decode(read, memory, lengths, need_weights=True)  # type: ignore[arg-type, call-arg]
        logprobs = log_softmax(model.logits(features[0]).numpy())[range(len(written)), written]
    assert maps is not None
    return {"logprobs": logprobs, "cross": maps[:, 0].numpy()}


def test_hidden_tokens_are_masked_keys(system: System) -> None:
    model, runner, sources = system
    models = reference(model)
    requests = [
        make_request(source, parameters=parameters, attention=frozenset({"cross"}), hidden_source_tokens=hidden)
        for source, parameters in zip(sources, (GREEDY, BEAMS), strict=False)
        for hidden in hidden_sets(source)
    ]
    for request, result in zip(requests, run(runner, requests, Random(1)), strict=True):
        assert len(result.targets) == request.num_targets
        for target in result.targets:
            written = [token.id for token in target.tokens]
            found = {"logprobs": np.array([token.logprob for token in target.tokens]), **target.attention}
            assert not found["cross"][..., list(request.hidden_source_tokens)].any()
            compute = partial(forced, source=request.source_ids, hidden=request.hidden_source_tokens, written=written)
            assert_within_rounding(models, compute, found)


def test_hiding_a_token_changes_the_scores(system: System) -> None:
    """Without this difference, the comparison with masked attention could not fail."""
    model, runner, sources = system
    source, target = sources[0], (20, 301, 2)
    requests = [
        make_request(source, parameters=FORCED, target_prefix=target, hidden_source_tokens=hidden)
        for hidden in hidden_sets(source)
    ]
    logprobs = {tuple(token.logprob for token in result.targets[0].tokens) for result in run(runner, requests)}
    is_hard = isinstance(model, RecurrentModel) and model.config.selection != "soft"  # sees one token in each step
    assert len(logprobs) > 1 if is_hard else len(logprobs) == len(requests)


def test_alone_equals_batched_bit_for_bit(system: System) -> None:
    _, runner, sources = system
    kinds = frozenset(one.kind for one in runner.manifest.attention)
    requests = [
        make_request(source, parameters=parameters, attention=kinds, hidden_source_tokens=hidden)
        for source in sources
        for hidden in hidden_sets(source)
        for parameters in (GREEDY, BEAMS)
    ]
    for request, *together in zip(requests, *(run(runner, requests, one) for one in (None, Random(2))), strict=True):
        (alone,) = run(runner, [request])
        for given in together:
            assert_same_targets(alone.targets, given.targets)


@pytest.mark.parametrize("name", REJECTED)
def test_a_decoder_that_needs_positions_is_rejected(name: str, folder: Path, toy_sentences: list[str]) -> None:
    _, runner, _ = load_system(folder, name, toy_sentences)
    assert reason_against_hiding(runner.manifest) == REJECTED[name]
