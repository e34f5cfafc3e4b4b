"""Slow reference of the graphs: NumPy in float64, without a cache and padding.

Axes: S tokens of a source, T tokens of a target, M width, H heads, V vocabulary, R positions of a
text whose results are kept.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

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
ZEROED = 2  # first tokens whose values are zeroed to measure contributions

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


class MeasuringLayers(ReferenceLayers):
    """Layers that measure the contributions of the tokens of a text.

    The graph subtracts what a zeroed value adds. Here the value is zeroed: the text is computed in
    several copies, the first of them whole, and each of the others without one value in one layer.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        kinds = ("self", "cross") if self.stack.cross else ("self",)
        self._modules = [f"{self.name}.{n}.{kind}_attention" for kind in kinds for n in range(self.stack.layers)]
        self._copies = 1 + ZEROED * len(self._modules)
        self._recorded: dict[str, Array] = {}  # vectors of the first copy by module; views would keep all
        # Outputs of the graph of contributions for `ZEROED` tokens, of each layer.
        self.measures = defaultdict[str, list[Array]](list)

    def _by_copy(self, x: Array) -> Array:
        return x.reshape(self._copies, -1, x.shape[-1])

    def linear(self, x: Array, module: str) -> Array:
        result, (attention, _, part) = super().linear(x, module), module.rpartition(".")
        copies = self._by_copy(result)
        if part == "value":
            first, count = 1 + ZEROED * self._modules.index(attention), min(ZEROED, copies.shape[1])
            copies[range(first, first + count), range(count)] = 0
        self._recorded[module] = copies[0].copy()
        return result

    def sublayer(self, x: Array, module: str, *arguments: Any, **options: Any) -> Array:
        result = super().sublayer(x, module, *arguments, **options)
        self._recorded |= {module: self._by_copy(result)[0].copy(), f"{module}.x": self._by_copy(x)[0].copy()}
        units = self._by_copy(result / np.linalg.norm(result, axis=-1, keepdims=True))
        self._recorded[f"{module}.changes"] = ((units - units[0]) ** 2).sum(axis=-1)  # of each copy, (copies, N)
        return result

    def measure(self, text: Sequence[int], memories: list[Array]) -> list[Array]:
        """Measure a text, and return its hidden states, in a list as `memories`."""
        rows, product, recorded = np.arange(len(text)), self.arithmetic.product, self._recorded
        hidden, (maps, *_) = self.run([text] * self._copies, [rows] * self._copies, memories * self._copies)
        for index, module in enumerate(self._modules):
            is_cross, layer = divmod(index, self.stack.layers)
            kind, weights = ("cross", maps["cross"][layer]) if is_cross else (self.name, maps["self"][layer])
            values = recorded[f"{module}.value"]
            values = values.reshape(len(values), len(weights), -1).transpose(1, 0, 2)  # (H, K, D)
            matrix = self.weights.read(f"{module}.output.weight").astype(np.float64).T
            vectors = product(values, matrix.reshape(len(values), -1, self.stack.width))  # (H, K, M)
            self.measures[f"norms.{kind}"].append(weights * np.linalg.norm(vectors, axis=-1)[:, None])

            first, changes = 1 + ZEROED * index, recorded[f"{self.name}.{layer}.feed_forward.changes"]
            self.measures[f"value_zeroing.{kind}"].append(changes[first : first + min(ZEROED, values.shape[1])])

            x, output = recorded[f"{module}.x"], recorded[module]
            parts = product(weights.transpose(2, 1, 0), vectors.transpose(1, 0, 2))  # (K, N, M)
            if is_cross:
                parts = np.concatenate([parts, x[None]])
            else:
                parts[rows, rows] += x
            if self.stack.norm_place == "post":  # LayerNorm without its bias
                variances = (x + recorded[f"{module}.output"]).var(axis=-1, keepdims=True)
                centred = parts - parts.mean(axis=-1, keepdims=True)
                scale = self.weights.read(f"{module}_norm.weight")
                parts = scale * centred / np.sqrt(variances + self.stack.norm.epsilon)
            whole, rest = (self.arithmetic.round(np.abs(y).sum(axis=-1), y.shape[-1]) for y in (output, output - parts))
            self.measures[f"alti.{kind}"].append(np.maximum(whole - rest, 0))
        return [hidden[0].copy()]
