"""A decoder-only Transformer: causal self-attention alone, each sublayer behind its own norm.

Layers are those of Radford et al. 2019 ("GPT-2", section 2.3): the norm stands at the input of each sublayer, and one
more after the last. Shapes use B batch, T tokens, M width of the model, H heads, L layers, V vocabulary.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from model.attention import MultiHeadAttention, causal_mask
from model.config import CausalConfig
from model.transformer import Dropout, Embedded, FeedForward


class CausalLayer(nn.Module):
    """x + SelfAttention(LayerNorm(x)), then x + FeedForward(LayerNorm(x))."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(config.d_model)
        self.self_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """(B, T, M) to (B, T, M) and the weights (B, H, T, T) or None."""
        normed = self.self_attention_norm(x)
        attended, weights = self.self_attention(normed, normed, mask, need_weights)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), weights


class CausalModel(Embedded):
    """The stack, and one embedding for input and output."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__(config)
        self.config = config
        self.layers = nn.ModuleList(CausalLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.initialise()

    def read(self, ids: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read texts (B, T).

        Padding on the right needs no mask: no real position looks at a later one.

        Returns:
            (B, T, M), what `logits` takes, and the weights (L, B, H, T, T) or None.
        """
        mask = causal_mask(ids.size(1), ids.device)
        x = self.embed(ids)
        maps = []
        for layer in cast(Iterable[CausalLayer], self.layers):
            x, weights = layer(x, mask, need_weights)
            if weights is not None:
                maps.append(weights)
        return self.norm(x), torch.stack(maps) if need_weights else None

    def logits(self, features: Tensor) -> Tensor:
        """(..., M) to (..., V), by the embedding's own matrix."""
        return features @ self.embedding.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token logits (B, T, V) after each token of texts (B, T)."""
        return self.logits(self.read(ids)[0])
