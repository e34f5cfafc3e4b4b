"""Positions of tokens: tables that are added to embeddings, and parts of self-attention.

`StackConfig.positions` selects one kind. Sinusoidal and learned tables are added to the embeddings
(Vaswani et al. 2017, section 3.5 and table 3, row E). The other kinds change the scores of
self-attention in every layer: they depend on the distance between query and key.

Shapes use B batch, H heads, T tokens, D width of one head, P positions, M width of the model.
"""

import torch
from torch import Tensor, nn

from sightline.model.config import MAX_DISTANCE, ROTARY_BASE, StackConfig, alibi_slopes


def sinusoidal_positions(num_positions: int, d_model: int) -> Tensor:
    """Compute sinusoidal position embeddings (P, M) (Vaswani et al. 2017, section 3.5), in float32.

    PE(pos, 2i) = sin(pos / 10000^(2i / M)) and PE(pos, 2i + 1) = cos(pos / 10000^(2i / M)).
    """
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)  # (M / 2,)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * rates  # (P, M / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of numbers of x (B, H, T, D), by angles whose cosines and sines are (T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def distances(num_tokens: int, device: torch.device) -> Tensor:
    """Return the distance (T, T) from each query to each key, positive for later keys."""
    positions = torch.arange(num_tokens, device=device)
    return positions - positions.unsqueeze(1)


class AttentionPositions(nn.Module):
    """Base class of positions in self-attention, which changes nothing."""

    def rotate(self, heads: Tensor) -> Tensor:
        """Return queries or keys (B, H, T, D) that depend on their position."""
        return heads

    def bias(self, queries: Tensor, scale: float) -> Tensor | None:
        """Return a bias, which broadcasts to (B, H, T, T), of scores scaled by `scale`, or None,
        given queries (B, H, T, D).
        """
        return None


class RotaryPositions(AttentionPositions):
    """Rotation of queries and keys by an angle that grows with the position (Su et al. 2021)."""

    def __init__(self, head_size: int, max_positions: int) -> None:
        super().__init__()
        rates = (ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)).float()
        angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * rates  # (P, D / 2)
        self.register_buffer("angles", torch.cat((angles, angles), dim=1), persistent=False)
        self.angles: Tensor

    def rotate(self, heads: Tensor) -> Tensor:
        angles = self.angles[: heads.size(2)]
        return rotate(heads, angles.cos(), angles.sin())


class AlibiPositions(AttentionPositions):
    """Bias of scores that falls linearly with the distance (Press et al. 2022, "ALiBi")."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(num_heads)), persistent=False)
        self.slopes: Tensor

    def bias(self, queries: Tensor, scale: float) -> Tensor:
        return -self.slopes[:, None, None] * distances(queries.size(2), queries.device).abs()


class RelativePositions(AttentionPositions):
    """Learned vectors of distances, added to the keys (Shaw et al. 2018, equations 4 and 5). All
    heads of a layer share them. Values have none, which changed no result of the paper (table 3).
    """

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(2 * MAX_DISTANCE + 1, head_size)

    def bias(self, queries: Tensor, scale: float) -> Tensor:
        by_distance = queries @ self.vectors.weight.T * scale  # (B, H, T, 2k + 1)
        rows = distances(queries.size(2), queries.device).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE
        return by_distance.gather(3, rows.expand(*by_distance.shape[:2], -1, -1))


def attention_positions(config: StackConfig, num_heads: int) -> AttentionPositions:
    """Return the positions that self-attention with a number of heads has."""
    match config.positions:
        case "rotary":
            return RotaryPositions(config.d_model // num_heads, config.max_positions)
        case "alibi":
            return AlibiPositions(num_heads)
        case "relative":
            return RelativePositions(config.d_model // num_heads)
    return AttentionPositions()
