"""Attention of recurrent decoders (Bahdanau et al. 2015, Luong et al. 2015): scores, windows and weights.

Shapes use B batch, S source, H state of the decoder, A annotation, K key. What a score needs of the annotations alone
is computed once per source, by `keys`; `forward` is one step.
"""

import torch
from torch import Tensor, nn

from model.config import RecurrentConfig
from model.layers.attention import masked_softmax


class Score(nn.Module):
    """How well each position of a source fits a state of the decoder."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()

    def keys(self, annotations: Tensor) -> Tensor:
        """(B, S, A) to (B, S, K)."""
        return annotations

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        """States (B, H) and keys (B, S, K) to scores (B, S)."""
        raise NotImplementedError


class ProjectedScore(Score):
    """One whose keys are the annotations, projected."""

    annotation: nn.Linear

    @property
    def key_size(self) -> int:
        """K."""
        return self.annotation.out_features

    def keys(self, annotations: Tensor) -> Tensor:
        projected: Tensor = self.annotation(annotations)
        return projected


def dot(state: Tensor, keys: Tensor) -> Tensor:
    """(B, K) and (B, S, K) to (B, S)."""
    return (keys @ state.unsqueeze(-1)).squeeze(-1)


class AdditiveScore(ProjectedScore):
    """e_ij = v^T tanh(W s + U h_j) (Bahdanau et al. 2015, section A.1.2, which leaves biases out; W s has one here).

    Luong's concat, v^T tanh(W [h_t; h_s]) (Luong et al. 2015, section 3.1), is the same: W is [W U] there.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.state = nn.Linear(config.decoder_size, config.attention_size)
        self.annotation = nn.Linear(config.annotation_size, config.attention_size, bias=False)
        self.weights = nn.Linear(config.attention_size, 1, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        scores: Tensor = self.weights((self.state(state).unsqueeze(1) + keys).tanh()).squeeze(-1)
        return scores


class DotScore(Score):
    """h_t^T h_s (Luong et al. 2015, section 3.1)."""

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return dot(state, keys)


class GeneralScore(ProjectedScore):
    """h_t^T W h_s (Luong et al. 2015, section 3.1): multiplicative, or bilinear, attention."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.annotation = nn.Linear(config.annotation_size, config.decoder_size, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return dot(state, keys)


class ReducedRankScore(ProjectedScore):
    """s^T (U^T V) h = (U s)^T (V h) with U (k, H) and V (k, A): multiplicative attention of rank k.

    It is in no paper of these; Manning's course CS224n at Stanford teaches it under this name.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.state = nn.Linear(config.decoder_size, config.attention_size, bias=False)
        self.annotation = nn.Linear(config.annotation_size, config.attention_size, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return dot(self.state(state), keys)


class LocationScore(Score):
    """W h_t + b (Luong et al. 2015, equation 8, without the bias): what stands at a position is not looked at."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.state = nn.Linear(config.decoder_size, config.max_positions)

    def keys(self, annotations: Tensor) -> Tensor:
        """Nothing, one number wide: the number of positions is all that is needed."""
        return annotations.new_zeros(*annotations.shape[:2], 1)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        scores: Tensor = self.state(state)[:, : keys.size(1)]
        return scores


SCORES: dict[str, type[Score]] = {
    "additive": AdditiveScore,
    "concat": AdditiveScore,
    "dot": DotScore,
    "general": GeneralScore,
    "location": LocationScore,
    "reduced_rank": ReducedRankScore,
}


class PredictedPosition(nn.Module):
    """p_t = S sigmoid(v_p^T tanh(W_p h_t)) (Luong et al. 2015, equation 9): between 0 and S.

    v_p is `outer.weight` / H. Adam moves every weight as far as any other: without the factor the sum over H of them
    runs into the sigmoid's flat ends within some hundred updates (Yang et al. 2022, "Tensor Programs V", scale what a
    network ends with like this, so that its steps do not grow with its width).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = 1 / size
        self.inner = nn.Linear(size, size, bias=False)
        self.outer = nn.Linear(size, 1, bias=False)

    def forward(self, state: Tensor, source_lengths: Tensor) -> Tensor:
        """States (B, H) and lengths (B,) to positions (B,)."""
        logits = self.gain * self.outer(self.inner(state).tanh())  # (B, 1)
        positions: Tensor = source_lengths * torch.sigmoid(logits).squeeze(-1)
        return positions


def align(
    scores: Tensor, source_lengths: Tensor, centres: Tensor | None = None, radius: int = 0, is_gaussian: bool = False
) -> Tensor:
    """The weights of one step, a softmax over the source or over a window (Luong et al. 2015, equation 7, section 3.2).

    Args:
        scores: (B, S).
        source_lengths: (B,).
        centres: (B,) where each window is; without, every position of the source counts.
        radius: D of the window [p - D, p + D].
        is_gaussian: multiply by exp(-(s - p)^2 / (2 sigma^2)) with sigma = D / 2, after the softmax (Luong et al. 2015,
            equation 10): the weights sum to less than 1.

    Returns:
        (B, S).
    """
    positions = torch.arange(scores.size(1), device=scores.device)
    mask = positions < source_lengths.unsqueeze(1)
    if centres is None:
        return masked_softmax(scores, mask)
    distances = positions - centres.unsqueeze(1)  # (B, S)
    weights = masked_softmax(scores, mask & (distances.abs() <= radius))
    if is_gaussian:
        weights = weights * torch.exp(-distances.square() / (2 * (radius / 2) ** 2))
    return weights
