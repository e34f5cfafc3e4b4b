"""Attention of recurrent decoders: score functions, windows and weights.

The score functions are those of Bahdanau et al. 2015 and Luong et al. 2015. `ScoreFunction.keys`
runs once per source and computes everything that depends only on the annotations;
`ScoreFunction.forward` runs at each decoder step. Shapes use B batch, S source, H decoder state, A
annotation, K key.
"""

import torch
from torch import Tensor, nn

from sightline.model.config import RecurrentConfig
from sightline.model.layers.multi_head_attention import length_mask, masked_softmax


class ScoreFunction(nn.Module):
    """Base class of score functions, which compare a decoder state with each source position. Both
    are projected before, unless the projection is None.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.is_scaled = config.scaled
        self.state: nn.Linear | None = None
        self.annotation: nn.Linear | None = None

    def keys(self, annotations: Tensor) -> Tensor:
        """Compute keys (B, S, K) from annotations (B, S, A)."""
        return annotations if self.annotation is None else self.annotation(annotations)

    def queries(self, state: Tensor) -> Tensor:
        """Compute what is compared with keys from decoder states (B, H)."""
        return state if self.state is None else self.state(state)

    def scale(self, key_size: int) -> float:
        """Return the factor of products of states and keys of a width."""
        return key_size**-0.5 if self.is_scaled else 1.0

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        """Compute scores (B, S) from decoder states (B, H) and keys (B, S, K)."""
        raise NotImplementedError


class AdditiveScore(ScoreFunction):
    """Additive attention, e_ij = v^T tanh(W s + b + U h_j) (Bahdanau et al. 2015, section A.1.2).

    The paper omits the bias b. The concat score of Luong et al. 2015 (section 3.1), v^T tanh(W
    [h_t; h_s]), is the same function: its W is [W U] here.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.state = nn.Linear(config.decoder_size, config.attention_size)
        self.annotation = nn.Linear(config.annotation_size, config.attention_size, bias=False)
        self.weights = nn.Linear(config.attention_size, 1, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        scores: Tensor = self.weights((self.queries(state).unsqueeze(1) + keys).tanh()).squeeze(-1)
        return scores


class ProductScore(ScoreFunction):
    """Product of a state and an annotation, divided by sqrt(K) if scaled.

    - "dot": h_t^T h_s (Luong et al. 2015, section 3.1).
    - "general", or bilinear: h_t^T W h_s (the same section).
    - "reduced_rank": s^T (U^T V) h = (U s)^T (V h) with U (k, H) and V (k, A). The name is from the
      course CS224n of Stanford University; neither of the two papers has this score.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        key_size = config.decoder_size
        if config.attention == "reduced_rank":
            key_size = config.attention_size
            self.state = nn.Linear(config.decoder_size, key_size, bias=False)
        if config.attention != "dot":
            self.annotation = nn.Linear(config.annotation_size, key_size, bias=False)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return (keys @ self.queries(state).unsqueeze(-1)).squeeze(-1) * self.scale(keys.size(-1))


class LocationScore(ScoreFunction):
    """Location score, W h_t + b (Luong et al. 2015, equation 8, which has no bias): it depends on
    the decoder state and the position, not on the annotations.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.state = nn.Linear(config.decoder_size, config.max_positions)

    def keys(self, annotations: Tensor) -> Tensor:
        """Return zeros (B, S, 1): only the number of positions is needed."""
        return annotations.new_zeros(*annotations.shape[:2], 1)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        return self.queries(state)[:, : keys.size(1)]


SCORES: dict[str, type[ScoreFunction]] = {
    "additive": AdditiveScore,
    "concat": AdditiveScore,
    "dot": ProductScore,
    "general": ProductScore,
    "location": LocationScore,
    "reduced_rank": ProductScore,
}


class PredictedPosition(nn.Module):
    """Predicted window centre of local-p attention, p_t = S sigmoid(v_p^T tanh(W_p h_t)) (Luong et
    al. 2015, equation 9).

    v_p is `outer.weight` / H. Adam changes all weights by about the same amount per update. Without
    the factor 1 / H, the sum over H terms saturates the sigmoid within some hundred updates. Yang
    et al. 2022 ("Tensor Programs V") scale output layers in the same way, so that the size of an
    update does not grow with the width.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = 1 / size
        self.inner = nn.Linear(size, size, bias=False)
        self.outer = nn.Linear(size, 1, bias=False)

    def forward(self, state: Tensor, source_lengths: Tensor) -> Tensor:
        """Predict positions (B,) between 0 and S from states (B, H) and source lengths (B,)."""
        logits = self.gain * self.outer(self.inner(state).tanh())  # (B, 1)
        positions: Tensor = source_lengths * torch.sigmoid(logits).squeeze(-1)
        return positions


def align(
    scores: Tensor, source_lengths: Tensor, centres: Tensor | None = None, radius: int = 0, is_gaussian: bool = False
) -> Tensor:
    """Compute attention weights (B, S) of scores (B, S) by a softmax over the source or over a
    window; they are 0 for padding and outside the window (Luong et al. 2015, section 3.2).

    Args:
        source_lengths: (B,).
        centres: window centres p (B,); None attends to the whole source.
        radius: D of the window [p - D, p + D].
        is_gaussian: after the softmax, multiply by exp(-(s - p)^2 / (2 sigma^2)) with sigma = D / 2
            (equation 10). The weights then sum to less than 1.
    """
    mask = length_mask(source_lengths, scores.size(1))
    if centres is None:
        return masked_softmax(scores, mask)
    distances = torch.arange(scores.size(1), device=scores.device) - centres.unsqueeze(1)  # (B, S)
    weights = masked_softmax(scores, mask & (distances.abs() <= radius))
    if is_gaussian:
        weights = weights * torch.exp(-distances.square() / (2 * (radius / 2) ** 2))
    return weights
