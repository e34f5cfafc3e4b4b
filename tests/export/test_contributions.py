"""Contributions equal those of the reference, which zeroes values one by one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest

import sightline
from sightline.base.bundle_files import read_bundle
from sightline.base.errors import UsageError
from sightline.export import pipeline
from sightline.export.check.verify import compare_contributions
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.families import trained
from sightline.export.families.description import Description
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.contributions import contributions_graph
from sightline.export.import_errors import VerificationError
from sightline.export.options import BundleMetadata, ExportOptions, QuantizationRecipe
from sightline.export.writing import write_graphs
from sightline.model.config import TransformerConfig
from sightline.service.api.models import card_of
from sightline.service.engine.contributions import roll_out
from sightline.service.inference import maps
from tests.equality.systems import MakeConfig, random_models, small
from tests.support.export import main
from tests.support.tensors import state_tensors
from tests.support.training_runs import export_bundle, omit_check
from tests.zoo.comparing import import_folder
from tests.zoo.models import SEQ2SEQ

METHODS = ("norms", "value_zeroing", "alti")
OPTIONS = ExportOptions(contributions=True)
SOURCE, TARGET = [11, 52, 9, 33, 45, 67, 2], [1, 45, 67, 12, 30]


def write(folder: Path, model: Description, weights: Weights) -> Path:
    with WeightFile(folder / "contributions.bin") as file:
        graph = write_graphs(folder, {"contributions": contributions_graph(model, weights, file)})["contributions"]
    return folder / graph.file


def assert_equal_the_reference(folder: Path, model: Description, weights: Weights) -> None:
    path = write(folder, model, weights)
    for source, target in ((SOURCE, TARGET), (SOURCE[:1], TARGET[:1])):
        pairs = compare_contributions(path, model, weights, source, target)
        assert len(pairs) == 9  # of three methods, for each kind of attention
        assert all(difference <= limit for difference, limit in pairs)


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


def _with_op(kind: str, new: str, **attributes: float) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        node = [one for one in graph.node if one.op_type == kind][-1]
        node.op_type = new
        kept = [one for one in node.attribute if one.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(*pair) for pair in attributes.items())])

    return change


WRONG: dict[str, Callable[[onnx.GraphProto], None]] = {
    "lengths": _with_op("ReduceL2", "ReduceL1"),
    "sums of absolute values": _with_op("ReduceL1", "ReduceL2"),
    "epsilon": _with_op("LayerNormalization", "LayerNormalization", epsilon=0.01),
    "unit vectors": _with_op("LpNormalization", "LpNormalization", p=1),
    "scale of attention": _with_op("Attention", "Attention", scale=0.2),
    "own part": _with_op("Equal", "Greater"),
}


@pytest.mark.parametrize("error", WRONG)
def test_a_wrong_graph_is_found(error: str, checkpoint: Path, tmp_path: Path) -> None:
    model, weights = describe_trained(small("transformer"), checkpoint)
    path = write(tmp_path, model, weights)
    graph = onnx.load(path, load_external_data=False)
    WRONG[error](graph.graph)
    onnx.save_model(graph, path)
    pairs = compare_contributions(path, model, weights, SOURCE, TARGET)
    assert any(not difference <= limit for difference, limit in pairs)


def test_shares_are_those_of_the_embeddings() -> None:
    """Ferrando et al. 2022: each sublayer mixes the shares of the vectors that it reads."""
    generator, source, target = np.random.default_rng(0), np.eye(7)[:4], np.eye(7)[4:]
    sizes = {"encoder": (2, 4, 4), "decoder": (3, 3, 3), "cross": (3, 3, 5)}
    shares = {kind: generator.dirichlet(np.ones(size[-1]), size[:-1]) for kind, size in sizes.items()}
    rolled = roll_out(shares)
    for mixed, found in zip(shares["encoder"], rolled["encoder"], strict=True):
        source = mixed @ source
        np.testing.assert_allclose(found, source[:, :4], rtol=1e-5)
    layers = (shares["decoder"], shares["cross"], rolled["cross"], rolled["decoder"])
    for mixed, attended, of_source, of_target in zip(*layers, strict=True):
        target = attended[:, :-1] @ source + attended[:, -1:] * (mixed @ target)
        np.testing.assert_allclose(np.concatenate([of_source, of_target], axis=1), target, rtol=1e-5)


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
    with (
        WeightFile(tmp_path / "weights.bin") as file,
        pytest.raises(UsageError, match="only for Transformers with self-attention in encoder and decoder"),
    ):
        contributions_graph(*describe_trained(config, checkpoint), file)


@pytest.fixture(scope="module")
def with_contributions(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "toy"
    with patch.object(pipeline, "check", omit_check):
        pipeline.export_checkpoint(pipeline.Export(checkpoint, folder, BundleMetadata("toy"), OPTIONS, "training"))
    return folder


def test_an_export_checks_the_graph(with_contributions: Path, checkpoint: Path, tmp_path: Path) -> None:
    pipeline.verify_bundle(with_contributions, read_bundle(with_contributions), checkpoint, kind="training")

    def wrong(*arguments: Any) -> onnx.ModelProto:
        model = contributions_graph(*arguments)
        WRONG["epsilon"](model.graph)
        return model

    export = pipeline.Export(checkpoint, tmp_path / "toy", BundleMetadata("toy"), OPTIONS, "training")
    with (
        patch.object(pipeline, "contributions_graph", wrong),
        pytest.raises(VerificationError, match="differ: contributions differ by"),
    ):
        pipeline.export_checkpoint(export)
    assert not list(tmp_path.iterdir())


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
    assert card_of(manifest, "ready").attention_methods == ["weights"]
    with (
        sightline.load(tmp_path / "toy8") as client,
        pytest.raises(
            sightline.SightlineError, match=r"has no alti\. Use the method weights, or make a float32 bundle"
        ),
    ):
        client.attention("a man sleeps", method="alti")


def test_a_model_lists_its_methods(with_contributions: Path) -> None:
    card = card_of(read_bundle(with_contributions), "ready")
    assert card.attention_methods == ["weights", *METHODS]


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
