"""The recurrent unit equals its equations, computed one number at a time."""

import math

import pytest
import torch

from sightline.model.layers.recurrent_unit import SimpleRecurrentUnit


def slow_outputs(unit: SimpleRecurrentUnit, x: torch.Tensor) -> list[list[list[float]]]:
    """Return the outputs (B, T, M) by the equations of Kim et al. 2019, section 3.1."""
    forget, bias, matrix = unit.forget.weight.tolist(), unit.forget.bias.tolist(), unit.input.weight.tolist()
    outputs = []
    for sequence in x.tolist():
        cell, rows = [0.0] * len(bias), []
        for vector in sequence:
            for index in range(len(bias)):
                score = sum(weight * value for weight, value in zip(forget[index], vector, strict=True)) + bias[index]
                kept = 1 / (1 + math.exp(-score))
                new = sum(weight * value for weight, value in zip(matrix[index], vector, strict=True))
                cell[index] = kept * cell[index] + (1 - kept) * new
            rows.append([max(0.0, value) for value in cell])
        outputs.append(rows)
    return outputs


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_unit_equals_its_equations_and_reads_no_later_position(length: int) -> None:
    torch.manual_seed(0)
    unit, x = SimpleRecurrentUnit(6), torch.randn(3, length, 6)
    outputs = unit(x)
    torch.testing.assert_close(outputs, torch.tensor(slow_outputs(unit, x)))
    torch.testing.assert_close(unit(x[:, :1]), outputs[:, :1])
    assert (outputs > 0).any() and (outputs == 0).any()
