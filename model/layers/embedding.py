"""Token embeddings and sinusoidal positions (Vaswani et al. 2017, sections 3.4 and 3.5).

Shapes use B batch, T tokens, M width of the model.
"""

import math

import torch
from torch import Tensor, nn

from model.config import StackConfig
from model.layers.attention import AttentionHeads
from model.layers.dropout import Dropout


def sinusoidal_positions(num_positions: int, d_model: int) -> Tensor:
    """Compute sinusoidal position embeddings (Vaswani et al. 2017, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos(pos / 10000^(2i /
    d_model)).

    Returns:
        (num_positions, d_model) float32.
    """
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)  # (M / 2,)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * rates  # (P, M / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


class TransformerBase(nn.Module):
    """Base class of Transformer models: token and position embedding, and weight initialization."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        positions = sinusoidal_positions(config.max_positions, config.d_model)
        self.register_buffer("positions", positions, persistent=False)
        self.positions: Tensor

    def init_weights(self) -> None:
        """Initialize all weights; subclasses call it after they have created their layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, AttentionHeads):
                # Xavier initialization of the three projections as one matrix has a gain smaller by
                # sqrt(2). Post-norm models converge much faster with it.
                for projection in (module.query, module.key, module.value):
                    nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        # `embed` multiplies by sqrt(d_model), so that token and position embeddings start at
        # similar sizes.
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids (B, T) as dropout(embedding * sqrt(d_model) + positions), (B, T, M).

        Raises:
            ValueError: T exceeds `max_positions`.
        """
        if ids.size(1) > self.positions.size(0):
            raise ValueError(f"input has {ids.size(1)} tokens, but max_positions is {self.positions.size(0)}")
        scaled = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(scaled + self.positions[: ids.size(1)])
        return embedded
