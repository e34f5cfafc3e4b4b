"""A decoder-only Transformer: causal self-attention alone, each sublayer behind its own norm.

Layers are those of Radford et al. 2019 ("GPT-2", section 2.3): the norm stands at the input of each sublayer, and one
more after the last. Shapes use B batch, T tokens, M width of the model, H heads, L layers, V vocabulary.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from model.config import CausalConfig
from model.layers.attention import causal_mask
from model.layers.embedding import Embedded
from model.layers.transformer_layer import EncoderLayer


class CausalModel(Embedded):
    """The stack, and one embedding for input and output."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__(config)
        self.config = config
        # The encoder's layer: that it looks at no later token is the mask's doing.
        self.layers = nn.ModuleList(EncoderLayer(config, pre_norm=True) for _ in range(config.layers))
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
        for layer in cast(Iterable[EncoderLayer], self.layers):
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
