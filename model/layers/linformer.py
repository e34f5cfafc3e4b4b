"""Linformer (Wang et al. 2020): attention to k projected keys instead of n tokens.

head_i = softmax(Q W_i^Q (E K W_i^K)^T / sqrt(d_k)) F V W_i^V (equation 7), with E and F in R^(k x
n). A projected key mixes all positions of the source. Therefore the projections work in an encoder
of at most n tokens, but not with a causal mask.

`sightline.model.layers.multi_head_attention` attends to them. Shapes use B batch, S source, M width
of the model, H heads, k projected keys, n longest source.
"""

import torch
from torch import Tensor, nn

from sightline.model.config import TransformerConfig, matrix_indices


class Projections(nn.Module):
    """Projections E and F of every layer (section 4, "Parameter sharing between projections").

    - "headwise": each layer has its own E and F, shared by its heads.
    - "key-value": each layer has its own E, and F = E.
    - "layerwise": all layers share one E, and F = E.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sharing = config.linformer_sharing
        self.size = config.linformer_size
        layers = config.encoder_layers
        count = {"headwise": 2 * layers, "key-value": layers, "layerwise": 1}[self.sharing]
        # Entries from N(0, 1 / k), like the random projections in the proofs of the paper.
        drawn = torch.randn(count, self.size, config.max_positions) * self.size**-0.5
        self.matrices = nn.Parameter(drawn)  # (matrices, k, n)

    def for_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return E and F of a layer, each (k, n)."""
        key_index, value_index = matrix_indices(self.sharing, layer)
        return self.matrices[key_index], self.matrices[value_index]


def project(matrix: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Project x (B, S, M), keys or values, with a matrix (k, n) to (B, k, M); S is at most n.
    Padding, where the mask (B, 1, 1, S) is False, counts as zeros.
    """
    is_token = mask[:, 0].transpose(1, 2)  # (B, S, 1)
    return matrix[:, : x.size(1)] @ x.masked_fill(~is_token, 0.0)


def token_weights(weights: Tensor, matrix: Tensor, mask: Tensor) -> Tensor:
    """Convert weights of projected keys (B, H, S, k) to weights of source tokens, softmax(...) F
    (B, H, S, S), 0 for padding.

    The output of a head is (softmax(...) F) V W^V, so the result is the factor of each token's
    value. It may be negative, and a row need not sum to 1. `matrix` (k, n) projects values; the
    mask (B, 1, 1, S) is True for tokens.
    """
    return (weights @ matrix[:, : weights.size(2)]).masked_fill(~mask, 0.0)
