"""Generations with a constraint: the state of each hypothesis, alone and in a batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.service.engine.request import GenerateRequest
from sightline.service.parameters import GenerateParameters
from tests.service.engine.conftest import FAR, SOURCES, Harness, ids_of, run_alone, slow_logits
from tests.support.fake_runner import fake_manifest

VOCABULARY = fake_manifest().limits.vocabulary
END = fake_manifest().tokens.end_id


@dataclass
class Ascending:
    """Allows ids above the last one, and the end after three of them."""

    last: int = END
    count: int = 0

    @property
    def is_complete(self) -> bool:
        return self.count >= 3

    def allowed(self) -> NDArray[np.bool_]:
        allowed = np.arange(VOCABULARY) > self.last
        allowed[END] = self.is_complete or not allowed.any()
        return allowed

    def update(self, token_id: int) -> None:
        if token_id != END:
            assert token_id > self.last
            self.last, self.count = token_id, self.count + 1

    def copy(self) -> "Ascending":
        return Ascending(self.last, self.count)


METHODS: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 3}, {"num_beams": 4, "num_return_sequences": 4}]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_tokens_are_allowed_and_do_not_depend_on_the_batch(method: dict[str, Any]) -> None:
    parameters = GenerateParameters(**method)
    harness = Harness(max_rows=9)
    requests = [GenerateRequest("r", source, FAR, parameters, matcher=Ascending()) for source in SOURCES[:5]]
    actives = [harness.submit(request) for request in requests]
    harness.generate(SOURCES[5], parameters=GenerateParameters(min_new_tokens=5))  # a neighbour without a constraint
    harness.run()
    for request, active in zip(requests, actives, strict=True):
        assert request.matcher == Ascending(), "its state is that of other generations"
        result, alone = harness.generated(active), run_alone(request, harness.runner.manifest)
        assert result.targets == alone.targets
        for target in result.targets:
            ids = ids_of(target)  # in ascending order, which `Ascending.update` asserts
            assert target.finish_reason == ("eos" if ids[-1] == END and len(ids) > 3 else "length")


def test_greedy_decoding_takes_the_best_allowed_token() -> None:
    harness = Harness()
    active = harness.submit(GenerateRequest("r", SOURCES[3], FAR, matcher=Ascending(), target_prefix=(9, 5)))
    harness.run()
    logits, state, ids = slow_logits(harness.runner.manifest, SOURCES[3]), Ascending(), [9, 5]
    start = harness.runner.manifest.decoder_prompt_ids(SOURCES[3])[-1]
    while ids[-1] != END and len(ids) < harness.runner.manifest.limits.max_target_tokens:
        (scores,) = logits([[start, *ids]])
        ids.append(int(np.where(state.allowed(), scores, -np.inf).argmax()))
        state.update(ids[-1])
    assert harness.ids(active) == ids
