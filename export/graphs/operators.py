"""Operators that have two forms; `GraphBuilder.ops` selects one.

The contrib form uses operators of ONNX Runtime and of the newest opset. The standard form is the
same calculation with operators of opset 18, for other runtimes. No other module chooses between the
two (docs/adr/0019).

Axes: B batch, S tokens of one call, K keys, T positions of a cache, P positions of the model, H
heads, KV heads of keys and values, D width of a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sightline.export.families.description import Attention
from sightline.export.graphs.builder import CONTRIB, GraphBuilder
from sightline.export.graphs.nodes import INT64, LOWEST, softcap

CACHED_AFTER_SOFTMAX = 2  # value of `qk_output` of GroupQueryAttention: return the attention weights
AFTER_SOFTMAX = 3  # value of `qk_matmul_output_mode` of Attention: the same


@dataclass(frozen=True)
class Cache:
    """Keys and values (B, KV, T, D) of a batch, and the range of positions that a call reads."""

    key: str
    value: str
    last: str  # last position of each row, (B,) int32
    longest: str  # number of positions of the longest row, () int32
    head_size: int  # D


def gelu(graph: GraphBuilder, x: str, approximate: bool = False) -> str:
    """Add GELU (Hendrycks and Gimpel 2016), with erf or with its approximation by tanh."""
    if graph.ops == "contrib":
        return graph.add("Gelu", x, **({"approximate": "tanh"} if approximate else {}))
    if approximate:
        cube = graph.add("Mul", graph.add("Mul", x, x), x)
        inner = graph.add("Add", x, graph.add("Mul", cube, graph.constant(0.044715, np.float32)))
        curve = graph.add("Tanh", graph.add("Mul", inner, graph.constant(math.sqrt(2 / math.pi), np.float32)))
    else:
        curve = graph.add("Erf", graph.add("Mul", x, graph.constant(math.sqrt(0.5), np.float32)))
    factor = graph.add("Mul", graph.add("Add", curve, graph.constant(1.0, np.float32)), graph.constant(0.5, np.float32))
    return graph.add("Mul", x, factor)


def quick_gelu(graph: GraphBuilder, x: str) -> str:
    """Add x * sigmoid(1.702 * x)."""
    if graph.ops == "contrib":
        return graph.add("QuickGelu", x, domain=CONTRIB, alpha=1.702)
    return graph.add("Mul", x, graph.add("Sigmoid", graph.add("Mul", x, graph.constant(1.702, np.float32))))


def rms_norm(graph: GraphBuilder, x: str, weight: str, epsilon: float) -> str:
    """Add RMSNorm over the last axis (Zhang and Sennrich 2019)."""
    if graph.ops == "contrib":
        return graph.add("RMSNormalization", x, weight, axis=-1, epsilon=epsilon)
    mean = graph.add("ReduceMean", graph.add("Mul", x, x), graph.constant([-1], np.int64))
    root = graph.add("Sqrt", graph.add("Add", mean, graph.constant(epsilon, np.float32)))
    return graph.add("Mul", graph.add("Div", x, root), weight)


def rotary_embedding(graph: GraphBuilder, x: str, heads: int, tables: Sequence[str], positions: str) -> str:
    """Add rotary position embedding of queries or keys.

    Args:
        graph: the graph to add nodes to.
        x: (B, S, heads * D).
        heads: number of heads.
        tables: cosines and sines, each (P, D / 2).
        positions: (B, S) int64.
    """
    if graph.ops == "contrib":
        return graph.add("RotaryEmbedding", x, *tables, positions, num_heads=heads)
    cosines, sines = (
        _unsqueezed(graph, graph.add_once("Gather", table, positions), 2) for table in tables
    )  # (B, S, 1, D / 2)
    first, second = (graph.unique(part) for part in ("first", "second"))
    by_head = graph.add("Reshape", x, graph.constant([0, 0, heads, -1], np.int64))
    graph.add_multi("Split", [by_head], [first, second], axis=-1, num_outputs=2)
    rotated = [
        graph.add("Sub", graph.add("Mul", first, cosines), graph.add("Mul", second, sines)),
        graph.add("Add", graph.add("Mul", second, cosines), graph.add("Mul", first, sines)),
    ]
    return graph.add("Reshape", graph.add("Concat", *rotated, axis=-1), graph.constant([0, 0, -1], np.int64))


def attention(
    graph: GraphBuilder,
    options: Attention,
    parts: Sequence[str],
    attention_map: str,
    lengths: str = "",
    bias: str = "",
) -> str:
    """Add attention of an encoder, in which all tokens see each other.

    Args:
        graph: the graph to add nodes to.
        options: heads, scale and softcap; other options are not read.
        parts: queries (B, S, H * D), and keys and values (B, K, KV * D).
        attention_map: name of the attention weights (B, H, S, K).
        lengths: number of keys of each row, (B,) int64; "" if all rows have K.
        bias: bias of the scores, (1, H, S, K), (1, 1, S, K) or (B, H, S, K); "" for none.

    Returns:
        (B, S, H * D).
    """
    if graph.ops == "contrib":
        attended = graph.unique("attended")
        graph.add_multi(
            "Attention",
            [*parts, bias, "", "", lengths] if bias or lengths else parts,
            [attended, "", "", attention_map],
            q_num_heads=options.heads,
            kv_num_heads=options.kv_heads,
            scale=options.scale,
            qk_matmul_output_mode=AFTER_SOFTMAX,
            **_softcap(options),
        )
        return attended
    counts = (options.heads, options.kv_heads, options.kv_heads)
    query, key, value = (by_head(graph, part, count) for part, count in zip(parts, counts, strict=True))
    is_visible = graph.once(f"keys before {lengths}", lambda: _before(graph, key, lengths)) if lengths else ""
    attended, _ = _attend(graph, options, query, key, value, is_visible, bias, attention_map)
    return attended


def self_attention(
    graph: GraphBuilder,
    options: Attention,
    parts: Sequence[str],
    cache: Cache,
    present: Sequence[str],
    tables: Sequence[str] = (),
    bias: str = "",
) -> tuple[str, str]:
    """Add causal attention to the tokens in a cache and to new tokens.

    In the contrib form, the caller of the graph binds `present` to the memory of the cache, which
    is updated in place, and a batch with several new tokens has one row. In the standard form,
    `present` is a copy of the cache with the new keys and values.

    Args:
        graph: the graph to add nodes to.
        options: options of the attention; the head size is not read.
        parts: queries (B, S, H * D), and keys and values (B, S, KV * D) of the new tokens; or all
            of them concatenated.
        cache: keys and values of earlier tokens. Its positions include the new tokens.
        present: names of the updated keys and values (B, KV, T, D).
        tables: cosines and sines of rotary embedding, each (P, D / 2); empty for none.
        bias: bias of the scores, (B, H, S, K); "" for none.

    Returns:
        (B, S, H * D), and the attention weights (B, H, S, K). K is `cache.longest`; columns beyond
        the last position of a row are undefined.
    """
    if graph.ops == "contrib":
        attended, attention_map = graph.unique("attended"), graph.unique("map")
        optional = [*(tables or ("", "")), "", bias]  # "": positions, which follow from the lengths
        while optional and not optional[-1]:
            optional.pop()
        packed = [*parts, "", ""] if len(parts) == 1 else parts
        graph.add_multi(
            "GroupQueryAttention",
            [*packed, cache.key, cache.value, cache.last, cache.longest, *optional],
            [attended, *present, attention_map],
            domain=CONTRIB,
            num_heads=options.heads,
            kv_num_heads=options.kv_heads,
            scale=options.scale,
            do_rotary=int(bool(tables)),
            local_window_size=options.window or -1,
            qk_output=CACHED_AFTER_SOFTMAX,
            **_softcap(options),
        )
        return attended, attention_map
    if len(parts) == 1:
        parts = split_heads(graph, parts[0], options, cache.head_size)
    query, key, value = parts
    row = graph.once(f"positions up to {cache.last}", lambda: _new_positions(graph, query, cache))  # (B, 1, S, 1)
    if tables:
        positions = graph.add_once("Reshape", row, graph.constant([0, -1], np.int64))
        query = rotary_embedding(graph, query, options.heads, tables, positions)
        key = rotary_embedding(graph, key, options.kv_heads, tables, positions)
    indices = graph.add_once("Expand", row, graph.constant([1, options.kv_heads, 1, cache.head_size], np.int64))
    for past, new, output in zip((cache.key, cache.value), (key, value), present, strict=True):
        new = by_head(graph, new, options.kv_heads)
        graph.add("ScatterElements", past, indices, new, output=output, axis=2)
    keys = _positions(graph, graph.add_once("Cast", cache.longest, to=INT64))
    is_visible = graph.add_once("LessOrEqual", keys, row)  # (B, 1, S, K)
    if options.window is not None:
        before = graph.add_once("Sub", row, graph.constant(options.window, np.int64))
        is_visible = graph.add_once("And", is_visible, graph.add_once("Greater", keys, before))
    updated = replace(cache, key=present[0], value=present[1])
    return _attend_to_cache(graph, options, query, updated, is_visible, bias)


def cross_attention(graph: GraphBuilder, options: Attention, query: str, memory: Cache) -> tuple[str, str]:
    """Add attention to the tokens of a source.

    Args:
        graph: the graph to add nodes to.
        options: heads and scale; other options are not read.
        query: (B, S, H * D).
        memory: keys and values of the source.

    Returns:
        (B, S, H * D), and the attention weights (B, H, S, K). K is `memory.longest`; columns beyond
        the last position of a row are undefined.
    """
    if graph.ops == "contrib":
        size = options.kv_heads * memory.head_size
        no_keys = graph.once(f"no keys of {size}", lambda: _no_keys(graph, query, size))
        attended, attention_map = graph.unique("attended"), graph.unique("map")
        graph.add_multi(
            "GroupQueryAttention",
            [query, no_keys, no_keys, memory.key, memory.value, memory.last, memory.longest],
            [attended, "", "", attention_map],
            domain=CONTRIB,
            num_heads=options.heads,
            kv_num_heads=options.kv_heads,
            scale=options.scale,
            causal=0,
            qk_output=CACHED_AFTER_SOFTMAX,
        )
        return attended, attention_map
    keys = _positions(graph, graph.add_once("Cast", memory.longest, to=INT64))
    is_visible = graph.add_once("LessOrEqual", keys, _last(graph, memory))  # (B, 1, 1, K)
    return _attend_to_cache(graph, options, query, memory, is_visible, "")


def split_heads(graph: GraphBuilder, packed: str, options: Attention, head_size: int) -> list[str]:
    """Split (B, S, (H + 2 * KV) * D) into queries, keys and values."""
    parts = [graph.unique(part) for part in ("query", "key", "value")]
    sizes = [count * head_size for count in (options.heads, options.kv_heads, options.kv_heads)]
    graph.add_multi("Split", [packed, graph.constant(sizes, np.int64)], parts, axis=-1)
    return parts


def _attend_to_cache(
    graph: GraphBuilder, options: Attention, query: str, cache: Cache, is_visible: str, bias: str
) -> tuple[str, str]:
    """Add attention of queries (B, S, H * D) to the first positions of a cache, see `_attend`."""
    longest = graph.add_once("Cast", cache.longest, to=INT64)
    first, axis = graph.constant([0], np.int64), graph.constant([2], np.int64)
    key, value = (
        graph.add("Slice", buffer, first, _unsqueezed(graph, longest, 0), axis) for buffer in (cache.key, cache.value)
    )  # (B, KV, K, D)
    # A buffer may hold anything beyond the last position of a row. A weight of 0 does not hide it,
    # because 0 times NaN is NaN.
    column = _unsqueezed(graph, _positions(graph, longest), 1)
    is_token = graph.add_once("LessOrEqual", column, _last(graph, cache))  # (B, 1, K, 1)
    value = graph.add("Where", is_token, value, graph.constant(0.0, np.float32))
    return _attend(graph, options, by_head(graph, query, options.heads), key, value, is_visible, bias)


def _attend(
    graph: GraphBuilder,
    options: Attention,
    query: str,
    key: str,
    value: str,
    is_visible: str,
    bias: str,
    attention_map: str | None = None,
) -> tuple[str, str]:
    """Add attention of queries (B, H, S, D) to keys and values (B, KV, K, D).

    Args:
        graph: the graph to add nodes to.
        options: heads, scale and softcap.
        query: (B, H, S, D).
        key: (B, KV, K, D).
        value: (B, KV, K, D).
        is_visible: True for the keys of each query, of a shape that broadcasts to (B, H, S, K);
            "" if all keys are visible.
        bias: bias of the scores, of such a shape; "" for none.
        attention_map: name of the attention weights, by default a new one.

    Returns:
        (B, S, H * D), and the attention weights (B, H, S, K).
    """

    def reshaped(x: str, heads: int) -> str:
        """Reshape (B, any, any, N) to (B, heads, any, N), if heads share keys."""
        if options.heads == options.kv_heads:
            return x
        return graph.add("Reshape", x, graph.constant([0, heads, -1, 0], np.int64))

    if options.scale != 1.0:
        query = graph.add("Mul", query, graph.constant(options.scale, np.float32))
    # The queries of all heads that share keys become rows of one product, (B, KV, H / KV * S, D).
    query = reshaped(query, options.kv_heads)
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 1, 3, 2]))
    scores = reshaped(scores, options.heads)  # (B, H, S, K)
    if options.softcap is not None:
        scores = softcap(graph, scores, options.softcap)
    if bias:
        scores = graph.add("Add", scores, bias)
    if is_visible:
        scores = graph.add("Where", is_visible, scores, graph.constant(LOWEST, np.float32))
    attention_map = graph.add("Softmax", scores, output=attention_map, axis=-1)
    attended = graph.add("MatMul", reshaped(attention_map, options.kv_heads), value)
    attended = graph.add("Transpose", reshaped(attended, options.heads), perm=[0, 2, 1, 3])
    return graph.add("Reshape", attended, graph.constant([0, 0, -1], np.int64)), attention_map


def _softcap(options: Attention) -> dict[str, Any]:
    """Return the attribute of an operator that limits the scores, if they are limited."""
    return {} if options.softcap is None else {"softcap": options.softcap}


def by_head(graph: GraphBuilder, x: str, heads: int) -> str:
    """Add the conversion of (B, S, heads * D) to (B, heads, S, D)."""
    split = graph.add("Reshape", x, graph.constant([0, 0, heads, -1], np.int64))
    return graph.add("Transpose", split, perm=[0, 2, 1, 3])


def _positions(graph: GraphBuilder, count: str) -> str:
    """Add the positions (K,) int64 from 0 on; `count` is K, () int64."""
    return graph.add_once("Range", graph.constant(0, np.int64), count, graph.constant(1, np.int64))


def _no_keys(graph: GraphBuilder, query: str, size: int) -> str:
    """Add keys of no token, (B, 0, size), from queries (B, S, any)."""
    start, end = graph.constant([0, 0], np.int64), graph.constant([0, size], np.int64)
    return graph.add("Slice", query, start, end, graph.constant([1, 2], np.int64))


def _before(graph: GraphBuilder, keys: str, lengths: str) -> str:
    """Add a mask (B, 1, 1, K) of keys (B, KV, K, D), True for positions below the length."""
    count = graph.add("Squeeze", graph.add("Shape", keys, start=2, end=3))
    return graph.add("Less", _positions(graph, count), _unsqueezed(graph, lengths, 1, 2, 3))


def _new_positions(graph: GraphBuilder, query: str, cache: Cache) -> str:
    """Add the positions (B, 1, S, 1) int64 of new tokens, which are the last ones of each row."""
    count = graph.add("Squeeze", graph.add("Shape", query, start=1, end=2))
    before = graph.add("Sub", _positions(graph, count), count)  # -S to -1
    offsets = graph.add("Add", before, graph.constant(1, np.int64))
    return graph.add("Add", _last(graph, cache), _unsqueezed(graph, offsets, 1))


def _last(graph: GraphBuilder, cache: Cache) -> str:
    """Add the last position of each row, (B, 1, 1, 1) int64."""
    return _unsqueezed(graph, graph.add_once("Cast", cache.last, to=INT64), 1, 2, 3)


def _unsqueezed(graph: GraphBuilder, x: str, *axes: int) -> str:
    return graph.add_once("Unsqueeze", x, graph.constant(list(axes), np.int64))
