"""Activations of the graphs are exact, and those of the reference equal Transformers."""

import math
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers.activations import ACT2FN

from sightline.export.check.numpy_reference import _erf, activate
from sightline.export.families.description import Activation
from sightline.export.families.values import ACTIVATIONS
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.layers import activation
from sightline.export.graphs.nodes import FLOAT
from sightline.model.float32 import ELEMENTARY, UNIT_ROUNDOFF


@pytest.mark.parametrize("kind", get_args(Activation))
def test_activations_are_exact(kind: Activation, tmp_path: Path) -> None:
    with WeightFile(tmp_path / "weights.bin") as file:
        graph = GraphBuilder("activation", file)
        y = activation(graph, graph.input("x", FLOAT, ("batch",)), kind)
        graph.add("Identity", y, output=graph.output("y", FLOAT, ("batch",)))
        onnx.save_model(graph.build(), tmp_path / "activation.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "activation.onnx", providers=["CPUExecutionProvider"])
    x = np.linspace(-30, 30, 6001, dtype=np.float32)
    (given,) = session.run(None, {"x": x})
    expected = activate(x.astype(np.float64), kind)
    # Eight operations at most, each with one rounding error, of which one is elementary.
    limits = (8 + ELEMENTARY) * UNIT_ROUNDOFF * np.maximum(1, np.maximum(np.abs(x), np.abs(expected)))
    assert (np.abs(given - expected) <= limits).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = np.linspace(-30, 30, 6001)
    expected = ACT2FN[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(activate(x, ACTIVATIONS[name]), expected, rtol=0, atol=1e-8)


def test_the_error_function_is_exact_in_float64() -> None:
    x = np.concatenate([np.linspace(-7, 7, 14_001), [np.inf, -np.inf, 1e-300, 1 / 128]])
    np.testing.assert_allclose(_erf(x), [math.erf(value) for value in x], rtol=4e-16, atol=0)
    assert np.isnan(_erf(np.array([np.nan]))).all()
