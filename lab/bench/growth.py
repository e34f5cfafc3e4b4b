"""Enlarge a trained Transformer so that it computes nearly the same, as in Net2Net (Chen et al.
2016).

Speed depends on a model's sizes and on the lengths of its outputs, not on how it was trained.
Training 6 + 6 layers of width 512 until the outputs have natural lengths takes a night on two
cores; enlarging a trained model takes a second.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import TransformerConfig
from sightline.model.layers.multi_head_attention import MultiHeadAttention
from sightline.model.layers.transformer_layer import AddNorm, DecoderLayer, EncoderLayer, PositionwiseFeedForward


def grow(small: Transformer, config: TransformerConfig) -> Transformer:
    """Return a larger model with nearly the same outputs, in evaluation mode.

    Features, heads and inner units are repeated; added layers pass on their input. The outputs
    differ slightly because a repeated feature gets the position encoding of its new index, which
    changes the statistics of the first layers' norms.

    Args:
        small: The model to enlarge.
        config: The new sizes, each a multiple of the old one, and at least as many layers. The
            vocabulary, number of positions and special tokens must be those of `small`.

    Raises:
        ValueError: A size is not a multiple of the old one, or there are fewer layers than before.
    """
    old = small.config
    for name in ("d_model", "num_heads", "d_ff", "head_size"):
        if getattr(config, name) % getattr(old, name):
            raise ValueError(f"{name} {getattr(config, name)} must be a multiple of {getattr(old, name)}")
    if config.encoder_layers < old.encoder_layers or config.decoder_layers < old.decoder_layers:
        raise ValueError("encoder_layers and decoder_layers must be at least those of the small model")
    large = Transformer(config).eval()
    with torch.no_grad():
        _Growth(old, config).copy_weights(small, large)
    return large


class _Growth:
    """The index of the old feature that each new feature repeats.

    Shapes use M and M' for the old and new width, F and F' for the old and new inner width of
    feed-forward.
    """

    def __init__(self, old: TransformerConfig, new: TransformerConfig) -> None:
        self._old, self._new = old, new
        copies = new.d_model // old.d_model
        pairs = torch.arange(new.d_model) // 2  # a sine and a cosine of the same frequency
        # Pair `copies * i` of the new position encoding has the frequency of the old pair i. Only
        # that copy is read.
        self.feature = 2 * (pairs // copies) + torch.arange(new.d_model) % 2  # (M',), values below M
        self.is_read = (pairs % copies == 0).float()  # (M',)
        self.unit = torch.arange(new.d_ff) % old.d_ff  # (F',), values below F
        heads, size = torch.arange(new.num_heads) % old.num_heads, torch.arange(new.head_size) % old.head_size
        self.in_head = (heads[:, None] * old.head_size + size).flatten()  # (M',), values below M, in the order of heads

    def copy_weights(self, small: Transformer, large: Transformer) -> None:
        # Embeddings are multiplied by the square root of the width, but the vocabulary projection
        # is not scaled.
        shrink = (self._old.d_model / self._new.d_model) ** 0.5
        large.embedding.weight.copy_(small.embedding.weight[:, self.feature] * shrink)
        for stack in ("encoder", "decoder"):
            layers, grown = list(getattr(small, stack)), list(getattr(large, stack))
            for old, new in zip(layers, grown, strict=False):
                self._layer(old, new)
            _pass_on(grown[len(layers) - 1 :])
            # The projection sums `copies` equal features, each scaled down with the embedding.
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
        # The dot product of longer heads sums more terms and is divided by the square root of the
        # head size.
        scale = (self._old.head_size / self._new.head_size) ** 0.25
        for linear in (new.query, new.key):
            linear.weight.mul_(scale)
            linear.bias.mul_(scale)
        new.output.weight.copy_(_repeated(old.output.weight, self.in_head)[self.feature])
        new.output.bias.copy_(old.output.bias[self.feature])

    def _feed_forward(self, old: PositionwiseFeedForward, new: PositionwiseFeedForward) -> None:
        self._linear(old.inner, new.inner, self.unit)
        new.outer.weight.copy_(_repeated(old.outer.weight, self.unit)[self.feature])
        new.outer.bias.copy_(old.outer.bias[self.feature])

    def _linear(self, old: nn.Linear, new: nn.Linear, rows: Tensor) -> None:
        """Copy a product that reads features; `rows` (N',) gives the old output that each new
        output repeats.
        """
        new.weight.copy_(old.weight[rows][:, self.feature] * self.is_read)
        new.bias.copy_(old.bias[rows])

    def _norm(self, old: AddNorm, new: AddNorm) -> None:
        new.norm.weight.copy_(old.norm.weight[self.feature])
        new.norm.bias.copy_(old.norm.bias[self.feature])


def _repeated(weight: Tensor, columns: Tensor) -> Tensor:
    """Return (N, len(columns)): repeated columns, scaled so that equal inputs give the same sum as
    before.
    """
    return weight[:, columns] * (weight.size(1) / len(columns))


def _pass_on(layers: Sequence[EncoderLayer | DecoderLayer]) -> None:
    """Make all layers but the first add nothing.

    A norm of an already normalized input changes nothing, so the first layer's gain and bias move
    to the last layer.
    """
    for first, second in pairwise(layers):
        assert isinstance(second.self_attention, MultiHeadAttention)
        outputs = [second.self_attention.output, second.feed_forward.outer]
        if isinstance(second, DecoderLayer):
            outputs.append(second.cross_attention.output)
        for linear in outputs:
            nn.init.zeros_(linear.weight)
        norm = first.feed_forward_norm.norm
        second.feed_forward_norm.norm.load_state_dict(norm.state_dict())
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)
