"""Hand-made graphs with results that are easy to compute, for the ONNX Runtime runner.

The decoder keeps a running total, which starts at the sum of the source ids (from the encoder) or
at zero; each step adds its input token. It also writes the token to its position in a state, and
returns all positions of the source and target axes. Tests of exported bundles cover real attention
graphs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from sightline.base.bundle import SCHEMA_VERSION, Graph, Limits, Manifest, State, Tokens
from sightline.base.bundle_files import record_files
from sightline.service.runtime.ort import OnnxRunner

OUTPUTS = ("logits", "logprobs", "top_logprobs", "top_ids")
SHOWN = ("read_shown", "source_shown")


def save(
    path: Path, nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> None:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    first, by_one = (helper.make_tensor(name, TensorProto.INT32, [], [n]) for n, name in enumerate(("first", "by_one")))
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, [one, first, by_one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def write_graphs(folder: Path) -> None:
    save(
        folder / "encoder.onnx",
        [
            helper.make_node("Cast", ["source_ids"], ["hidden"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["hidden", "one"], ["source_sum"], keepdims=1),
        ],
        [value("source_ids", TensorProto.INT64, "B", "S"), value("source_lengths", TensorProto.INT32, "B")],
        [value("hidden", TensorProto.FLOAT, "B", "S"), value("source_sum", TensorProto.FLOAT, "B", 1)],
    )
    save(
        folder / "step.onnx",
        [
            helper.make_node("Cast", ["token_ids"], ["token"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["token", "one"], ["column"]),
            helper.make_node("Add", ["from_source", "column"], ["from_source_out"]),
            helper.make_node("Add", ["from_zero", "column"], ["from_zero_out"]),
            helper.make_node("Concat", ["from_source_out", "from_zero_out"], ["logits"], axis=1),
            helper.make_node("LogSoftmax", ["logits"], ["logprobs"], axis=1),
            helper.make_node("TopK", ["logprobs", "one"], ["top_logprobs", "top_ids"]),
            helper.make_node("Unsqueeze", ["lengths", "one"], ["place"]),
            helper.make_node("Shape", ["read"], ["count"], start=1, end=2),
            helper.make_node("Cast", ["count"], ["count32"], to=TensorProto.INT32),
            helper.make_node("Squeeze", ["count32"], ["slots_end"]),
            helper.make_node("Range", ["first", "slots_end", "by_one"], ["slots"]),
            helper.make_node("Equal", ["place", "slots"], ["is_place"]),
            helper.make_node("Where", ["is_place", "column", "read"], ["read_out"]),
            helper.make_node("Identity", ["read_out"], ["read_shown"]),
            helper.make_node("Identity", ["hidden_state"], ["source_shown"]),
        ],
        [
            value("token_ids", TensorProto.INT64, "B"),
            value("lengths", TensorProto.INT32, "B"),
            value("from_source", TensorProto.FLOAT, "B", 1),
            value("from_zero", TensorProto.FLOAT, "B", 1),
            value("hidden_state", TensorProto.FLOAT, "B", "S"),
            value("read", TensorProto.FLOAT, "B", "T"),
        ],
        [
            value("logits", TensorProto.FLOAT, "B", 2),
            value("logprobs", TensorProto.FLOAT, "B", 2),
            value("top_logprobs", TensorProto.FLOAT, "B", 1),
            value("top_ids", TensorProto.INT64, "B", 1),
            value("from_source_out", TensorProto.FLOAT, "B", 1),
            value("from_zero_out", TensorProto.FLOAT, "B", 1),
            value("read_out", TensorProto.FLOAT, "B", "T"),
            value("read_shown", TensorProto.FLOAT, "B", "T"),
            value("source_shown", TensorProto.FLOAT, "B", "S"),
        ],
    )


def running_total(
    folder: Path, max_source_tokens: int, max_target_tokens: int, max_rows: int = 4, **settings: int
) -> OnnxRunner:
    """Rows with the graphs of `write_graphs`."""
    states = (
        State(input="from_source", output="from_source_out", init="encoder", encoder_output="source_sum", shape=(1,)),
        State(input="from_zero", output="from_zero_out", init="zeros", shape=(1,)),
        State(input="hidden_state", init="encoder", encoder_output="hidden", shape=("source",)),
        State(input="read", output="read_out", init="zeros", shape=("target",)),
    )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name="running-total",
        architecture="none",
        description="",
        license="Apache-2.0",
        created=0,
        dtype="float32",
        tasks=("generate",),
        parameters=0,
        source_tokenizer="tokenizer.json",
        target_tokenizer="tokenizer.json",
        tokens=Tokens(pad_id=0, start_ids=(1,), end_ids=(2,)),
        limits=Limits(max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens, vocabulary=2),
        encoder=Graph(file="encoder.onnx", inputs=("source_ids", "source_lengths"), outputs=("hidden", "source_sum")),
        decoder=Graph(
            file="step.onnx",
            inputs=("token_ids", "lengths", *(state.input for state in states)),
            outputs=(*OUTPUTS, "from_source_out", "from_zero_out", "read_out", *SHOWN),
        ),
        states=states,
        attention=(),
        verification=None,
        files=record_files(folder, ("encoder.onnx", "step.onnx")),
    )
    return OnnxRunner(folder, manifest, num_threads=1, max_rows=max_rows, **settings)


def admit(runner: OnnxRunner, first: int, *sources: Sequence[int], examples: Sequence[int] | None = None) -> None:
    """Encode the sources in one batch and initialize rows from all or some of them."""
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.zeros((len(sources), lengths.max()), np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    runner.init_rows(
        first, runner.run_encoder(ids, lengths, ("hidden", "source_sum")), examples or [*range(len(sources))]
    )


def step(
    runner: OnnxRunner, tokens: Sequence[int], outputs: Sequence[str] = OUTPUTS, position: int | Sequence[int] = 0
) -> dict[str, Any]:
    """Run a step with the tokens at given positions; return the outputs as lists."""
    rows = len(tokens)
    positions = np.broadcast_to(np.array(position, np.int32), rows)
    given = runner.step(np.array(tokens, np.int64), positions, np.ones(rows, np.int32), outputs)
    return {name: array.tolist() for name, array in given.items()}
