"""Token and position embeddings (Vaswani et al. 2017, sections 3.4 and 3.5).

Shapes use B batch, T tokens, M width of the model.
"""

import math

from torch import Tensor, nn

from sightline.model.config import StackConfig
from sightline.model.layers.dropout import Dropout
from sightline.model.layers.multi_head_attention import MultiHeadAttention
from sightline.model.layers.positions import RelativePositions, sinusoidal_positions


class TransformerBase(nn.Module):
    """Base class of Transformer models: token and position embedding, and weight initialization."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.max_positions = config.max_positions
        # Rows to add at the first positions; none if positions are a part of self-attention.
        rows = config.max_positions if config.positions == "sinusoidal" else 0
        self.register_buffer("positions", sinusoidal_positions(rows, config.d_model), persistent=False)
        self.positions: Tensor
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_positions, config.d_model)

    def init_weights(self) -> None:
        """Initialize all weights; subclasses call it after they have created their layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                # Xavier initialization of the three projections as one matrix has a gain smaller by
                # sqrt(2). Post-norm models converge much faster with it.
                for projection in (module.query, module.key, module.value):
                    nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
            elif isinstance(module, RelativePositions):
                nn.init.xavier_uniform_(module.vectors.weight)
        # `embed` multiplies by sqrt(d_model), so that token and position embeddings start at
        # similar sizes.
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)
        if hasattr(self, "position_embedding"):
            # The standard deviation is the root mean square of sinusoidal positions.
            nn.init.normal_(self.position_embedding.weight, std=0.5**0.5)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids (B, T), T at most `max_positions`, as (B, T, M).

        The result is dropout(embedding * sqrt(d_model) + positions); positions that are a part of
        self-attention are not added.
        """
        if ids.size(1) > self.max_positions:
            raise ValueError(f"input has {ids.size(1)} tokens, but max_positions is {self.max_positions}")
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        positions = self.position_embedding.weight if hasattr(self, "position_embedding") else self.positions
        if len(positions):
            x = x + positions[: ids.size(1)]
        embedded: Tensor = self.dropout(x)
        return embedded
