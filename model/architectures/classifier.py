"""A Transformer encoder that reads a text and says how likely each label is.

Shapes use B batch, S source, M width of the model, H heads, L layers, C labels.
"""

import torch
from torch import Tensor, nn

from model.config import ClassifierConfig
from model.layers.attention import length_mask
from model.layers.embedding import Embedded
from model.layers.transformer_layer import EncoderLayer
from model.precision import at_least_float32


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """(B, S, M) to (B, M): the mean over the tokens where `mask` (B, S) is True, at least one in each row."""
    kept = mask.unsqueeze(2).to(hidden.dtype)  # (B, S, 1)
    # Rows of padding may hold anything, and are no part of the sum.
    pooled: Tensor = hidden.masked_fill(~mask.unsqueeze(2), 0.0).sum(dim=1) / kept.sum(dim=1)
    return pooled


class Classifier(Embedded):
    """The encoder of Vaswani et al. 2017, the mean over its tokens, and a linear layer."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.config = config
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.output = nn.Linear(config.d_model, len(config.labels))
        self.initialise()

    def encode(
        self, source: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As `Transformer.encode`: (B, S, M), and the weights (L, B, H, S, S) or None."""
        return self._encode(source, length_mask(source_lengths, source.size(1)).squeeze(1), need_weights)

    def _encode(self, source: Tensor, mask: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """`mask` (B, S) is True where a token is read."""
        x, maps = self.embed(source), []
        for layer in self.encoder:
            x, weights = layer(x, mask[:, None, None], need_weights)
            maps.append(weights)
        return x, torch.stack(maps) if need_weights else None

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The log-probability of each label (B, C), of the encoder's output (B, S, M)."""
        logits = at_least_float32(self.output(self.dropout(mean_pool(hidden, mask))))
        return logits.log_softmax(dim=-1)

    def forward(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        """Log-probabilities (B, C) of padded sources (B, S).

        In training, tokens are left out at random (word dropout; Iyyer et al. 2015, section 3.1), the last one, which
        every source has, excepted: what is left out is neither attended to nor part of the mean.
        """
        mask = length_mask(source_lengths, source.size(1)).squeeze(1)  # (B, S)
        if self.training and self.config.word_dropout:
            is_last = torch.arange(source.size(1), device=source.device) == source_lengths.unsqueeze(1) - 1
            mask &= is_last | (torch.rand(source.shape, device=source.device) >= self.config.word_dropout)
        return self.classify(self._encode(source, mask)[0], mask)
