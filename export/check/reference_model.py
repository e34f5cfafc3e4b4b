"""Slow reference of the encoder and decoder graphs: NumPy in float64, without a cache and padding.

Axes: S tokens of a source, T tokens of a target, M width, H heads, V vocabulary, R positions of a
text whose results are kept.
"""

from collections.abc import Sequence

import numpy as np

from sightline.base.bundle import is_entailment
from sightline.export.check.numpy_reference import (
    EXACT,
    Arithmetic,
    Array,
    Positions,
    ReferenceLayers,
    activate,
    log_softmax,
    split_texts,
)
from sightline.export.families.description import Description, Head, Predictions, Reader
from sightline.export.families.weights import Weights

VOCABULARY_BLOCK = 8192  # logits computed at a time, to limit memory

Texts = Sequence[Sequence[int]]  # token ids


def encode_all(
    model: Description, weights: Weights, texts: Texts, rows: Sequence[Positions], arithmetic: Arithmetic = EXACT
) -> list[dict[str, Array]]:
    """Return the results of the encoder for each text, by kind of output.

    They are `hidden` (S, M), the attention weights `encoder` (layers, H, R, S) and `encoder_slots`
    of projected keys (layers, H, R, k), `labels` (labels,) or (S, labels) for tokens,
    `label_logits`, and `predictions` of tokens (R, V), as far as the model has them. `rows` are the
    positions (R,) of each text.
    """
    layers = ReferenceLayers(weights, "encoder", model.encoder_stack, arithmetic)
    hidden, maps = layers.run(texts, rows)
    results = [{"hidden": states, "encoder": own["self"]} for states, own in zip(hidden, maps, strict=True)]
    for result, own in zip(results, maps, strict=True):
        if "slots" in own:
            result["encoder_slots"] = own["slots"]
    if model.head is not None:
        pooled = hidden if model.reader is None else _read_again(model.reader, layers, texts, hidden)
        for result, states, ids in zip(results, pooled, texts, strict=True):
            result |= _labels(model, model.head, layers, states, ids)
    if model.predictions is not None:
        for result, states, selected in zip(results, hidden, rows, strict=True):
            result["predictions"] = _predictions(model.predictions, layers, states[selected])
    return results


def _read_again(reader: Reader, layers: ReferenceLayers, texts: Texts, memories: Sequence[Array]) -> list[Array]:
    """Return the hidden state (M,) of the reader at the last end token of each text."""
    decoder = ReferenceLayers(layers.weights, "decoder", reader.stack, layers.arithmetic)
    shifted = [[reader.start_id, *text[:-1]] for text in texts]
    hidden, _ = decoder.run(shifted, [np.arange(0)] * len(texts), memories)
    ends = [max((index for index, id_ in enumerate(text) if id_ == reader.end_id), default=0) for text in texts]
    return [states[end] for states, end in zip(hidden, ends, strict=True)]


def _labels(model: Description, head: Head, layers: ReferenceLayers, x: Array, ids: Sequence[int]) -> dict[str, Array]:
    """Return the scores of labels from hidden states (S, M) of a text, and their logits."""
    if head.pooling == "first":
        x = x[0]
    elif head.pooling == "mean":
        x = x.mean(axis=0)
    elif head.pooling == "last":
        x = x[max((position for position, id_ in enumerate(ids) if id_ != head.padding), default=0)]
    if head.activation is not None:
        x = activate(layers.linear(x, "head.dense"), head.activation)
    if head.has_norm:
        x = layers.norm(x, "head.norm")
    logits = layers.linear(x, "head.output")
    if head.label_kind not in ("classes", "tokens"):
        return {"labels": logits}
    labels = {"labels": log_softmax(logits, layers.arithmetic)}
    has_logits = head.label_kind == "classes" and any(map(is_entailment, model.labels))
    return labels | ({"label_logits": logits} if has_logits else {})


def _predictions(options: Predictions, layers: ReferenceLayers, x: Array) -> Array:
    """Return the logits of tokens (R, V) from hidden states (R, M)."""
    x = activate(layers.linear(x, "prediction.dense"), options.activation)
    return layers.linear(layers.norm(x, "prediction.norm"), "prediction.output")


def decode_all(
    model: Description,
    weights: Weights,
    texts: Texts,
    rows: Sequence[Positions],
    memories: Sequence[Array] = (),
    arithmetic: Arithmetic = EXACT,
) -> list[dict[str, Array]]:
    """Return the results of the decoder for each text, by kind of output.

    They are `logits` (R, V), `hidden` (T, M), and the attention weights `decoder`
    (layers, H, R, T) and `cross` (layers, H, R, S), as far as the model has them. `memories` are
    the hidden states (S, M) of the encoder for each text.
    """
    layers = ReferenceLayers(weights, "decoder", model.decoder_stack, arithmetic)
    hidden, maps = layers.run(texts, rows, memories)
    kept_states = np.concatenate([states[selected] for states, selected in zip(hidden, rows, strict=True)])
    logits = split_texts(_logits(model, layers, kept_states), [len(selected) for selected in rows])
    kinds = {"self": "decoder", "cross": "cross"}
    return [
        {"logits": scores, "hidden": states, **{kinds[kind]: array for kind, array in own.items()}}
        for scores, states, own in zip(logits, hidden, maps, strict=True)
    ]


def _logits(model: Description, layers: ReferenceLayers, x: Array) -> Array:
    """Return the logits (…, V) of hidden states (…, M) after the final normalization."""
    tables = ("output", "embedding", "decoder.embedding")
    name = next(module for module in tables if f"{module}.weight" in layers.weights)
    table, product = layers.weights.read(f"{name}.weight"), layers.arithmetic.product
    logits = np.concatenate(
        [
            model.logits_scale * product(x, table[start : start + VOCABULARY_BLOCK].astype(np.float64).T)
            for start in range(0, len(table), VOCABULARY_BLOCK)
        ],
        axis=1,
    )
    bias, cap = layers.read("output.bias"), model.logits_softcap
    logits = logits if bias is None else logits + bias.reshape(-1)
    return logits if cap is None else cap * np.tanh(logits / cap)
