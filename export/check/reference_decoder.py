"""Slow reference of the decoder graphs: NumPy in float64, without a cache and padding.

Axes: N tokens of all texts, T tokens of a text, S tokens of its source, M width, H heads, V
vocabulary, R positions of a text whose results are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sightline.export.check.numpy_reference import (
    EXACT,
    Arithmetic,
    Array,
    Positions,
    ReferenceLayers,
    causal_mask,
    split_texts,
)
from sightline.export.families.description import Attention, Description
from sightline.export.families.weights import Weights

VOCABULARY_BLOCK = 8192  # logits computed at a time, to limit memory


@dataclass(frozen=True)
class Decoded:
    """Result of the decoder for one text of T tokens, by kind of output."""

    logits: Array  # (R, V)
    hidden: Array  # after the final normalization, (T, M)
    decoder: Array | None  # weights of self-attention, (layers, H, R, T); None for a recurrent decoder
    cross: Array | None  # those of cross-attention, (layers, H, R, S); None without it


class ReferenceDecoder:
    """Decoder of a described model. It holds the weights of one linear layer at a time."""

    def __init__(self, model: Description, weights: Weights, arithmetic: Arithmetic = EXACT) -> None:
        self._model = model
        self._stack = model.decoder_stack
        self._layers = ReferenceLayers(weights, "decoder", self._stack, arithmetic)

    def decode_all(
        self, texts: Sequence[Sequence[int]], rows: Sequence[Positions], memories: Sequence[Array] | None = None
    ) -> list[Decoded]:
        """Read several sequences of token ids.

        Args:
            texts: the inputs of the decoder, start tokens included.
            rows: (R,) positions of each text whose logits and attention weights are kept.
            memories: hidden states (S, M) of the encoder for each text, for cross-attention.
        """
        hidden, maps, cross_maps = self.read(texts, rows, memories)
        kept_states = np.concatenate([states[selected] for states, selected in zip(hidden, rows, strict=True)])
        logits = split_texts(self._logits(kept_states), [len(selected) for selected in rows])
        return [
            Decoded(
                logits[text],
                hidden[text],
                np.stack(maps[text]) if maps[text] else None,
                np.stack(cross_maps[text]) if cross_maps[text] else None,
            )
            for text in range(len(texts))
        ]

    def read(
        self, texts: Sequence[Sequence[int]], rows: Sequence[Positions], memories: Sequence[Array] | None = None
    ) -> tuple[list[Array], list[list[Array]], list[list[Array]]]:
        """Return the hidden states (T, M) of each text, and the maps of each layer and text."""
        layers, stack = self._layers, self._stack
        lengths, nothing = [len(text) for text in texts], [None] * len(texts)
        biases = [layers.relative_bias(length, length) for length in lengths]
        maps: list[list[Array]] = [[] for _ in texts]
        cross_maps: list[list[Array]] = [[] for _ in texts]

        def attend_self(number: int, attention: Attention, x: Array) -> Array:
            visible = [causal_mask(length, attention.window) for length in lengths]
            module = f"decoder.{number}.self_attention"
            output, weights, _ = layers.attention(module, attention, x, lengths, x, lengths, biases, visible)
            for kept, text_weights, selected in zip(maps, weights, rows, strict=True):
                kept.append(text_weights[:, selected])
            return output

        def attend_source(number: int, attention: Attention, x: Array) -> Array:
            assert memories is not None, "cross-attention needs the hidden states of the encoder"
            memory, sizes = np.concatenate(memories), [len(states) for states in memories]
            module = f"decoder.{number}.cross_attention"
            output, weights, _ = layers.attention(module, attention, x, lengths, memory, sizes, nothing, nothing)
            for kept, text_weights, selected in zip(cross_maps, weights, rows, strict=True):
                kept.append(text_weights[:, selected])
            return output

        x = layers.embed(texts)
        for number, attention in enumerate(stack.attention):
            before, module = x, f"decoder.{number}.self_attention"
            compute = partial(attend_self, number, attention)
            if stack.cell == "ssru":
                compute = partial(self._recur, number, lengths)
            x = layers.sublayer(x, module, compute, number)
            if stack.cross is not None:
                module = f"decoder.{number}.cross_attention"
                x = layers.sublayer(x, module, partial(attend_source, number, stack.cross))
            x = layers.feed_forward(x, number, before)
        return split_texts(layers.finish(x), lengths), maps, cross_maps

    def _recur(self, number: int, lengths: Sequence[int], x: Array) -> Array:
        """Return the outputs (N, M) of a simpler simple recurrent unit (Kim et al. 2019, eq. 2)."""
        module, outputs = f"decoder.{number}.cell", []
        forgets, inputs = self._layers.linear(x, f"{module}.forget"), self._layers.linear(x, f"{module}.input")
        forgets = self._layers.arithmetic.round(1 / (1 + np.exp(-forgets)))
        for text in zip(split_texts(forgets, lengths), split_texts(inputs, lengths), strict=True):
            cell = np.zeros(x.shape[1])
            for forget, new in zip(*text, strict=True):
                cell = forget * cell + (1 - forget) * new
                outputs.append(np.maximum(cell, 0))
        return np.stack(outputs)

    def _logits(self, x: Array) -> Array:
        """Return the logits (…, V) of hidden states (…, M) after the final normalization."""
        weights = self._layers.weights
        tables = ("output", "embedding", "decoder.embedding")
        name = next(module for module in tables if f"{module}.weight" in weights)
        table, product = weights.read(f"{name}.weight"), self._layers.arithmetic.product
        logits = np.concatenate(
            [
                self._model.logits_scale * product(x, table[start : start + VOCABULARY_BLOCK].astype(np.float64).T)
                for start in range(0, len(table), VOCABULARY_BLOCK)
            ],
            axis=1,
        )
        bias, cap = self._layers.read("output.bias"), self._model.logits_softcap
        logits = logits if bias is None else logits + bias.reshape(-1)
        return logits if cap is None else cap * np.tanh(logits / cap)
