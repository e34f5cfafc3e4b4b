import base64
from pathlib import Path

import numpy as np
import pytest

from lab.study.heads import end_columns, singular_values, statistics_of_heads
from lab.study.served import serve
from sightline.service.discovery import find_bundles

KINDS = ["encoder", "cross", "decoder"]


def test_statistics_are_those_of_the_service(bundle: Path, toy_sentences: list[str]) -> None:
    """The service computes entropy and weight on special tokens for each text on its own."""
    with serve(bundle.parent) as served:
        (manifest,) = find_bundles(bundle.parent).values()
        body = {"model": manifest.name, "kinds": KINDS, "encoding": "base64", "statistics": True}
        outputs = served.outputs("/v1/attention", body, toy_sentences[:3])
    found = {(row["kind"], row["quantity"]): np.array(row["value"]) for row in statistics_of_heads("toy", outputs)}
    for number, kind in enumerate(KINDS):
        for quantity, name in (("entropy", "entropy"), ("special", "special_share")):
            maps = [output["maps"][number] for output in outputs]
            weights = [entry["rows"] for entry in maps]
            values = [[one[name] for one in entry["statistics"]] for entry in maps]
            expected = np.average(values, axis=0, weights=weights)
            np.testing.assert_allclose(found[kind, quantity][:, :-1].flatten(), expected, atol=1e-4)


def test_the_final_mark_is_found() -> None:
    output = {"source_tokens": [" A", " dog", ".", "</s>"], "source_offsets": [[0, 1], [1, 5], [5, 6], None]}
    assert end_columns(output, "cross") == ([3], [3, 2])
    assert end_columns({**output, "source_tokens": [" A", " dog", "s", "</s>"]}, "encoder") == ([3], [3])
    assert end_columns(output, "decoder") == ([0], [0])


def test_shuffled_weights_of_equal_rows_need_more_singular_values() -> None:
    row = np.array([0.7, 0.2, 0.05, 0.03, 0.02], np.float32)
    data = base64.b64encode(np.tile(row, (5, 1)).tobytes()).decode()
    output = {"maps": [{"kind": "encoder", "shape": [1, 1, 5, 5], "data": data}]}
    found = singular_values("toy", "sentences", [output] * 3)
    assert found["layers"] == [0.2] and found["heads"] == [[0.2]]
    assert found["shuffled"][0] > 0.4
    assert found["curves"][0][-1] == pytest.approx(1)
