"""The encoder-decoder Transformer of Vaswani et al. 2017, with one embedding for source, target and output.

It is post-norm as the paper's; pre-norm, and other self-attention in the encoder, come by the configuration.

Shapes use B batch, S source, T target, M width of the model, H heads, L layers, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.config import StackConfig, TransformerConfig
from model.layers.attention import AttentionHeads, AttentionWithoutWeights, MultiHeadAttention, causal_mask, length_mask
from model.layers.linformer import LinformerAttention, Projections, pull_back


def sinusoidal_positions(num_positions: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i+1) = cos of the same (section 3.5).

    Returns:
        (num_positions, d_model).
    """
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)  # (M / 2,)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * rates  # (P, M / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


class Dropout(nn.Module):
    """Zero with probability p, scale the rest by 1 / (1 - p); p in steps of 1/256.

    One random byte an element instead of PyTorch's one random number: on a CPU that takes a tenth off a training step.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.threshold = round(p * 256)  # bytes below it are zeroed

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.threshold == 0:
            return x
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.threshold
        return x * (kept.to(x.dtype) * (256 / (256 - self.threshold)))


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
        """What the sublayer reads."""
        read: Tensor = self.norm(x) if self.pre_norm else x
        return read

    def forward(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """What comes of x and of what the sublayer made of `before(x)`."""
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


class Embedded(nn.Module):
    """What a stack of layers reads: tokens and their positions as vectors."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        positions = sinusoidal_positions(config.max_positions, config.d_model)
        self.register_buffer("positions", positions, persistent=False)
        self.positions: Tensor

    def initialise(self) -> None:
        """Draw all weights anew; to be called when all layers are there."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, AttentionHeads):
                # Smaller by sqrt(2), as if the three were one matrix: post-norm stacks converge much faster so.
                for projection in (module.query, module.key, module.value):
                    nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        # Scaled by sqrt(d_model) in `embed`, so that a token and its position start with like sizes.
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, M): embedding times sqrt(d_model), plus positions."""
        if ids.size(1) > self.positions.size(0):
            raise ValueError(f"{ids.size(1)} tokens are more than max_positions ({self.positions.size(0)})")
        scaled = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(scaled + self.positions[: ids.size(1)])
        return embedded


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
