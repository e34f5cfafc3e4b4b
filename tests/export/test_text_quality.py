"""Loss of quantized bundles on plain text, for each kind of imported model."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from sacrebleu.metrics.chrf import CHRF
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from sightline.base.bundle import (
    AgreementQuality,
    BundleError,
    EmbeddingQuality,
    LabelQuality,
    PredictionQuality,
    SentenceEmbedding,
    TextQuality,
)
from sightline.base.bundle_files import read_bundle
from sightline.export import pipeline
from sightline.export.check.sessions import Sessions, encode, onnx_steps, open_sessions
from sightline.export.convert import conversions, text_quality
from sightline.export.convert.conversions import half_bundle, quantize_bundle
from sightline.export.convert.products import projection_input
from sightline.export.convert.quality import ParallelText
from sightline.export.convert.text_quality import (
    PlainText,
    check_text_loss,
    chrf,
    cosine,
    greedy_outputs,
    label_probabilities,
    pool,
    text_ids,
)
from sightline.export.import_errors import VerificationError
from sightline.export.options import BundleMetadata, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.evaluation.bleu import EvaluationSet
from tests.export.folders_of_others import WIDTH, bert_tensors, write_bert
from tests.export.products import everywhere
from tests.support.export import main
from tests.support.reference_decoding import greedy
from tests.support.tables import read_table
from tests.support.training_runs import omit_check

TEXTS = ("word1 word2 word3 word4", "word9", "word30 word2 word17", "word5 word6 word5 word6 word5 word6")


def write_ranker(folder: Path, labels: int) -> None:
    """Write a BERT classifier with random weights; with one label it compares pairs of texts."""
    write_bert(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {str(number): f"label{number}" for number in range(labels)}
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": names, "num_labels": labels}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = np.random.default_rng(2).standard_normal
    head = {"bert.pooler.dense": (WIDTH, WIDTH), "classifier": (labels, WIDTH)}
    tensors = {f"bert.{name}": tensor for name, tensor in bert_tensors().items()}
    for name, shape in head.items():
        tensors |= {f"{name}.weight": random(shape), f"{name}.bias": random(shape[0])}
    arrays = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(arrays, folder / "model.safetensors")


def write_hf(folder: Path, model: Any) -> None:
    """Write a model of transformers with random weights, and a tokenizer of words."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    words = ["<pad>", "</s>", "<unk>", *(f"word{number}" for number in range(37))]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    if model.config.is_encoder_decoder:
        tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write imported bundles of every kind, and return their folder."""
    checkpoints, bundles = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("bundles")
    write_bert(checkpoints / "encoder")
    write_ranker(checkpoints / "classifier", 3)
    write_ranker(checkpoints / "ranker", 1)
    llama = LlamaConfig(
        vocab_size=40, max_position_embeddings=32, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    write_hf(checkpoints / "decoder", LlamaForCausalLM(llama))
    t5 = T5Config(
        vocab_size=40, d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=1, num_decoder_layers=1,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    write_hf(checkpoints / "translator", T5ForConditionalGeneration(t5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "check", omit_check)
        for folder in sorted(checkpoints.iterdir()):
            export_checkpoint(Export(folder, bundles / folder.name, BundleMetadata(folder.name, "a test", "MIT")))
    return bundles


def load(bundle: Path) -> Sessions:
    return open_sessions(bundle, read_bundle(bundle))


def ids_of(bundle: Path) -> list[list[int]]:
    manifest = read_bundle(bundle)
    return text_ids(manifest, read_tokenizer(bundle / manifest.source_tokenizer), TEXTS)


@pytest.mark.parametrize(
    "recipe", [QuantizationRecipe(8), QuantizationRecipe(4), everywhere("per-tensor"), everywhere("per-token")], ids=str
)
@pytest.mark.parametrize("name", ["encoder", "classifier", "ranker", "decoder", "translator"])
def test_every_kind_of_imported_model_is_quantized(
    bundles: Path, tmp_path: Path, name: str, recipe: QuantizationRecipe
) -> None:
    out = tmp_path / "small"
    record = quantize_bundle(bundles / name, out, recipe, PlainText(TEXTS), force=True, calibration=TEXTS)
    manifest, original = read_bundle(out), read_bundle(bundles / name)
    assert manifest.quantization == record
    changed = {"name", "created", "dtype", "verification", "quantization", "files"}
    if name == "translator":  # has 8-bit states
        changed |= {"states", "decoder"}
    assert manifest.model_dump(exclude=changed) == original.model_dump(exclude=changed)
    assert manifest.origin is not None
    kinds: dict[str, type] = {"decoder": PredictionQuality, "translator": AgreementQuality}
    assert type(record.quality) is kinds.get(name, EmbeddingQuality)
    groups = {"decoder": {"layers", "projection"}, "translator": {"encoder", "layers", "projection"}}
    assert set(record.schemes) == groups.get(name, {"encoder", "projection"})


def test_layers_of_a_decoder_only_model_are_group_wise_if_integers_lose_too_much(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, recipe = tmp_path / "small", QuantizationRecipe(8)
    assert quantize_bundle(bundles / "decoder", out, recipe, None).schemes["layers"] == "per-token"
    compared: list[TextQuality] = []

    def reject_first(quality: TextQuality) -> None:
        compared.append(quality)
        if len(compared) == 1:
            raise VerificationError("loses too much")

    monkeypatch.setattr(conversions, "check_text_loss", reject_first)
    record = quantize_bundle(bundles / "decoder", out, recipe, PlainText(TEXTS))
    assert record.schemes["layers"] == "group-wise"
    assert record == read_bundle(out).quantization
    assert compared[0] != compared[1] == record.quality
    compared.clear()
    with pytest.raises(VerificationError, match="loses too much"):
        quantize_bundle(bundles / "decoder", out, replace(recipe, layers="per-token"), PlainText(TEXTS))


@pytest.mark.parametrize("name", ["encoder", "classifier", "ranker"])
def test_embeddings_and_labels_are_compared_as_for_single_texts(bundles: Path, tmp_path: Path, name: str) -> None:
    small = tmp_path / "small"
    quality = quantize_bundle(bundles / name, small, QuantizationRecipe(4), PlainText(TEXTS), force=True).quality
    assert isinstance(quality, EmbeddingQuality)
    cosines, equal, differences = [], [], []
    for ids in ids_of(bundles / name):
        before, after = (encode(load(bundle), [ids]) for bundle in (bundles / name, small))
        means = [outputs["hidden"][0].astype(np.float64).mean(axis=0) for outputs in (before, after)]
        cosines.append(means[0] @ means[1] / np.linalg.norm(means[0]) / np.linalg.norm(means[1]))
        if name == "classifier":
            old, new = (np.exp(outputs["label_logprobs"][0].astype(np.float64)) for outputs in (before, after))
            equal.append(old.argmax() == new.argmax())
            differences.append(np.abs(old - new).max())
        if name == "ranker":
            old, new = (1 / (1 + np.exp(-outputs["label_logits"][0].astype(np.float64))) for outputs in (before, after))
            equal.append(True)
            differences.append(np.abs(old - new).max())
    # The sums of float64 differ only in the order of addition.
    assert (quality.mean_cosine, quality.min_cosine) == pytest.approx((np.mean(cosines), min(cosines)), rel=1e-12)
    assert quality.min_cosine < 1
    if name == "encoder":
        assert quality.labels is None
    else:
        assert quality.labels is not None and quality.labels.compared == len(TEXTS)
        assert quality.labels.same_best == np.mean(equal)
        assert quality.labels.max_difference == pytest.approx(max(differences), rel=1e-9) and max(differences) > 0


def test_a_ranker_compares_each_text_with_the_next(bundles: Path) -> None:
    tokenizer = read_tokenizer(bundles / "ranker" / "tokenizer.json")
    assert ids_of(bundles / "ranker")[-1] == tokenizer.encode(TEXTS[-1], TEXTS[0]).ids


def test_poolings() -> None:
    hidden = np.array([[1, 5], [4, 0], [1, 1]], np.float32)
    expected = {"mean": [2, 2], "max": [4, 5], "first": [1, 5], "last": [1, 1]}
    given = {name: pool(hidden, SentenceEmbedding(pooling=name, normalize=True)).tolist() for name in expected}  # type: ignore[arg-type]
    assert given == expected
    assert pool(hidden, None).tolist() == [2, 2]
    assert cosine(np.array([3.0, 4.0]), np.array([6.0, 8.0])) == pytest.approx(1)
    assert cosine(np.zeros(2), np.ones(2)) == 0


def test_labels_of_tokens_leave_out_padding(bundles: Path) -> None:
    manifest = read_bundle(bundles / "classifier").model_copy(update={"label_kind": "tokens"})
    scores = {"token_label_logprobs": np.log(np.array([[[0.2, 0.8], [0.5, 0.5]]]))}
    assert label_probabilities(manifest, scores, 0, 1) == pytest.approx(np.array([[0.2, 0.8]]))


def test_perplexity_is_that_of_single_texts(bundles: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    record = quantize_bundle(bundles / "decoder", small, QuantizationRecipe(4), PlainText(TEXTS), force=True)
    sources = ids_of(bundles / "decoder")
    rows: list[list[NDArray[np.float64]]] = []  # log-probabilities before and after
    targets = []
    for source in sources:
        steps = [onnx_steps(load(bundle), source[:1]) for bundle in (bundles / "decoder", small)]
        for position in range(1, len(source)):
            logits = [one([source[:position]])[0].astype(np.float64) for one in steps]
            rows.append([one - np.log(np.exp(one).sum()) for one in logits])
            targets.append(source[position])
    before, after = np.array(rows).transpose(1, 0, 2)
    index, quality = np.arange(len(targets)), record.quality
    assert isinstance(quality, PredictionQuality)
    assert quality.predicted_tokens == len(targets)
    assert quality.float32 == pytest.approx(math.exp(-before[index, targets].mean()), rel=1e-4)
    assert quality.quantized == pytest.approx(math.exp(-after[index, targets].mean()), rel=1e-4)
    divergence = (np.exp(before) * (before - after)).sum(axis=1).mean()
    assert divergence > 0 and quality.mean_divergence == pytest.approx(divergence, rel=1e-3)
    assert quality.same_first == np.mean(before.argmax(axis=1) == after.argmax(axis=1)) < 1


@pytest.mark.usefixtures("unverified")
def test_a_random_model_is_rejected_though_its_perplexity_falls(tmp_path: Path) -> None:
    """The perplexity of texts about which a model knows nothing may change in either direction."""
    sizes = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 40}
    write_hf(tmp_path / "random", GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)))
    export_checkpoint(Export(tmp_path / "random", tmp_path / "bundle", BundleMetadata("random")))
    words = np.random.default_rng(0).integers(37, size=(8, 12))
    texts = PlainText([" ".join(f"word{word}" for word in row) for row in words])
    quality = quantize_bundle(tmp_path / "bundle", tmp_path / "small", QuantizationRecipe(4), texts, force=True).quality
    assert isinstance(quality, PredictionQuality) and quality.quantized < quality.float32
    with pytest.raises(VerificationError, match="of the most probable next tokens equal those of float32"):
        quantize_bundle(tmp_path / "bundle", tmp_path / "refused", QuantizationRecipe(4), texts)
    assert not (tmp_path / "refused").exists()


def test_outputs_of_a_batch_are_those_of_single_texts(bundles: Path) -> None:
    sessions, sources = load(bundles / "translator"), ids_of(bundles / "translator")
    tokens, outputs = sessions.manifest.tokens, greedy_outputs(sessions, sources)
    for source, output in zip(sources, outputs, strict=True):
        alone = greedy(onnx_steps(sessions, source), tokens.start_ids[0], tokens.end_id, len(output) + 1)
        assert [token for token in alone.ids if token not in tokens.end_ids][: len(output)] == output


def test_suppressed_tokens_are_never_compared(bundles: Path) -> None:
    sessions, sources = load(bundles / "translator"), ids_of(bundles / "translator")
    suppressed = greedy_outputs(sessions, sources)[0][0]
    generation = sessions.manifest.generation.model_copy(update={"suppress_tokens": (suppressed,)})
    manifest = sessions.manifest.model_copy(update={"generation": generation})
    outputs = greedy_outputs(Sessions(manifest, sessions.encoder, sessions.decoder), sources)
    assert all(suppressed not in output for output in outputs)


@pytest.mark.parametrize(("outputs", "references"), read_table(__file__))
def test_chrf_equals_that_of_sacrebleu(outputs: list[str], references: list[str]) -> None:
    expected = CHRF().corpus_score(outputs, [references]).score
    assert chrf(outputs, references) == pytest.approx(expected, abs=1e-9)


def embeddings(mean: float, labels: LabelQuality | None = None) -> EmbeddingQuality:
    return EmbeddingQuality(texts=2, mean_cosine=mean, min_cosine=0.5, labels=labels)


def labels(count: int, same: float, difference: float) -> LabelQuality:
    return LabelQuality(labels=count, compared=200, same_best=same, max_difference=difference)


def predicted(divergence: float, same: float) -> PredictionQuality:
    return PredictionQuality(
        texts=2, predicted_tokens=9, float32=48.62, quantized=59.33, mean_divergence=divergence, same_first=same
    )


def agreement(value: float) -> AgreementQuality:
    return AgreementQuality(texts=2, chrf=value, same_outputs=0.5)


@pytest.mark.parametrize(
    "quality",
    [
        embeddings(0.991, labels(3, 0.985, 0.9)),
        embeddings(0.99, labels(1, 1.0, 0.09)),
        predicted(0.049, 0.91),
        agreement(95.1),
    ],
    ids=str,
)
def test_small_losses_are_accepted(quality: TextQuality) -> None:
    check_text_loss(quality)


@pytest.mark.parametrize(
    ("quality", "message"),
    [
        (
            embeddings(0.977),
            "the embeddings have a mean cosine of 0.9770 with those of float32, but at least 0.99 is required; try a",
        ),
        (embeddings(math.nan), "a mean cosine of nan"),
        (
            embeddings(0.999, labels(3, 0.9, 0.1)),
            "90.0% of 200 best labels equal those of float32, but at least 98% is required; try a smaller",
        ),
        (
            embeddings(0.999, labels(1, 1.0, 0.2)),
            "a score differs by 0.200 from that of float32, but at most 0.1 is accepted; try a smaller",
        ),
        (
            predicted(0.1234, 0.95),
            "the probabilities of the next token diverge from those of float32 by a mean of 0.1234 nats, but at most "
            "0.05 is accepted (perplexity 48.62 before and 59.33 after); try a smaller",
        ),
        (predicted(math.nan, 0.95), "a mean of nan nats"),
        (
            predicted(0.01, 0.65),
            "65.0% of the most probable next tokens equal those of float32, but at least 90% is required; try a",
        ),
        (
            agreement(80),
            "the outputs have a chrF of 80.0 with those of float32, but at least 95 is required; try a smaller "
            "--block-size, more --bits or float32 for one group of layers, or use --force; or measure BLEU on parallel "
            "text with --data",
        ),
    ],
    ids=str,
)
def test_large_losses_are_rejected(quality: TextQuality, message: str) -> None:
    with pytest.raises(VerificationError) as info:
        check_text_loss(quality)
    assert message in str(info.value)


def test_a_bundle_that_loses_too_much_is_not_written(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "small"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    arguments = ["quantize", str(bundles / "decoder"), "--out", str(out), "--bits", "4", "--texts", str(texts)]
    quality = quantize_bundle(
        bundles / "decoder", tmp_path / "forced", QuantizationRecipe(4), PlainText(TEXTS), force=True
    ).quality
    assert isinstance(quality, PredictionQuality)
    assert quality.mean_divergence is not None
    monkeypatch.setattr(text_quality, "MIN_SAME_FIRST", 0.0)
    monkeypatch.setattr(text_quality, "MAX_DIVERGENCE", 0.999 * quality.mean_divergence)
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: the probabilities of the next token diverge ")
    assert not out.exists()
    assert main([*arguments, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["quality"] == quality.model_dump()
    monkeypatch.setattr(text_quality, "MAX_DIVERGENCE", 1.001 * quality.mean_divergence)
    assert main(arguments) == 0


def test_a_text_that_is_too_long_is_named(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "small"
    texts.write_text("word1\n\n" + "word2 " * 40, encoding="utf-8")
    arguments = ["quantize", str(bundles / "encoder"), "--out", str(out), "--bits", "8", "--texts", str(texts)]
    assert main(arguments) == 1
    assert f"{texts}, line 3 has 42 tokens, but the model reads at most 24" in capsys.readouterr().err
    with pytest.raises(ValueError, match="each text has only one token, so that there is none to predict"):
        quantize_bundle(bundles / "decoder", out, QuantizationRecipe(8), PlainText(["word1"]))
    assert not out.exists()


def test_bleu_needs_a_model_that_generates_text(bundles: Path, tmp_path: Path) -> None:
    text = ParallelText("val", "de", EvaluationSet(["word1"], ["word2"], tokenised_references=None))
    with pytest.raises(ValueError, match="does not generate text, so that BLEU cannot be measured; use --texts"):
        quantize_bundle(bundles / "encoder", tmp_path / "small", QuantizationRecipe(8), text)
    for name, kind in (("encoder", "an encoder"), ("decoder", "a decoder-only model")):
        with pytest.raises(BundleError, match=f"is {kind}; float16 is only for encoder-decoder models"):
            half_bundle(bundles / name, tmp_path / "small", None)


def test_neither_pytorch_nor_sacrebleu_is_needed(bundles: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    arguments = ["quantize", str(bundles / "translator"), "--out", str(tmp_path / "small"), "--bits", "8"]
    arguments += ["--texts", str(texts), "--force"]
    code = (
        "import sys; from sightline.__main__ import main\n"
        f"assert main({arguments}) == 0\n"
        "print([name for name in ('torch', 'sacrebleu', 'sacremoses') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr


def test_static_scales_need_logits_of_a_constant_matrix(bundles: Path) -> None:
    graph = onnx.load(bundles / "decoder" / "step.onnx", load_external_data=False).graph
    del graph.initializer[:]
    with pytest.raises(
        ValueError, match="the logits are not a product with a constant matrix; use the scheme group-wise"
    ):
        projection_input(graph)
