from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.export.check.sessions import Sessions, onnx_steps
from sightline.model.architectures.transformer import Transformer
from sightline.model.rounding import Reference
from tests.rounding import assert_within_rounding
from tests.support.reference_decoding import beam, greedy, pytorch_steps


def test_greedy_over_onnx_runtime_equals_greedy_over_pytorch(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    outputs = set()
    for source in sources:
        expected = greedy(pytorch_steps(models.exact, source), 1, 2, 40)
        given = greedy(onnx_steps(sessions, source), 1, 2, 40)
        assert given.ids == expected.ids

        def compute(model: Transformer, source: list[int] = source) -> dict[str, NDArray[Any]]:
            return {"log_probs": np.array(greedy(pytorch_steps(model, source), 1, 2, 40).log_probs)}

        assert_within_rounding(models, compute, {"log_probs": np.array(given.log_probs)})
        outputs.add(given.ids)
    assert len(outputs) > 3, "outputs that do not depend on the source prove little"


def test_beam_search_over_onnx_runtime_equals_that_over_pytorch(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    expected = beam(pytorch_steps(models.exact, sources[2]), 1, 2, 12, num_beams=4, num_return=4)
    given = beam(onnx_steps(sessions, sources[2]), 1, 2, 12, num_beams=4, num_return=4)
    assert [hypothesis.ids for hypothesis in given] == [hypothesis.ids for hypothesis in expected]

    def compute(model: Transformer) -> dict[str, NDArray[Any]]:
        found = beam(pytorch_steps(model, sources[2]), 1, 2, 12, num_beams=4, num_return=4)
        return {"scores": np.array([hypothesis.score for hypothesis in found])}

    assert_within_rounding(models, compute, {"scores": np.array([hypothesis.score for hypothesis in given])})


def test_prefixes_that_do_not_extend_the_last_ones_are_read_from_the_start(
    sessions: Sessions, models: Reference[Transformer], sources: list[list[int]]
) -> None:
    given = onnx_steps(sessions, sources[0])
    for prefixes in ([[1, 5, 9, 12]], [[1, 5], [1, 6]], [[1, 6, 7], [1, 6, 8], [1, 5, 7]], [[1]]):

        def compute(model: Transformer, prefixes: list[list[int]] = prefixes) -> dict[str, NDArray[Any]]:
            return {"logits": pytorch_steps(model, sources[0])(prefixes)}

        assert_within_rounding(models, compute, {"logits": given(prefixes)})
