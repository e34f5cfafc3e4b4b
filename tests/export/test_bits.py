"""Imports with `--bits`, and the bits that a checkpoint gets by default."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sightline.base.bundle import AgreementQuality, EmbeddingQuality, Manifest
from sightline.base.bundle_files import read_bundle
from sightline.export import commands
from sightline.export.convert import text_quality
from sightline.export.options import ImportOptions, Kind
from sightline.export.sources.opened_checkpoint import Provenance
from tests.export.firefox.models import VOCABULARY, random_tensors, write_folder, write_shortlist
from tests.export.folders import names
from tests.export.folders_of_others import write_bert
from tests.support.export import main
from tests.support.tables import read_table
from tests.support.training_runs import UNCHECKED


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unverified: None) -> None:
    """Omit the verification, and measure the loss on few texts, of which one is too long.

    Models with random weights may lose anything.
    """
    (tmp_path / "texts").write_text("a b\nc\nd e f a\n" + 600 * "a " + "\n", encoding="utf-8")
    monkeypatch.setattr(commands, "DEFAULT_SENTENCES", tmp_path / "texts")
    monkeypatch.setattr(text_quality, "MIN_CHRF", 0.0)
    monkeypatch.setattr(text_quality, "MIN_COSINE", -1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ende", random_tensors(seed=4))


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    return tmp_path / "bundles"


def export(folder: Path, bundle: Path, *options: str) -> Manifest:
    assert main([str(folder), "--out", str(bundle), *options]) == 0
    return read_bundle(bundle)


def test_a_firefox_model_has_8_bits_by_default_as_by_the_command_quantize(
    folder: Path, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles.mkdir()
    (bundles / "given").mkdir()
    (bundles / "given" / "MODEL_CARD.md").write_text("a card", encoding="utf-8")
    manifest = export(folder, bundles / "given", "--name", "mine", "--license", "MPL-2.0")
    output = capsys.readouterr().out
    assert names(bundles) == {"given"}
    assert (bundles / "given" / "MODEL_CARD.md").read_text(encoding="utf-8") == "a card"
    assert (manifest.name, manifest.license, manifest.dtype) == ("mine", "MPL-2.0", "int8")
    assert manifest.origin is not None and manifest.verification is None and manifest.quantization is not None
    assert isinstance(manifest.quantization.quality, AgreementQuality)
    assert manifest.quantization.quality.texts == 3
    summary, _, record = output.partition("\n")
    assert summary.startswith(f"{bundles / 'given'}: ") and summary.endswith(manifest.digest)
    assert json.loads(record) == manifest.quantization.model_dump(mode="json")
    float32 = export(folder, bundles / "float32", "--bits", "32")
    assert float32.dtype == "float32" and float32.verification is not None
    assert main(["quantize", str(bundles / "float32"), "--out", str(bundles / "int8"), "--bits", "8"]) == 0
    quantized = read_bundle(bundles / "int8")
    assert quantized.files == manifest.files
    assert quantized.quantization is not None
    assert quantized.quantization.quality == manifest.quantization.quality


@pytest.mark.parametrize("bits", ["8", "32"])
def test_a_firefox_model_has_its_shortlist_unless_the_option_leaves_it_out(
    folder: Path, bundles: Path, bits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lex.50.50.ende.s2t.bin").write_bytes(write_shortlist([[3, 4]] * VOCABULARY))
    manifests = {}
    for name, option in (("short", []), ("whole", ["--no-shortlist"])):
        manifests[name] = export(folder, bundles / name, "--bits", bits, *option)
    assert str(bundles / "short") in capsys.readouterr().out
    assert manifests["short"].shortlist is not None and manifests["whole"].shortlist is None
    assert manifests["short"].name == "short" and names(bundles) == {"short", "whole"}
    (folder / "lex.50.50.ende.s2t.bin").write_bytes(b"damaged")
    assert main([str(folder), "--out", str(bundles / "short"), "--bits", bits]) == 1
    assert "is not a shortlist of this model" in capsys.readouterr().err
    assert read_bundle(bundles / "short") == manifests["short"]


def test_16_bits_are_float16_by_every_command(
    checkpoint: Path, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = export(checkpoint, bundles / "float16", "--bits", "16", "--name", "mine")
    assert (manifest.name, manifest.dtype) == ("mine", "float16")
    export(checkpoint, bundles / "float32", "--bits", "32")
    quantize = ["quantize", str(bundles / "float32"), "--out", str(bundles / "again"), "--bits", "16"]
    assert main(quantize) == 0
    again = read_bundle(bundles / "again")
    assert (again.files, again.rows) == (manifest.files, manifest.rows)
    capsys.readouterr()
    for option in (["--encoder", "per-token"], ["--states", "int8"], ["--block-size", "16"]):
        with pytest.raises(SystemExit) as ended:
            main([*quantize, *option])
        name = option[0].removeprefix("--").replace("-", "_")
        error = f"error: --bits: 16 is float16, which has no {name}; leave them out"
        assert ended.value.code == 2 and error in capsys.readouterr().err
    assert main([str(write_bert(bundles.parent / "bert")), "--out", str(bundles / "bert"), "--bits", "16"]) == 1
    assert "is an encoder; float16 is only for encoder-decoder models: use --bits 8 or 32" in capsys.readouterr().err
    assert names(bundles) == {"float16", "float32", "again"}


@pytest.mark.parametrize("bits", ["4", "8"])
def test_bits_that_are_asked_for_and_lose_too_much_are_an_error_that_leaves_the_old_bundle(
    folder: Path, bundles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bits: str
) -> None:
    old = export(folder, bundles / "mine", "--bits", "32")
    monkeypatch.setattr(text_quality, "MIN_CHRF", 101.0)
    assert main([str(folder), "--out", str(bundles / "mine"), "--bits", bits]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "but at least 101 is required; try a smaller --block-size" in error
    assert error.endswith(
        "; nothing was written: --bits 32 imports float32, which `sightline quantize` converts with these options"
    )
    assert read_bundle(bundles / "mine") == old
    assert names(bundles) == {"mine"}


def test_a_model_that_loses_too_much_by_default_stays_float32(
    folder: Path, bundles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_quality, "MIN_CHRF", 101.0)
    manifest = export(folder, bundles / "mine")
    assert "note: the bundle is float32: with 8 bits, the outputs have a chrF of " in capsys.readouterr().err
    assert (manifest.name, manifest.dtype, manifest.verification) == ("mine", "float32", UNCHECKED)
    assert names(bundles) == {"mine"}
    assert manifest.files == export(folder, bundles / "other", "--bits", "32").files


def test_other_models_have_the_bits_that_are_asked_for(tmp_path: Path, bundles: Path) -> None:
    folder = write_bert(tmp_path / "bert")
    assert export(folder, bundles / "float32").dtype == "float32"
    manifest = export(folder, bundles / "int8", "--bits", "8")
    assert manifest.dtype == "int8" and manifest.quantization is not None
    assert isinstance(manifest.quantization.quality, EmbeddingQuality)


@pytest.mark.parametrize(("kind", "encodings", "bits"), read_table(__file__))
def test_the_default_is_8_bits_for_checkpoints_of_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, encodings: str | None, bits: int
) -> None:
    found: list[int] = []
    monkeypatch.setattr(commands, "_write", lambda export, bits, is_default, is_shortened: found.append(bits))
    provenance = Provenance(quantized=encodings)
    monkeypatch.setattr(commands, "find_firefox_files", lambda folder: SimpleNamespace(shortlist=None))
    commands.export_folder(ImportOptions(), tmp_path / "mine", tmp_path, kind, provenance=provenance)
    assert found == [bits]


@pytest.mark.parametrize("source", ["en", "de"])
def test_texts_are_in_the_language_of_the_model(folder: Path, bundles: Path, source: str) -> None:
    manifest = export(folder, bundles / "mine", "--languages", source, "fr")
    assert manifest.quantization is not None and isinstance(manifest.quantization.quality, AgreementQuality)
    assert (manifest.quantization.quality.texts == 3) == (source == "en")
