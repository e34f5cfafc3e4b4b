"""Export of the folder of a training run: choice of the checkpoint, and use of the record."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline.base.bundle import Languages, Manifest, SentenceEmbedding, Verification
from sightline.base.bundle_files import read_bundle, read_manifest
from sightline.export import commands
from sightline.export.card import CARD, MARK
from sightline.export.describe import describe_source
from sightline.export.options import ExportOptions
from sightline.export.pipeline import open_source
from sightline.export.sources.run_folder import RunRecord, is_run, read_record, run_checkpoint
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model, load_tensors, save_checkpoint, save_tensors
from sightline.model.config import CausalConfig
from sightline.model.parts import WEIGHTS
from tests.export.folders_of_others import word_tokenizer, write_bert
from tests.support.export import main
from tests.support.tables import read_table
from tests.support.training_runs import UNCHECKED
from tests.zoo.models import ENCODERS

RECORD: dict[str, Any] = read_table(__file__)

SETTINGS = {"max_epochs": 3, "note": "```"}
pytestmark = pytest.mark.usefixtures("unverified")


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    """Folder of a translation run as the trainer leaves it, with three epochs that differ."""
    folder = tmp_path / "run"
    for name in ("averaged", "best"):
        shutil.copytree(checkpoint, folder / name)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy2(checkpoint / name, folder / name)
    (folder / "epochs").mkdir()
    for epoch, factor in ((3, 1.0), (4, 2.0), (5, 6.0)):
        weights = {name: factor * tensor for name, tensor in load_tensors(checkpoint / WEIGHTS).items()}
        save_tensors(folder / "epochs" / f"{epoch:04}.safetensors", weights)
    write_record(folder, RECORD)
    (folder / "train.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    return folder


def write_record(run: Path, record: Any) -> None:
    (run / "record.json").write_text(json.dumps(record), encoding="utf-8")


def chosen(run: Path) -> tuple[Path, str]:
    with run_checkpoint(run) as found:
        return found


def test_the_averaged_checkpoint_of_a_run_is_chosen(run: Path) -> None:
    assert is_run(run) and not is_run(run / "averaged")
    assert chosen(run) == (run / "averaged", "")
    assert chosen(run / "best") == (run / "best", "")


def test_the_epochs_of_a_run_without_an_averaged_checkpoint_are_averaged(run: Path, checkpoint: Path) -> None:
    shutil.rmtree(run / "averaged")
    for before, after in (("0004", "9999"), ("0005", "10000")):
        (run / "epochs" / f"{before}.safetensors").rename(run / "epochs" / f"{after}.safetensors")
    with run_checkpoint(run) as (folder, note):
        assert note == f"{run} has no averaged/; used is the mean of the 3 epochs in epochs/, 0003 to 10000"
        model, _ = load_model(folder)
        expected = load_tensors(checkpoint / WEIGHTS)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, 3 * expected[name], rtol=1e-6, atol=0)
        assert read_record(folder) == RunRecord(**RECORD, config=SETTINGS)
    assert not folder.exists()
    (run / "config.json").unlink()
    with run_checkpoint(run) as (folder, _):
        assert load_model(folder)[0].config == model.config  # by that of best/


def test_the_best_checkpoint_is_used_without_others(run: Path) -> None:
    (run / "averaged" / WEIGHTS).unlink()  # the training was killed while it wrote it
    shutil.rmtree(run / "epochs")
    folder, note = chosen(run)
    assert folder == run / "best"
    assert note == f"{run} has no averaged/, and no epochs that can be averaged; used is best/"


def test_a_run_without_a_checkpoint_is_an_error(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("averaged", "best", "epochs"):
        shutil.rmtree(run / name)
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 2
    assert capsys.readouterr().err == (
        f"error: {run} is a training run without a checkpoint: it has no weights in averaged/, epochs/ or best/; train "
        "it for at least one epoch\n"
    )


def test_a_bundle_has_what_the_record_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "toy"
    assert main([str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().err == ""
    manifest = read_bundle(out)
    assert manifest.languages == Languages(sources=("de-CH",), targets=("zh-Hans",))
    assert (manifest.license, manifest.training_unit) == ("CC-BY-4.0", "sentence")
    assert manifest.description == "Translation from de-CH to zh-Hans"


def test_options_precede_the_record_and_the_record_precedes_the_bundle(run: Path, tmp_path: Path) -> None:
    arguments = [str(run), "--out", str(tmp_path / "toy")]
    options = ["--languages", "x-elvish", "sl-rozaj-1994", "--license", "MIT", "--description", "mine"]
    assert main([*arguments, *options]) == 0
    manifest = read_manifest(tmp_path / "toy")
    assert manifest.languages == Languages(sources=("x-elvish",), targets=("sl-rozaj-1994",))
    assert (manifest.license, manifest.description) == ("MIT", "mine")
    write_record(run, RECORD | {"license": None})
    assert main(arguments) == 0
    manifest = read_manifest(tmp_path / "toy")
    assert manifest.languages == Languages(sources=("de-CH",), targets=("zh-Hans",))
    assert (manifest.license, manifest.description) == ("MIT", "mine")


def test_a_card_repeats_the_record(run: Path, tmp_path: Path) -> None:
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    card = (tmp_path / "toy" / CARD).read_text(encoding="utf-8")
    front = 'license: "cc-by-4.0"\nlanguage: ["de-CH", "zh-Hans"]\npipeline_tag: "translation"\n'
    assert card.startswith(
        f'---\n{front}tags: ["sightline", "onnx"]\n---\n\n# toy\n\nTranslation from de-CH to zh-Hans'
    )
    for part in (
        "| task | translation |",
        "| examples | train 5,000, dev 200, test 200 |",
        "| languages | de-CH to zh-Hans |",
        "| license | CC-BY-4.0 |",
        "| metric | value | split | examples | search | weights |\n| --- | --- | --- | --- | --- | --- |\n"
        "| BLEU | 31.23 | dev | 100 of 200 | greedy | epoch 7 |\n"
        "| chrF | 55 | dev | 200 | greedy | epoch 7 |\n"
        "| BLEU | 30 | test | 200 | 5 beams, length penalty 1 | averaged |\n",
        "Signature of BLEU on dev: `a|b`\n\nSignature of chrF on dev: `c|d`\n\nSignature of BLEU on test: `e|f`",
        "```sh\nsightline train translation pairs --run run --license 'CC BY 4.0'\n```",
        "Versions: python 3.11.2, torch null",
        f"| train.jsonl | `{'ab' * 32}` |",
        '````json\n{\n  "max_epochs": 3,\n  "note": "```"\n}\n````',
    ):
        assert part in card
    assert card.endswith(f"\n\n{MARK}\n")


def test_a_card_of_the_user_is_kept(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, card = [str(run), "--out", str(tmp_path / "toy")], tmp_path / "toy" / CARD
    assert main(arguments) == 0
    write_record(run, RECORD | {"examples": {"train": 7}})
    assert main(arguments) == 0
    text = card.read_text(encoding="utf-8")
    assert "| examples | train 7 |" in text
    card.write_text(text.replace(MARK, "My own words."), encoding="utf-8")
    capsys.readouterr()
    write_record(run, RECORD)
    assert main(arguments) == 0
    assert capsys.readouterr().err == f"note: {card} was not written by this command, so it is kept\n"
    assert card.read_text(encoding="utf-8").endswith("My own words.\n")


@pytest.mark.parametrize("license_", ["for research: no sale", "  "])
def test_a_license_without_an_identifier_is_named_in_the_card(license_: str, run: Path, tmp_path: Path) -> None:
    assert main([str(run), "--out", str(tmp_path / "toy"), "--license", license_]) == 0
    card = (tmp_path / "toy" / CARD).read_text(encoding="utf-8")
    assert f'license: "other"\nlicense_name: "{license_}"\n' in card


def test_a_record_may_lack_everything(run: Path, tmp_path: Path) -> None:
    write_record(run, {"future": [1], "starts": [{"versions": "unknown"}]})
    (run / "train.json").unlink()
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    manifest = read_bundle(tmp_path / "toy")
    assert (manifest.languages, manifest.license, manifest.description) == (None, "", "")
    card = (tmp_path / "toy" / CARD).read_text(encoding="utf-8")
    assert "| license | not stated |" in card and "## " not in card


def test_numbers_of_a_record_may_be_null(run: Path, tmp_path: Path) -> None:
    nulls = {"examples": {"train": 5, "test": None}, "metrics": {"test": None, "dev": {"BLEU": 1.5, "chrF": None}}}
    write_record(run, RECORD | nulls)
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    card = (tmp_path / "toy" / CARD).read_text(encoding="utf-8")
    assert "| examples | train 5 |" in card
    assert "| metric | value | split |\n| --- | --- | --- |\n| BLEU | 1.5 | dev |\n\n## Training" in card


def test_a_card_has_the_settings_of_a_run_of_any_version(run: Path, tmp_path: Path) -> None:
    """Earlier ones stated languages and a size of the vocabulary for every task."""
    write_record(run, {"config": {"max_epochs": 7, "source": "en", "target": "de", "vocab_size": 6000}})
    for is_last in (False, True):
        assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
        card = (tmp_path / "toy" / CARD).read_text(encoding="utf-8")
        assert f'"max_epochs": {7 if is_last else 3}' in card
        assert "source" not in card and "6000" not in card
        (run / "train.json").unlink(missing_ok=True)


def test_a_run_without_a_record_has_no_card(run: Path, tmp_path: Path) -> None:
    (run / "record.json").unlink()
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    assert read_manifest(tmp_path / "toy").languages is None
    assert not (tmp_path / "toy" / CARD).exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ('{"examples": {"train": "many"}}', "examples.train: Input should be a valid integer"),
    ],
)
def test_a_damaged_record_is_one_sentence(
    text: str, reason: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "record.json").write_text(text, encoding="utf-8")
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run / 'record.json'} is not the record of a training run: {reason}")
    assert error.count("\n") == 1 and not (tmp_path / "toy").exists()


def test_languages_of_a_record_that_are_no_tags_are_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(run, RECORD | {"target": "deutsch"})
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 2
    assert capsys.readouterr().err == (
        "error: languages must be BCP 47 tags such as en, de-CH or zh-Hans, got de-CH and deutsch; name the languages "
        "with --languages SOURCE TARGET\n"
    )
    assert main([str(run), "--out", str(tmp_path / "toy"), "--languages", "de-CH", "de"]) == 0


@pytest.mark.parametrize("out", ["run", ".", "run/averaged", "run/best/new"])
def test_a_bundle_never_replaces_a_run(out: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("averaged", "epochs") if out == "run/best/new" else ():
        shutil.rmtree(run / name)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert main([str(run), "--out", str(tmp_path / out)]) == 2
    assert f"--out {tmp_path / out} would replace the checkpoint" in capsys.readouterr().err
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_verify_accepts_the_folder_of_a_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verified = list[Path]()

    def verify(bundle: Path, manifest: Manifest, checkpoint: Path, *_: object, **__: object) -> Verification:
        assert (checkpoint / WEIGHTS).is_file() and manifest == read_manifest(bundle)
        verified.append(checkpoint)
        return UNCHECKED

    monkeypatch.setattr(commands, "verify_bundle", verify)
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    assert main(["verify", str(tmp_path / "toy"), "--checkpoint", str(run)]) == 0
    assert verified == [run / "averaged"]
    shutil.rmtree(run / "averaged")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "toy"), "--checkpoint", str(run)]) == 0
    assert "used is the mean of the 3 epochs" in capsys.readouterr().err


@pytest.mark.parametrize("has_epochs", [False, True])
def test_a_run_of_an_imported_encoder_has_its_record(
    has_epochs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints are folders of Hugging Face, and `config.json` of the run is one, too."""
    run = tmp_path / "run"
    write_bert(run / "averaged")
    shutil.copy2(run / "averaged" / "config.json", run / "config.json")
    write_record(run, {"task": "encoder", "license": "Apache-2.0", "examples": {"train": 1000}})
    if has_epochs:  # their names of tensors may be others
        (run / "averaged").rename(run / "best")
        (run / "epochs").mkdir()
        save_tensors(run / "epochs" / "0001.safetensors", {"a": torch.zeros(1)})
    assert main([str(run), "--out", str(tmp_path / "vectors")]) == 0
    assert ("used is best/" in capsys.readouterr().err) == has_epochs
    manifest = read_bundle(tmp_path / "vectors")
    assert manifest.origin is not None and manifest.origin.family == "bert"
    assert manifest.embedding == SentenceEmbedding(pooling="mean", normalize=True)
    assert (manifest.license, manifest.name) == ("Apache-2.0", "vectors")
    assert manifest.description == "Embeddings of texts"
    assert 'pipeline_tag: "sentence-similarity"' in (tmp_path / "vectors" / CARD).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("problem", "kind"), [("single_label_classification", "classes"), ("multi_label_classification", "independent")]
)
def test_a_run_of_an_imported_classifier_has_its_labels(problem: str, kind: str, tmp_path: Path) -> None:
    run, labels = tmp_path / "run", ("praise", "complaint", "question", "order", "Größe 🙂")
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: id_ for id_, label in enumerate(labels)}}
    options: dict[str, Any] = {"num_labels": len(labels), "problem_type": problem, "pad_token_id": 0, **names}
    ENCODERS["bert"].save(run / "averaged", "BertForSequenceClassification", **options)
    word_tokenizer(211).save(str(run / "averaged" / "tokenizer.json"))
    write_record(run, {"task": "classification"})
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    manifest = read_bundle(tmp_path / "toy")
    assert (manifest.labels, manifest.label_kind) == (labels, kind)
    assert manifest.description == "Classification of texts"


def test_dialogues_need_the_tokens_of_messages(checkpoint: Path, tmp_path: Path) -> None:
    _, tokenizer = load_model(checkpoint)
    config = CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=1, max_positions=64)
    folder = tmp_path / "run" / "averaged"
    save_checkpoint(folder, config, CausalModel(config).state_dict(), checkpoint / "tokenizer.json", {})
    write_record(tmp_path / "run", {"task": "language-model", "has_dialogues": True})
    with pytest.raises(ValueError, match=r"has no special token <\|im_start"):
        describe_source(open_source(folder, "training"), ExportOptions())


def test_the_record_of_the_working_directory_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "best")
    assert read_record(Path()) == read_record(Path("../averaged")) == RunRecord(**RECORD, config=SETTINGS)


def test_a_bundle_of_another_task_loses_its_languages(run: Path, classifier_checkpoint: Path, tmp_path: Path) -> None:
    assert main([str(run), "--out", str(tmp_path / "toy")]) == 0
    shutil.copytree(classifier_checkpoint, tmp_path / "other" / "averaged")
    write_record(tmp_path / "other", {"task": "classification"})
    assert main([str(tmp_path / "other"), "--out", str(tmp_path / "toy")]) == 0
    assert read_bundle(tmp_path / "toy").languages is None


def test_the_record_of_another_folder_is_not_read(run: Path) -> None:
    shutil.move(run / "averaged", run / "other")
    assert read_record(run / "other") is None
    assert read_record(run / "best") == RunRecord(**RECORD, config=SETTINGS)


def test_other_folders_are_no_runs(checkpoint: Path, tmp_path: Path) -> None:
    write_bert(tmp_path / "bert")
    (tmp_path / "bert" / "best").mkdir()
    for folder in (tmp_path, tmp_path / "none", tmp_path / "bert", checkpoint):
        assert not is_run(folder)
