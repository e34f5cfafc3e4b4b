"""Decoder-only Transformer with pre-norm layers.

The layers follow Radford et al. 2019 ("GPT-2", section 2.3): layer normalization is applied to the
input of each sublayer, and once more after the last layer. Shapes use B batch, T tokens, M width of
the model, H heads, L layers, V vocabulary.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from sightline.model.config import CausalConfig
from sightline.model.layers.embedding import TransformerBase
from sightline.model.layers.multi_head_attention import causal_mask
from sightline.model.layers.transformer_layer import EncoderLayer


class CausalModel(TransformerBase):
    """Causal language model with one embedding matrix for input and output."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__(config)
        self.config = config
        # A decoder-only layer is an encoder layer with a causal mask.
        self.layers = nn.ModuleList(EncoderLayer(config, pre_norm=True) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.init_weights()

    def hidden_states(self, ids: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Compute the final hidden states of token ids (B, T), T at most `max_positions`.

        Padding on the right needs no mask, because no token attends to a later position. Returns
        normalized hidden states (B, T, M), the input of `logits`, and the attention weights
        (L, B, H, T, T), None unless requested.
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
        """Project hidden states (..., M) to logits (..., V) with the embedding matrix."""
        return features @ self.embedding.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) after each token of `ids` (B, T)."""
        return self.logits(self.hidden_states(ids)[0])
