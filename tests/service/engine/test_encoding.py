"""Results of encode requests."""

import numpy as np

from sightline.service.engine.request import Encoded, EncodeRequest, Failed
from tests.service.engine.conftest import FAR, SOURCES, Harness
from tests.support.fake_runner import FakeRunner, Faults, fake_classifier_manifest, fake_label_logprobs

MAPS = frozenset({"encoder"})


def classifier(faults: Faults | None = None) -> Harness:
    return Harness(runner=FakeRunner(fake_classifier_manifest(), 4, faults=faults))


def request(source: tuple[int, ...], return_labels: bool = True, attention: frozenset[str] = MAPS) -> EncodeRequest:
    return EncodeRequest("e", source, FAR, return_labels, attention)


def test_requests_of_several_kinds_share_a_batch_and_each_gets_its_result() -> None:
    harness = classifier()
    source = SOURCES[3]
    asked = [(True, MAPS), (True, frozenset[str]()), (False, MAPS), (False, frozenset[str]())]
    handles = [harness.submit(request(source, *one)) for one in asked]
    harness.run()
    assert isinstance(harness.runner, FakeRunner) and harness.runner.num_encodes == 1
    for active, (return_labels, attention) in zip(handles, asked, strict=True):
        result = harness.final(active)
        assert isinstance(result, Encoded)
        assert result.hidden.shape == (len(source), 4)
        assert (result.label_scores is not None) == return_labels
        assert frozenset(result.attention) == attention


def test_labels_and_maps_do_not_depend_on_the_batch() -> None:
    harness = classifier()
    handles = [harness.submit(request(source)) for source in SOURCES]
    harness.run()
    for source, active in zip(SOURCES, handles, strict=True):
        alone = classifier()
        lonely = alone.submit(request(source))
        alone.run()
        result, expected = harness.final(active), alone.final(lonely)
        assert isinstance(result, Encoded) and isinstance(expected, Encoded)
        assert result.label_scores is not None and expected.label_scores is not None
        np.testing.assert_allclose(result.label_scores, fake_label_logprobs(source), rtol=1e-6)
        np.testing.assert_array_equal(result.label_scores, expected.label_scores)
        np.testing.assert_array_equal(result.attention["encoder"], expected.attention["encoder"])
        np.testing.assert_allclose(result.attention["encoder"].sum(axis=-1), 1, rtol=1e-6)


def test_labels_that_are_not_finite_fail_only_their_request() -> None:
    harness = classifier(Faults(nan_id=SOURCES[2][0]))
    first, second = harness.submit(request(SOURCES[2][:1])), harness.submit(request(SOURCES[8]))
    harness.run()
    assert harness.final(first) == Failed("internal")
    assert isinstance(harness.final(second), Encoded)


def test_the_encoder_of_a_generating_model_returns_its_maps() -> None:
    harness = Harness()
    active = harness.submit(request(SOURCES[1], return_labels=False))
    harness.run()
    result = harness.final(active)
    assert isinstance(result, Encoded)
    assert result.attention["encoder"].shape == (2, 2, len(SOURCES[1]), len(SOURCES[1]))
