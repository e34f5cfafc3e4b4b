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
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i+1) = cos of the same (section 3.5).

    Returns:
        (num_positions, d_model).
    """
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)  # (M / 2,)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * rates  # (P, M / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


class Embedded(nn.Module):
    """Base class of models over a stack of layers: the embedding of tokens and positions, and the initialisation."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        positions = sinusoidal_positions(config.max_positions, config.d_model)
        self.register_buffer("positions", positions, persistent=False)
        self.positions: Tensor

    def initialise(self) -> None:
        """Draw all weights anew; to be called when all layers are there."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, AttentionHeads):
                # Smaller by sqrt(2), as if the three were one matrix: post-norm stacks converge much faster so.
                for projection in (module.query, module.key, module.value):
                    nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        # Scaled by sqrt(d_model) in `embed`, so that a token and its position start with like sizes.
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, M): embedding times sqrt(d_model), plus positions."""
        if ids.size(1) > self.positions.size(0):
            raise ValueError(f"{ids.size(1)} tokens are more than max_positions ({self.positions.size(0)})")
        scaled = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(scaled + self.positions[: ids.size(1)])
        return embedded
