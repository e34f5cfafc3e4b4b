"""Transformer encoder for text classification.

Shapes use B batch, S source, M width of the model, H heads, L layers, C labels.
"""

import torch
from torch import Tensor, nn

from model.config import ClassifierConfig
from model.layers.attention import length_mask
from model.layers.embedding import TransformerBase
from model.layers.transformer_layer import EncoderLayer
from model.precision import at_least_float32


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average hidden states (B, S, M) over the tokens where `mask` (B, S) is True.

    Each row of the mask must have at least one True.

    Returns:
        (B, M).
    """
    kept = mask.unsqueeze(2).to(hidden.dtype)  # (B, S, 1)
    # `masked_fill` and not a product: padding may hold NaN, and 0 * NaN is NaN.
    pooled: Tensor = hidden.masked_fill(~mask.unsqueeze(2), 0.0).sum(dim=1) / kept.sum(dim=1)
    return pooled


class Classifier(TransformerBase):
    """Encoder of Vaswani et al. 2017, mean pooling over its tokens, and a linear layer."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.config = config
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.output = nn.Linear(config.d_model, len(config.labels))
        self.init_weights()

    def encode(
        self, source: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Encode padded sources.

        Args:
            source: token ids (B, S); positions at and beyond a source's length are ignored.
            source_lengths: (B,).
            need_weights: also return the attention weights.

        Returns:
            Hidden states (B, S, M), and the attention weights (L, B, H, S, S) or None.
        """
        return self._encode(source, length_mask(source_lengths, source.size(1)).squeeze(1), need_weights)

    def _encode(self, source: Tensor, mask: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Encode the tokens where `mask` (B, S) is True."""
        x, maps = self.embed(source), []
        for layer in self.encoder:
            x, weights = layer(x, mask[:, None, None], need_weights)
            maps.append(weights)
        return x, torch.stack(maps) if need_weights else None

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the log-probability of each label (B, C), given hidden states (B, S, M)."""
        logits = at_least_float32(self.output(self.dropout(mean_pool(hidden, mask))))
        return logits.log_softmax(dim=-1)

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Return the log-probabilities (B, C) of the labels of padded sources (B, S).

        In training mode, tokens are dropped at random (word dropout; Iyyer et al. 2015, section
        3.1). A dropped token is neither attended to nor part of the mean. The end token, the last
        of each source, is never dropped.
        """
        mask = length_mask(source_lengths, source.size(1)).squeeze(1)  # (B, S)
        if self.training and self.config.word_dropout:
            is_last = torch.arange(source.size(1), device=source.device) == source_lengths.unsqueeze(1) - 1
            mask &= is_last | (torch.rand(source.shape, device=source.device) >= self.config.word_dropout)
        return self.classify(self._encode(source, mask)[0], mask)
