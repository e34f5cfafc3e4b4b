"""Encoder and decoder layers of Vaswani et al. 2017, with post-norm or pre-norm.

Shapes use B batch, S source, T target, M width of the model, H heads.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from sightline.model.config import StackConfig, TransformerConfig
from sightline.model.layers.dropout import Dropout
from sightline.model.layers.multi_head_attention import AttentionWithoutWeights, MultiHeadAttention
from sightline.model.layers.recurrent_unit import SimpleRecurrentUnit


class AddNorm(nn.Module):
    """Residual connection and layer normalization around a sublayer.

    Post-norm computes LayerNorm(x + Dropout(Sublayer(x))) (Vaswani et al. 2017, sections 3.1 and
    5.4). Pre-norm computes x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020, table 1).
    Without the residual connection, x + is omitted.
    """

    def __init__(self, config: StackConfig, pre_norm: bool = False) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.has_residual = config.residual
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def sublayer_input(self, x: Tensor) -> Tensor:
        """Return the input of the sublayer: x, normalized if pre-norm."""
        normalized: Tensor = self.norm(x) if self.pre_norm else x
        return normalized

    def forward(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Combine x with the sublayer's output for the input `sublayer_input(x)`."""
        total = self.dropout(sublayer_output)
        if self.has_residual:
            total = x + total
        result: Tensor = total if self.pre_norm else self.norm(total)
        return result


class PositionwiseFeedForward(nn.Module):
    """Position-wise feed-forward network, max(0, x W_1 + b_1) W_2 + b_2 (equation 2)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.outer(self.inner(x).relu())
        return projected


SelfAttention = MultiHeadAttention | AttentionWithoutWeights


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward network, each with residual connection and normalization. The
    default of `self_attention` is multi-head attention.
    """

    def __init__(
        self, config: StackConfig, self_attention: SelfAttention | None = None, pre_norm: bool = False
    ) -> None:
        super().__init__()
        self.self_attention: SelfAttention = self_attention or MultiHeadAttention.between_own_tokens(
            config, config.num_heads
        )
        self.self_attention_norm = AddNorm(config, pre_norm)
        self.feed_forward = PositionwiseFeedForward(config.d_model, config.d_ff)
        self.feed_forward_norm = AddNorm(config, pre_norm)

    def forward(
        self, x: Tensor, mask: Tensor, need_weights: bool = False, projections: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on x (B, S, M).

        The mask, broadcastable to (B, H, S, S), is True where a query may attend to a key.
        `projections` are E and F of Linformer, empty for other attention. Returns (B, S, M), and
        the attention weights (B, H, S, S), or (B, H, S, k) of projected keys, or None.
        """
        normalized = self.self_attention_norm.sublayer_input(x)
        attended, weights = self.self_attention(normalized, normalized, mask, need_weights, *projections)
        x = self.self_attention_norm(x, attended)
        return self.feed_forward_norm(x, self.feed_forward(self.feed_forward_norm.sublayer_input(x))), weights


class DecoderLayer(nn.Module):
    """Causal self-attention or a recurrent unit, cross-attention and feed-forward network, each
    with residual connection and normalization.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        pre_norm = config.pre_norm
        if config.decoder == "ssru":
            self.cell = SimpleRecurrentUnit(config.d_model)
        else:
            self.self_attention = MultiHeadAttention.between_own_tokens(config, config.num_heads)
        self.self_attention_norm = AddNorm(config, pre_norm)
        self.cross_attention = MultiHeadAttention(config.d_model, config.num_heads, config.scaled)
        self.cross_attention_norm = AddNorm(config, pre_norm)
        self.feed_forward = PositionwiseFeedForward(config.d_model, config.d_ff)
        self.feed_forward_norm = AddNorm(config, pre_norm)

    def forward(
        self, x: Tensor, memory: Tensor, self_mask: Tensor, memory_mask: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the layer on x (B, T, M) and the encoder's output (B, S, M).

        The masks are broadcastable to (B, H, T, T) and (B, H, T, S). Returns (B, T, M), the
        self-attention weights (B, H, T, T) and the cross-attention weights (B, H, T, S), which are
        None unless requested; a recurrent unit has no weights.
        """
        normalized = self.self_attention_norm.sublayer_input(x)
        if hasattr(self, "cell"):
            attended, self_weights = self.cell(normalized), None
        else:
            attended, self_weights = self.self_attention(normalized, normalized, self_mask, need_weights)
        x = self.self_attention_norm(x, attended)
        normalized = self.cross_attention_norm.sublayer_input(x)
        attended, cross_weights = self.cross_attention(normalized, memory, memory_mask, need_weights)
        x = self.cross_attention_norm(x, attended)
        x = self.feed_forward_norm(x, self.feed_forward(self.feed_forward_norm.sublayer_input(x)))
        return x, self_weights, cross_weights
