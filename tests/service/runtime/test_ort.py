"""The ONNX Runtime runner over hand-made graphs whose answers can be told by heart.

The decoder keeps a running total: it starts at the sum of the source's ids (from the encoder) or at zero, and each step
adds the token that it reads. It also writes the token into the slot of its place, and shows all slots of both axes that
grow. Real attention graphs are covered where bundles are exported.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from service.bundle import SCHEMA_VERSION, Graph, Limits, Manifest, State, Tokens, record_files
from service.runtime.ort import OnnxRunner

OUTPUTS = ("logits", "logprobs", "top_logprobs", "top_ids")
SHOWN = ("read_shown", "source_shown")


def save(
    path: Path, nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> None:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    slots = helper.make_tensor("slots", TensorProto.INT32, [5], range(5))
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, [one, slots])
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
            helper.make_node("LogSoftmax", ["logits"], ["logprobs"], axis=1),
            helper.make_node("TopK", ["logprobs", "one"], ["top_logprobs", "top_ids"]),
            helper.make_node("Unsqueeze", ["lengths", "one"], ["place"]),
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
        State(input="read", output="read_out", fill="zeros", shape=("target",)),
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
        tokens=Tokens(pad_id=0, start_id=1, end_id=2),
        limits=Limits(max_source_tokens=6, max_target_tokens=5, vocabulary=2),
        encoder=Graph(file="encoder.onnx", inputs=("source_ids", "source_lengths"), outputs=("hidden", "source_sum")),
        step=Graph(
            file="step.onnx",
            inputs=("token_ids", "lengths", *(state.input for state in states)),
            outputs=(*OUTPUTS, "from_source_out", "from_zero_out", "read_out", *SHOWN),
        ),
        states=states,
        attention=(),
        verification=None,
        files=record_files(folder, ("encoder.onnx", "step.onnx")),
    )
    return OnnxRunner(folder, manifest, num_threads=1, max_rows=4)


def admit(runner: OnnxRunner, first: int, *sources: Sequence[int], examples: Sequence[int] | None = None) -> None:
    """Begin rows from the sources, which the encoder reads together; or from some of them."""
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.zeros((len(sources), lengths.max()), np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    runner.fill(first, runner.encode(ids, lengths, ("hidden", "source_sum")), examples or [*range(len(sources))])


def step(
    runner: OnnxRunner, tokens: Sequence[int], outputs: Sequence[str] = OUTPUTS, place: int = 0
) -> dict[str, list[object]]:
    """Read the tokens, each of them at the same place of its row."""
    rows = len(tokens)
    given = runner.step(np.array(tokens, np.int64), np.full(rows, place, np.int32), np.ones(rows, np.int32), outputs)
    return {name: array.tolist() for name, array in given.items()}


def test_a_state_of_fixed_size_goes_from_step_to_step(runner: OnnxRunner) -> None:
    admit(runner, 0, [3, 4])
    assert step(runner, [10])["logits"] == [[17, 10]]
    assert step(runner, [100])["logits"] == [[117, 110]]


def test_a_state_that_grows_with_the_target_is_written_where_it_lies(runner: OnnxRunner) -> None:
    admit(runner, 0, [3], [4])
    step(runner, [10, 20])
    step(runner, [11, 21], place=1)
    assert step(runner, [12, 22], SHOWN, place=2)["read_shown"] == [[10, 11, 12, 0, 0], [20, 21, 22, 0, 0]]


def test_rows_keep_their_own_states_and_a_moved_row_goes_on(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    admit(runner, 1, [2])
    assert step(runner, [10, 20])["logits"] == [[11, 10], [22, 20]]
    runner.move(1, 0, target_tokens=1, source_tokens=1)
    assert step(runner, [5])["logits"] == [[27, 25]]


def test_a_move_takes_all_states_and_no_more_slots_than_are_used(runner: OnnxRunner) -> None:
    admit(runner, 0, [1, 1, 1, 1, 1, 1])
    admit(runner, 1, [7, 8, 9])
    for place in range(3):
        step(runner, [10 + place, 20 + place], place=place)
    runner.move(1, 0, target_tokens=2, source_tokens=3)
    given = step(runner, [5], (*OUTPUTS, *SHOWN), place=4)
    assert given["logits"] == [[24 + 63 + 5, 63 + 5]]
    assert given["source_shown"] == [[7, 8, 9, 1, 1, 1]]
    assert given["read_shown"] == [[20, 21, 12, 0, 5]]


def test_several_rows_begin_from_one_example(runner: OnnxRunner) -> None:
    admit(runner, 0, [5])
    admit(runner, 1, [1], [2, 3], examples=[1, 1, 0])
    assert step(runner, [10, 20, 30, 40])["logits"] == [[15, 10], [25, 20], [35, 30], [41, 40]]
    shown = step(runner, [0] * 4, SHOWN)["source_shown"]
    assert shown == [[5, 0, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_a_branch_takes_over_what_steps_change_and_nothing_else(runner: OnnxRunner) -> None:
    admit(runner, 0, [1], [2], [3], [4])
    for place in range(3):
        step(runner, [10 + place, 20 + place, 30 + place, 40 + place], place=place)
    runner.branch([2, 2], [0, 3], target_tokens=2)
    given = step(runner, [5, 6, 7, 8], (*OUTPUTS, *SHOWN), place=4)
    assert given["logits"] == [[101, 98], [71, 69], [103, 100], [104, 101]]  # 3 + 30 + 31 + 32 + 5, and so on
    first_slots = [row[0] for row in given["source_shown"]]  # type: ignore[index]
    assert first_slots == [1, 2, 3, 4]  # rows that branch have the same source, so it is not copied
    assert given["read_shown"] == [[30, 31, 12, 0, 5], [20, 21, 22, 0, 6], [30, 31, 32, 0, 7], [30, 31, 42, 0, 8]]


def test_rows_that_branch_go_their_own_ways(runner: OnnxRunner) -> None:
    admit(runner, 0, [1], examples=[0, 0])
    step(runner, [10, 99])
    runner.branch([0], [1], target_tokens=1)
    step(runner, [2, 3], place=1)
    assert step(runner, [0, 0], SHOWN, place=2)["read_shown"] == [[10, 2, 0, 0, 0], [10, 3, 0, 0, 0]]


def test_a_row_that_is_filled_again_remembers_nothing(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    step(runner, [10])
    admit(runner, 0, [7])
    assert step(runner, [1])["logits"] == [[8, 1]]


def test_only_the_outputs_that_are_asked_for_come_back(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    given = step(runner, [4], ("top_ids", "top_logprobs"))
    assert set(given) == {"top_ids", "top_logprobs"}
    assert given["top_ids"] == [[0]]
    assert given["top_logprobs"] == [[pytest.approx(-0.31326, abs=1e-5)]]  # 5 beside 4
    assert set(step(runner, [4], ("logprobs",))) == {"logprobs"}


def test_outputs_of_free_size_come_back_beside_fixed_ones(runner: OnnxRunner) -> None:
    admit(runner, 0, [1])
    for token in (4, 5):
        given = step(runner, [token], ("read_shown", "top_ids"))
        assert given == {"read_shown": [[token, 0, 0, 0, 0]], "top_ids": [[0]]}


def test_a_state_that_grows_with_the_source_lies_at_the_beginning_of_its_row(runner: OnnxRunner) -> None:
    admit(runner, 2, [5, 6, 7])
    shown = step(runner, [0] * 4, SHOWN)["source_shown"]
    assert shown == [[0] * 6, [0] * 6, [5, 6, 7, 0, 0, 0], [0] * 6]


def test_warming_up_leaves_nothing_behind(runner: OnnxRunner) -> None:
    runner.warm_up(max_batch_tokens=24)
    admit(runner, 0, [3])
    assert step(runner, [1])["logits"] == [[4, 1]]
