"""Training of every system in bfloat16 is close to float32."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.zoo.systems import PLAN, SYSTEMS
from lab.zoo.training import TASKS
from sightline.model.architectures.factory import Model, build_model
from sightline.model.precision import at_least_float32, autocast, product_type

VOCABULARY = 300
CPU = torch.device("cpu")
SENTENCES = [[5, 9, 7, 2], [30, 31, 32, 33, 34, 35, 36, 2], [8, 2], [40, 41, 42, 43, 2]]


def batch_of(name: str) -> Any:
    system, config = SYSTEMS[name], SYSTEMS[name].make_config(VOCABULARY)
    examples: list[Any]
    if system.task == "translation":
        examples = list(zip(SENTENCES, reversed(SENTENCES), strict=True))
    elif system.task == "classification":
        examples = [(sentence, [number % 2]) for number, sentence in enumerate(SENTENCES)]
    else:
        examples = [(sentence, [0] + [1] * (len(sentence) - 1)) for sentence in SENTENCES]
    return TASKS[system.task].make_batch(examples, config)


def loss_and_gradient(name: str, model: Model, batch: Any, precision: str) -> tuple[float, Tensor]:
    model = copy.deepcopy(model)  # a loss may move a baseline
    torch.manual_seed(4)  # of what hard attention draws
    with autocast(CPU, precision):
        loss = TASKS[SYSTEMS[name].task].training_loss(model, batch, 0.1)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert loss.dtype == torch.float32
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("name", [name for name, plan in PLAN.items() if plan.group in ("zoo", "order")])
def test_the_loss_and_its_gradient_equal_those_of_float32_up_to_rounding(name: str) -> None:
    torch.manual_seed(1)
    model, batch = build_model(SYSTEMS[name].make_config(VOCABULARY)).eval(), batch_of(name)
    exact_loss, exact_gradient = loss_and_gradient(name, model, batch, "float32")
    rounded_loss, rounded_gradient = loss_and_gradient(name, model, batch, "bfloat16")
    assert rounded_loss == pytest.approx(exact_loss, rel=0.01)
    assert rounded_loss != exact_loss
    assert rounded_gradient.dtype == torch.float32
    assert torch.cosine_similarity(rounded_gradient, exact_gradient, dim=0) > 0.99


def test_types_follow_autocast() -> None:
    x = torch.ones(1)
    assert product_type(x) == torch.float32
    assert product_type(x.double()) == torch.float64
    with autocast(CPU, "bfloat16"):
        assert product_type(x) == torch.bfloat16
        assert (x[None] @ x[None]).dtype == torch.bfloat16
    with autocast(CPU, "float32"):
        assert product_type(x) == torch.float32


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_types_narrower_than_float32_become_float32(given: torch.dtype, expected: torch.dtype) -> None:
    assert at_least_float32(torch.ones(1, dtype=given)).dtype == expected
