"""Simpler simple recurrent unit, which takes the place of self-attention in a decoder."""

import torch
from torch import Tensor, nn


class SimpleRecurrentUnit(nn.Module):
    """Recurrent unit whose state has one vector (Kim et al. 2019, section 3.1).

    It computes c_t = f_t * c_{t-1} + (1 - f_t) * W x_t with f_t = sigmoid(W_f x_t + b_f) and c_0 =
    0, and returns max(0, c_t). Only these products of vectors are sequential.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.forget = nn.Linear(d_model, d_model)
        self.input = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (B, T, M) of inputs (B, T, M)."""
        forget = self.forget(x).sigmoid()
        new = (1 - forget) * self.input(x)
        cells = [new[:, 0]]
        for kept, added in zip(forget.unbind(1)[1:], new.unbind(1)[1:], strict=True):
            cells.append(torch.addcmul(added, kept, cells[-1]))
        return torch.stack(cells, dim=1).relu()
