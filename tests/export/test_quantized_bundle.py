"""Quantized bundles: files, manifest, and rejection if they lose too much BLEU."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from sightline.base.bundle import BundleError, Languages, Quality
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import onnx_steps, open_sessions
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.convert.quality import ParallelText
from sightline.export.import_errors import VerificationError
from sightline.export.options import QuantizationRecipe
from sightline.model.data.tokenizer_training import decode_ids, encode_lines, read_tokenizer
from sightline.model.evaluation.bleu import EvaluationSet
from tests.export.folders import BUNDLE_FILES, names
from tests.export.products import everywhere
from tests.support.reference_decoding import greedy
from tests.support.training_runs import verify_bundle


def test_a_quantised_bundle_is_complete_and_declares_its_type(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    given = quantize_bundle(bundle, out, QuantizationRecipe(8, 32, "group-wise"), None)
    manifest, original = read_bundle(out), read_bundle(bundle)
    assert names(out) == BUNDLE_FILES
    assert manifest.quantization == given
    schemes = dict.fromkeys(("encoder", "layers", "projection"), "group-wise")
    assert given.model_dump() == {
        "bits": 8,
        "block_size": 32,
        "schemes": schemes,
        "float32_digest": original.digest,
        "quality": None,
    }
    changed = {"name", "created", "dtype", "verification", "quantization", "files", "states", "decoder"}
    assert manifest.model_dump(exclude=changed) == original.model_dump(exclude=changed)
    assert manifest.languages == Languages(sources=("en",), targets=("de",))
    assert (manifest.name, manifest.dtype, manifest.verification) == ("small", "int8", None)
    assert (out / "weights.bin").stat().st_size < (bundle / "weights.bin").stat().st_size / 2
    for graph, file in ((manifest.encoder_graph, "encoder.onnx"), (manifest.decoder_graph, "step.onnx")):
        proto = onnx.load_model(out / file, load_external_data=False)
        assert tuple(value.name for value in proto.graph.input) == graph.inputs
        assert tuple(value.name for value in proto.graph.output) == graph.outputs
        operators = {node.op_type for node in proto.graph.node}
        assert {"MatMulNBits", "GatherBlockQuantized"} <= operators
        assert not {"MatMul", "Gemm", "DynamicQuantizeLinear"} & operators


@pytest.mark.parametrize(
    ("recipe", "encoder", "step"),
    [
        (
            QuantizationRecipe(8, encoder="per-token", projection="per-token"),
            {"MatMulIntegerToFloat": 9, "ReduceMin": 9, "Relu": 2},
            {"MatMulNBits": 12, "MatMulInteger": 1, "ReduceMin": 1, "Relu": 2},
        ),
        (
            everywhere("per-token"),
            {"MatMulIntegerToFloat": 9, "ReduceMin": 9, "Relu": 2},
            {"MatMulIntegerToFloat": 12, "MatMulInteger": 1, "ReduceMin": 13, "Relu": 2},
        ),
        (
            QuantizationRecipe(8, layers="float32"),
            {"MatMulIntegerToFloat": 9, "ReduceMin": 9, "Relu": 2},
            {"MatMul": 12, "MatMulNBits": 1, "Relu": 2},
        ),
        (QuantizationRecipe(4), {"MatMulNBits": 9, "Relu": 2}, {"MatMulNBits": 13, "Relu": 2}),
        (everywhere("per-tensor"), {"MatMulIntegerToFloat": 9}, {"MatMulIntegerToFloat": 12, "MatMulInteger": 1}),
        (QuantizationRecipe(4, encoder="per-tensor"), {"MatMulIntegerToFloat": 9}, {"MatMulNBits": 13, "Relu": 2}),
        (
            QuantizationRecipe(8, encoder="float32", layers="per-tensor", projection="float32"),
            {"MatMul": 9, "Relu": 2},
            {"MatMulIntegerToFloat": 12, "Gemm": 1},
        ),
    ],
    ids=str,
)
def test_a_quantised_bundle_has_the_declared_forms(
    bundle: Path,
    tmp_path: Path,
    toy_sentences: list[str],
    recipe: QuantizationRecipe,
    encoder: dict[str, int],
    step: dict[str, int],
) -> None:
    out = tmp_path / "small"
    quantize_bundle(bundle, out, recipe, None, calibration=toy_sentences[:2])
    manifest = read_bundle(out)
    assert manifest.dtype == f"int{recipe.bits}"
    assert manifest.quantization is not None
    assert manifest.quantization.schemes == recipe.schemes
    for file, counts in (("encoder.onnx", encoder), ("step.onnx", step)):
        operators = [node.op_type for node in onnx.load_model(out / file, load_external_data=False).graph.node]
        telling = ("MatMul", "Gemm", "ReduceMin", "Relu")  # of each row where products are by rows
        assert Counter(operator for operator in operators if operator.startswith(telling)) == counts


@pytest.mark.parametrize(
    ("recipe", "largest"),
    [
        (QuantizationRecipe(4, 16), 1.5),
        (QuantizationRecipe(8, 16), 0.1),
        (everywhere("per-token"), 0.1),
        (everywhere("per-tensor"), 0.1),
        (QuantizationRecipe(4, 16, encoder="per-tensor"), 1.5),
    ],
    ids=str,
)
def test_quantised_graphs_stay_near_those_of_float32(
    bundle: Path, tmp_path: Path, toy_sentences: list[str], recipe: QuantizationRecipe, largest: float
) -> None:
    quantize_bundle(bundle, tmp_path / "small", recipe, None, calibration=toy_sentences)
    scores = []
    for folder in (bundle, tmp_path / "small"):
        steps = onnx_steps(open_sessions(folder, read_bundle(folder)), [11, 52, 90, 33, 2])
        scores.append(steps([[1, 45, 67, 12]])[0])
    assert 0 < np.abs(scores[1] - scores[0]).max() < largest


def test_the_scales_of_static_products_are_those_of_the_sentences(
    bundle: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    few = quantize_bundle(bundle, tmp_path / "few", everywhere("per-tensor"), None, calibration=toy_sentences[1:2])
    many = quantize_bundle(bundle, tmp_path / "many", everywhere("per-tensor"), None, calibration=toy_sentences)
    assert few == many
    files = [read_bundle(tmp_path / name).files for name in ("few", "many")]
    assert files[0]["encoder.onnx"] != files[1]["encoder.onnx"]
    assert files[0]["step.onnx"] != files[1]["step.onnx"]


@pytest.mark.parametrize("recipe", [everywhere("per-tensor"), QuantizationRecipe(8, layers="per-tensor")], ids=str)
def test_static_products_without_sentences_are_rejected(bundle: Path, copied: Path, recipe: QuantizationRecipe) -> None:
    before = read_bundle(copied)
    with pytest.raises(
        ValueError, match="the scheme per-tensor needs calibration sentences; name a file with --calibration"
    ):
        quantize_bundle(bundle, copied, recipe, None)
    assert read_bundle(copied) == before
    assert names(copied.parent) == {"copied"}


def test_only_a_float32_bundle_is_quantised_and_only_such_a_one_verified(
    bundle: Path, checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    out = tmp_path / "small"
    quantize_bundle(bundle, out, QuantizationRecipe(4), None)
    with pytest.raises(BundleError, match="small must be a float32 bundle, got int4"):
        quantize_bundle(out, tmp_path / "smaller", QuantizationRecipe(4), None)
    with pytest.raises(
        BundleError, match="small is int4 and intentionally differs from its checkpoint; verify its float32 bundle"
    ):
        verify_bundle(out, checkpoint, toy_sentences[:1])
    assert names(tmp_path) == {"small"}


def test_a_bundle_that_loses_too_much_is_written_by_force_alone(
    bundle: Path, copied: Path, toy_sentences: list[str]
) -> None:
    """The references are the outputs of the float32 model, so that its BLEU is 100."""
    manifest = read_bundle(bundle)
    sessions, tokenizer = open_sessions(bundle, manifest), read_tokenizer(bundle / "tokenizer.json")
    references = []
    for source in encode_lines(tokenizer, toy_sentences):
        output = greedy(onnx_steps(sessions, source), manifest.tokens.start_ids[0], manifest.tokens.end_id, 128)
        references.append(decode_ids(tokenizer, output.ids))
    text = ParallelText("own", "de", EvaluationSet(toy_sentences, references, tokenised_references=None))
    with pytest.raises(VerificationError, match=r"with num_beams 1, BLEU falls from 100\.00 to"):
        quantize_bundle(bundle, copied, QuantizationRecipe(4), text)
    assert read_bundle(copied) == manifest
    assert names(copied.parent) == {"copied"}
    (copied / "MODEL_CARD.md").write_text("a card", encoding="utf-8")
    quality = quantize_bundle(bundle, copied, QuantizationRecipe(4), text, force=True).quality
    assert isinstance(quality, Quality)
    assert (quality.split, quality.sentences) == ("own", 6)
    assert quality.bleu[0].float32 == pytest.approx(100) and quality.bleu[0].quantized < 99
    assert names(copied) == BUNDLE_FILES | {"MODEL_CARD.md"}
    assert read_bundle(copied).dtype == "int4"
