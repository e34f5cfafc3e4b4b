"""The graphs of a recurrent encoder-decoder: encoder and one decoder step.

`sightline.model.architectures.recurrent` names the equations.

Axes: B batch, S source, E embedding, H decoder state, A annotation, K key, V vocabulary. In the
decoder graph, S is the longest source of the batch, rounded up to a multiple of
`sightline.export.graphs.nodes.SOURCE_BLOCK`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from sightline.base.bundle import AttentionMaps, State, Window
from sightline.export.graphs.builder import GraphBuilder, WeightFile
from sightline.export.graphs.model import Graphs
from sightline.export.graphs.nodes import (
    FLOAT,
    INT32,
    INT64,
    LOWEST,
    products,
    scores,
    token_mask,
    weighted_sum,
    whole_blocks,
    with_positions,
)
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.config import RecurrentConfig
from sightline.model.layers.recurrent_attention import AdditiveScore, LocationScore

# Order of the gates. ONNX has z, r, h for a GRU and i, o, f, c for an LSTM; PyTorch has r, z, n and
# i, f, g, o.
GATES = {"gru": (1, 0, 2), "lstm": (0, 3, 1, 2)}
# Inputs of the decoder graph for the fields of
# `sightline.model.architectures.recurrent.RecurrentState`.
STATE_INPUTS = {"hidden": "state", "cell": "cell", "feed": "feed"}


def build(model: RecurrentModel, file: WeightFile) -> Graphs:
    """Build the graphs of a model; their constants are added to `file`."""
    return Graphs(
        encoder_graph(model, file),
        _Step(model, file).build(),
        states(model),
        attention_maps(model.config),
    )


def states(model: RecurrentModel) -> tuple[State, ...]:
    """Describe the states: outputs of the encoder, and states that the decoder updates."""
    config, made = model.config, []
    size = config.annotation_size
    if config.attention == "none" and config.feeds_context:
        made.append(State(input="context", init="encoder", encoder_output="context", shape=(size,)))
    elif config.attention != "none":
        made.append(State(input="annotations", init="encoder", encoder_output="hidden", shape=("source", size)))
    if model.score is not None and model.score.annotation is not None:
        size = model.score.annotation.out_features
        made.append(State(input="keys", init="encoder", encoder_output="keys", shape=("source", size)))
    hidden = (config.decoder_size,)
    state, cell, feed = STATE_INPUTS.values()
    made.append(State(input=state, output="state_out", init="encoder", encoder_output="first_state", shape=hidden))
    if config.cell == "lstm":
        made.append(State(input=cell, output="cell_out", init="zeros", shape=hidden))
    if config.input_feeding:
        made.append(State(input=feed, output="feed_out", init="zeros", shape=(config.embedding_size,)))
    return tuple(made)


def attention_maps(config: RecurrentConfig) -> tuple[AttentionMaps, ...]:
    """Describe the attention weights: one layer and one head of cross-attention, or none."""
    if config.attention == "none":
        return ()
    centres: Mapping[str, Literal["monotonic", "predicted"]] = {"local-m": "monotonic", "local-p": "predicted"}
    window = None
    if config.window != "global":
        window = Window(centre=centres[config.window], radius=config.window_radius)
    is_normalized = config.window != "local-p"
    cross = AttentionMaps(
        kind="cross",
        outputs=("cross_attention",),
        layers=1,
        heads=1,
        window=window,
        normalized=is_normalized,
        by_position=config.attention == "location",
    )
    return (cross,)


def encoder_graph(model: RecurrentModel, weights: WeightFile) -> onnx.ModelProto:
    """Build the encoder graph.

    It maps `source_ids` (B, S) and `source_lengths` (B,) to `hidden` (B, S, A), which is 0 at
    padding, and the initial states.
    """
    graph, config = GraphBuilder("encoder", weights), model.config
    ids = graph.input("source_ids", INT64, ("batch", "source"))
    lengths = graph.input("source_lengths", INT32, ("batch",))
    embedded = _scaled_embedding(graph, model.embedding.weight, ids)  # (B, S, E)
    by_time = graph.add("Transpose", embedded, perm=[1, 0, 2])  # (S, B, E)
    suffixes = ("_l0", "_l0_reverse") if config.bidirectional else ("_l0",)
    outputs, last, _ = _recurrence(graph, "encoder", config.cell, model.encoder, suffixes, by_time, lengths)
    by_row = graph.add("Transpose", outputs, perm=[2, 0, 1, 3])  # (B, S, directions, A / directions)
    shape = graph.constant([0, 0, config.annotation_size], np.int64)
    hidden = graph.output("hidden", FLOAT, ("batch", "source", config.annotation_size))
    graph.add("Reshape", by_row, shape, output=hidden)
    if model.score is not None and (projection := model.score.annotation) is not None:
        keys = graph.output("keys", FLOAT, ("batch", "source", projection.out_features))
        weight = graph.weight("score.annotation.weight", projection.weight.T)
        graph.add("MatMul", hidden, weight, output=keys)
    by_direction = graph.add("Transpose", last, perm=[1, 0, 2])  # (B, directions, A / directions)
    last_states = graph.constant([0, config.annotation_size], np.int64)
    if config.attention == "none" and config.feeds_context:
        flat = graph.output("context", FLOAT, ("batch", config.annotation_size))
        graph.add("Reshape", by_direction, last_states, output=flat)
    if config.feeds_context:
        first = graph.add("Gather", by_direction, graph.constant(-1, np.int64), axis=1)  # the backward state
    else:
        first = graph.add("Reshape", by_direction, last_states)
    state = graph.output("first_state", FLOAT, ("batch", config.decoder_size))
    graph.add("Tanh", _linear(graph, "bridge", first, model.bridge), output=state)
    return graph.build()


def _linear(graph: GraphBuilder, name: str, x: str, layer: nn.Linear) -> str:
    """Add a linear layer."""
    product = graph.add("MatMul", x, graph.weight(f"{name}.weight", layer.weight.T))
    return product if layer.bias is None else graph.add("Add", product, graph.weight(f"{name}.bias", layer.bias))


def _scaled_embedding(graph: GraphBuilder, table: Tensor, ids: str) -> str:
    """Look up embeddings and multiply them by the square root of their width."""
    # The table itself is not scaled, because the output projection uses the same tensor.
    embedded = graph.add("Gather", graph.weight("embedding", table), ids)
    return graph.add("Mul", embedded, graph.constant(math.sqrt(table.size(1)), np.float32))


class _Step:
    """Builder of the decoder graph, which runs one step; see `sightline.base.bundle.Graph`."""

    def __init__(self, model: RecurrentModel, weights: WeightFile) -> None:
        self._model = model
        self._config = model.config
        self._graph = graph = GraphBuilder("step", weights)
        self._token_ids = graph.input("token_ids", INT64, ("batch",))
        self._lengths = graph.input("lengths", INT32, ("batch",))
        self._source_lengths = graph.input("source_lengths", INT32, ("batch",))
        for state in states(model):
            graph.input(state.input, FLOAT, ("batch", *state.shape))

    def build(self) -> onnx.ModelProto:
        graph, config = self._graph, self._config
        embedded = _scaled_embedding(graph, self._model.embedding.weight, self._token_ids)  # (B, E)
        if config.query == "previous":
            context = self._attend("state")
            contexts = [context] if context else []
            hidden = self._run_cell(graph.add("Concat", embedded, *contexts, axis=1))
            readout = graph.add("Concat", hidden, embedded, *contexts, axis=1)
        else:
            inputs = graph.add("Concat", embedded, "feed", axis=1) if config.input_feeding else embedded
            hidden = self._run_cell(inputs)
            readout = graph.add("Concat", self._attend(hidden), hidden, axis=1)
        output = self._read_out(readout)
        if config.input_feeding:
            graph.add("Identity", output, output=graph.output("feed_out", FLOAT, ("batch", config.embedding_size)))
        gain = self._model.readout.gain
        features = output if gain == 1 else graph.add("Mul", output, graph.constant(gain, np.float32))
        table = self._model.embedding.weight
        scores(graph, features, [graph.weight("embedding", table)], table.size(0))
        return graph.build()

    def _run_cell(self, inputs: str) -> str:
        """Add the update of the state with inputs (B, I); return the new state (B, H)."""
        graph, config = self._graph, self._config
        first = graph.constant([0], np.int64)
        initial = [
            graph.add("Unsqueeze", name, first) for name in ("state", "cell")[: 2 if config.cell == "lstm" else 1]
        ]
        by_time = graph.add("Unsqueeze", inputs, first)  # (1, B, I)
        _, hidden, cell = _recurrence(graph, "decoder", config.cell, self._model.cell, ("",), by_time, "", *initial)
        outputs = {"state_out": hidden, "cell_out": cell} if config.cell == "lstm" else {"state_out": hidden}
        for name, value in outputs.items():
            graph.add("Squeeze", value, first, output=graph.output(name, FLOAT, ("batch", config.decoder_size)))
        return "state_out"

    def _attend(self, query: str) -> str:
        """Add the attention; return the context vector (B, A), or "" if steps do not read it."""
        if self._config.attention == "none":
            return "context" if self._config.feeds_context else ""
        graph = self._graph
        weights = self._attention_weights(query)
        cross = graph.output("cross_attention", FLOAT, ("batch", 1, 1, "longest"))
        graph.add("Unsqueeze", weights, graph.constant([1, 2], np.int64), output=cross)
        _, is_token = self._tokens
        return weighted_sum(graph, weights, self._truncate("annotations"), is_token)

    def _truncate(self, state: str) -> str:
        """Truncate a state (B, buffer, ...) to the longest source of the batch, (B, S, ...)."""
        return self._graph.once(f"truncated {state}", lambda: with_positions(self._graph, state, self._size))

    @functools.cached_property
    def _size(self) -> str:
        """Name of S, () int64: the longest source of the batch, rounded up to whole blocks."""
        longest = self._graph.add("ReduceMax", self._source_lengths, keepdims=0)
        return whole_blocks(self._graph, self._graph.add("Cast", longest, to=INT64))

    @functools.cached_property
    def _tokens(self) -> tuple[str, str]:
        """Positions and mask of `sightline.export.graphs.nodes.token_mask`."""
        return token_mask(self._graph, self._graph.add("Cast", self._source_lengths, to=INT64), self._size)

    def _attention_weights(self, query: str) -> str:
        """Add the attention weights (B, S) of `sightline.model.layers.recurrent_attention.align`.

        With hard attention, the largest weight becomes 1 and all others 0.
        """
        graph, config = self._graph, self._config
        positions, mask = self._tokens
        distances = ""
        if config.window != "global":
            centres = graph.add("Unsqueeze", self._centres(query), graph.constant([1], np.int64))
            distances = graph.add("Sub", graph.add("Cast", positions, to=FLOAT), centres)
            is_near = graph.add(
                "LessOrEqual", graph.add("Abs", distances), graph.constant(float(config.window_radius), np.float32)
            )
            mask = graph.add("And", mask, is_near)
        lowest = graph.constant(LOWEST, np.float32)
        weights = graph.add("Softmax", graph.add("Where", mask, self._score(query), lowest), axis=-1)
        if config.window == "local-p":
            width = graph.constant(-2 * (config.window_radius / 2) ** 2, np.float32)
            falloff = graph.add("Exp", graph.add("Div", graph.add("Mul", distances, distances), width))
            weights = graph.add("Mul", weights, falloff)
        if config.selection == "soft":
            return weights
        best = graph.add("ArgMax", weights, axis=1, keepdims=1)
        return graph.add("Cast", graph.add("Equal", positions, best), to=FLOAT)

    def _score(self, query: str) -> str:
        """Add the scores (B, S) of a state (B, H)."""
        graph, config, score = self._graph, self._config, self._model.score
        assert score is not None, "the model has attention"
        if score.state is not None:
            query = _linear(graph, "score.state", query, score.state)
        if isinstance(score, LocationScore):
            return self._truncate(query)
        keys = self._truncate("annotations" if score.annotation is None else "keys")
        query = graph.add("Unsqueeze", query, graph.constant([1], np.int64))  # (B, 1, K)
        if isinstance(score, AdditiveScore):
            inner = graph.add("Tanh", graph.add("Add", query, keys))  # (B, S, K)
            return products(graph, graph.weight("score.weights.weight", score.weights.weight.unsqueeze(0)), inner)
        unscaled = products(graph, query, keys)
        factor = score.scale(config.annotation_size if score.annotation is None else score.annotation.out_features)
        return unscaled if factor == 1 else graph.add("Mul", unscaled, graph.constant(factor, np.float32))

    def _centres(self, query: str) -> str:
        """Add the window centre of each row, (B,)."""
        graph, position = self._graph, self._model.position
        lengths = graph.add("Cast", self._source_lengths, to=FLOAT)
        if position is None:
            end = graph.add("Sub", lengths, graph.constant(1.0, np.float32))
            return graph.add("Min", end, graph.add("Cast", self._lengths, to=FLOAT))
        inner = graph.add("Tanh", _linear(graph, "position.inner", query, position.inner))
        gain = graph.constant(position.gain, np.float32)
        share = graph.add("Sigmoid", graph.add("Mul", _linear(graph, "position.outer", inner, position.outer), gain))
        return graph.add("Mul", lengths, graph.add("Squeeze", share, graph.constant([1], np.int64)))

    def _read_out(self, inputs: str) -> str:
        graph, readout = self._graph, self._model.readout
        inner = _linear(graph, "readout", inputs, readout.inner)
        if not readout.has_maxout:
            return graph.add("Tanh", inner)
        pairs = graph.add("Reshape", inner, graph.constant([0, -1, 2], np.int64))
        return graph.add("ReduceMax", pairs, graph.constant([2], np.int64), keepdims=0)


def _recurrence(
    graph: GraphBuilder,
    name: str,
    kind: Literal["gru", "lstm"],
    module: nn.RNNBase | nn.RNNCellBase,
    suffixes: Sequence[str],
    inputs: str,
    lengths: str,
    *initial: str,
) -> tuple[str, str, str]:
    """Add a GRU or LSTM over inputs (T, B, I).

    The names of the weights of `module` end with one of `suffixes` for each direction.

    Returns:
        Outputs (T, directions, B, H), and the last hidden and cell states (directions, B, H). A GRU
        returns its hidden state twice.
    """
    order = GATES[kind]

    def packed(*names: str) -> Tensor:
        """Stack weights as (directions, gates of all names * H, ...)."""
        gates = ([getattr(module, field + suffix).chunk(len(order)) for field in names] for suffix in suffixes)
        return torch.stack([torch.cat([parts[index] for parts in tensors for index in order]) for tensors in gates])

    weights = [
        graph.weight(f"{name}.weight_ih", packed("weight_ih")),
        graph.weight(f"{name}.weight_hh", packed("weight_hh")),
        graph.weight(f"{name}.bias", packed("bias_ih", "bias_hh")),
    ]
    outputs = [graph.unique(part) for part in ("outputs", "state", "cell")][: 3 if kind == "lstm" else 2]
    attributes: dict[str, Any] = {"linear_before_reset": 1} if kind == "gru" else {}
    graph.add_multi(
        kind.upper(),
        [inputs, *weights, lengths, *initial],
        outputs,
        direction="bidirectional" if len(suffixes) == 2 else "forward",
        hidden_size=module.hidden_size,
        **attributes,
    )
    return outputs[0], outputs[1], outputs[-1]
