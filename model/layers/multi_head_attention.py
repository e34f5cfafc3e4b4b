"""Masks, scaled dot-product attention and multi-head attention (Vaswani et al. 2017, section 3.2).

Shapes use B batch, H heads, Q queries, K keys, D width of one head, M width of the model.
A mask is boolean, True where a query may attend to a key.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.model.config import StackConfig
from sightline.model.layers.linformer import project
from sightline.model.layers.positions import AttentionPositions, attention_positions
from sightline.model.precision import at_least_float32


def length_mask(valid_lengths: Tensor, num_keys: int) -> Tensor:
    """Return a mask (..., K) that excludes the keys at and beyond each of the lengths (...)."""
    return torch.arange(num_keys, device=valid_lengths.device) < valid_lengths.unsqueeze(-1)


def causal_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Return a lower triangular mask (size, size): position i attends to positions 0 to i."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Apply softmax over the keys of scores (..., Q, K) that the mask, which broadcasts to them,
    allows.

    The weights of a query sum to 1, or to 0 if no key is allowed; they are never NaN.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    # The lowest finite number instead of -inf, because the softmax over only -inf is NaN.
    lowest = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(~mask, lowest).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


def scaled_dot_product_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T / sqrt(d_k)) V (Vaswani et al. 2017, equation 1).

    Args:
        queries: (..., Q, D).
        keys: (..., K, D).
        values: (..., K, V).
        mask: broadcastable to (..., Q, K).
        scale: factor of Q K^T in place of 1 / sqrt(d_k).
        bias: added to the scaled scores, broadcastable to (..., Q, K).

    Returns:
        The result (..., Q, V) and the weights (..., Q, K).
    """
    scale = queries.size(-1) ** -0.5 if scale is None else scale
    scores = queries @ keys.transpose(-2, -1) * scale  # (..., Q, K)
    if bias is not None:
        scores = scores + bias
    weights = masked_softmax(scores, mask)
    return weights @ values, weights


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    need_weights: bool,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `scaled_dot_product_attention`, with PyTorch's fused kernel and None in place of
    weights if they are not needed.
    """
    if need_weights:
        return scaled_dot_product_attention(queries, keys, values, mask, scale, bias)
    device = queries.device.type
    if device == "cpu" and torch.is_autocast_enabled(device):
        # On sentences, PyTorch's bfloat16 kernel for CPUs takes ten times as long as its float32
        # kernel.
        with torch.autocast(device, enabled=False):
            queries, keys, values = map(at_least_float32, (queries, keys, values))
            bias = None if bias is None else at_least_float32(bias)
            return attend(queries, keys, values, mask, need_weights, scale, bias)
    if bias is not None:
        # The kernel has one argument for both.
        lowest = torch.finfo(bias.dtype).min
        mask = bias if mask is None else torch.where(mask, bias, lowest)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale), None


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    It computes Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).
    It is cross-attention if the queries come from another sequence than the keys and values. With
    one head, it is single-head attention with projections (M, M).

    d_model M must be a multiple of num_heads H. Scores are divided by sqrt(D) if `scaled`. By
    default, scores do not depend on positions.
    """

    def __init__(
        self, d_model: int, num_heads: int, scaled: bool = True, positions: AttentionPositions | None = None
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({num_heads}), got {d_model}")
        self.num_heads = num_heads
        self.scale = (d_model // num_heads) ** -0.5 if scaled else 1.0
        self.positions = positions or AttentionPositions()
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    @classmethod
    def between_own_tokens(cls, config: StackConfig, num_heads: int) -> "MultiHeadAttention":
        """Return self-attention with the positions and the scale of a configuration."""
        return cls(config.d_model, num_heads, config.scaled, attention_positions(config, num_heads))

    def split_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, T, M) to (B, H, T, D)."""
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, H, T, D) to (B, T, M)."""
        return x.transpose(1, 2).flatten(-2)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
        *projections: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries (B, Q, M) to keys (B, K, M), which also provide the values.

        The mask is broadcastable to (B, H, Q, K). With the projections E and F (k, n) of Linformer,
        it is (B, 1, 1, K), and the heads attend to k projected keys and values (Wang et al. 2020,
        equation 7). Returns outputs (B, Q, M), and the attention weights (B, H, Q, K), or
        (B, H, Q, k) of projected keys, None unless requested.
        """
        parts = self.query(queries), self.key(keys), self.value(keys)
        if projections:
            assert mask is not None, "a projection mixes all positions"
            parts = parts[0], project(projections[0], parts[1], mask), project(projections[1], parts[2], mask)
            mask = None
        q, k, v = map(self.split_heads, parts)  # (B, H, Q, D), (B, H, K, D) twice
        q, k = self.positions.rotate(q), self.positions.rotate(k)
        heads, weights = attend(q, k, v, mask, need_weights, self.scale, self.positions.bias(q, self.scale))
        return self.output(self.merge_heads(heads)), weights


class AttentionWithoutWeights(nn.Module):
    """Single-head self-attention without parameters: equation 1 with Q = K = V. Each output is a
    mean of all inputs, weighted by the softmax of their scaled dot products.
    """

    num_heads = 1

    def forward(
        self, queries: Tensor, keys: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `MultiHeadAttention.forward` does; the attention weights are (B, 1, Q, K)."""
        heads, weights = attend(queries.unsqueeze(1), keys.unsqueeze(1), keys.unsqueeze(1), mask, need_weights)
        return heads.squeeze(1), weights
