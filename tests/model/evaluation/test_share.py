import pytest

from sightline.model.evaluation.result import Share


def test_the_interval_is_wilsons() -> None:
    low, high = Share(count=40, total=50).interval
    assert low == pytest.approx(0.6696, abs=1e-4)
    assert high == pytest.approx(0.8876, abs=1e-4)
    assert Share(count=3, total=3).interval[1] == pytest.approx(1)
