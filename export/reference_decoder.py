"""Slow, obvious twin of the decoder graphs: NumPy in float64, one sequence, without a cache.

Axes: T tokens, S tokens of the source, M width, H heads, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from export.description import Attention, Description
from export.reference import Array, Mask, ReferenceLayers
from export.weights import Weights

VOCABULARY_BLOCK = 8192  # logits computed at a time, to limit memory


@dataclass(frozen=True)
class Decoded:
    """Result of the decoder for one sequence of T tokens."""

    logits: Array  # (T, V)
    hidden: Array  # after the final normalization, (T, M)
    maps: Array  # self-attention, (layers, H, T, T); no layers for a recurrent decoder
    cross_maps: Array | None  # (layers, H, T, S); None without cross-attention


class ReferenceDecoder:
    """Decoder of a described model. It holds the weights of one linear layer at a time."""

    def __init__(self, model: Description, weights: Weights) -> None:
        assert model.decoder is not None, "the model has a decoder"
        self._model = model
        self._stack = model.decoder
        self._layers = ReferenceLayers(weights, "decoder", model.decoder)

    def decode(self, ids: Sequence[int], memory: Array | None = None) -> Decoded:
        """Read one sequence of token ids.

        Args:
            ids: the inputs of the decoder, start tokens included.
            memory: hidden states (S, M) of the encoder, for cross-attention.
        """
        layers, stack, maps, cross_maps = self._layers, self._stack, list[Array](), list[Array]()
        positions = np.arange(len(ids))
        distances = positions[:, None] - positions  # of a key before its query
        x = layers.embed(ids, positions)
        bias = layers.relative_bias(len(ids), len(ids))

        def attend_self(number: int, attention: Attention, x: Array) -> Array:
            visible: Mask = distances >= 0
            if attention.window is not None:
                visible = visible & (distances < attention.window)
            module = f"decoder.{number}.self_attention"
            output, weights = layers.attention(module, attention, x, x, bias, visible)
            maps.append(weights)
            return output

        def attend_source(number: int, attention: Attention, x: Array) -> Array:
            assert memory is not None, "cross-attention needs the hidden states of the encoder"
            output, weights = layers.attention(f"decoder.{number}.cross_attention", attention, x, memory)
            cross_maps.append(weights)
            return output

        for number, attention in enumerate(stack.attention):
            module = f"decoder.{number}.self_attention"
            compute = partial(attend_self, number, attention)
            if stack.cell == "ssru":
                compute = partial(self._recur, number)
            x = layers.sublayer(x, module, compute, number)
            if stack.cross is not None:
                module = f"decoder.{number}.cross_attention"
                x = layers.sublayer(x, module, partial(attend_source, number, stack.cross))
            x = layers.feed_forward(x, number)
        if stack.has_final_norm:
            x = layers.norm(x, "decoder.norm")
        return Decoded(
            self._logits(x),
            x,
            np.stack(maps) if maps else np.empty((0, 0, len(ids), len(ids))),
            np.stack(cross_maps) if cross_maps else None,
        )

    def _recur(self, number: int, x: Array) -> Array:
        """Return the outputs (T, M) of a simpler simple recurrent unit (Kim et al. 2019, eq. 2)."""
        module, cell, outputs = f"decoder.{number}.cell", np.zeros(x.shape[1]), []
        forgets, inputs = self._layers.linear(x, f"{module}.forget"), self._layers.linear(x, f"{module}.input")
        for forget, new in zip(1 / (1 + np.exp(-forgets)), inputs, strict=True):
            cell = forget * cell + (1 - forget) * new
            outputs.append(np.maximum(cell, 0))
        return np.stack(outputs)

    def _logits(self, x: Array) -> Array:
        weights = self._layers.weights
        tables = ("output", "embedding", "decoder.embedding")
        name = next(one for one in tables if f"{one}.weight" in weights)
        table = weights.read(f"{name}.weight")
        logits = np.concatenate(
            [
                self._model.logits_scale * (x @ table[start : start + VOCABULARY_BLOCK].astype(np.float64).T)
                for start in range(0, len(table), VOCABULARY_BLOCK)
            ],
            axis=1,
        )
        bias = self._layers.read("output.bias")
        return logits if bias is None else logits + bias.reshape(-1)
