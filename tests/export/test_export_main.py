import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from sightline.base.bundle import Languages
from sightline.base.bundle_files import read_bundle, read_manifest, write_manifest
from sightline.export import commands
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.options import languages_of
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import CausalConfig, TransformerConfig
from sightline.model.data.tokenizer_training import read_tokenizer
from tests.export.products import everywhere
from tests.support.dialogues import LINES
from tests.support.export import main
from tests.support.tables import read_table

pytestmark = pytest.mark.usefixtures("few_sentences")


@pytest.fixture
def short_reader(checkpoint: Path, tmp_path: Path) -> Path:
    """Checkpoint with max_positions 24."""
    tokenizer = checkpoint / "tokenizer.json"
    config = TransformerConfig(
        read_tokenizer(tokenizer).get_vocab_size(), d_model=16, num_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1
    )
    config = dataclasses.replace(config, max_positions=24)
    save_checkpoint(tmp_path / "short", config, Transformer(config).state_dict(), tokenizer, {})
    return tmp_path / "short"


@pytest.fixture
def sentences_path(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("A man sleeps.\n", encoding="utf-8")
    return path


def test_export_writes_a_bundle_and_verify_accepts_it(
    checkpoint: Path,
    tmp_path: Path,
    sentences_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "my-model"
    assert main([str(checkpoint), "--out", str(out), "--sentences", str(sentences_path)]) == 0
    assert capsys.readouterr().out.startswith(str(out))
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["name"], manifest["training_unit"]) == ("my-model", "sentence")
    arguments = ["verify", str(out), "--checkpoint", str(checkpoint), "--sentences", str(sentences_path)]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["sentences"] == 1


def test_a_failed_verification_exits_with_1_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "toy"
    arguments = [str(checkpoint), "--out", str(out), "--sentences", str(sentences_path), "--tolerance", "0"]
    assert main(arguments) == 1
    assert re.match(
        r"error: \S+ and its checkpoint differ: hidden differ by \S+ from the reference, but the limit is 0;",
        capsys.readouterr().err,
    )
    assert not out.exists()


@pytest.mark.parametrize(("arguments", "message"), read_table(__file__, "missing"))
def test_missing_files_exit_with_2_and_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    assert message in output.err
    assert not any(tmp_path.iterdir())


def test_weights_that_do_not_fit_exit_with_1_and_one_line(
    checkpoint: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "d_ff": 128}), encoding="utf-8")
    assert main([str(folder), "--out", str(tmp_path / "toy"), "--sentences", str(sentences_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_heads_of_unsupported_sizes_are_padded(checkpoint: Path, tmp_path: Path, sentences_path: Path) -> None:
    """The bundle is verified against PyTorch before it is written."""
    tokenizer = checkpoint / "tokenizer.json"
    vocab_size = read_tokenizer(tokenizer).get_vocab_size()
    config = TransformerConfig(vocab_size, d_model=16, num_heads=4, d_ff=16, encoder_layers=1, decoder_layers=1)
    save_checkpoint(tmp_path / "narrow", config, Transformer(config).state_dict(), tokenizer, {})
    assert main([str(tmp_path / "narrow"), "--out", str(tmp_path / "toy"), "--sentences", str(sentences_path)]) == 0
    assert {state.shape[-1] for state in read_manifest(tmp_path / "toy").states} == {8}


def test_a_name_that_no_request_could_use_is_rejected(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), "--out", str(tmp_path / "toy"), "--name", "no/slash"]) == 2
    assert "error: name must be 1 to 128 letters, digits," in capsys.readouterr().err


def test_an_export_after_a_killed_one_keeps_the_metadata_of_the_bundle(
    short_reader: Path, tmp_path: Path, sentences_path: Path, unverified: None
) -> None:
    arguments = [str(short_reader), "--out", str(tmp_path / "toy"), "--sentences", str(sentences_path)]
    assert main([*arguments, "--description", "a toy", "--license", "for research"]) == 0
    (tmp_path / "toy").rename(tmp_path / ".toy.old")  # killed between the two moves
    (tmp_path / ".toy.new").mkdir()
    assert main(arguments) == 0
    manifest = read_manifest(tmp_path / "toy")
    assert (manifest.description, manifest.license) == ("a toy", "for research")
    assert not list(tmp_path.glob(".*"))


def test_a_replaced_bundle_keeps_its_metadata(
    short_reader: Path, tmp_path: Path, sentences_path: Path, unverified: None
) -> None:
    out = tmp_path / "toy"
    arguments = [str(short_reader), "--out", str(out), "--sentences", str(sentences_path)]
    assert main([*arguments, "--description", "a toy", "--license", "for research"]) == 0
    manifest = read_manifest(out)
    assert (manifest.languages, manifest.chat) == (None, None)
    write_manifest(out, manifest.model_copy(update={"chat": LINES}))
    said = []
    changes = ["--languages", "de", "fr", "--unit", "text", "--license", "Apache-2.0"]
    for more in (["--languages", "en", "de"], [], changes):
        assert main([*arguments, *more]) == 0
        said.append(read_manifest(out))
    assert [(one.name, one.description, one.chat) for one in said] == [("toy", "a toy", LINES)] * 3
    assert [one.license for one in said] == ["for research", "for research", "Apache-2.0"]
    first, last = Languages(sources=("en",), targets=("de",)), Languages(sources=("de",), targets=("fr",))
    assert [one.languages for one in said] == [first, first, last]
    assert [one.training_unit for one in said] == ["sentence", "sentence", "text"]


@pytest.mark.parametrize(("tag", "usual"), read_table(__file__, "tags"))
def test_languages_of_a_bundle_have_their_usual_case(tag: str, usual: str) -> None:
    assert languages_of((tag, "fr")) == Languages(sources=(usual,), targets=("fr",))


@pytest.mark.parametrize("languages", [("english", "de"), ("en", "de_CH"), ("en", "d")])
def test_languages_that_are_no_codes_exit_with_2_and_one_line(
    checkpoint: Path, tmp_path: Path, languages: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), "--out", str(tmp_path / "toy"), "--languages", *languages]) == 2
    error = capsys.readouterr().err
    assert (
        error == f"error: languages must be BCP 47 tags such as en, de-CH or zh-Hans, got {' and '.join(languages)}\n"
    )
    assert not (tmp_path / "toy").exists()


@pytest.fixture
def parallel_text(tmp_path: Path) -> Path:
    """Two pairs with translations that random weights do not generate."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "val.en").write_text("A man sleeps.\nA dog.\n", encoding="utf-8")
    (folder / "val.de").write_text("Ein Mann schläft.\nEin Hund.\n", encoding="utf-8")
    return folder


def test_quantize_writes_a_bundle_with_its_measurements(
    bundle: Path, tmp_path: Path, parallel_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    arguments = ["quantize", str(bundle), "--out", str(out), "--bits", "8", "--block-size", "32"]
    arguments += ["--encoder", "per-token", "--layers", "float32"]
    assert main([*arguments, "--data", str(parallel_text), "--limit", "1", "--force"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bits"], printed["block_size"]) == (8, 32)
    assert printed["schemes"] == {"encoder": "per-token", "layers": "float32", "projection": "group-wise"}
    assert (printed["quality"]["split"], printed["quality"]["sentences"]) == ("val", 1)
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8"))["quantization"] == printed


def test_quantize_without_verification_is_recorded(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert main(["quantize", str(bundle), "--out", str(out), "--bits", "4", "--unverified"]) == 0
    assert json.loads(capsys.readouterr().out)["quality"] is None
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["dtype"], manifest["quantization"]["quality"]) == ("int4", None)


def quantize_static(bundle: Path, out: Path, *more: str) -> list[str]:
    arguments = ["quantize", str(bundle), "--out", str(out), "--bits", "8", "--unverified"]
    return [*arguments, "--encoder", "per-tensor", "--layers", "per-tensor", "--projection", "per-tensor", *more]


def test_quantize_measures_static_scales_on_the_given_sentences(
    bundle: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    assert main(quantize_static(bundle, out, "--calibration", str(sentences_path))) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schemes"] == dict.fromkeys(("encoder", "layers", "projection"), "per-tensor")
    quantize_bundle(bundle, tmp_path / "expected", everywhere("per-tensor"), None, calibration=["A man sleeps."])
    assert read_bundle(out).files == read_bundle(tmp_path / "expected").files


def test_static_scales_are_measured_on_the_default_sentences(
    bundle: Path, tmp_path: Path, sentences_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, own = (tmp_path / name for name in ("given", "own"))
    monkeypatch.setattr(commands, "DEFAULT_SENTENCES", sentences_path)
    assert main(quantize_static(bundle, own)) == 0
    assert main(quantize_static(bundle, given, "--calibration", str(sentences_path))) == 0
    assert read_bundle(given).files == read_bundle(own).files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("", "few.txt has no sentences"),
        ("A dog.\n" + "walks " * 300, "line 2 has 1202 tokens, but the model reads at most 256"),
    ],
    ids=["no file", "no sentence", "too long"],
)
def test_static_scales_that_cannot_be_measured_are_an_error(
    bundle: Path, tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "small", tmp_path / "few.txt"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(quantize_static(bundle, out, "--calibration", str(path))) == (2 if text is None else 1)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
    assert not out.exists()


@pytest.mark.parametrize("site", ["encoder", "layers", "projection"])
def test_an_unknown_form_is_rejected(
    bundle: Path, tmp_path: Path, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(bundle), "--out", str(tmp_path / "small"), "--bits", "8", "--unverified"]
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, f"--{site}", "columns"])
    assert exit_info.value.code == 2
    assert (
        f"--{site} must be one of group-wise, per-token, per-tensor, float32, got 'columns'" in capsys.readouterr().err
    )


def test_float16_writes_a_bundle_with_its_measurements(
    bundle: Path, tmp_path: Path, parallel_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    arguments = ["quantize", str(bundle), "--out", str(out), "--bits", "16", "--data", str(parallel_text)]
    assert main([*arguments, "--limit", "1", "--force"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bits"], printed["block_size"]) == (16, None)
    assert printed["quality"]["sentences"] == 1
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["dtype"], manifest["quantization"]) == ("float16", printed)
    assert manifest["languages"] == {**manifest["languages"], "sources": ["en"], "targets": ["de"]}


@pytest.mark.parametrize("bits", ["8", "16"])
def test_the_loss_is_measured_on_the_sentences_of_the_repository_by_default(
    bundle: Path,
    tmp_path: Path,
    sentences_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bits: str,
) -> None:
    arguments = ["quantize", str(bundle), "--out", str(tmp_path / "small"), "--bits", bits, "--force"]
    monkeypatch.setattr(commands, "DEFAULT_SENTENCES", sentences_path)
    assert main(arguments) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    assert quality.keys() == {"texts", "chrf", "same_outputs"} and quality["texts"] == 1


def test_quantize_without_text_in_the_language_asks_for_it(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    languages = Languages(sources=("de",), targets=("en",))
    write_manifest(copied, read_bundle(copied).model_copy(update={"languages": languages}))
    assert main(["quantize", str(copied), "--out", str(tmp_path / "small"), "--bits", "8"]) == 2
    assert capsys.readouterr().err == (
        "error: measuring the loss needs text in the language of the model; name a file with one text per line with "
        "--texts or a folder of parallel text with --data, or use --unverified\n"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--split", "test"], "test.en: parallel text of the split "),
        (["--target", "fr"], "val.fr: parallel text of the split "),
    ],
)
def test_quantize_on_missing_text_exits_with_2(
    bundle: Path, tmp_path: Path, parallel_text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    arguments = ["quantize", str(bundle), "--out", str(out), "--bits", "8", "--data", str(parallel_text)]
    assert main([*arguments, *more]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture
def own_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Default sentences, of which the second and third have more than 24 tokens."""
    path = tmp_path / "own.txt"
    path.write_text(f"A man sleeps.\n{'walks ' * 30}\n{'runs ' * 90}\nA boy.\n", encoding="utf-8")
    monkeypatch.setattr(commands, "DEFAULT_SENTENCES", path)
    return path


def test_default_sentences_that_a_model_cannot_read_are_omitted_by_every_command(
    short_reader: Path, own_sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A too long default sentence must not prevent export and calibration."""
    note = f"note: skipped 2 of 4 sentences of {own_sentences} with more than 24 tokens, the limit of the model"
    out = tmp_path / "float32"
    assert main([str(short_reader), "--out", str(out)]) == 0
    assert note in capsys.readouterr().err
    verification = read_manifest(out).verification
    assert verification is not None and verification.sentences == 2
    assert main(["verify", str(out), "--checkpoint", str(short_reader)]) == 0
    output = capsys.readouterr()
    assert note in output.err and json.loads(output.out)["sentences"] == 2
    assert main(quantize_static(out, tmp_path / "int8")) == 0
    assert f"{note} (lines 2, 3); name another file with --calibration\n" in capsys.readouterr().err
    quantize_bundle(out, tmp_path / "expected", everywhere("per-tensor"), None, calibration=["A man sleeps.", "A boy."])
    assert read_bundle(tmp_path / "int8").files == read_bundle(tmp_path / "expected").files


def test_default_sentences_of_which_none_can_be_read_are_an_error_that_asks_for_others(
    short_reader: Path, own_sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_sentences.write_text("walks " * 30, encoding="utf-8")
    assert main([str(short_reader), "--out", str(tmp_path / "float32")]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"error: every sentence of {own_sentences} has more than 24 tokens, the limit of the model; name a file "
        "with shorter ones with --sentences\n"
    )


def test_a_given_sentence_that_is_too_long_is_rejected_with_its_file_and_line(
    bundle: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"A dog.\n\n{'walks ' * 300}\n", encoding="utf-8")
    for arguments in (
        [str(checkpoint), "--out", str(tmp_path / "out"), "--sentences", str(path)],
        ["verify", str(bundle), "--checkpoint", str(checkpoint), "--sentences", str(path)],
        quantize_static(bundle, tmp_path / "out", "--calibration", str(path)),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}, line 3 has ") and error.count("\n") == 1
        assert "but the model reads at most 256; shorten or remove the line" in error
        assert not (tmp_path / "out").exists()


def test_a_pair_that_is_too_long_is_rejected_with_its_file_and_line(
    bundle: Path, tmp_path: Path, parallel_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (parallel_text / "val.en").write_text(f"A man sleeps.\n{'walks ' * 300}\n", encoding="utf-8")
    arguments = ["quantize", str(bundle), "--out", str(tmp_path / "small"), "--bits", "8", "--data", str(parallel_text)]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {parallel_text / 'val.en'}, line 2 has ") and error.count("\n") == 1
    assert main([*arguments, "--limit", "1", "--force"]) == 0


@pytest.mark.parametrize("bits", ["8", pytest.param("16", marks=pytest.mark.slow)])
def test_few_pairs_are_reported_as_insufficient(
    bundle: Path,
    tmp_path: Path,
    parallel_text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bits: str,
) -> None:
    arguments = ["quantize", str(bundle), "--out", str(tmp_path / "small"), "--data", str(parallel_text), "--force"]
    arguments += ["--bits", bits]
    warning = "pairs are too few to distinguish a loss of 0.3 BLEU from chance; use at least"
    assert main(arguments) == 0
    assert f"warning: 2 {warning} 1000" in capsys.readouterr().err
    monkeypatch.setattr(commands, "MIN_PAIRS", 2)
    assert main(arguments) == 0
    assert warning not in capsys.readouterr().err
    assert main([*arguments, "--limit", "1"]) == 0
    assert f"warning: 1 {warning} 2" in capsys.readouterr().err


def test_a_chat_model_is_exported_with_the_format_of_its_training(
    tmp_path: Path, sentences_path: Path, checkpoint: Path
) -> None:
    """A chat bundle without template would be rejected by chat completions."""
    tokenizer = checkpoint / "tokenizer.json"
    config = CausalConfig(
        read_tokenizer(tokenizer).get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=1, max_positions=64
    )
    save_checkpoint(tmp_path / "chat", config, CausalModel(config).state_dict(), tokenizer, {})
    out = tmp_path / "my-chat"
    assert main([str(tmp_path / "chat"), "--out", str(out), "--sentences", str(sentences_path)]) == 0
    shipped = read_manifest(Path(__file__).parents[2] / "bundles" / "smalltalk-chat-gatt")
    assert shipped.chat is not None and read_manifest(out).chat == shipped.chat


def test_the_folder_of_a_run_means_its_averaged_checkpoint(
    short_reader: Path, sentences_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(short_reader, tmp_path / "run" / "averaged")
    arguments = ["--sentences", str(sentences_path), "--out"]
    assert main([str(tmp_path / "run"), *arguments, str(tmp_path / "toy")]) == 0
    assert read_manifest(tmp_path / "toy").name == "toy"


@pytest.mark.parametrize("out", ["run", "run/averaged", ".", "run/averaged/bundle", "link"])
def test_a_bundle_never_replaces_its_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "run" / "averaged")
    (tmp_path / "link").symlink_to("run/averaged")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main([str(tmp_path / "run" / "averaged"), "--out", str(tmp_path / out)]) == 2
    assert f"error: --out {tmp_path / out} would replace the checkpoint" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
