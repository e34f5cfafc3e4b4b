"""Linformer (Wang et al. 2020): attention of a source to k slots instead of its n tokens.

head_i = softmax(Q W_i^Q (E K W_i^K)^T / sqrt(d_k)) F V W_i^V (equation 7), with E and F in R^(k x n). They mix
positions, so they fit an encoder of at most n tokens and no decoder.

Shapes use B batch, S source, M width of the model, H heads, L layers, k slots, n the longest source.
"""

import torch
from torch import Tensor, nn

from model.config import TransformerConfig
from model.layers.attention import AttentionHeads


class Projections(nn.Module):
    """E and F of every layer (section 4, "Parameter sharing between projections").

    "headwise": E and F of a layer's own, for all its heads; "key-value": a layer's own, and E = F; "layerwise": E = F,
    the same in all layers.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sharing = config.linformer_sharing
        self.size = config.linformer_size
        layers = config.encoder_layers
        count = {"headwise": 2 * layers, "key-value": layers, "layerwise": 1}[self.sharing]
        # Entries from N(0, 1 / k), as the random projections in the paper's proofs.
        drawn = torch.randn(count, self.size, config.max_positions) * self.size**-0.5
        self.matrices = nn.Parameter(drawn)  # (matrices, k, n)

    def places_of(self, layer: int) -> tuple[int, int]:
        """Where a layer's E and F stand among the matrices."""
        first = {"headwise": 2 * layer, "key-value": layer, "layerwise": 0}[self.sharing]
        return first, first + 1 if self.sharing == "headwise" else first

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """E and F of a layer, each (k, n)."""
        key_place, value_place = self.places_of(layer)
        return self.matrices[key_place], self.matrices[value_place]


def project(matrix: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """E x, as if what is not a token were not there.

    Args:
        matrix: (k, n).
        x: (B, S, M), S at most n.
        mask: (B, 1, 1, S), True for tokens.

    Returns:
        (B, k, M).
    """
    is_token = mask[:, 0].transpose(1, 2)  # (B, S, 1)
    return matrix[:, : x.size(1)] @ x.masked_fill(~is_token, 0.0)


def pull_back(slots: Tensor, matrix: Tensor, mask: Tensor) -> Tensor:
    """Weights of slots as weights of the tokens that the slots are made of: softmax(...) F.

    A head's result is (softmax(...) F) V W^V, so these are what multiplies each token's value. They may be negative and
    a row need not sum to 1.

    Args:
        slots: (B, H, S, k).
        matrix: (k, n), the one that projects values.
        mask: (B, 1, 1, S), True for tokens.

    Returns:
        (B, H, S, S), 0 for what is not a token.
    """
    return (slots @ matrix[:, : slots.size(2)]).masked_fill(~mask, 0.0)


class LinformerAttention(AttentionHeads):
    """Heads that attend to projected keys and values."""

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        mask: Tensor,
        need_weights: bool,
        key_projection: Tensor,
        value_projection: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `queries` (B, Q, M) to slots made of `keys` (B, S, M), which also give the values.

        Args:
            mask: (B, 1, 1, S).
            need_weights: also return the attention weights.
            key_projection: E, (k, n).
            value_projection: F, (k, n).

        Returns:
            (B, Q, M), and the weights of the slots (B, H, Q, k), whose rows sum to 1, or None.
        """
        slot_keys = project(key_projection, self.key(keys), mask)
        slot_values = project(value_projection, self.value(keys), mask)
        return self.attend(self.query(queries), slot_keys, slot_values, None, need_weights)
