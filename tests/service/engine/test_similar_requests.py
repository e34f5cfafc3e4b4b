"""Similar requests: they wait in the same queue, run alone and fail alone."""

import numpy as np
import pytest

from sightline.service.engine.request import Cancelled, Compared, Encoded, Failed, Generated, SimilarRequest
from tests.service.engine.conftest import FAR, SOURCES, Harness
from tests.support.fake_runner import Faults, fake_table


def request(*token_ids: int, deadline: float = FAR) -> SimilarRequest:
    return SimilarRequest("s", token_ids, deadline)


def test_cosines_are_those_of_the_embeddings() -> None:
    harness = Harness()
    active = harness.submit(request(7, 5))
    harness.run()
    result = harness.final(active)
    assert isinstance(result, Compared)
    table = fake_table(48)
    for token_id, row in zip((7, 5), result.cosines, strict=True):
        for other, cosine in enumerate(row):
            own, its = table[token_id], table[other]
            assert cosine == pytest.approx(own @ its / np.sqrt((own @ own) * (its @ its)), abs=1e-6)
    assert result.cosines.shape == (2, 48)


@pytest.mark.parametrize("max_batch_tokens", [1, 4, 1024])
def test_every_kind_of_request_gets_its_result_in_any_mix(max_batch_tokens: int) -> None:
    harness = Harness(max_batch_tokens=max_batch_tokens)
    handles = [
        active
        for index, source in enumerate(SOURCES)
        for active in (harness.submit(request(index)), harness.encode(source), harness.generate(source))
    ]
    harness.run()
    kinds = [Compared, Encoded, Generated] * len(SOURCES)
    assert [type(harness.final(active)) for active in handles] == kinds


def test_at_most_one_comparison_runs_between_steps() -> None:
    harness = Harness()
    handles = [harness.submit(request(index)) for index in range(3)]
    for done in range(4):
        assert [active.has_ended for active in handles] == [index < done for index in range(3)]
        harness.engine.step()


def test_a_waiting_comparison_can_expire_or_be_cancelled() -> None:
    harness = Harness()
    late, given_up, kept = (harness.submit(request(3, deadline=when)) for when in (1.0, FAR, FAR))
    harness.now = 2.0
    harness.engine.cancel(given_up)
    harness.run()
    assert harness.final(late) == Failed("deadline_exceeded")
    assert harness.final(given_up) == Cancelled()
    assert isinstance(harness.final(kept), Compared)


@pytest.mark.parametrize("faults", [Faults(raising_id=9), Faults(nan_id=9)])
def test_a_failed_comparison_fails_only_its_request(faults: Faults) -> None:
    harness = Harness(faults=faults)
    first, second = harness.submit(request(4, 9)), harness.submit(request(4))
    harness.run()
    assert harness.final(first) == Failed("internal")
    assert isinstance(harness.final(second), Compared)
