"""Slow, obvious twin of the graphs: a described model in NumPy, in float64, for one sequence.

An import compares the ONNX graphs with it, and therefore needs neither PyTorch nor transformers.
Axes: T queries, S keys, M width, H heads, D width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.description import Activation, Attention, Description, Head, Norm, Rotary, Stack, rotary_angles
from export.graphs.relative import buckets
from export.weights import Weights

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def normalize(x: Array, weight: Array | None, bias: Array | None, options: Norm) -> Array:
    """Normalize over the last axis; weight and bias may be absent."""
    if options.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + options.epsilon)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def activate(x: Array, kind: Activation) -> Array:
    match kind:
        case "relu":
            return np.maximum(x, 0)
        case "tanh":
            return np.tanh(x)
        case "gelu":
            return np.asarray(x * (1 + _erf(x / math.sqrt(2))) / 2)
        case "gelu_tanh":
            return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)
        case "silu":
            return x * _sigmoid(x)
        case "quick_gelu":
            return x * _sigmoid(1.702 * x)


def softmax(x: Array) -> Array:
    """Return the softmax over the last axis."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def log_softmax(x: Array) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def rotate(x: Array, rotary: Rotary) -> Array:
    """Apply rotary position embedding to heads (T, H, D) at positions 0 to T - 1."""
    angles = rotary_angles(rotary, len(x))[:, None]  # (T, 1, D / 2)
    cosine, sine = rotary.factor * np.cos(angles), rotary.factor * np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def attend(
    query: Array, key: Array, value: Array, scale: float, bias: Array | None = None, visible: Mask | None = None
) -> tuple[Array, Array]:
    """Compute scaled dot-product attention.

    Args:
        query: (T, H, D).
        key: (S, KV, D); head h of the queries uses head h // (H / KV).
        value: the same.
        scale: factor of the scores.
        bias: is added to the scores, (H, T, S).
        visible: False for keys that a query does not attend to, (T, S).

    Returns:
        The weighted sums (T, H * D), and the attention weights (H, T, S).
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
    scores = np.einsum("thd,shd->hts", query, key) * scale
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = softmax(scores)
    return np.einsum("hts,shd->thd", weights, value).reshape(len(query), -1), weights


class ReferenceLayers:
    """Layers of one stack for one sequence."""

    def __init__(self, weights: Weights, name: str, stack: Stack) -> None:
        """Create the layers.

        Args:
            weights: weights of the model.
            name: "encoder" or "decoder", the start of the names of its modules.
            stack: options of the layers.
        """
        self.weights = weights
        self.name = name
        self.stack = stack

    def read(self, name: str) -> Array | None:
        """Return a tensor in float64, or None if the model does not have it."""
        return self.weights.read(name).astype(np.float64) if name in self.weights else None

    def linear(self, x: Array, module: str) -> Array:
        weight, bias = self.weights.read(f"{module}.weight").astype(np.float64), self.read(f"{module}.bias")
        return x @ weight.T if bias is None else x @ weight.T + bias

    def norm(self, x: Array, module: str, options: Norm | None = None) -> Array:
        return normalize(x, self.read(f"{module}.weight"), self.read(f"{module}.bias"), options or self.stack.norm)

    def embed(self, ids: Sequence[int], positions: Positions) -> Array:
        """Return the embeddings (T, M) of tokens at positions (T,)."""
        options, weights = self.stack.embedding, self.weights
        table = "embedding" if "embedding.weight" in weights else f"{self.name}.embedding"
        x = options.scale * weights.read(f"{table}.weight")[list(ids)].astype(np.float64)
        if options.has_types:
            seen = np.cumsum(np.array(ids) == options.type_separator)
            types = np.minimum(1, np.concatenate([[0], seen[:-1]]))
            x = x + weights.read(f"{self.name}.types.weight")[types]
        if options.has_positions:
            x = x + weights.read(f"{self.name}.positions.weight")[positions]
        if options.has_norm:
            x = self.norm(x, f"{self.name}.embedding_norm")
        return self.linear(x, f"{self.name}.embedding_projection") if options.has_projection else x

    def sublayer(self, x: Array, module: str, compute: Callable[[Array], Array], layer: int = -1) -> Array:
        """Add a sublayer to its input (T, M), with its normalization before or after."""
        if self.stack.norm_place == "post":
            return self.norm(x + compute(x), f"{module}_norm")
        has_norm = layer != 0 or not self.stack.skips_first_norm
        return x + compute(self.norm(x, f"{module}_norm") if has_norm else x)

    def attention(
        self,
        module: str,
        options: Attention,
        x: Array,
        memory: Array,
        bias: Array | None = None,
        visible: Mask | None = None,
    ) -> tuple[Array, Array]:
        """Attend from x to memory; self-attention has memory = x at positions 0, 1, ….

        Args:
            module: name of the attention, such as "encoder.0.self_attention".
            options: its options; the window is left to `visible`.
            x: (T, M).
            memory: (S, M).
            bias: see `attend`.
            visible: see `attend`.

        Returns:
            The output (T, M), and the attention weights (H, T, S). Weights of projected keys are
            converted to weights of tokens.
        """
        heads: dict[str, Array] = {}
        for part, source in (("query", x), ("key", memory), ("value", memory)):
            projected = self.linear(source, f"{module}.{part}") if options.has_projections else source
            heads[part] = projected.reshape(len(source), -1, options.head_size)
        for part in ("query", "key"):
            if options.head_norm is not None:
                heads[part] = self.norm(heads[part], f"{module}.{part}_norm", options.head_norm)
            if options.rotary is not None:
                heads[part] = rotate(heads[part], options.rotary)
        matrices: dict[str, Array] = {}  # of projected keys and values, (k, S)
        if options.projected_keys is not None:
            numbers = {"key": options.projected_keys.key, "value": options.projected_keys.value}
            for part, number in numbers.items():
                matrix = self.weights.read(f"{self.name}.projection.{number}.weight").astype(np.float64)
                matrices[part] = matrix[:, : len(memory)]
                heads[part] = np.einsum("ks,shd->khd", matrices[part], heads[part])
        attended, weights = attend(heads["query"], heads["key"], heads["value"], options.scale, bias, visible)
        if matrices:
            weights = weights @ matrices["value"]
        return self.linear(attended, f"{module}.output") if options.has_projections else attended, weights

    def relative_bias(self, queries: int, keys: int) -> Array | None:
        """Return the bias of scores (H, T, S) for positions from 0, or None without such a bias."""
        options = self.stack.relative_bias
        if options is None:
            return None
        table = self.weights.read(f"{self.name}.relative_bias.weight").astype(np.float64)  # (buckets, H)
        offsets = np.arange(keys) - np.arange(queries)[:, None]
        return table[buckets(options, offsets)].transpose(2, 0, 1)

    def feed_forward(self, x: Array, layer: int) -> Array:
        """Return the output (T, M) of the feed-forward sublayer of a layer."""
        options, module = self.stack.feed_forward, f"{self.name}.{layer}.feed_forward"

        def compute(x: Array) -> Array:
            inner = self.linear(x, f"{module}.inner")
            if options.gated:
                inner = activate(self.linear(x, f"{module}.gate"), options.activation) * inner
            else:
                inner = activate(inner, options.activation)
            return self.linear(inner, f"{module}.outer")

        return self.sublayer(x, module, compute)


@dataclass(frozen=True)
class Encoded:
    """Result of the encoder for one sequence of S tokens."""

    hidden: Array  # (S, M)
    maps: Array  # (layers, H, S, S)
    labels: Array | None  # as the graph returns them: (labels,), or (S, labels) for tokens


class Reference:
    """Encoder of a described model."""

    def __init__(self, model: Description, weights: Weights) -> None:
        assert model.encoder is not None, "a decoder-only model has no encoder"
        self._model = model
        self._stack = model.encoder
        self._layers = ReferenceLayers(weights, "encoder", model.encoder)

    def encode(self, ids: Sequence[int]) -> Encoded:
        """Encode one sequence of token ids."""
        layers, stack, maps = self._layers, self._stack, list[Array]()
        positions = np.arange(len(ids))
        x = layers.embed(ids, positions)
        bias = layers.relative_bias(len(ids), len(ids))
        for number, attention in enumerate(stack.attention):
            module = f"encoder.{number}.self_attention"
            visible = None
            if attention.window is not None:
                visible = np.abs(positions - positions[:, None]) <= attention.window // 2

            def attend_self(
                x: Array, module: str = module, attention: Attention = attention, visible: Mask | None = visible
            ) -> Array:
                output, weights = layers.attention(module, attention, x, x, bias, visible)
                maps.append(weights)
                return output

            x = layers.sublayer(x, module, attend_self, number)
            x = layers.feed_forward(x, number)
        if stack.has_final_norm:
            x = layers.norm(x, "encoder.norm")
        return Encoded(x, np.stack(maps), None if self._model.head is None else self._labels(self._model.head, x))

    def _labels(self, head: Head, x: Array) -> Array:
        """Return the scores of labels from hidden states (S, M)."""
        if head.pooling == "first":
            x = x[0]
        elif head.pooling == "mean":
            x = x.mean(axis=0)
        if head.activation is not None:
            x = activate(self._layers.linear(x, "head.dense"), head.activation)
        if head.has_norm:
            x = self._layers.norm(x, "head.norm")
        logits = self._layers.linear(x, "head.output")
        return log_softmax(logits) if head.label_kind in ("classes", "tokens") else logits


def _sigmoid(x: Array) -> Array:
    return np.asarray((1 + np.tanh(x / 2)) / 2)
