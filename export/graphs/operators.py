"""Attention as nodes of a graph.

Axes: B batch, S tokens of one call, K keys, T positions of a cache, P positions of the model, H
heads, KV heads of keys and values, D width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sightline.export.families.description import Attention
from sightline.export.graphs.builder import CONTRIB, GraphBuilder

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


def attention(
    graph: GraphBuilder, options: Attention, parts: Sequence[str], attention_map: str, lengths: str = "", bias: str = ""
) -> str:
    """Add attention (B, S, H * D) of an encoder, in which all tokens see each other.

    Args:
        options: heads, scale and softcap; other options are not read.
        parts: queries (B, S, H * D), and keys and values (B, K, KV * D).
        attention_map: name of the attention weights (B, H, S, K).
        lengths: number of keys of each row, (B,) int64; "" if all rows have K.
        bias: bias of the scores, (1, H, S, K), (1, 1, S, K) or (B, H, S, K); "" for none.
    """
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

    The caller of the graph binds `present` to the memory of the cache, which is updated in place. A
    batch with several new tokens has one row.

    Args:
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


def cross_attention(graph: GraphBuilder, options: Attention, query: str, memory: Cache) -> tuple[str, str]:
    """Add attention of queries (B, S, H * D) to the tokens of a source.

    Of the options, only heads and scale are read.

    Returns:
        (B, S, H * D), and the attention weights (B, H, S, K). K is `memory.longest`; columns beyond
        the last position of a row are undefined.
    """
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


def split_heads(graph: GraphBuilder, packed: str, options: Attention, head_size: int) -> list[str]:
    """Split (B, S, (H + 2 * KV) * D) into queries, keys and values."""
    parts = [graph.unique(part) for part in ("query", "key", "value")]
    sizes = [count * head_size for count in (options.heads, options.kv_heads, options.kv_heads)]
    graph.add_multi("Split", [packed, graph.constant(sizes, np.int64)], parts, axis=-1)
    return parts


def _softcap(options: Attention) -> dict[str, Any]:
    """Return the attribute of an operator that limits the scores, if they are limited."""
    return {} if options.softcap is None else {"softcap": options.softcap}


def by_head(graph: GraphBuilder, x: str, heads: int) -> str:
    """Add the conversion of (B, S, heads * D) to (B, heads, S, D)."""
    split = graph.add("Reshape", x, graph.constant([0, 0, heads, -1], np.int64))
    return graph.add("Transpose", split, perm=[0, 2, 1, 3])


def _no_keys(graph: GraphBuilder, query: str, size: int) -> str:
    """Add keys of no token, (B, 0, size), from queries (B, S, any)."""
    start, end = graph.constant([0, 0], np.int64), graph.constant([0, size], np.int64)
    return graph.add("Slice", query, start, end, graph.constant([1, 2], np.int64))
