import numpy as np
import pytest

from export.sessions import Sessions, onnx_steps
from model.reference import beam, greedy, pytorch_steps
from model.transformer import Transformer


def test_greedy_over_onnx_runtime_equals_greedy_over_pytorch(
    sessions: Sessions, model: Transformer, sources: list[list[int]]
) -> None:
    outputs = set()
    for source in sources:
        expected = greedy(pytorch_steps(model, source), 1, 2, 40)
        given = greedy(onnx_steps(sessions, source), 1, 2, 40)
        assert given.ids == expected.ids
        np.testing.assert_allclose(given.log_probs, expected.log_probs, atol=1e-5)
        outputs.add(given.ids)
    assert len(outputs) > 3, "outputs that do not depend on the source prove little"


def test_beam_search_over_onnx_runtime_equals_that_over_pytorch(
    sessions: Sessions, model: Transformer, sources: list[list[int]]
) -> None:
    expected = beam(pytorch_steps(model, sources[2]), 1, 2, 12, num_beams=4, num_return=4)
    given = beam(onnx_steps(sessions, sources[2]), 1, 2, 12, num_beams=4, num_return=4)
    assert [hypothesis.ids for hypothesis in given] == [hypothesis.ids for hypothesis in expected]
    assert [hypothesis.score for hypothesis in given] == pytest.approx(
        [hypothesis.score for hypothesis in expected], abs=1e-4
    )


def test_prefixes_that_do_not_extend_the_last_ones_are_read_from_the_start(
    sessions: Sessions, model: Transformer, sources: list[list[int]]
) -> None:
    given, expected = onnx_steps(sessions, sources[0]), pytorch_steps(model, sources[0])
    for prefixes in ([[1, 5, 9, 12]], [[1, 5], [1, 6]], [[1, 6, 7], [1, 6, 8], [1, 5, 7]], [[1]]):
        np.testing.assert_allclose(given(prefixes), expected(prefixes), atol=1e-5)
