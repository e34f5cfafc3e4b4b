"""Transformer encoders without a decoder: their common part, and the encoder of text vectors.

Shapes use B batch, S source, M width of the model, H heads, L layers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.model.config import EncoderConfig, EncoderOnlyConfig
from sightline.model.layers.embedding import TransformerBase
from sightline.model.layers.multi_head_attention import length_mask
from sightline.model.layers.transformer_layer import EncoderLayer
from sightline.model.precision import at_least_float32


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average states (B, S, M) to (B, M) where `mask` (B, S) is True, at least once in each row."""
    kept = mask.unsqueeze(2).to(hidden.dtype)  # (B, S, 1)
    # `masked_fill` and not a product: padding may hold NaN, and 0 * NaN is NaN.
    pooled: Tensor = hidden.masked_fill(~mask.unsqueeze(2), 0.0).sum(dim=1) / kept.sum(dim=1)
    return pooled


class EncoderOnlyModel(TransformerBase):
    """Encoder of Vaswani et al. 2017. A subclass adds its output and initializes the weights."""

    def __init__(self, config: EncoderOnlyConfig) -> None:
        super().__init__(config)
        self.config = config
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))

    def encode(
        self, source: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Encode padded token ids (B, S), ignoring those at and beyond `source_lengths` (B,).

        Returns hidden states (B, S, M), and the attention weights (L, B, H, S, S) or None.
        """
        return self._encode(source, length_mask(source_lengths, source.size(1)), need_weights)

    def _encode(self, source: Tensor, mask: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Encode the tokens where `mask` (B, S) is True."""
        x, maps = self.embed(source), []
        for layer in self.encoder:
            x, weights = layer(x, mask[:, None, None], need_weights)
            maps.append(weights)
        return x, torch.stack(maps) if need_weights else None

    def source_mask(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the mask (B, S) of the tokens that the model reads.

        In training mode, tokens are dropped at random (word dropout; Iyyer et al. 2015, section
        3.1). A dropped token is neither attended to nor part of the mean. The end token, the last
        of each source, is never dropped.
        """
        mask = length_mask(source_lengths, source.size(1))  # (B, S)
        if self.training and self.config.word_dropout:
            is_last = torch.arange(source.size(1), device=source.device) == source_lengths.unsqueeze(1) - 1
            mask &= is_last | (torch.rand(source.shape, device=source.device) >= self.config.word_dropout)
        return mask


class TextEncoder(EncoderOnlyModel):
    """Encoder whose mean hidden state, divided by its norm, is the vector of a text."""

    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.init_weights()

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the vectors (B, M) of padded texts (B, S), each of length 1, in float32. In
        training mode, words are dropped as `source_mask` describes.
        """
        mask = self.source_mask(source, source_lengths)
        pooled = at_least_float32(mean_pool(self._encode(source, mask)[0], mask))
        return functional.normalize(pooled, dim=-1)
