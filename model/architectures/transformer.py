"""The encoder-decoder Transformer of Vaswani et al. 2017, with one embedding for source, target and output.

It is post-norm as the paper's; pre-norm, and other self-attention in the encoder, come by the configuration.

Shapes use B batch, S source, T target, M width of the model, H heads, L layers, V vocabulary.
"""

import torch
from torch import Tensor, nn

from model.config import TransformerConfig
from model.layers.attention import AttentionWithoutWeights, MultiHeadAttention, causal_mask, length_mask
from model.layers.embedding import Embedded
from model.layers.linformer import LinformerAttention, Projections, pull_back
from model.layers.transformer_layer import DecoderLayer, EncoderLayer, SelfAttention


def _encoder_attention(config: TransformerConfig) -> SelfAttention:
    if config.encoder_attention == "single-head-without-weights":
        return AttentionWithoutWeights()
    kind = LinformerAttention if config.encoder_attention == "linformer" else MultiHeadAttention
    return kind(config.d_model, config.encoder_heads)


class Transformer(Embedded):
    """Encoder, decoder and the shared embedding (section 3.4: one matrix for both inputs and the output)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.config = config
        self.encoder = nn.ModuleList(
            EncoderLayer(config, _encoder_attention(config), config.pre_norm) for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(DecoderLayer(config, config.pre_norm) for _ in range(config.decoder_layers))
        # Of pre-norm stacks no layer ends with a norm, so the stack does.
        self.encoder_norm = nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.d_model) if config.pre_norm else nn.Identity()
        self.projections = Projections(config) if config.encoder_attention == "linformer" else None
        self.initialise()

    def encode(
        self, source: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Encode padded sources.

        Args:
            source: (B, S) ids; what lies at and beyond a source's length is ignored.
            source_lengths: (B,).

        Returns:
            (B, S, M), and the weights or None, by kind: see `attention_maps`.
        """
        mask = length_mask(source_lengths, source.size(1)).unsqueeze(1)  # (B, 1, 1, S)
        x = self.embed(source)
        maps: dict[str, list[Tensor]] = {}
        for number, layer in enumerate(self.encoder):
            projections = () if self.projections is None else self.projections.of_layer(number)
            x, weights = layer(x, mask, need_weights, projections)
            if need_weights and projections:
                maps.setdefault("encoder_slots", []).append(weights)
                weights = pull_back(weights, projections[1], mask)
            if need_weights:
                maps.setdefault("encoder", []).append(weights)
        stacked = {kind: torch.stack(layers) for kind, layers in maps.items()}
        return self.encoder_norm(x), stacked if need_weights else None

    def decode(
        self, target: Tensor, memory: Tensor, source_lengths: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Read target prefixes (B, T) against the encoder's output (B, S, M).

        Padding on the right needs no mask: no real position looks at a later one.

        Returns:
            (B, T, M), and the decoder and cross weights (L, B, H, T, T), (L, B, H, T, S), or None.
        """
        self_mask = causal_mask(target.size(1), target.device)
        memory_mask = length_mask(source_lengths, memory.size(1)).unsqueeze(1)  # (B, 1, 1, S)
        x = self.embed(target)
        self_maps, cross_maps = [], []
        for layer in self.decoder:
            x, self_weights, cross_weights = layer(x, memory, self_mask, memory_mask, need_weights)
            self_maps.append(self_weights)
            cross_maps.append(cross_weights)
        x = self.decoder_norm(x)
        if not need_weights:
            return x, None, None
        return x, torch.stack(self_maps), torch.stack(cross_maps)

    def logits(self, decoded: Tensor) -> Tensor:
        """(..., M) to (..., V), by the embedding's own matrix."""
        return decoded @ self.embedding.weight.T

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Next-token logits (B, T, V) after each prefix of `target` (B, T), given `source` (B, S)."""
        memory, _ = self.encode(source, source_lengths)
        return self.logits(self.decode(target, memory, source_lengths)[0])

    def attention_maps(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The weights of one forward pass, in evaluation mode or not, as it stands; layers first.

        Returns:
            "encoder" (L, B, H, S, S), "decoder" (L, B, H, T, T) and "cross" (L, B, H, T, S). Of a Linformer "encoder"
            are the weights of the slots pulled back to the source, and "encoder_slots" (L, B, H, S, k) those weights
            themselves.
        """
        memory, encoder_maps = self.encode(source, source_lengths, need_weights=True)
        _, decoder_maps, cross_maps = self.decode(target, memory, source_lengths, need_weights=True)
        assert encoder_maps is not None and decoder_maps is not None and cross_maps is not None
        return {**encoder_maps, "decoder": decoder_maps, "cross": cross_maps}
