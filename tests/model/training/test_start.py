"""Runs that start from a run or a third-party checkpoint, and the checkpoints that they save."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from sightline.__main__ import main
from sightline.base.bundle import Manifest
from sightline.base.errors import UsageError
from sightline.export import pipeline, training_check
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import build_model
from sightline.model.checkpoint import load_metadata, load_model, load_tensors, save_checkpoint
from sightline.model.config import ClassifierConfig, PretrainedConfig, model_config_to_json, read_model_config
from sightline.model.data.tokenizer_training import check_tokenizer
from sightline.model.training.start import Start, start_from
from tests.export.test_jina import write_model as write_jina
from tests.model.pretrained_folders import (
    TEMPLATE,
    begin,
    begin_checked,
    check_here,
    write_decoder,
    write_encoder,
    write_translator,
)
from tests.support.tables import read_table
from tests.zoo.folders import modules
from tests.zoo.models import edit_config

NAMES = ["cat", "dog", "bird"]
IDS = torch.tensor([[2, 5, 6, 7, 9], [2, 9, 8, 0, 0]])
LENGTHS = torch.tensor([5, 3])
MASK = torch.arange(5) < LENGTHS[:, None]


def save(folder: Path, start: Start, model: nn.Module, task: str, run: Path) -> Path:
    """Save a model as the run in the folder `run` does, which begins with the files of `begin`."""
    run.mkdir(exist_ok=True)
    parts = folder.with_name(f"{folder.name} for {task}")
    (parts / "pretrained").rename(run / "pretrained")
    (run / "tokenizer.json").write_text(start.tokenizer.to_str(pretty=True), encoding="utf-8")
    (run / "config.json").write_text(model_config_to_json(start.config), encoding="utf-8")
    save_checkpoint(run / "averaged", start.config, model.state_dict(), run / "tokenizer.json", {"epoch": 3})
    return run / "averaged"


def export(folder: Path, bundle: Path) -> Manifest:
    """Export and verify a checkpoint."""
    options = ExportOptions(sentences=("word1 word2", "word7"))
    return pipeline.export_checkpoint(pipeline.Export(folder, bundle, BundleMetadata(bundle.name), options)).manifest


# Saved checkpoints


@pytest.mark.parametrize("family", ["bert", "nomic_bert"])
def test_transformers_loads_a_saved_classifier(family: str, tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", family)
    start, model = begin(tmp_path / "from", "classification", NAMES)
    saved = save(tmp_path / "from", start, model, "classification", tmp_path / "run")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    assert loaded.config.id2label == {0: "cat", 1: "dog", 2: "bird"}
    assert loaded.config.label2id == {"cat": 0, "dog": 1, "bird": 2}
    assert loaded.config.problem_type == "single_label_classification"
    assert loaded.dtype == torch.float32
    ids = torch.where(MASK, IDS, start.config.pad_id)
    with torch.no_grad():
        expected = loaded(input_ids=ids, attention_mask=MASK.long()).logits.log_softmax(dim=1)
        assert_close(model(ids, LENGTHS), expected, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert tokenizer("word1 word2")["input_ids"] == start.tokenizer.encode("word1 word2").ids
    again, _ = load_model(saved)
    assert again.config == start.config
    with torch.no_grad():
        assert torch.equal(again(ids, LENGTHS), model(ids, LENGTHS))


@pytest.mark.parametrize("task", ["encoder", "classification"])
def test_weights_that_were_not_trained_are_saved_with_the_same_bits(task: Any, tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    start, model = begin(tmp_path / "from", task, NAMES if task == "classification" else ())
    saved = save(tmp_path / "from", start, model, task, tmp_path / "run")
    before, after = load_file(tmp_path / "from" / "model.safetensors"), load_file(saved / "model.safetensors")
    prefix = "bert." if task == "classification" else ""
    assert {f"{prefix}{name}" for name in before} == {name for name in after if not name.startswith("classifier")}
    assert all(torch.equal(tensor, after[f"{prefix}{name}"]) for name, tensor in before.items())
    assert load_metadata(saved / "model.safetensors") == {"epoch": 3}


@pytest.mark.parametrize(("pooling", "mode"), [("mean", "mean"), ("first", "cls")])
def test_a_saved_encoder_is_imported_with_its_pooling(pooling: str, mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "from"
    write_encoder(folder, "bert")
    if pooling != "mean":
        kinds = modules("Transformer", "Pooling")
        (folder / "modules.json").write_text(json.dumps(kinds), encoding="utf-8")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}), encoding="utf-8")
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 11}), encoding="utf-8")
    start, model = begin(folder, "encoder")
    assert isinstance(start.config, PretrainedConfig) and start.config.pooling == pooling
    assert start.config.max_positions == (23 if pooling == "mean" else 11)
    saved = save(folder, start, model, "encoder", tmp_path / "run")
    manifest = export(saved, tmp_path / "bundle")
    assert manifest.embedding is not None and manifest.verification is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == (pooling, True)
    assert manifest.limits.max_source_tokens == start.config.max_positions
    again: Any = load_model(saved)[0]
    with torch.no_grad():
        assert torch.equal(again.embed(IDS, LENGTHS), model.embed(IDS, LENGTHS))


def test_the_configuration_of_a_run_is_read_back(tmp_path: Path) -> None:
    write_decoder(tmp_path / "from", template=TEMPLATE)
    start, _ = begin(tmp_path / "from", "language-model", template="not used")
    (tmp_path / "config.json").write_text(model_config_to_json(start.config), encoding="utf-8")
    assert read_model_config(tmp_path / "config.json") == start.config
    check_tokenizer(start.tokenizer, start.config)


def write_data(folder: Path, task: str) -> Path:
    """Write examples of a task that all tokenizers of these tests read."""
    records: list[dict[str, str]] = [
        {
            "classification": {"text": f"word{number}", "label": "ab"[number % 2]},
            "language-model": {"text": f"There are {number} birds."},
            "translation": {"source": f"word{number + 5}", "target": f"word{number + 17}"},
        }[task]
        for number in range(12)
    ]
    file = folder / f"{task}.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return file


@pytest.mark.parametrize("task", ["classification", "language-model", "translation"])
def test_a_run_continues_to_the_same_bits(task: str, tmp_path: Path) -> None:
    folder, data = tmp_path / "from", write_data(tmp_path, task)
    if task == "classification":
        write_encoder(folder, "bert")
    elif task == "translation":
        write_translator(folder, "m2m100")
    else:
        write_decoder(folder, "llama-biases")
    options = ["--from", str(folder), "--threads", "1", "--warmup-steps", "2", "--dropout", "0.3"]
    options += ["--source", "en", "--target", "de"] if task == "translation" else []
    for run, lengths in (("whole", "2"), ("resumed", "12")):
        for epochs in lengths:
            words = ["train", task, str(data), "--run", str(tmp_path / run), "--epochs", epochs, *options]
            with patch.object(training_check, "run_limited", check_here):
                assert main(words) == 0
    first, second = (load_tensors(tmp_path / run / "state.safetensors") for run in ("whole", "resumed"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    before = load_file(folder / "model.safetensors")
    for name in before.keys() - {"model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights"}:
        after = first.get(f"model.{name}", first.get(f"model.bert.{name}"))
        assert after is not None and ("bias" in name or not torch.equal(after, before[name]))


# Checkpoints in other forms


def test_weights_in_shards_pickles_and_half_precision_are_equal(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert", "ForMaskedLM")
    weights = load_file(tmp_path / "from" / "model.safetensors")
    expected = begin(tmp_path / "from", "encoder")[1].state_dict()
    for kind in ("shards", "pickle", "half"):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((tmp_path / "from" / name).read_bytes())
        if kind == "shards":
            names = sorted(weights)
            parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            for file, part in parts.items():
                save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
            index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        elif kind == "pickle":
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            half = {name: one.bfloat16() for name, one in weights.items()}
            save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
        found = begin(folder, "encoder")[1].state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if "pooler" not in name:  # the checkpoint has none
                assert torch.equal(found[name], tensor.bfloat16().float() if kind == "half" else tensor)


def test_known_labels_keep_their_rows_and_new_ones_get_a_new_layer(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    reference = write_encoder(folder, "bert", "ForSequenceClassification").state_dict()
    start, model = begin(folder, "classification", ["LABEL_3", "LABEL_0"])
    head = model.module.classifier
    assert torch.equal(head.weight, reference["classifier.weight"][[3, 0]])
    assert torch.equal(head.bias, reference["classifier.bias"][[3, 0]])
    for labels in (["LABEL_3", "other"], [*"abcde"]):
        start, model = begin(folder, "classification", labels)
        assert start.note == f"; the output layer is new, for the labels {', '.join(labels)}"
        head = model.module.classifier
        assert len(head.weight) == len(labels) and head.weight.abs().max() < 0.1 and not head.bias.any()
        pooler = model.module.bert.pooler.dense
        assert torch.equal(pooler.weight, reference["bert.pooler.dense.weight"])


def test_the_head_of_another_task_is_left_out(tmp_path: Path) -> None:
    for architecture in ("ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM"):
        reference = write_encoder(tmp_path / architecture, "roberta", architecture).state_dict()
        _, model = begin(tmp_path / architecture, "classification", NAMES)
        assert model.module.classifier.out_proj.weight.shape == (3, 30)
        name = "roberta.encoder.layer.0.output.dense.weight"
        assert torch.equal(model.state_dict()[name], reference[name])


# Runs of our own


@pytest.fixture
def run(tmp_path: Path, tokenizer_path: Path) -> Path:
    """Run of a small classifier."""
    torch.manual_seed(0)
    config = ClassifierConfig(400, d_model=16, num_heads=2, d_ff=32, encoder_layers=1, labels=("bad", "good", "fair"))
    model = Classifier(config)
    save_checkpoint(tmp_path / "run" / "best", config, model.state_dict(), tokenizer_path, {})
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    save_checkpoint(tmp_path / "run" / "averaged", config, state, tokenizer_path, {})
    return tmp_path / "run"


def continued(folder: Path, labels: list[str]) -> tuple[Start, Any]:
    start = start_from(folder, "classification", labels)
    model = build_model(start.config)
    start.initialise(model)
    return start, model


def test_a_run_starts_from_the_averaged_weights_of_another(run: Path, tokenizer_path: Path) -> None:
    start, model = continued(run / "averaged", ["good", "bad", "fair"])
    before = load_file(run / "averaged" / "weights.safetensors")
    assert torch.equal(model.embedding.weight, before["embedding.weight"])
    assert torch.equal(model.output.weight, before["output.weight"][[1, 0, 2]])
    assert start.tokenizer.to_str() == load_model(run / "averaged")[1].to_str()
    assert start.note == ""
    start, model = continued(run / "averaged", ["ham", "spam"])
    assert model.output.weight.shape == (2, 16)
    assert torch.equal(model.embedding.weight, before["embedding.weight"])


def test_a_run_of_a_pretrained_model_is_continued(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    first, model = begin(tmp_path / "from", "classification", NAMES)
    saved = save(tmp_path / "from", first, model, "classification", tmp_path / "run")
    second, continued = begin(saved, "classification", NAMES)
    assert second.note == ""
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in continued.state_dict().items())


# Errors


def refused(folder: Path, task: Any = "encoder", **options: Any) -> str:
    with pytest.raises((UsageError, ImportFailedError)) as caught:
        begin_checked(
            folder, task, ["a", "b"] if task == "classification" else (), **options
        )  # before data are encoded
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json; --from needs a run folder"):
        start_from(tmp_path, "encoder")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    write_encoder(folder, "bert")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    assert "model.safetensors" in refused(folder)
    (folder / "model.safetensors").unlink()
    assert f"{folder} has neither model.safetensors nor" in refused(folder)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert "tokenizer.json or other files of the tokenizer cannot be used" in refused(folder)


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    (tmp_path / "from" / "model.safetensors").unlink()
    torch.save({"weight": nn.Linear(1, 1)}, tmp_path / "from" / "pytorch_model.bin")
    assert "save_pretrained, which writes safetensors" in refused(tmp_path / "from")


@pytest.mark.parametrize(("changes", "expected"), read_table(__file__))
def test_configurations_that_cannot_be_trained(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    edit_config(tmp_path / "from", **changes)
    assert expected in refused(tmp_path / "from")


def test_a_family_with_code_of_its_own_cannot_be_trained(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    write_jina(tmp_path / "from", "small")
    assert "of the family jina_bert can be imported at most, not trained" in refused(tmp_path / "from")


def test_tasks_that_do_not_suit_the_family(tmp_path: Path, run: Path) -> None:
    write_encoder(tmp_path / "bert", "bert")
    write_decoder(tmp_path / "llama")
    assert "is an encoder (bert), but the task language-model needs a decoder" in refused(
        tmp_path / "bert", "language-model"
    )
    assert "is a decoder (llama), but the task encoder needs an encoder" in refused(tmp_path / "llama")
    assert "the task translation needs an encoder-decoder" in refused(tmp_path / "bert", "translation")
    with pytest.raises(UsageError, match="architecture classifier, which cannot be trained for the task translation"):
        start_from(run / "averaged", "translation")


def test_languages_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    write_translator(tmp_path / "from", "m2m100")
    assert "name those of the data with --source and --target" in refused(tmp_path / "from", "translation")
    message = refused(tmp_path / "from", "translation", pair=("en", "it"))
    assert message == "the checkpoint has no language it; it has de, en, fr"


def test_layers_after_the_pooling_cannot_be_trained(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    (tmp_path / "from" / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling", "WordWeights")))
    assert "the modules Transformer, Pooling, WordWeights are not supported" in refused(tmp_path / "from")


def test_a_template_is_added_where_there_is_none(tmp_path: Path) -> None:
    write_decoder(tmp_path / "from")
    start, model = begin(tmp_path / "from", "language-model", template=TEMPLATE)
    assert isinstance(start.config, PretrainedConfig)
    assert start.config.chat
    saved = save(tmp_path / "from", start, model, "language-model", tmp_path / "run")
    assert (saved / "chat_template.jinja").read_text("utf-8") == TEMPLATE
    assert json.loads((saved / "generation_config.json").read_text("utf-8"))["eos_token_id"] == [4, 7, 9]
    assert start.config.eos_id == 4
