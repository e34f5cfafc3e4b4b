"""Encoder-decoder Transformer of Vaswani et al. 2017 with a shared embedding.

The default is post-norm, as in the paper; the configuration selects pre-norm and other kinds of
encoder self-attention, and a recurrent unit in place of the decoder's. Shapes use B batch, S
source, T target, M width of the model, H heads, L layers, V vocabulary.
"""

from collections.abc import Container

import torch
from torch import Tensor, nn

from sightline.model.config import TransformerConfig, guided_layer
from sightline.model.layers.embedding import TransformerBase
from sightline.model.layers.linformer import Projections, token_weights
from sightline.model.layers.multi_head_attention import (
    AttentionWithoutWeights,
    MultiHeadAttention,
    causal_mask,
    length_mask,
)
from sightline.model.layers.transformer_layer import DecoderLayer, EncoderLayer, SelfAttention


def _encoder_attention(config: TransformerConfig) -> SelfAttention:
    if config.encoder_attention == "single-head-without-weights":
        return AttentionWithoutWeights()
    return MultiHeadAttention.between_own_tokens(config, config.encoder_heads)


class Transformer(TransformerBase):
    """Encoder and decoder with one embedding for both inputs and the output (section 3.4)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.config = config
        self.encoder = nn.ModuleList(
            EncoderLayer(config, _encoder_attention(config), config.pre_norm) for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        # Pre-norm layers do not normalize their output, so the stack does (Xiong et al. 2020, table
        # 1).
        self.encoder_norm = nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()
        self.projections = Projections(config) if config.encoder_attention == "linformer" else None
        self.init_weights()

    def encode(
        self, source: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Encode padded token ids (B, S), ignoring those at and beyond `source_lengths` (B,).

        S is at most `max_positions`. Returns hidden states (B, S, M), and the attention weights by
        kind (see `attention_maps`) or None.
        """
        mask = length_mask(source_lengths, source.size(1))[:, None, None]  # (B, 1, 1, S)
        if self.config.causal_encoder:
            mask = mask & causal_mask(source.size(1), source.device)
        x = self.embed(source)
        maps: dict[str, list[Tensor]] = {}
        for number, layer in enumerate(self.encoder):
            projections = () if self.projections is None else self.projections.for_layer(number)
            x, weights = layer(x, mask, need_weights, projections)
            if need_weights and projections:
                maps.setdefault("encoder_slots", []).append(weights)
                weights = token_weights(weights, projections[1], mask)
            if need_weights:
                maps.setdefault("encoder", []).append(weights)
        stacked = {kind: torch.stack(layers) for kind, layers in maps.items()}
        return self.encoder_norm(x), stacked if need_weights else None

    def decode(
        self, target: Tensor, memory: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the decoder over target prefixes (B, T), beginning with the start token, and the
        encoder's output (B, S, M). T is at most `max_positions`.

        Padding on the right needs no mask, because no token attends to a later position. Returns
        hidden states (B, T, M), the decoder self-attention weights (L, B, H, T, T) and the
        cross-attention weights (L, B, H, T, S). The weights are None unless requested; a recurrent
        unit has no self-attention.
        """
        layers = range(len(self.decoder)) if need_weights else ()
        x, self_maps, cross_maps = self._decode(target, memory, source_lengths, layers)
        if not need_weights:
            return x, None, None
        return x, torch.stack(self_maps) if self_maps else None, torch.stack(cross_maps)

    def decode_guided(self, target: Tensor, memory: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Run the decoder as `decode` does. Returns hidden states (B, T, M), and the weights
        (B, T, S) of the head that is trained to align words.
        """
        x, _, (weights,) = self._decode(target, memory, source_lengths, [guided_layer(len(self.decoder))])
        return x, weights[:, 0]

    def _decode(
        self, target: Tensor, memory: Tensor, source_lengths: Tensor, weighted: Container[int]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the decoder; return hidden states, and the weights of self-attention and of
        cross-attention of the layers in `weighted`.
        """
        self_mask = causal_mask(target.size(1), target.device)
        memory_mask = length_mask(source_lengths, memory.size(1))[:, None, None]  # (B, 1, 1, S)
        x = self.embed(target)
        self_maps, cross_maps = list[Tensor](), list[Tensor]()
        for number, layer in enumerate(self.decoder):
            x, self_weights, cross_weights = layer(x, memory, self_mask, memory_mask, number in weighted)
            self_maps += [self_weights] if self_weights is not None else []
            cross_maps += [cross_weights] if cross_weights is not None else []
        return self.decoder_norm(x), self_maps, cross_maps

    def logits(self, decoded: Tensor) -> Tensor:
        """Project hidden states (..., M) to logits (..., V) with the embedding matrix."""
        return decoded @ self.embedding.weight.T

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) after each prefix of `target` (B, T)."""
        memory, _ = self.encode(source, source_lengths)
        return self.logits(self.decode(target, memory, source_lengths)[0])

    def attention_maps(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the attention weights of one forward pass in the current mode.

        They are "encoder" (L, B, H, S, S), "decoder" (L, B, H, T, T) unless the decoder has
        recurrent units, and "cross" (L, B, H, T, S). A Linformer also has "encoder_slots"
        (L, B, H, S, k), the weights of the k projected keys; its "encoder" weights are those mapped
        to source tokens (`sightline.model.layers.linformer.token_weights`).
        """
        memory, encoder_maps = self.encode(source, source_lengths, need_weights=True)
        _, decoder_maps, cross_maps = self.decode(target, memory, source_lengths, need_weights=True)
        assert encoder_maps is not None and cross_maps is not None
        own = {} if decoder_maps is None else {"decoder": decoder_maps}
        return {**encoder_maps, **own, "cross": cross_maps}
