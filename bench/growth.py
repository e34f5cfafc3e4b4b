"""A larger Transformer that computes what a trained one computes, as Net2Net grows networks (Chen et al. 2016).

Time depends on a model's sizes and on how long its sentences are, not on how it came by its weights. Training 6 + 6
layers of width 512 until their sentences end where they should takes a night on two cores; growing them takes a second.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from model.architectures.transformer import Transformer
from model.config import TransformerConfig
from model.layers.attention import MultiHeadAttention
from model.layers.transformer_layer import AddNorm, DecoderLayer, EncoderLayer, FeedForward


def grow(small: Transformer, config: TransformerConfig) -> Transformer:
    """A model of a larger shape with nearly the same outputs, in evaluation mode.

    Every feature, head and inner unit is repeated; layers are added that pass on what they read. Nearly: a repeated
    feature has the position that its new place has, which shifts what the first layers' norms divide by.

    Args:
        small: the model to grow.
        config: its vocabulary, positions and special tokens; other sizes a multiple of its sizes, or more layers.

    Raises:
        ValueError: the one shape does not fit into the other.
    """
    old = small.config
    for name in ("d_model", "num_heads", "d_ff", "head_size"):
        if getattr(config, name) % getattr(old, name):
            raise ValueError(f"{name} {getattr(config, name)} is no multiple of {getattr(old, name)}")
    if config.encoder_layers < old.encoder_layers or config.decoder_layers < old.decoder_layers:
        raise ValueError("a model grows by layers, it loses none")
    large = Transformer(config).eval()
    with torch.no_grad():
        _Growth(old, config).fill(small, large)
    return large


class _Growth:
    """Which old feature every new one repeats."""

    def __init__(self, old: TransformerConfig, new: TransformerConfig) -> None:
        self._old, self._new = old, new
        copies = new.d_model // old.d_model
        pairs = torch.arange(new.d_model) // 2  # sine and cosine of one rate
        # Pair `copies * i` of the new positions has the rate of the old pair i: that copy is the one that is read.
        self.feature = 2 * (pairs // copies) + torch.arange(new.d_model) % 2  # (M',) in M
        self.is_read = (pairs % copies == 0).float()  # (M',)
        self.unit = torch.arange(new.d_ff) % old.d_ff  # (F',) in F
        heads, size = torch.arange(new.num_heads) % old.num_heads, torch.arange(new.head_size) % old.head_size
        self.in_head = (heads[:, None] * old.head_size + size).flatten()  # (M',) in M, of what lies head by head

    def fill(self, small: Transformer, large: Transformer) -> None:
        # Embeddings are multiplied by the square root of the width; the projection to the vocabulary by nothing.
        shrink = (self._old.d_model / self._new.d_model) ** 0.5
        large.embedding.weight.copy_(small.embedding.weight[:, self.feature] * shrink)
        for stack in ("encoder", "decoder"):
            layers, grown = list(getattr(small, stack)), list(getattr(large, stack))
            for old, new in zip(layers, grown, strict=False):
                self._layer(old, new)
            _pass_on(grown[len(layers) - 1 :])
            # What the projection reads: of equal features it sums `copies`, each shrunk with the embedding.
        last = grown[-1].feed_forward_norm.norm
        for part in (last.weight, last.bias):
            part.mul_(self._old.d_model / self._new.d_model / shrink)

    def _layer(self, old: EncoderLayer | DecoderLayer, new: EncoderLayer | DecoderLayer) -> None:
        assert isinstance(old.self_attention, MultiHeadAttention) and isinstance(new.self_attention, MultiHeadAttention)
        self._attention(old.self_attention, new.self_attention)
        self._norm(old.self_attention_norm, new.self_attention_norm)
        if isinstance(old, DecoderLayer) and isinstance(new, DecoderLayer):
            self._attention(old.cross_attention, new.cross_attention)
            self._norm(old.cross_attention_norm, new.cross_attention_norm)
        self._feed_forward(old.feed_forward, new.feed_forward)
        self._norm(old.feed_forward_norm, new.feed_forward_norm)

    def _attention(self, old: MultiHeadAttention, new: MultiHeadAttention) -> None:
        for name in ("query", "key", "value"):
            self._linear(getattr(old, name), getattr(new, name), self.in_head)
        # A longer head sums more products and divides them by the root of its length.
        scale = (self._old.head_size / self._new.head_size) ** 0.25
        for linear in (new.query, new.key):
            linear.weight.mul_(scale)
            linear.bias.mul_(scale)
        new.output.weight.copy_(_repeated(old.output.weight, self.in_head)[self.feature])
        new.output.bias.copy_(old.output.bias[self.feature])

    def _feed_forward(self, old: FeedForward, new: FeedForward) -> None:
        self._linear(old.inner, new.inner, self.unit)
        new.outer.weight.copy_(_repeated(old.outer.weight, self.unit)[self.feature])
        new.outer.bias.copy_(old.outer.bias[self.feature])

    def _linear(self, old: nn.Linear, new: nn.Linear, rows: Tensor) -> None:
        """A product that reads features; `rows` says which old output each new one repeats."""
        new.weight.copy_(old.weight[rows][:, self.feature] * self.is_read)
        new.bias.copy_(old.bias[rows])

    def _norm(self, old: AddNorm, new: AddNorm) -> None:
        new.norm.weight.copy_(old.norm.weight[self.feature])
        new.norm.bias.copy_(old.norm.bias[self.feature])


def _repeated(weight: Tensor, columns: Tensor) -> Tensor:
    """(N, len(columns)): equal columns share what one of them was multiplied by."""
    return weight[:, columns] * (weight.size(1) / len(columns))


def _pass_on(layers: Sequence[EncoderLayer | DecoderLayer]) -> None:
    """Let all layers but the first add nothing; norms of what is normed change nothing, and the last has the gain."""
    for first, second in pairwise(layers):
        assert isinstance(second.self_attention, MultiHeadAttention)
        outputs = [second.self_attention.output, second.feed_forward.outer]
        if isinstance(second, DecoderLayer):
            outputs.append(second.cross_attention.output)
        for linear in outputs:
            nn.init.zeros_(linear.weight)
        gained = first.feed_forward_norm.norm
        second.feed_forward_norm.norm.load_state_dict(gained.state_dict())
        nn.init.ones_(gained.weight)
        nn.init.zeros_(gained.bias)
