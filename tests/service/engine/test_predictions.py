"""Predictions of tokens: logits at some positions, and the largest logits over a text."""

import numpy as np
import pytest

from sightline.service.engine import encoding
from sightline.service.engine.request import Encoded, EncodeRequest, Failed
from sightline.service.runtime.runner import Array
from tests.service.engine.conftest import FAR, SOURCES, Harness
from tests.support.fake_runner import FakeFaultError, FakeRunner, Faults, fake_masked_manifest, fake_predictions

VOCABULARY = 48


def request(source: tuple[int, ...], predicted: tuple[int, ...] = (), return_largest: bool = False) -> EncodeRequest:
    return EncodeRequest("p", source, FAR, predicted=predicted, return_largest=return_largest)


def masked(faults: Faults | None = None) -> Harness:
    return Harness(runner=FakeRunner(fake_masked_manifest(vocabulary=VOCABULARY), 4, faults=faults))


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_results_are_those_of_all_positions(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PREDICTED_ROWS", rows)
    harness = masked()
    handles = [harness.submit(request(source, (0,), True)) for source in SOURCES]
    plain = harness.submit(request(SOURCES[3]))
    last = harness.submit(request(SOURCES[3], (len(SOURCES[3]) - 1, 0)))
    harness.run()
    for source, active in zip(SOURCES, handles, strict=True):
        result = harness.final(active)
        assert isinstance(result, Encoded)
        expected = fake_predictions(source, VOCABULARY)
        assert result.predictions is not None and result.largest is not None
        np.testing.assert_allclose(result.predictions, expected[:1], rtol=1e-6, atol=1e-4)
        np.testing.assert_allclose(result.largest, expected.max(axis=0), rtol=1e-6, atol=1e-4)
    result = harness.final(plain)
    assert isinstance(result, Encoded) and result.predictions is None and result.largest is None
    result = harness.final(last)
    assert isinstance(result, Encoded) and result.predictions is not None
    expected = fake_predictions(SOURCES[3], VOCABULARY)[[-1, 0]]
    np.testing.assert_allclose(result.predictions, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_a_failed_prediction_fails_only_its_request(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = masked()
    predict = harness.runner.predict

    def predict_once(hidden: Array) -> Array:
        monkeypatch.setattr(harness.runner, "predict", predict)
        if fault == "raises":
            raise FakeFaultError("predict")
        return np.full_like(predict(hidden), np.nan)

    monkeypatch.setattr(harness.runner, "predict", predict_once)
    first, second = (harness.submit(request(source, (0,))) for source in SOURCES[:2])
    harness.run()
    assert harness.final(first) == Failed("internal")
    assert isinstance(harness.final(second), Encoded)
