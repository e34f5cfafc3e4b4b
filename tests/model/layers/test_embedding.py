import math

import pytest

from sightline.model.layers.positions import sinusoidal_positions


def test_encodings_follow_the_formula_at_every_position() -> None:
    encoding = sinusoidal_positions(50, 8)
    for position in (0, 1, 7, 49):
        for i in range(4):
            angle = position / 10000 ** (2 * i / 8)
            assert encoding[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encoding[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
