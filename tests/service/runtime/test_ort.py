"""The ONNX Runtime runner over hand-made graphs whose answers can be told by heart.

The decoder keeps a running total: it starts at the sum of the source's ids (from the encoder) or at zero, and each step
adds the token that it reads. Real attention graphs are covered where bundles are exported.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from service.bundle import Graph, Limits, Manifest, State, Tokens, record_files
from service.runtime.ort import OnnxRunner, RuntimeUnavailableError, choose_provider

OUTPUTS = ("logits", "top_logits", "top_ids", "log_normalizer")


def save(
    path: Path, nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> None:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, [one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("running-total")
    save(
        path / "encoder.onnx",
        [
            helper.make_node("Cast", ["source_ids"], ["hidden"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["hidden", "one"], ["source_sum"], keepdims=1),
        ],
        [value("source_ids", TensorProto.INT64, "B", "S"), value("source_lengths", TensorProto.INT32, "B")],
        [value("hidden", TensorProto.FLOAT, "B", "S"), value("source_sum", TensorProto.FLOAT, "B", 1)],
    )
    save(
        path / "step.onnx",
        [
            helper.make_node("Cast", ["token_ids"], ["token"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["token", "one"], ["column"]),
            helper.make_node("Add", ["from_source", "column"], ["from_source_out"]),
            helper.make_node("Add", ["from_zero", "column"], ["from_zero_out"]),
            helper.make_node("Concat", ["from_source_out", "from_zero_out"], ["logits"], axis=1),
            helper.make_node("TopK", ["logits", "one"], ["top_logits", "top_ids"]),
            helper.make_node("ReduceLogSumExp", ["logits", "one"], ["log_normalizer"], keepdims=0),
            helper.make_node("Shape", ["hidden_state"], ["seen_shape"]),
            helper.make_node("Expand", ["column", "seen_shape"], ["seen"]),
        ],
        [
            value("token_ids", TensorProto.INT64, "B"),
            value("from_source", TensorProto.FLOAT, "B", 1),
            value("from_zero", TensorProto.FLOAT, "B", 1),
            value("hidden_state", TensorProto.FLOAT, "B", "S"),
        ],
        [
            value("logits", TensorProto.FLOAT, "B", 2),
            value("top_logits", TensorProto.FLOAT, "B", 1),
            value("top_ids", TensorProto.INT64, "B", 1),
            value("log_normalizer", TensorProto.FLOAT, "B"),
            value("from_source_out", TensorProto.FLOAT, "B", 1),
            value("from_zero_out", TensorProto.FLOAT, "B", 1),
            value("seen", TensorProto.FLOAT, "B", "S"),
        ],
    )
    return path


@pytest.fixture
def runner(folder: Path) -> OnnxRunner:
    states = (
        State(
            input="from_source",
            output="from_source_out",
            fill="encoder",
            encoder_output="source_sum",
            shape=(1,),
        ),
        State(input="from_zero", output="from_zero_out", fill="zeros", shape=(1,)),
        State(input="hidden_state", fill="encoder", encoder_output="hidden", shape=("source",)),
    )
    manifest = Manifest(
        schema_version=1,
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
        tokens=Tokens(pad_id=0, start_id=1, end_id=2),
        limits=Limits(max_source_tokens=6, max_target_tokens=5, vocabulary=2),
        encoder=Graph(file="encoder.onnx", inputs=("source_ids", "source_lengths"), outputs=("hidden", "source_sum")),
        step=Graph(
            file="step.onnx",
            inputs=("token_ids", "from_source", "from_zero", "hidden_state"),
            outputs=(*OUTPUTS, "from_source_out", "from_zero_out", "seen"),
        ),
        states=states,
        attention=(),
        verification=None,
        files=record_files(folder, ("encoder.onnx", "step.onnx")),
    )
    return OnnxRunner(folder, manifest, num_threads=1, max_rows=4)


def admit(runner: OnnxRunner, row: int, source: Sequence[int]) -> None:
    ids = np.array([source], np.int64)
    encoded = runner.encode(ids, np.array([len(source)], np.int32), ("hidden", "source_sum"))
    runner.fill(row, encoded, 0)


def step(runner: OnnxRunner, tokens: Sequence[int], outputs: Sequence[str] = OUTPUTS) -> dict[str, list[object]]:
    rows = len(tokens)
    given = runner.step(np.array(tokens, np.int64), np.zeros(rows, np.int32), np.ones(rows, np.int32), outputs)
    return {name: array.tolist() for name, array in given.items()}


def test_a_state_of_fixed_size_goes_from_step_to_step(runner: OnnxRunner) -> None:
    admit(runner, 0, [3, 4])
    assert step(runner, [10])["logits"] == [[17, 10]]
    assert step(runner, [100])["logits"] == [[117, 110]]


def test_rows_keep_their_own_states_and_a_moved_row_goes_on(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    admit(runner, 1, [2])
    assert step(runner, [10, 20])["logits"] == [[11, 10], [22, 20]]
    runner.move(1, 0)
    assert step(runner, [5])["logits"] == [[27, 25]]


def test_a_row_that_is_filled_again_remembers_nothing(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    step(runner, [10])
    admit(runner, 0, [7])
    assert step(runner, [1])["logits"] == [[8, 1]]


def test_only_the_outputs_that_are_asked_for_come_back(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    assert step(runner, [4], ("top_ids", "top_logits")) == {"top_ids": [[0]], "top_logits": [[5]]}
    assert set(step(runner, [4], ("log_normalizer",))) == {"log_normalizer"}


def test_outputs_of_free_size_come_back_beside_fixed_ones(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    for token in (4, 5):
        given = step(runner, [token], ("seen", "top_ids"))
        assert given["seen"] == [[token] * runner.manifest.limits.max_source_tokens]
        assert given["top_ids"] == [[0]]


def test_a_state_that_grows_with_the_source_lies_at_the_beginning_of_its_row(runner: OnnxRunner) -> None:
    admit(runner, 2, [5, 6, 7])
    (buffer,) = (buffer for buffer in runner._states if buffer.state.input == "hidden_state")
    assert buffer.rows[2].tolist() == [5, 6, 7, 0, 0, 0]
    assert not buffer.rows[:2].any()


def test_warming_up_leaves_nothing_behind(runner: OnnxRunner) -> None:
    runner.warm_up(max_batch_tokens=24)
    admit(runner, 0, [3])
    assert step(runner, [1])["logits"] == [[4, 1]]


def test_cuda_is_refused_by_name_where_the_runtime_lacks_it() -> None:
    assert choose_provider("cpu") == "cpu"
    assert choose_provider("auto") == "cpu"
    with pytest.raises(RuntimeUnavailableError, match="'gpu'"):
        choose_provider("cuda")
