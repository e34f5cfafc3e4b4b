"""Slow reference of the encoder graphs: NumPy in float64, without padding.

Axes: N tokens of all texts, T queries of a text, S keys of a text, M width, H heads, V vocabulary,
R positions of a text whose results are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sightline.base.bundle import is_entailment
from sightline.export.check.numpy_reference import (
    EXACT,
    Arithmetic,
    Array,
    Mask,
    Positions,
    ReferenceLayers,
    activate,
    causal_mask,
    log_softmax,
    split_texts,
)
from sightline.export.check.reference_decoder import ReferenceDecoder
from sightline.export.families.description import Attention, Description, Head, Predictions, Reader
from sightline.export.families.weights import Weights


@dataclass(frozen=True)
class ReferenceEncoding:
    """Result of the encoder for one text of S tokens, by kind of output."""

    hidden: Array  # (S, M)
    encoder: Array  # attention weights (layers, H, R, S)
    encoder_slots: Array | None  # those of projected keys (layers, H, R, k), None without such keys
    labels: Array | None  # as the graph returns them: (labels,), or (S, labels) for tokens
    label_logits: Array | None  # if the graph returns them in addition
    predictions: Array | None  # logits of tokens (R, V), None if the model does not predict them


class ReferenceEncoder:
    """Encoder of a described model."""

    def __init__(self, model: Description, weights: Weights, arithmetic: Arithmetic = EXACT) -> None:
        self._model = model
        self._stack = model.encoder_stack
        self._layers = ReferenceLayers(weights, "encoder", self._stack, arithmetic)

    def encode_all(self, texts: Sequence[Sequence[int]], rows: Sequence[Positions]) -> list[ReferenceEncoding]:
        """Encode sequences of token ids; keep rows (R,) of the attention maps of each text."""
        layers, stack = self._layers, self._stack
        lengths = [len(text) for text in texts]
        biases = [layers.relative_bias(length, length) for length in lengths]
        maps: list[list[Array]] = [[] for _ in texts]
        slots: list[list[Array]] = [[] for _ in texts]

        def attend_self(number: int, attention: Attention, x: Array) -> Array:
            mask = causal_mask if stack.is_causal else _window_mask
            visible = [mask(length, attention.window) for length in lengths]
            module = f"encoder.{number}.self_attention"
            output, weights, projected = layers.attention(module, attention, x, lengths, x, lengths, biases, visible)
            for text, selected in enumerate(rows):
                maps[text].append(weights[text][:, selected])
                if projected:
                    slots[text].append(projected[text][:, selected])
            return output

        x = embedded = layers.embed(texts)
        for number, attention in enumerate(stack.attention):
            before, module = x, f"encoder.{number}.self_attention"
            x = layers.sublayer(x, module, partial(attend_self, number, attention), number)
            x = layers.feed_forward(x, number, before)
            if number == 0 and stack.convolution is not None:
                x = layers.convolution(stack.convolution, embedded, x, lengths)
        x = layers.finish(x)
        head, predictions = self._model.head, self._model.predictions
        hidden_states = split_texts(x, lengths)
        pooled = (
            hidden_states if self._model.reader is None else self._read_again(self._model.reader, texts, hidden_states)
        )
        labels: list[tuple[Array | None, Array | None]] = [
            (None, None) if head is None else self._labels(head, states, ids)
            for states, ids in zip(pooled, texts, strict=True)
        ]
        return [
            ReferenceEncoding(
                hidden,
                np.stack(maps[text]),
                np.stack(slots[text]) if slots[text] else None,
                *labels[text],
                None if predictions is None else self._predictions(predictions, hidden[rows[text]]),
            )
            for text, hidden in enumerate(hidden_states)
        ]

    def _read_again(self, reader: Reader, texts: Sequence[Sequence[int]], memories: Sequence[Array]) -> list[Array]:
        """Return the hidden state (M,) of the reader at the last end token of each text."""
        model = replace(self._model, decoder=reader.stack)
        decoder = ReferenceDecoder(model, self._layers.weights, self._layers.arithmetic)
        shifted = [[reader.start_id, *text[:-1]] for text in texts]
        hidden, _, _ = decoder.read(shifted, [np.arange(0)] * len(texts), memories)
        ends = [max((index for index, id_ in enumerate(text) if id_ == reader.end_id), default=0) for text in texts]
        return [states[end] for states, end in zip(hidden, ends, strict=True)]

    def _labels(self, head: Head, x: Array, ids: Sequence[int]) -> tuple[Array, Array | None]:
        """Return the scores of labels from hidden states (S, M) of a text, and their logits."""
        if head.pooling == "first":
            x = x[0]
        elif head.pooling == "mean":
            x = x.mean(axis=0)
        elif head.pooling == "last":
            x = x[max((position for position, id_ in enumerate(ids) if id_ != head.padding), default=0)]
        if head.activation is not None:
            x = activate(self._layers.linear(x, "head.dense"), head.activation)
        if head.has_norm:
            x = self._layers.norm(x, "head.norm")
        logits = self._layers.linear(x, "head.output")
        if head.label_kind not in ("classes", "tokens"):
            return logits, None
        has_logits = head.label_kind == "classes" and any(map(is_entailment, self._model.labels))
        return log_softmax(logits, self._layers.arithmetic), logits if has_logits else None

    def _predictions(self, options: Predictions, x: Array) -> Array:
        """Return the logits of tokens (R, V) from hidden states (R, M)."""
        x = activate(self._layers.linear(x, "prediction.dense"), options.activation)
        return self._layers.linear(self._layers.norm(x, "prediction.norm"), "prediction.output")


def _window_mask(length: int, window: int | None) -> Mask | None:
    """Return the mask (S, S) of an encoder layer, None if all keys are visible."""
    positions = np.arange(length)
    return None if window is None else np.abs(positions - positions[:, None]) <= window // 2
