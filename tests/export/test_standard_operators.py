"""Graphs of standard operators are valid ONNX, and compute what those of contrib operators do."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers.activations import ACT2FN

from sightline.__main__ import main as sightline
from sightline.base.bundle import Ops, read_bundle
from sightline.export.check.reference import activate
from sightline.export.families import firefox, trained
from sightline.export.families.description import Activation, Description
from sightline.export.families.table import FAMILIES, describe, find_family
from sightline.export.families.values import ACTIVATIONS
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import CONTRIB, STANDARD_OPSET, GraphBuilder, WeightFile
from sightline.export.graphs.decoder import decoder_graph, states
from sightline.export.graphs.encoder import encoder_graph
from sightline.export.graphs.layers import activation
from sightline.export.graphs.nodes import FLOAT
from sightline.export.graphs.similar import similar_graph
from sightline.export.sources.checkpoint import Tensors, open_folder
from sightline.export.sources.firefox.shortlist import Shortlist
from sightline.model.architectures.factory import build_model
from sightline.model.config import EncoderConfig
from sightline.model.float32 import ELEMENTARY, UNIT_ROUNDOFF, max_abs, rounding_error
from tests.equality.systems import MakeConfig, small
from tests.export import (
    decoder_models,
    encoder_models,
    imported,
    test_bart_classifier,
    test_encoder_families,
    test_firefox_models,
    test_jina,
    test_seq2seq_families,
)

Array = NDArray[Any]
SOURCES = (11, 1, 6)  # lengths of the texts of an encoder
READ = (11, 0, 7)  # tokens of each row that are read alone, before steps of all rows
CHUNK = 4  # of a prompt of a decoder-only model
STEPS = 3
POSITIONS = max(READ) + STEPS + 2  # of a cache; some are never used
# One system of each architecture and kind of attention that training runs have.
TRAINED = ("transformer", "single-head-without-weights", "linformer", "sentiment", "chat-gatt")


@dataclass(frozen=True)
class Model:
    """A model with random weights."""

    description: Description
    weights: Weights


@dataclass(frozen=True)
class Graph:
    """A graph in a runtime, which is a function from all inputs to all outputs in their order."""

    path: Path
    names: tuple[str, ...]
    run: Callable[[Mapping[str, Array]], Sequence[Array]]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self.names, self.run(inputs), strict=True))


def hugging_face(hf: Any, folder: Path) -> Model:
    hf.save_pretrained(folder)
    return read(folder)


def read(folder: Path) -> Model:
    with open_folder(folder) as opened:
        stored, config = opened.tensors, opened.config
        tensors = Tensors.of_arrays({name: stored.read(name) for name in stored.names if not name.endswith("_ids")})
        family = find_family(config)
        return Model(*describe(family, config, tensors, encoder_models.TOKENIZER))


def encoder(name: str, task: str = "ForSequenceClassification") -> Callable[[Path], Model]:
    case = encoder_models.FAMILIES[name]
    return lambda folder: hugging_face(encoder_models.make_model(case, task if task in case.tasks else "Model"), folder)


def decoder(name: str) -> Callable[[Path], Model]:
    return lambda folder: hugging_face(decoder_models.hf_model(decoder_models.MODELS[name]), folder)


def seq2seq(case: test_seq2seq_families.Case) -> Callable[[Path], Model]:
    def make(folder: Path) -> Model:
        test_seq2seq_families.save(case, folder)
        return read(folder)

    return make


def jina(folder: Path) -> Model:
    test_jina.write_model(folder, "base")
    return read(folder)


def original_gte(folder: Path) -> Model:
    encoder_models.make_model(encoder_models.FAMILIES["gte"], "Model").save_pretrained(folder)
    test_encoder_families.rewrite_config(folder, test_encoder_families.ORIGINAL_GTE, ("rope_parameters",))
    return read(folder)


def student(folder: Path) -> Model:
    tensors = Tensors.of_arrays(test_firefox_models.random_tensors())
    return Model(*firefox.describe(test_firefox_models.SETTINGS, tensors, "model.bin"))


def with_shortlist(folder: Path) -> Model:
    model, size = student(folder), test_firefox_models.TARGET_VOCABULARY
    targets = np.random.default_rng(0).integers(size, size=2 * size)  # two translations of each token
    shortlist = Shortlist(5, 2, np.arange(0, 2 * size + 1, 2), targets, size, is_shared=True)
    return replace(model, description=replace(model.description, shortlist=shortlist))


def trained_model(make_config: MakeConfig) -> Callable[[Path], Model]:
    def make(_: Path) -> Model:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model = build_model(make_config(47)).eval()
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return Model(*trained.describe(model.config, trained.state_tensors(model)))

    return make


CASES: dict[str, Callable[[Path], Model]] = {
    **{name: encoder(name) for name in encoder_models.FAMILIES},
    "gte's original": original_gte,
    "jina": jina,
    "bart's classifier": lambda folder: hugging_face(test_bart_classifier.make_model("nli"), folder),
    "tagger": encoder("bert", "ForTokenClassification"),
    **{name: decoder(name) for name in decoder_models.MODELS},
    **{case.name: seq2seq(case) for case in test_seq2seq_families.CASES},
    "firefox": student,
    "firefox with a shortlist": with_shortlist,
    **{name: trained_model(small(name)) for name in TRAINED},
    "encoder": trained_model(lambda vocab_size: EncoderConfig(vocab_size, d_model=32, num_heads=4, d_ff=64)),
}
SECOND_RUNTIME = ("modernbert with biases", "qwen3-windows", "flan-t5", "firefox")  # one of each kind


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = CASES[name](tmp_path_factory.mktemp("checkpoint"))
        return made[name]

    return model


def onnx_runtime(path: Path) -> Callable[[Mapping[str, Array]], Sequence[Array]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))


def reference(path: Path) -> Callable[[Mapping[str, Array]], Sequence[Array]]:
    session: Any = ReferenceEvaluator(str(path))
    return lambda inputs: session.run(None, dict(inputs))


def load(folder: Path, runtime: Callable[[Path], Any] = onnx_runtime) -> dict[str, Graph]:
    found = {}
    for path in sorted(folder.glob("*.onnx")):
        names = tuple(value.name for value in onnx.load(path, load_external_data=False).graph.output)
        found[path.stem] = Graph(path, names, runtime(path))
    return found


def write(model: Model, folder: Path, ops: Ops) -> Path:
    """Write the graphs of a model to a new folder."""
    folder.mkdir()
    with WeightFile(folder / "weights.bin") as file:
        if model.description.encoder is not None:
            onnx.save_model(encoder_graph(model.description, model.weights, file, ops), folder / "encoder.onnx")
        if model.description.decoder is not None:
            onnx.save_model(decoder_graph(model.description, model.weights, file, ops), folder / "decoder.onnx")
    return folder


def outputs_of(model: Description, graphs: Mapping[str, Graph]) -> dict[str, Array]:
    """Run fixed tokens through the graphs of a model, and return all defined outputs by name."""
    found: dict[str, Array] = {}
    encoded: dict[str, Array] = {}
    if "encoder" in graphs:
        ids, lengths = tokens(47, len(SOURCES), max(SOURCES)), np.array(SOURCES, np.int32)
        encoded = graphs["encoder"]({"source_ids": ids, "source_lengths": lengths})
        for name, array in encoded.items():
            found |= {f"{name}, row {row}": of_source(name, array[row], size) for row, size in enumerate(SOURCES)}
    if "decoder" in graphs:
        found |= decoded(model, graphs["decoder"], encoded)
    return found


def tokens(vocabulary: int, *shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(len(shape)).integers(4, vocabulary, shape)


def of_source(name: str, array: Array, size: int) -> Array:
    """Return an output of the encoder for one row without padding."""
    if name.startswith("encoder_attention"):
        return array[:, :size, :size]
    if name.startswith("encoder_slots"):  # its columns are no tokens
        return array[:, :size]
    if name.startswith("cross_"):
        return array[:, :size]
    return array[:size] if name in ("hidden", "token_label_logprobs") else array


def decoded(model: Description, graph: Graph, encoded: Mapping[str, Array]) -> dict[str, Array]:
    """Read the first tokens of each row alone, then run steps of all rows, which differ in age."""
    ids, found = tokens(47, 1, len(READ), max(READ) + STEPS)[0], dict[str, Array]()
    buffers: dict[str, Array] = {}
    for state in states(model):
        if state.encoder_output is not None:
            buffers[state.input] = encoded[state.encoder_output]
        else:  # a cache may hold anything, but a cell starts with zeros
            shape = [axis if isinstance(axis, int) else POSITIONS for axis in state.shape]
            start = np.nan if "target" in state.shape else 0.0
            buffers[state.input] = np.full((len(READ), *shape), start, np.float32)

    def call(rows: list[int], lengths: list[int], count: int) -> None:
        """Read `count` tokens of each row."""
        new = np.stack([ids[row, length : length + count] for row, length in zip(rows, lengths, strict=True)])
        inputs = {"token_ids": new if model.is_decoder_only else new[:, 0], "lengths": np.array(lengths, np.int32)}
        if encoded:
            inputs["source_lengths"] = np.array(SOURCES, np.int32)[rows]
        given = graph(inputs | {name: buffer[rows] for name, buffer in buffers.items()})
        np.testing.assert_array_equal(
            np.take_along_axis(given["logprobs"], given["top_ids"], axis=1), given["top_logprobs"]
        )
        for state in states(model):
            if state.output is not None:
                assert given[state.output].shape == buffers[state.input][rows].shape
                buffers[state.input][rows] = given[state.output]
        columns = {"decoder_attention": max(lengths) + count, "cross_attention": max(SOURCES[row] for row in rows)}
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            valid = {"decoder_attention": length + count, "cross_attention": SOURCES[row]}
            for name, array in given.items():
                part = array[index]
                if name in valid:
                    assert array.shape[-1] == columns[name]
                    part = part[..., : valid[name]]
                elif name.startswith("self_"):
                    part = part[:, : length + count]
                if name != "top_ids":
                    found[f"{name}, row {row} at {length}"] = part

    for row, read in enumerate(READ):
        step = CHUNK if model.is_decoder_only else 1
        for start in range(0, read, step):
            call([row], [start], min(step, read - start))
    for step in range(STEPS):
        call([*range(len(READ))], [read + step for read in READ], 1)
    return found


# A perturbed matrix stands for the rounding of one product. Four more operations of a layer round:
# the products of queries and keys, the softmax, the sum of values, and normalization with the
# residual connection. Their errors have the same size and add up to at most five times one of them.
ROUNDED_OPERATIONS = 5


class PerturbedWeights(Weights):
    """Weights with relative errors of the size of float32 rounding."""

    def __init__(self, weights: Weights, sign: int) -> None:
        """Create a view.

        Args:
            weights: the exact weights.
            sign: 1 or -1; the random direction is used with both signs.
        """
        self._weights = weights
        self._sign = sign

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def read(self, name: str) -> NDArray[np.float32]:
        array = self._weights.read(name)
        signs = np.random.default_rng([0, *name.encode()]).choice([-1, 1], array.shape)
        error = self._sign * rounding_error(array.shape[-1])
        return (array * (1 + error * signs)).astype(np.float32)


def limits_of(
    model: Model,
    exact: Mapping[str, Array],
    folder: Path,
    ops: Ops = "contrib",
    compute: Callable[[Description, Mapping[str, Graph]], dict[str, Array]] = outputs_of,
) -> dict[str, float]:
    """Return the largest difference of two float32 results that rounding explains.

    The same graphs with weights that have the relative errors of products show how the model
    amplifies rounding errors. Each of the two results may have them.
    """
    spread = dict.fromkeys(exact, 0.0)
    for sign in (1, -1):
        perturbed = Model(model.description, PerturbedWeights(model.weights, sign))
        outputs = compute(model.description, load(write(perturbed, folder / f"perturbed{sign}", ops)))
        for name, array in outputs.items():
            spread[name] = max(spread[name], max_abs(array - exact[name]))
    stack = model.description.decoder or model.description.encoder
    assert stack is not None
    error = rounding_error(stack.width)
    return {name: 2 * (ROUNDED_OPERATIONS * spread[name] + error * max_abs(array)) for name, array in exact.items()}


def assert_close(given: Mapping[str, Array], expected: Mapping[str, Array], limits: Mapping[str, float]) -> None:
    assert given.keys() == expected.keys()
    for name, array in given.items():
        assert array.shape == expected[name].shape and array.dtype == expected[name].dtype
        assert max_abs(array - expected[name]) <= limits[name], name
        # A wrong operator changes outputs by the order of their size.
        assert limits[name] <= 1e-2 * max(1, max_abs(expected[name])), name


def signature(path: Path) -> list[str]:
    """Return the names, types and shapes of the inputs and outputs of a graph."""
    graph = onnx.load(path, load_external_data=False).graph
    return [str(value) for value in (*graph.input, *graph.output)]


@pytest.mark.parametrize("name", CASES)
def test_standard_graphs_are_valid_and_equal_contrib_graphs(
    name: str, models: Callable[[str], Model], tmp_path: Path
) -> None:
    model = models(name)
    contrib, standard = (load(write(model, tmp_path / ops, ops)) for ops in ("contrib", "standard"))
    assert contrib.keys() == standard.keys()
    for kind, graph in standard.items():
        onnx.checker.check_model(str(graph.path), full_check=True)
        proto = onnx.load(graph.path, load_external_data=False)
        assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", STANDARD_OPSET)]
        assert {node.domain for node in proto.graph.node} == {""}
        assert signature(graph.path) == signature(contrib[kind].path)
    expected = outputs_of(model.description, contrib)
    assert_close(outputs_of(model.description, standard), expected, limits_of(model, expected, tmp_path))


@pytest.mark.parametrize("name", SECOND_RUNTIME)
def test_a_second_runtime_computes_the_same(name: str, models: Callable[[str], Model], tmp_path: Path) -> None:
    model = models(name)
    expected = outputs_of(model.description, load(write(model, tmp_path / "contrib", "contrib")))
    limits = limits_of(model, expected, tmp_path)
    with np.errstate(divide="ignore"):
        given = outputs_of(model.description, load(write(model, tmp_path / "standard", "standard"), reference))
    # It computes the logarithm after the softmax, which is -inf for a probability that underflows.
    given, expected = (
        {name: array for name, array in outputs.items() if not name.startswith("logprobs")}
        for outputs in (given, expected)
    )
    assert_close(given, expected, limits)


@pytest.mark.parametrize("name", ["flan-t5", "firefox"])
def test_sessions_of_the_export_run_both_forms(name: str, models: Callable[[str], Model], tmp_path: Path) -> None:
    model, runs = models(name), []
    for ops in get_args(Ops):
        (tmp_path / ops).mkdir()
        sessions = imported.load(model.description, model.weights, tmp_path / ops, ops=ops)
        runs.append(imported.run_rows(sessions, [[5, 6, 7], [8]], [[9, 10, 11, 12], [13, 14]])[0])
    for contrib, standard in zip(*runs, strict=True):
        np.testing.assert_allclose(standard.logits, contrib.logits, rtol=0, atol=imported.TOLERANCE)
        np.testing.assert_allclose(standard.cross, contrib.cross, rtol=0, atol=imported.MAP_TOLERANCE)


def test_every_family_is_compared(models: Callable[[str], Model]) -> None:
    families = {*(family.name for family in FAMILIES), *trained.FAMILIES, "firefox"}
    assert {models(name).description.family for name in CASES} == families


def test_several_rows_may_read_several_tokens(models: Callable[[str], Model], tmp_path: Path) -> None:
    model, ages, count = models("llama"), (1, 2), 3
    described, ids = states(model.description), tokens(47, 2, 5)
    size = [axis if isinstance(axis, int) else POSITIONS for axis in described[0].shape]

    def run(graphs: Mapping[str, Graph], batches: Sequence[Sequence[int]]) -> dict[str, Array]:
        """Read the first tokens of each row alone, and the others in the given batches."""
        graph, found, inputs = graphs["decoder"], dict[str, Array](), list[dict[str, Array]]()
        for row, age in enumerate(ages):
            tensors: dict[str, Array] = {state.input: np.zeros((1, *size), np.float32) for state in described}
            tensors |= {"token_ids": ids[row : row + 1, :age], "lengths": np.zeros(1, np.int32)}
            first = graph(tensors)
            tensors = {state.input: first[state.output or ""] for state in described}
            tensors |= {"token_ids": ids[row : row + 1, age : age + count], "lengths": np.array([age], np.int32)}
            inputs.append(tensors)
        for batch in batches:
            given = graph({name: np.concatenate([inputs[row][name] for row in batch]) for name in inputs[0]})
            for index, row in enumerate(batch):
                for name in ("hidden", "logits", *(state.output or "" for state in described)):
                    found[f"{name}, row {row}"] = given[name][index]
                found[f"map, row {row}"] = given["decoder_attention"][index][..., : ages[row] + count]
        return found

    graphs = load(write(model, tmp_path / "standard", "standard"))
    alone = run(graphs, [[0], [1]])
    limits = limits_of(model, alone, tmp_path, "standard", lambda _, graphs: run(graphs, [[0], [1]]))
    assert_close(run(graphs, [[0, 1]]), alone, limits)


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("kind", get_args(Activation))
def test_activations_are_exact(kind: Activation, ops: Ops, tmp_path: Path) -> None:
    with WeightFile(tmp_path / "weights.bin") as file:
        graph = GraphBuilder("activation", file, ops)
        y = activation(graph, graph.input("x", FLOAT, ("batch",)), kind)
        graph.add("Identity", y, output=graph.output("y", FLOAT, ("batch",)))
        onnx.save_model(graph.build(), tmp_path / "activation.onnx")
    x = np.linspace(-30, 30, 6001, dtype=np.float32)
    (given,) = onnx_runtime(tmp_path / "activation.onnx")({"x": x})
    expected = activate(x.astype(np.float64), kind)
    # Eight operations at most, each with one rounding error, of which one is elementary.
    limits = (8 + ELEMENTARY) * UNIT_ROUNDOFF * np.maximum(1, np.maximum(np.abs(x), np.abs(expected)))
    assert (np.abs(given - expected) <= limits).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = np.linspace(-30, 30, 6001)
    expected = ACT2FN[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(activate(x, ACTIVATIONS[name]), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_the_graph_that_compares_tokens(ops: Ops, tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    with WeightFile(tmp_path / "weights.bin") as file:
        onnx.save_model(similar_graph(table, file, ops), tmp_path / "similar.onnx")
    onnx.checker.check_model(str(tmp_path / "similar.onnx"), full_check=True)
    (cosines,) = reference(tmp_path / "similar.onnx")({"token_ids": np.array([2, 6])})
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines, units[[2, 6]] @ units.T, rtol=0, atol=4 * rounding_error(5))


def test_a_standard_graph_takes_no_contrib_operator(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "weights.bin") as file:
        graph = GraphBuilder("wrong", file, "standard")
        graph.add(
            "QuickGelu",
            graph.input("x", FLOAT, ("batch",)),
            output=graph.output("y", FLOAT, ("batch",)),
            domain=CONTRIB,
        )
        with pytest.raises(AssertionError, match=r"wrong has operators of the domains com\.microsoft"):
            graph.build()


def test_an_import_is_verified_and_runs_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path("docs/how-to/bring-your-own-checkpoint.md").read_text(encoding="utf-8")
    command, program = re.findall(r"```(?:sh|python)\n(.*?)```", page.partition("## Run the graphs in")[2], re.DOTALL)[
        :2
    ]
    hf = decoder_models.hf_model(decoder_models.MODELS["llama"])
    hf.save_pretrained(tmp_path / "path" / "to" / "folder")
    words = ["the", "sea", "was", "calm", *(f"word{index}" for index in range(4, decoder_models.VOCABULARY))]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({word: index for index, word in enumerate(words)}, "word4"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "path" / "to" / "folder" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    assert sightline(command.split()[1:]) == 0

    manifest = read_bundle(tmp_path / "exported" / "mine")
    assert manifest.ops == "standard" and manifest.verification is not None
    for graph in manifest.graphs:
        onnx.checker.check_model(str(tmp_path / "exported" / "mine" / graph.file), full_check=True)

    capsys.readouterr()
    exec(program, {})
    generated = hf.generate(
        torch.tensor([[0, 1, 2, 3]]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=[],
    )
    assert capsys.readouterr().out.split() == [words[index] for index in generated[0, 4:]]
