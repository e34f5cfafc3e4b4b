"""The encoder layer and the decoder layer of Vaswani et al. 2017, post-norm or pre-norm, and their parts.

Shapes use B batch, S source, T target, M width of the model, H heads.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from model.config import StackConfig
from model.layers.attention import AttentionWithoutWeights, MultiHeadAttention
from model.layers.dropout import Dropout
from model.layers.linformer import LinformerAttention


class AddNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) (section 3.1 and 5.4).

    With `pre_norm` it is x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020, table 1).
    """

    def __init__(self, d_model: int, dropout: float, pre_norm: bool = False) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the sublayer."""
        read: Tensor = self.norm(x) if self.pre_norm else x
        return read

    def forward(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Combine x with the output of the sublayer, whose input is `before(x)`."""
        total = x + self.dropout(sublayer_output)
        passed_on: Tensor = total if self.pre_norm else self.norm(total)
        return passed_on


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, at each position alike (equation 2)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.outer(self.inner(x).relu())
        return projected


SelfAttention = MultiHeadAttention | AttentionWithoutWeights | LinformerAttention


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each inside Add & Norm."""

    def __init__(
        self, config: StackConfig, self_attention: SelfAttention | None = None, pre_norm: bool = False
    ) -> None:
        """`self_attention` is multi-head where it is not given."""
        super().__init__()
        self.self_attention: SelfAttention = self_attention or MultiHeadAttention(config.d_model, config.num_heads)
        self.self_attention_norm = AddNorm(config.d_model, config.dropout, pre_norm)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.feed_forward_norm = AddNorm(config.d_model, config.dropout, pre_norm)

    def forward(
        self, x: Tensor, mask: Tensor, need_weights: bool = False, projections: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, M) to (B, S, M) and the weights (B, H, S, S) or None.

        `projections` are E and F of `LinformerAttention`, whose weights are (B, H, S, k).
        """
        read = self.self_attention_norm.before(x)
        attended, weights = self.self_attention(read, read, mask, need_weights, *projections)
        x = self.self_attention_norm(x, attended)
        return self.feed_forward_norm(x, self.feed_forward(self.feed_forward_norm.before(x))), weights


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder's output, feed-forward, each inside Add & Norm."""

    def __init__(self, config: StackConfig, pre_norm: bool = False) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.self_attention_norm = AddNorm(config.d_model, config.dropout, pre_norm)
        self.cross_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.cross_attention_norm = AddNorm(config.d_model, config.dropout, pre_norm)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.feed_forward_norm = AddNorm(config.d_model, config.dropout, pre_norm)

    def forward(
        self, x: Tensor, memory: Tensor, self_mask: Tensor, memory_mask: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(B, T, M) to (B, T, M), the weights (B, H, T, T) and the cross-attention weights (B, H, T, S), or None."""
        read = self.self_attention_norm.before(x)
        attended, self_weights = self.self_attention(read, read, self_mask, need_weights)
        x = self.self_attention_norm(x, attended)
        read = self.cross_attention_norm.before(x)
        attended, cross_weights = self.cross_attention(read, memory, memory_mask, need_weights)
        x = self.cross_attention_norm(x, attended)
        x = self.feed_forward_norm(x, self.feed_forward(self.feed_forward_norm.before(x)))
        return x, self_weights, cross_weights
