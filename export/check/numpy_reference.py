"""Slow reference of the graphs: a described model in NumPy, in float64, without padding.

An import compares the ONNX graphs with it, and therefore needs neither PyTorch nor transformers.
Several texts are computed at once, so that each weight is read only once: the tokens of all texts
follow each other on one axis, and only attention treats the texts separately.

With `Rounded` arithmetic, it also measures by how much rounding to float32 changes its results.

Axes: N tokens of all texts, T queries of a text, S keys of a text, M width, H heads, D width of a
head, R positions of a text whose results are kept.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sightline.export.families.description import (
    Activation,
    Attention,
    Convolution,
    Disentangled,
    Norm,
    RelativeKeys,
    Rotary,
    Stack,
    rotary_tables,
)
from sightline.export.families.weights import Weights
from sightline.export.graphs.disentangled import rows_of_distances
from sightline.export.graphs.relative import bias_of_slopes, buckets
from sightline.model.float32 import rounding_error

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]


class Arithmetic:
    """Arithmetic of exact results, as far as float64 is exact."""

    def round(self, x: Array, terms: int = 0) -> Array:
        """Return numbers with the errors of the arithmetic; sums have `terms` terms."""
        return x

    def product(self, left: Array, right: Array) -> Array:
        """Return a matrix product with the errors of its sums, see `Rounded`."""
        terms = left.shape[-1]
        return self.round(self.round(left, terms) @ right, terms)


class Rounded(Arithmetic):
    """Arithmetic with random errors of at least the size of float32 rounding.

    A float32 sum rounds after each of its n terms, so that its error is a sum of n random errors,
    each of at most u times a partial sum. It is of the size of sqrt(n) * u times the largest
    partial sum. The partial sums reach the result S like a random walk: they exceed S by about the
    root r of the sum of the squared terms. The error is therefore estimated as e * S + e * r, with
    e from `rounding_error`. Multiplying S by 1 + e or 1 - e at random gives the first part, and
    doing so with one factor of each term gives the second.

    The errors of different tokens are independent, as those of float32 are. Errors of the weights
    would be the same for all tokens. They would leave attention weights unchanged where all keys
    are similar, although rounding changes those.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def round(self, x: Array, terms: int = 0) -> Array:
        error = rounding_error(terms)
        bits = np.frombuffer(self._generator.bytes(-(-x.size // 8)), np.uint8)
        factors = np.unpackbits(bits, count=x.size).reshape(x.shape).astype(np.float64)
        factors *= 2 * error
        factors += 1 - error
        factors *= x
        return factors


EXACT = Arithmetic()


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
        case "relu2":
            return np.maximum(x, 0) ** 2
        case "tanh":
            return np.tanh(x)
        case "gelu_10":
            return np.clip(activate(x, "gelu"), -10, 10)
        case "mish":
            return x * np.tanh(np.logaddexp(0, x))
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


def log_softmax(x: Array, arithmetic: Arithmetic = EXACT) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    sums = np.exp(shifted).sum(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(arithmetic.round(sums, x.shape[-1])))


def rotate(x: Array, rotary: Rotary) -> Array:
    """Apply rotary position embedding to heads (T, H, D) at positions 0 to T - 1."""
    cosine, sine = (table[:, None] for table in rotary_tables(rotary, len(x), x.shape[-1]))  # (T, 1, D / 2)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def attend(
    query: Array,
    key: Array,
    value: Array,
    scale: float,
    bias: Array | None = None,
    visible: Mask | None = None,
    arithmetic: Arithmetic = EXACT,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Compute scaled dot-product attention.

    Args:
        query: (T, H, D).
        key, value: (S, KV, D); head h of the queries uses head h // (H / KV).
        bias: is added to the scores, (H, T, S).
        visible: False for keys that a query does not attend to, (T, S).
        softcap: limit of the scaled scores, see `Attention.softcap`.

    Returns:
        The weighted sums (T, H * D), and the attention weights (H, T, S).
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
    scores = arithmetic.product(query.transpose(1, 0, 2), key.transpose(1, 2, 0)) * scale
    if softcap is not None:
        scores = softcap * arithmetic.round(np.tanh(scores / softcap))
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = arithmetic.round(softmax(scores), len(key))
    sums = arithmetic.product(weights, value.transpose(1, 0, 2))
    return sums.transpose(1, 0, 2).reshape(len(query), -1), weights


def split_texts(x: Array, lengths: Sequence[int]) -> list[Array]:
    """Split an array (N, …) of the tokens of all texts into those of each text (T, …)."""
    return np.split(x, np.cumsum(lengths)[:-1])


def _positions(text: Sequence[int], padding: int | None) -> Positions:
    """Return the rows of the table of positions for the tokens of a text, see `Embedding`."""
    is_counted = np.array(text) != padding
    return np.arange(len(text)) if padding is None else np.cumsum(is_counted) * is_counted


class ReferenceLayers:
    """Layers of one stack. Arrays (N, …) have the tokens of all texts, one text after another."""

    def __init__(self, weights: Weights, name: str, stack: Stack, arithmetic: Arithmetic = EXACT) -> None:
        """Create layers; the names of their modules start with `name`, "encoder" or "decoder"."""
        self.weights = weights
        self.name = name
        self.stack = stack
        self.arithmetic = arithmetic

    def read(self, name: str) -> Array | None:
        """Return a tensor in float64, or None if the model does not have it."""
        return self.weights.read(name).astype(np.float64) if name in self.weights else None

    def linear(self, x: Array, module: str) -> Array:
        weight, bias = self.weights.read(f"{module}.weight").astype(np.float64), self.read(f"{module}.bias")
        x = self.arithmetic.product(x, weight.T)
        return x if bias is None else x + bias

    def norm(self, x: Array, module: str, options: Norm | None = None) -> Array:
        x = self.arithmetic.round(x, x.shape[-1])  # differences from the mean, which is a sum
        return normalize(x, self.read(f"{module}.weight"), self.read(f"{module}.bias"), options or self.stack.norm)

    def embed(self, texts: Sequence[Sequence[int]]) -> Array:
        """Return the embeddings (N, M) of the tokens of texts."""
        options, weights = self.stack.embedding, self.weights
        table = "embedding" if "embedding.weight" in weights else f"{self.name}.embedding"
        ids = np.concatenate([np.array(text) for text in texts])
        x: Array = options.scale * weights.read(f"{table}.weight")[ids].astype(np.float64)
        if options.projects_tokens:
            x = self.linear(x, f"{self.name}.embedding_projection")
        if options.types:
            seen = [np.cumsum(np.array(text) == options.type_separator) for text in texts]
            types = np.concatenate([np.minimum(1, [0, *counts[:-1]]) for counts in seen])
            x = x + weights.read(f"{self.name}.types.weight")[types]
        if options.has_positions:
            positions = np.concatenate([_positions(text, options.padding) for text in texts])
            x = x + weights.read(f"{self.name}.positions.weight")[positions]
        if options.has_norm:
            x = self.norm(x, f"{self.name}.embedding_norm")
        if options.projected_from is None or options.projects_tokens:
            return x
        return self.linear(x, f"{self.name}.embedding_projection")

    def finish(self, x: Array) -> Array:
        """Return the hidden states of a stack from those (N, M) after its last sublayer."""
        if self.stack.has_final_norm:
            x = self.norm(x, f"{self.name}.norm")
        return x if self.stack.projected_to is None else self.linear(x, f"{self.name}.output_projection")

    def sublayer(
        self, x: Array, module: str, compute: Callable[[Array], Array], layer: int = -1, source: Array | None = None
    ) -> Array:
        """Add a sublayer to x (N, M), with its normalization before or after.

        Args:
            layer: number of the layer, if its first normalization may be absent.
            source: input of the sublayer, x by default.
        """
        stack = self.stack
        source = x if source is None else source
        has_norm = stack.norm_place == "pre" and not (layer == 0 and stack.skips_first_norm)
        result = compute(self.norm(source, f"{module}_norm") if has_norm else source)
        if stack.has_output_norms:
            result = self.norm(result, f"{module}_output_norm")
        total = self.arithmetic.round((x if stack.has_residual else 0) + stack.residual_scale * result)
        return self.norm(total, f"{module}_norm") if stack.norm_place == "post" else total

    def attention(
        self,
        module: str,
        options: Attention,
        x: Array,
        lengths: Sequence[int],
        memory: Array,
        memory_lengths: Sequence[int],
        biases: Sequence[Array | None],
        visible: Sequence[Mask | None],
    ) -> tuple[Array, list[Array], list[Array]]:
        """Attend from the tokens x (N, M) of each text to those of its memory.

        Self-attention has memory = x, at positions 0, 1, … of each text. The window of the options
        is left to `visible`, which has an entry for each text like `biases` (see `attend`).

        Returns:
            The output (N, M), the attention weights (H, T, S) of each text, and those of projected
            keys (H, T, k), if there are such keys. The former are then converted from the latter.
        """
        heads: dict[str, list[Array]] = {}
        for part, source, sizes in (
            ("query", x, lengths),
            ("key", memory, memory_lengths),
            ("value", memory, memory_lengths),
        ):
            projected = self.linear(source, f"{module}.{part}") if options.has_projections else source
            if options.head_norm is not None and options.joins_heads and part != "value":
                projected = self.norm(projected, f"{module}.{part}_norm", options.head_norm)
            projected = projected.reshape(len(source), -1, options.head_size)
            if options.head_norm is not None and not options.joins_heads and part != "value":
                projected = self.norm(projected, f"{module}.{part}_norm", options.head_norm)
            heads[part] = split_texts(projected, sizes)
            if options.rotary is not None and part != "value":
                heads[part] = [rotate(vectors, options.rotary) for vectors in heads[part]]
        matrices: dict[str, Array] = {}  # of projected keys and values, (k, P)
        if options.projected_keys is not None:
            for part, number in (("key", options.projected_keys.key), ("value", options.projected_keys.value)):
                matrix = self.weights.read(f"{self.name}.projection.{number}.weight").astype(np.float64)
                heads[part] = [self._project(matrix[:, : len(vectors)], vectors) for vectors in heads[part]]
                matrices[part] = matrix
        if self.stack.disentangled is not None:
            assert not any(mask is not None for mask in biases), "there is one kind of relative positions"
            biases = self._position_scores(module, self.stack.disentangled, options, heads["query"], heads["key"])
        if options.relative_keys is not None:
            biases = self._relative_key_scores(module, options, options.relative_keys, heads["query"])
        results = [
            attend(query, key, value, options.scale, bias, mask, self.arithmetic, options.softcap)
            for query, key, value, bias, mask in zip(
                heads["query"], heads["key"], heads["value"], biases, visible, strict=True
            )
        ]
        attended, maps = np.concatenate([sums for sums, _ in results]), [weights for _, weights in results]
        slots = list[Array]()
        if matrices:
            slots = maps
            product, matrix = self.arithmetic.product, matrices["value"]
            maps = [product(weights, matrix[:, :size]) for weights, size in zip(maps, memory_lengths, strict=True)]
        output = self.linear(attended, f"{module}.output") if options.has_projections else attended
        return output, maps, slots

    def _project(self, matrix: Array, heads: Array) -> Array:
        """Return projected keys or values (k, H, D) of heads (S, H, D), with a matrix (k, S)."""
        projected = self.arithmetic.product(matrix, heads.reshape(len(heads), -1))
        return projected.reshape(len(matrix), *heads.shape[1:])

    def _position_scores(
        self, module: str, options: Disentangled, attention: Attention, queries: list[Array], keys: list[Array]
    ) -> list[Array | None]:
        """Return the scores (H, T, T) of positions for queries and keys (T, H, D) of each text."""
        table = self.weights.read(f"{self.name}.relative.weight").astype(np.float64)
        if options.has_norm:
            table = self.norm(table, f"{self.name}.relative_norm")
        vectors = {
            part: self.linear(table, f"{module}.{part}").reshape(len(table), -1, attention.head_size).transpose(1, 2, 0)
            for part in options.projections
        }
        biases: list[Array | None] = []
        for query, key in zip(queries, keys, strict=True):
            positions = np.arange(len(query))
            rows = rows_of_distances(options, positions[:, None] - positions)  # (T, T)
            scores = np.zeros((query.shape[1], *rows.shape))
            for part, columns in vectors.items():
                tokens, picked = (query, rows) if part == "relative_key" else (key, rows.T)
                products = self.arithmetic.product(tokens.transpose(1, 0, 2), columns)  # (H, T, 2 * span)
                by_token = np.take_along_axis(products, np.broadcast_to(picked, scores.shape), axis=2)
                scores += by_token if part == "relative_key" else by_token.transpose(0, 2, 1)
            biases.append(self.arithmetic.round(scores) * attention.scale)
        return biases

    def _relative_key_scores(
        self, module: str, attention: Attention, options: RelativeKeys, queries: list[Array]
    ) -> list[Array | None]:
        """Return the scores (H, T, T) of queries (T, H, D) with vectors of distances, by text."""
        table = self.weights.read(f"{module}.relative_keys.weight").astype(np.float64)
        biases: list[Array | None] = []
        for query in queries:
            positions = np.arange(len(query))
            rows = options.rows_of_distances(positions - positions[:, None])
            products = self.arithmetic.product(query.transpose(1, 0, 2), table.T)  # (H, T, 2 * span + 1)
            picked = np.broadcast_to(rows, (len(products), *rows.shape))
            biases.append(attention.scale * np.take_along_axis(products, picked, axis=2))
        return biases

    def convolution(self, options: Convolution, embedded: Array, x: Array, lengths: Sequence[int]) -> Array:
        """Add the convolution of the embeddings (N, M) of each text to the output of layer 0."""
        weight = self.weights.read(f"{self.name}.convolution.weight").astype(np.float64)  # (M, M, size)
        bias, reach = self.weights.read(f"{self.name}.convolution.bias"), options.size // 2
        matrix = weight.transpose(2, 1, 0).reshape(-1, len(weight))  # (size * M, M)
        columns = []
        for text in split_texts(embedded, lengths):
            padded = np.pad(text, [(reach, reach), (0, 0)])
            columns.append(np.concatenate([padded[first : first + len(text)] for first in range(options.size)], axis=1))
        outputs = activate(self.arithmetic.product(np.concatenate(columns), matrix) + bias, options.activation)
        return self.norm(self.arithmetic.round(x + outputs), f"{self.name}.convolution_norm")

    def relative_bias(self, length: int) -> Array | None:
        """Return the bias of scores (H, T, T) of a text, or None without such a bias."""
        options, offsets = self.stack.relative_bias, np.arange(length) - np.arange(length)[:, None]
        if self.stack.slopes is not None:
            return bias_of_slopes(self.stack.slopes, offsets).astype(np.float64)
        if options is None:
            return None
        table = self.weights.read(f"{self.name}.relative_bias.weight").astype(np.float64)  # (buckets, H)
        return table[buckets(options, offsets)].transpose(2, 0, 1)

    def run(
        self, texts: Sequence[Sequence[int]], rows: Sequence[Positions], memories: Sequence[Array] = ()
    ) -> tuple[list[Array], list[dict[str, Array]]]:
        """Run the stack on several sequences of token ids.

        Args:
            texts: the tokens; those of a decoder include its start tokens.
            rows: (R,) positions of each text whose attention weights are kept.
            memories: hidden states (S, M) of the encoder for each text, for cross-attention.

        Returns:
            The hidden states (T, M) of each text, and its attention weights (layers, H, R, keys) by
            kind, as far as the stack has them: "self", "slots" of projected keys, and "cross".
        """
        stack, lengths = self.stack, [len(text) for text in texts]
        nothing, sizes = [None] * len(texts), [len(states) for states in memories]
        biases = [self.relative_bias(length) for length in lengths]
        maps: list[dict[str, list[Array]]] = [{} for _ in texts]

        def attend(number: int, kind: str, options: Attention, x: Array) -> Array:
            module = f"{self.name}.{number}.{kind}_attention"
            if kind == "cross":
                memory = np.concatenate(memories)
                results = self.attention(module, options, x, lengths, memory, sizes, nothing, nothing)
            else:
                visible = [self._mask(length, options.window) for length in lengths]
                results = self.attention(module, options, x, lengths, x, lengths, biases, visible)
            output, *weights = results
            for name, of_texts in zip((kind, "slots"), weights, strict=True):
                for text, array in enumerate(of_texts):
                    maps[text].setdefault(name, []).append(array[:, rows[text]])
            return output

        x = embedded = self.embed(texts)
        for number, attention in enumerate(stack.attention):
            before, compute = x, partial(attend, number, "self", attention)
            if stack.cell == "ssru":
                compute = partial(self._recur, number, lengths)
            x = self.sublayer(x, f"{self.name}.{number}.self_attention", compute, number)
            if stack.cross is not None:
                compute = partial(attend, number, "cross", stack.cross)
                x = self.sublayer(x, f"{self.name}.{number}.cross_attention", compute)
            x = self.feed_forward(x, number, before)
            if number == 0 and stack.convolution is not None:
                x = self.convolution(stack.convolution, embedded, x, lengths)
        stacked = [{kind: np.stack(layers) for kind, layers in kept.items()} for kept in maps]
        return split_texts(self.finish(x), lengths), stacked

    def _mask(self, length: int, window: int | None) -> Mask | None:
        """Return the mask (T, T) of a layer, None if all keys are visible."""
        positions = np.arange(length)
        distances = positions[:, None] - positions  # of a key before its query
        if self.name == "decoder" or self.stack.is_causal:
            return (distances >= 0) if window is None else (distances >= 0) & (distances < window)
        return None if window is None else np.abs(distances) <= window // 2

    def _recur(self, number: int, lengths: Sequence[int], x: Array) -> Array:
        """Return the outputs (N, M) of a simpler simple recurrent unit (Kim et al. 2019, eq. 2)."""
        module, outputs = f"{self.name}.{number}.cell", []
        forgets, inputs = self.linear(x, f"{module}.forget"), self.linear(x, f"{module}.input")
        forgets = self.arithmetic.round(1 / (1 + np.exp(-forgets)))
        for text in zip(split_texts(forgets, lengths), split_texts(inputs, lengths), strict=True):
            cell = np.zeros(x.shape[1])
            for forget, new in zip(*text, strict=True):
                cell = forget * cell + (1 - forget) * new
                outputs.append(np.maximum(cell, 0))
        return np.stack(outputs)

    def feed_forward(self, x: Array, layer: int, before: Array) -> Array:
        """Return the output (N, M) of the feed-forward sublayer for x (N, M).

        `before` is the input of the layer, which a parallel layer reads in place of x.
        """
        options, module = self.stack.feed_forward, f"{self.name}.{layer}.feed_forward"

        def compute(x: Array) -> Array:
            inner = self.linear(x, f"{module}.inner")
            if options.gated:
                inner = activate(self.linear(x, f"{module}.gate"), options.activation) * inner
            else:
                inner = activate(inner, options.activation)
            return self.linear(inner, f"{module}.outer")

        return self.sublayer(x, module, compute, source=before if self.stack.is_parallel else x)


ERF_END, ERF_STEPS = 6, 64  # erf is 1 in float64 from 6 on; the polynomials have a distance of 1 / 64


@functools.cache
def _erf_polynomials() -> Array:
    """Return the Taylor coefficients (order, points) of erf, whose next term is below 1e-17."""
    points = np.arange(-ERF_END * ERF_STEPS, ERF_END * ERF_STEPS + 1) / ERF_STEPS
    slopes = 2 / math.sqrt(math.pi) * np.exp(-(points**2))
    rows, hermite = [np.array([math.erf(point) for point in points])], [np.zeros_like(points), np.ones_like(points)]
    for order in range(1, 9):
        rows.append(slopes * hermite[-1] / math.factorial(order))
        hermite.append(-2 * points * hermite[-1] - 2 * (order - 1) * hermite[-2])
    return np.stack(rows)


def _erf(x: Array) -> Array:
    """Return the error function; calls of `math.erf` took a third of the time of a check."""
    steps = np.clip(x, -ERF_END, ERF_END) * ERF_STEPS
    nearest = np.rint(steps)
    indices, distances = np.nan_to_num(nearest).astype(np.int64) + ERF_END * ERF_STEPS, (steps - nearest) / ERF_STEPS
    result = np.zeros_like(steps)
    for coefficients in reversed(_erf_polynomials()):
        result = result * distances + coefficients[indices]
    return np.asarray(result)


def _sigmoid(x: Array) -> Array:
    return np.asarray((1 + np.tanh(x / 2)) / 2)
