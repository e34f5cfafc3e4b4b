"""Contributions equal a plain calculation with NumPy in float64, which zeroes values one by one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

import sightline
from sightline.base.bundle_files import read_bundle
from sightline.base.errors import UsageError
from sightline.export import pipeline
from sightline.export.check.numpy_reference import ReferenceLayers
from sightline.export.check.sessions import open_session
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.families import trained
from sightline.export.families.description import Attention, Description, Norm
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.contributions import contributions_graph
from sightline.export.options import BundleMetadata, ExportOptions, QuantizationRecipe
from sightline.export.writing import write_graphs
from sightline.model.config import TransformerConfig
from sightline.service.engine.contributions import maps_of
from sightline.service.inference import maps
from tests.equality.systems import MakeConfig, random_models, small
from tests.support.export import main
from tests.support.tensors import state_tensors
from tests.support.training_runs import export_bundle, omit_check
from tests.zoo.comparing import import_folder
from tests.zoo.models import SEQ2SEQ

Array = NDArray[np.float64]
Maps = dict[str, Array]

METHODS = ("norms", "value_zeroing", "alti")
SOURCE, TARGET = [11, 52, 9, 33, 45, 67, 2], [1, 45, 67, 12, 30]
# Of float32; norms are of the order of 1 to 10, and other values are shares of rows.
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Sublayer:
    """One attention sublayer of a text."""

    kind: str
    x: Array  # what it is added to, (N, M)
    tokens: Array  # what it attends to, (K, M)
    weights: Array  # (H, N, K)
    result: Array  # (N, M)
    output: Array  # (N, M)
    vectors: Array  # f(x), (H, K, M)


class RecordingLayers(ReferenceLayers):
    """Records the attention of one text, and zeroes the value of one token in one module."""

    def __init__(self, *arguments: Any, zeroed: tuple[str, int] = ("", 0)) -> None:
        super().__init__(*arguments)
        self.zeroed = zeroed
        self.sublayers: dict[str, Sublayer] = {}
        self.layers: list[Array] = []  # outputs
        self._attended: dict[str, tuple[Array, Array, Array, Array]] = {}

    def linear(self, x: Array, module: str) -> Array:
        result = super().linear(x, module)
        if module == f"{self.zeroed[0]}.value":
            result[self.zeroed[1]] = 0
        return result

    def attention(self, module: str, options: Attention, x: Array, *arguments: Any) -> Any:
        tokens = arguments[1]
        output, maps, slots = super().attention(module, options, x, *arguments)
        matrix = self.weights.read(f"{module}.output.weight").astype(np.float64)  # (M, H * D)
        values = self.linear(tokens, f"{module}.value").reshape(len(tokens), options.heads, -1)
        parts = matrix.reshape(len(matrix), options.heads, -1)  # (M, H, D)
        vectors = np.stack([values[:, head] @ parts[:, head].T for head in range(options.heads)])
        self._attended[module] = tokens, maps[0], output, vectors
        return output, maps, slots

    def sublayer(self, x: Array, module: str, compute: Callable[[Array], Array], *arguments: Any, **more: Any) -> Array:
        output = super().sublayer(x, module, compute, *arguments, **more)
        if module in self._attended:
            tokens, weights, result, vectors = self._attended[module]
            kind = "cross" if module.endswith("cross_attention") else self.name
            self.sublayers[module] = Sublayer(kind, x, tokens, weights, result, output, vectors)
        return output

    def feed_forward(self, x: Array, layer: int, before: Array) -> Array:
        self.layers.append(super().feed_forward(x, layer, before))
        return self.layers[-1]


def run(model: Description, weights: Weights, zeroed: tuple[str, int] = ("", 0)) -> list[RecordingLayers]:
    encoder = RecordingLayers(weights, "encoder", model.encoder_stack, zeroed=zeroed)
    memories, _ = encoder.run([SOURCE], [np.arange(len(SOURCE))])
    decoder = RecordingLayers(weights, "decoder", model.decoder_stack, zeroed=zeroed)
    decoder.run([TARGET], [np.arange(len(TARGET))], memories)
    return [encoder, decoder]


def norms(stacks: list[RecordingLayers]) -> Maps:
    """Kobayashi et al. 2020, equation 5: the norms of weighted vectors of each head."""
    maps: dict[str, list[Array]] = {}
    for sublayer in (each for stack in stacks for each in stack.sublayers.values()):
        weighted = sublayer.weights[..., None] * sublayer.vectors[:, None]  # (H, N, K, M)
        maps.setdefault(sublayer.kind, []).append(np.linalg.norm(weighted, axis=-1))
    return {kind: np.stack(layers) for kind, layers in maps.items()}


def value_zeroing(model: Description, weights: Weights, stacks: list[RecordingLayers]) -> Maps:
    """Mohebbi et al. 2023: the cosine distances of the outputs of a layer without a value."""
    maps: dict[str, list[Array]] = {}
    for number, stack in enumerate(stacks):
        for module, sublayer in stack.sublayers.items():
            layer, columns = int(module.split(".")[1]), []
            for token in range(len(sublayer.tokens)):
                changed = run(model, weights, (module, token))[number].layers[layer]
                whole = stack.layers[layer]
                cosines = (changed * whole).sum(-1) / np.linalg.norm(changed, axis=-1) / np.linalg.norm(whole, axis=-1)
                columns.append(1 - cosines)
            rows = np.stack(columns, axis=-1)  # (N, K)
            maps.setdefault(sublayer.kind, []).append((rows / rows.sum(axis=-1, keepdims=True))[None])
    return {kind: np.stack(layers) for kind, layers in maps.items()}


def mixing(sublayer: Sublayer, scale: Array | None, norm: Norm) -> Array:
    """Ferrando et al. 2022: the shares of tokens in each output of a sublayer (N, K).

    Cross-attention has one more column. With `scale`, the sum is normalized.
    """
    rows = []
    for index, weights in enumerate(sublayer.weights.transpose(1, 2, 0)):  # (K, H)
        parts = [weights[token] @ sublayer.vectors[:, token] for token in range(len(sublayer.tokens))]
        if sublayer.kind == "cross":
            parts.append(sublayer.x[index])
        else:
            parts[index] = parts[index] + sublayer.x[index]
        if scale is not None:
            deviation = np.sqrt(np.var(sublayer.x[index] + sublayer.result[index]) + norm.epsilon)
            parts = [scale * (part - part.mean()) / deviation for part in parts]
        output = sublayer.output[index]
        near = [max(0.0, np.abs(output).sum() - np.abs(output - part).sum()) for part in parts]
        rows.append(np.array(near) / sum(near))
    return np.stack(rows)


def alti(stacks: list[RecordingLayers]) -> Maps:
    """Ferrando et al. 2022: the shares of the embeddings in the outputs of each layer."""
    maps: dict[str, list[Array]] = {}
    shares: dict[str, Array] = {}  # of all tokens of source and target, by text
    for name, first, stack in (("encoder", 0, stacks[0]), ("decoder", len(SOURCE), stacks[1])):
        size = len(SOURCE) if name == "encoder" else len(TARGET)
        shares[name] = np.eye(len(SOURCE) + len(TARGET))[first : first + size]
        for module, sublayer in stack.sublayers.items():
            scale = None
            if stack.stack.norm_place == "post":
                scale = stack.read(f"{module}_norm.weight")
            mixed = mixing(sublayer, scale, stack.stack.norm)
            if sublayer.kind == "cross":
                shares[name] = mixed[:, :-1] @ shares["encoder"] + mixed[:, -1:] * shares[name]
                maps.setdefault("cross", []).append(shares[name][None, :, : len(SOURCE)])
                maps.setdefault("decoder", []).append(shares[name][None, :, len(SOURCE) :])
            else:
                shares[name] = mixed @ shares[name]
                if name == "encoder":
                    maps.setdefault("encoder", []).append(shares[name][None, :, : len(SOURCE)])
    return {kind: np.stack(layers) for kind, layers in maps.items()}


def measured(folder: Path, model: Description, weights: Weights) -> dict[str, Maps]:
    """Return the maps of each method from the graph."""
    with WeightFile(folder / "contributions.bin") as file:
        graph = write_graphs(folder, {"contributions": contributions_graph(model, weights, file)})["contributions"]
    session, found = open_session(folder / graph.file), {}
    feeds = {"source_ids": np.array([SOURCE]), "target_ids": np.array([TARGET]), "zeroed_tokens": np.array([9])}
    for method in METHODS:
        names = [name for name in graph.outputs if name.startswith(f"{method}.")]
        outputs = session.run(names, feeds)
        columns = {name.partition(".")[2]: array for name, array in zip(names, outputs, strict=True)}
        found[method] = {kind: np.asarray(array, np.float64) for kind, array in maps_of(method, columns).items()}
    return found


def assert_equal_the_reference(folder: Path, model: Description, weights: Weights) -> None:
    stacks, found = run(model, weights), measured(folder, model, weights)
    expected = {"norms": norms(stacks), "value_zeroing": value_zeroing(model, weights, stacks), "alti": alti(stacks)}
    for method, of_kinds in expected.items():
        assert found[method].keys() == of_kinds.keys() == {"encoder", "cross", "decoder"}
        for kind, array in of_kinds.items():
            np.testing.assert_allclose(
                found[method][kind], array, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{method} of {kind}"
            )


SYSTEMS: dict[str, MakeConfig] = {
    "shipped": lambda vocab_size: TransformerConfig(
        vocab_size, d_model=128, num_heads=4, d_ff=256, encoder_layers=4, decoder_layers=4
    ),
    "pre-norm": small("transformer", pre_norm=True),
    **{
        f"positions-{kind}": small("transformer", positions=kind) for kind in ("rotary", "relative", "alibi", "learned")
    },
    "single-head": small("transformer", encoder_attention="single-head"),
}


def describe_trained(config: MakeConfig, checkpoint: Path) -> tuple[Description, Weights]:
    (model,) = random_models({"": config}, checkpoint / "tokenizer.json", noise=0.1).values()
    assert isinstance(model.config, TransformerConfig)
    return trained.describe(model.config, state_tensors(model))


@pytest.mark.parametrize("name", SYSTEMS)
def test_contributions_of_trained_models_equal_the_reference(name: str, checkpoint: Path, tmp_path: Path) -> None:
    assert_equal_the_reference(tmp_path, *describe_trained(SYSTEMS[name], checkpoint))


@pytest.mark.parametrize("name", ["marian", "bart with many heads", "mbart", "m2m100", "pegasus", "t5", "mt5"])
def test_contributions_of_imported_models_equal_the_reference(name: str, tmp_path: Path) -> None:
    SEQ2SEQ[name].save(tmp_path, scale=0.4)
    imported = import_folder(tmp_path)
    assert_equal_the_reference(tmp_path, imported.model, imported.weights)


@pytest.mark.parametrize(
    "config",
    [
        small("linformer"),
        small("transformer", decoder="ssru"),
        small("transformer", residual=False),
        small("transformer", encoder_attention="single-head", positions="rotary"),
    ],
)
def test_other_architectures_are_rejected(config: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    with WeightFile(tmp_path / "weights.bin") as file, pytest.raises(UsageError, match="--contributions is only for"):
        contributions_graph(*describe_trained(config, checkpoint), file)


@pytest.fixture(scope="module")
def with_contributions(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "toy"
    options = ExportOptions(contributions=True)
    with patch.object(pipeline, "check", omit_check):
        pipeline.export_checkpoint(pipeline.Export(checkpoint, folder, BundleMetadata("toy"), options, "training"))
    return folder


def test_a_bundle_without_contributions_keeps_every_bit(
    with_contributions: Path, checkpoint: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "toy"
    export_bundle(checkpoint, plain, BundleMetadata("toy"), (), check=False)
    assert "contributions" not in (plain / "manifest.json").read_text()
    for name in read_bundle(plain).files:
        expected = (plain / name).read_bytes()
        assert (with_contributions / name).read_bytes()[: len(expected)] == expected  # weights are added at the end
    assert read_bundle(with_contributions).files.keys() - read_bundle(plain).files.keys() == {"contributions.onnx"}


def test_a_converted_bundle_has_no_contributions(with_contributions: Path, checkpoint: Path, tmp_path: Path) -> None:
    quantize_bundle(with_contributions, tmp_path / "toy8", QuantizationRecipe(8), None)
    manifest = read_bundle(tmp_path / "toy8")
    assert manifest.contributions is None
    assert "contributions.onnx" not in manifest.files
    arguments = [str(checkpoint), "--out", str(tmp_path / "none"), "--contributions", "--bits", "8"]
    assert main(arguments) == 2


@pytest.fixture(scope="module")
def client(with_contributions: Path) -> Iterator[sightline.Client]:
    with sightline.load(with_contributions) as loaded:
        yield loaded


@pytest.mark.parametrize("method", METHODS)
def test_contributions_take_the_place_of_weights(client: sightline.Client, method: str) -> None:
    (weights,), (found,) = client.attention("a man sleeps"), client.attention("a man sleeps", method=method)
    assert (found.text, found.tokens) == (weights.text, weights.tokens)
    (forced,) = client.attention("a man sleeps", targets="Hund", method=method)
    (part,) = client.attention("a man sleeps", targets="Hund", method=method, kinds=["cross"], layers=[-1])
    np.testing.assert_array_equal(part.maps["cross"].values, forced.maps["cross"].values[-1:])
    sums = {kind: array.values.sum(axis=-1) for kind, array in found.maps.items()}
    for kind, array in found.maps.items():
        heads = weights.maps[kind].values.shape[1] if method == "norms" else 1
        assert array.values.shape == (2, heads, *weights.maps[kind].values.shape[2:])
    assert np.all(np.triu(found.maps["decoder"].values, k=1) == 0)
    if method == "alti":
        sums = {"encoder": sums["encoder"], "both": sums["cross"] + sums["decoder"]}
    for kind, rows in sums.items() if method != "norms" else ():
        np.testing.assert_allclose(rows, 1, rtol=1e-5, err_msg=kind)
    is_normalized = {each["kind"]: each["normalized"] for each in found.raw["maps"]}
    is_sum = {"encoder": method != "norms", "cross": method == "value_zeroing", "decoder": method == "value_zeroing"}
    assert is_normalized == is_sum
    (generated,) = client.generate("a man sleeps", return_attention={"method": method})
    assert generated.attention is not None
    np.testing.assert_array_equal(generated.attention.maps["cross"].values, found.maps["cross"].values)
    (words,) = client.attention("a man sleeps", units="words", method=method)
    assert words.maps["cross"].values.shape[3] == 3
    assert words.draw().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_source_tokens": [0]}, "leave out parameters.hidden_source_tokens"),
        ({"max_new_tokens": 200}, "at most 128 tokens each, got 5 and up to 200"),
        ({"heads": [1]}, "heads"),
    ],
)
def test_combinations_without_contributions_are_errors(
    client: sightline.Client, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(sightline.SightlineError, match=message):
        client.attention("a man sleeps", method="alti", **options)


def test_a_large_model_zeroes_the_values_of_fewer_tokens(
    client: sightline.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "MAX_ZEROING", 10_000_000)
    with pytest.raises(sightline.SightlineError, match=r"at most 1\d tokens each, got 5 and up to 40"):
        client.attention("a man sleeps", method="value_zeroing", max_new_tokens=40)
    assert client.attention("a man sleeps", method="value_zeroing", max_new_tokens=5)
    assert client.attention("a man sleeps", method="alti", max_new_tokens=40)
