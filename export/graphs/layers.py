"""Layers that encoder and decoder share."""

from collections.abc import Callable, Sequence

import numpy as np

from sightline.export.families.description import Activation, Attention, Norm, Rotary, Stack, rotary_tables
from sightline.export.families.weights import Array, Weights
from sightline.export.graphs.builder import CONTRIB, GraphBuilder
from sightline.export.graphs.nodes import INT64
from sightline.export.graphs.operators import split_heads


class LayerBuilder:
    """Adds layers of one stack to a graph."""

    def __init__(self, graph: GraphBuilder, weights: Weights, name: str, stack: Stack) -> None:
        """Create a builder; names of its modules start with `name`, "encoder" or "decoder"."""
        self.graph = graph
        self.weights = weights
        self.name = name
        self.stack = stack

    def linear(self, x: str, *modules: str, arrays: tuple[Array, Array | None] | None = None) -> str:
        """Add linear layers as one product; the outputs of several modules are concatenated.

        `arrays` are a weight (outputs, inputs) and a bias (outputs,) in place of the modules' own.
        The input x is (..., inputs).
        """
        graph = self.graph
        weight, bias = arrays if arrays is not None else self.matrices(*modules)
        name = ".".join((modules[0].rpartition(".")[0], "_".join(module.rpartition(".")[2] for module in modules)))
        product = graph.add("MatMul", x, graph.weight(f"{name}.weight", np.ascontiguousarray(weight.T)))
        return product if bias is None else graph.add("Add", product, graph.weight(f"{name}.bias", bias))

    def matrices(
        self, *modules: str, pad: Callable[[str, Array], Array] = lambda module, array: array
    ) -> tuple[Array, Array | None]:
        """Return the concatenated weights (outputs, inputs) and biases (outputs,) of modules.

        `pad` gets the name of a module, and its weight or its bias.
        """
        weights, biases, has_bias = list[Array](), list[Array](), False
        for module in modules:
            weight, bias = self.weights.read(f"{module}.weight"), f"{module}.bias"
            has_bias |= bias in self.weights
            weights.append(pad(module, weight))
            values = self.weights.read(bias) if bias in self.weights else np.zeros(len(weight), np.float32)
            biases.append(pad(module, values))
        return np.concatenate(weights), np.concatenate(biases) if has_bias else None

    def padded(self, modules: Sequence[str], attention: Attention, multiple: int) -> tuple[Array, Array | None]:
        """Return concatenated projections to queries, keys or values with padded heads.

        The size of a head becomes a multiple of `multiple`.
        """
        size = attention_size(attention, multiple)

        def pad(module: str, array: Array) -> Array:
            kind = module.rpartition(".")[2]
            heads = attention.heads if kind == "query" else attention.kv_heads
            return padded_heads(array, heads, size, halves=attention.rotary is not None and kind != "value")

        return self.matrices(*modules, pad=pad)

    def norm(self, x: str, module: str, options: Norm | None = None) -> str:
        """Add a normalization over the last axis."""
        graph, options = self.graph, options or self.stack.norm
        parameters = [
            graph.weight(name, self.weights.read(name))
            for name in (f"{module}.weight", f"{module}.bias")
            if name in self.weights
        ]
        if options.kind == "rms":
            return graph.add("RMSNormalization", x, parameters[0], axis=-1, epsilon=options.epsilon)
        return graph.add("LayerNormalization", x, *parameters, axis=-1, epsilon=options.epsilon)

    def heads(self, module: str, attention: Attention, packed: str, size: int) -> list[str]:
        """Split queries, keys and values (B, S, (H + 2 * KV) * size); normalize queries and keys.

        The normalization, if there is one, is that of each head, or of all as one vector.
        """
        graph, parts = self.graph, split_heads(self.graph, packed, attention, size)
        for index, (part, count) in enumerate((("query", attention.heads), ("key", attention.kv_heads))):
            if attention.head_norm is None:
                continue
            if attention.joins_heads:
                parts[index] = self._head_norm(f"{module}.{part}_norm", attention, size, parts[index], count)
                continue
            split = graph.add("Reshape", parts[index], graph.constant([0, 0, count, size], np.int64))
            normalized = self._head_norm(f"{module}.{part}_norm", attention, size, split)
            parts[index] = graph.add("Reshape", normalized, graph.constant([0, 0, count * size], np.int64))
        return parts

    def _head_norm(self, module: str, attention: Attention, size: int, heads: str, joined: int = 1) -> str:
        """Add RMSNorm of padded heads (B, S, heads, size), or of all `joined` heads as one.

        The mean square over the padded size P is D / P times the one over the D dimensions of a
        head. Epsilon and the weight are scaled accordingly.
        """
        norm, ratio = attention.head_norm, attention.head_size / size
        assert norm is not None and norm.kind == "rms", "heads are normalized by RMSNorm"
        weight = padded_heads(self.weights.read(f"{module}.weight"), joined, size, attention.rotary is not None)
        name = self.graph.weight(f"{module}.weight", weight * np.float32(ratio**0.5))
        return self.graph.add("RMSNormalization", heads, name, axis=-1, epsilon=norm.epsilon * ratio)

    def sublayer_input(self, x: str, module: str, layer: int = -1) -> str:
        """Add the normalization before a sublayer, if the stack is pre-norm."""
        stack = self.stack
        if stack.norm_place != "pre" or (layer == 0 and stack.skips_first_norm):
            return x
        return self.norm(x, f"{module}_norm")

    def add_sublayer(self, x: str, inner: str, module: str) -> str:
        """Add the residual connection, and the normalization after it if the stack is post-norm.

        Post-norm uses two nodes: the fused operator of ONNX Runtime takes four times as long.
        """
        if self.stack.has_output_norms:
            inner = self.norm(inner, f"{module}_output_norm")
        if self.stack.residual_scale != 1.0:
            inner = self.graph.add("Mul", inner, self.graph.constant(self.stack.residual_scale, np.float32))
        total = self.graph.add("Add", x, inner) if self.stack.has_residual else inner
        return self.norm(total, f"{module}_norm") if self.stack.norm_place == "post" else total

    def feed_forward(self, x: str, layer: int, before: str) -> str:
        """Add the feed-forward sublayer of a layer for x (..., M).

        `before` is the input of the layer, which a parallel layer reads in place of x.
        """
        graph, options = self.graph, self.stack.feed_forward
        module = f"{self.name}.{layer}.feed_forward"
        normalized = self.sublayer_input(before if self.stack.is_parallel else x, module)
        first = f"{module}.gate" if options.gated else f"{module}.inner"
        inner = activation(graph, self.linear(normalized, first), options.activation)
        if options.gated:
            inner = graph.add("Mul", inner, self.linear(normalized, f"{module}.inner"))
        return self.add_sublayer(x, self.linear(inner, f"{module}.outer"), module)

    def embed(self, ids: str, at_positions: Callable[[str], str]) -> str:
        """Add the embedding (B, S, M) or (B, M) of tokens (B, S) or (B,) int64.

        `at_positions` adds the rows of a table (P, M) at the positions of the tokens.
        """
        graph, weights, options = self.graph, self.weights, self.stack.embedding
        x = graph.add("Gather", self.embedding(), ids)
        if options.scale != 1.0:
            x = graph.add("Mul", x, graph.constant(options.scale, np.float32))
        if options.projects_tokens:
            x = self.linear(x, f"{self.name}.embedding_projection")
        if options.types:
            types = weights.read(f"{self.name}.types.weight")
            if options.type_separator is None:
                of_tokens = graph.weight(f"{self.name}.types.0", types[0])
            else:
                of_tokens = graph.add("Gather", graph.weight(f"{self.name}.types", types), self._types(ids))
            x = graph.add("Add", x, of_tokens)
        if options.has_positions:
            table = graph.weight(f"{self.name}.positions", weights.read(f"{self.name}.positions.weight"))
            x = graph.add("Add", x, at_positions(table))
        if options.has_norm:
            x = self.norm(x, f"{self.name}.embedding_norm")
        if options.projected_from is not None and not options.projects_tokens:
            x = self.linear(x, f"{self.name}.embedding_projection")
        return x

    def embed_text(self, ids: str, size: str) -> str:
        """Add the embedding (B, S, M) of all tokens of texts (B, S); `size` is S, (1,) int64."""
        graph, padding, first = self.graph, self.stack.embedding.padding, self.graph.constant([0], np.int64)

        def at_positions(table: str) -> str:
            if padding is None:
                return graph.add("Slice", table, first, size, first)
            # The tokens of each row are numbered from 1; those of `padding` get 0.
            is_counted = graph.add("Not", graph.add("Equal", ids, graph.constant(padding, np.int64)))
            counted = graph.add("Cast", is_counted, to=INT64)
            numbers = graph.add("CumSum", counted, graph.constant(1, np.int64))
            return graph.add("Gather", table, graph.add("Mul", numbers, counted))

        return self.embed(ids, at_positions)

    def rotary_tables(self, rotary: Rotary, positions: int, size: int) -> list[str]:
        """Add the tables of cosines and sines (P, D / 2) of some layers, with heads of `size` D."""
        number = [*dict.fromkeys(attention.rotary for attention in self.stack.attention)].index(rotary)
        return [
            self.graph.weight(f"rotary.{name}.{number}", table.astype(np.float32))
            for name, table in zip(("cos", "sin"), rotary_tables(rotary, positions, size), strict=True)
        ]

    def finish(self, x: str) -> str:
        """Add the layers after the last sublayer: a normalization and a linear layer, if any."""
        if self.stack.has_final_norm:
            x = self.norm(x, f"{self.name}.norm")
        return x if self.stack.projected_to is None else self.linear(x, f"{self.name}.output_projection")

    def embedding(self) -> str:
        """Add the table of tokens (V, E) of the stack."""
        name = "embedding" if "embedding.weight" in self.weights else f"{self.name}.embedding"
        return self.graph.weight(name, self.weights.read(f"{name}.weight"))

    def _types(self, ids: str) -> str:
        """Add the token types (B, S): 0 up to the first separator, 1 after it."""
        graph = self.graph
        separator = graph.constant(self.stack.embedding.type_separator or 0, np.int64)
        is_separator = graph.add("Cast", graph.add("Equal", ids, separator), to=INT64)
        before = graph.add("CumSum", is_separator, graph.constant(1, np.int64), exclusive=1)
        return graph.add("Min", before, graph.constant(1, np.int64))


def activation(graph: GraphBuilder, x: str, kind: Activation) -> str:
    """Add an activation function."""
    match kind:
        case "relu":
            return graph.add("Relu", x)
        case "relu2":
            positive = graph.add("Relu", x)
            return graph.add("Mul", positive, positive)
        case "tanh":
            return graph.add("Tanh", x)
        case "gelu_10":
            limits = graph.constant(-10.0, np.float32), graph.constant(10.0, np.float32)
            return graph.add("Clip", graph.add("Gelu", x), *limits)
        case "mish":
            return _mish(graph, x)
        case "gelu":
            return graph.add("Gelu", x)
        case "gelu_tanh":
            return graph.add("Gelu", x, approximate="tanh")
        case "silu":
            return graph.add("Mul", x, graph.add("Sigmoid", x))
        case "quick_gelu":
            return graph.add("QuickGelu", x, domain=CONTRIB, alpha=1.702)


def _mish(graph: GraphBuilder, x: str) -> str:
    """Add x * tanh(log(1 + e^x)) (Misra 2019).

    With n = e^x * (e^x + 2), the hyperbolic tangent is n / (n + 2), which is 1 in float32 for x
    above 20. ONNX Runtime rounds logarithms at the end of an array differently, so that the result
    of a row would depend on the other rows.
    """
    two = graph.constant(2.0, np.float32)
    power = graph.add("Exp", graph.add("Min", x, graph.constant(20.0, np.float32)))
    n = graph.add("Mul", power, graph.add("Add", power, two))
    return graph.add("Mul", x, graph.add("Div", n, graph.add("Add", n, two)))


def padded_heads(array: Array, heads: int, size: int, halves: bool) -> Array:
    """Pad the outputs of a projection with zeros, so that each head has `size` outputs.

    Args:
        array: weight (heads * D, inputs) or bias (heads * D,).
        halves: pad both halves of a head, which rotary embedding treats as pairs.
    """
    parts = 2 if halves else 1
    split = array.reshape(heads, parts, -1, *array.shape[1:])
    missing = size // parts - split.shape[2]
    padding = [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 1)
    return np.pad(split, padding).reshape(heads * size, *array.shape[1:])


def attention_size(attention: Attention, multiple: int) -> int:
    """Return the head size rounded up to a multiple; both halves have an equal size."""
    return -(-attention.head_size // multiple) * multiple
