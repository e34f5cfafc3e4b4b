"""Runs that start from a run or a third-party checkpoint, and the checkpoints that they save."""

import dataclasses
import io
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

from sightline.base.bundle import Manifest
from sightline.base.errors import UsageError
from sightline.export import pipeline
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.factory import build_model
from sightline.model.checkpoint import load_metadata, load_model, save_checkpoint
from sightline.model.config import ClassifierConfig, PretrainedConfig, model_config_to_json, read_model_config
from sightline.model.data.chat_template import read_chat_template
from sightline.model.data.pretrained import GENERATION, checkpoint_texts
from sightline.model.data.tokenizer_training import check_tokenizer
from sightline.model.training.start import Start, start_from
from tests.model.pretrained_folders import ENCODERS, TEMPLATE, write_decoder, write_encoder
from tests.zoo.folders import modules

NAMES = ["cat", "dog", "bird"]
IDS = torch.tensor([[2, 5, 6, 7, 9], [2, 9, 8, 0, 0]])
LENGTHS = torch.tensor([5, 3])


def begin(folder: Path, task: str, labels: list[str] | None = None, **options: Any) -> tuple[Start, Any]:
    start = start_from(folder, task, labels or (), **options)
    torch.manual_seed(1)
    model = build_model(start.config)
    start.initialise(model)
    return start, model.eval()


def load(folder: Path) -> Any:
    """Load a saved third-party model."""
    model, _ = load_model(folder)
    assert isinstance(model.config, PretrainedConfig)
    return model


def save(folder: Path, start: Start, model: nn.Module) -> Path:
    """Save a model as a run does."""
    folder.mkdir(parents=True)
    tokenizer = folder.parent / "tokenizer.json"
    tokenizer.write_text(start.tokenizer.to_str(pretty=True), encoding="utf-8")
    save_checkpoint(folder, start.config, model.state_dict(), tokenizer, {"epoch": 3})
    return folder


def export(folder: Path, bundle: Path) -> Manifest:
    """Export and verify a checkpoint, in this process."""
    with patch.object(pipeline, "check_in_child", pipeline.check):
        options = ExportOptions(sentences=("word1 word2", "word7"))
        return pipeline.export_checkpoint(
            pipeline.Export(folder, bundle, BundleMetadata(bundle.name), options), stream=io.StringIO()
        ).manifest


# Saved checkpoints


@pytest.mark.parametrize("family", ENCODERS)
def test_transformers_loads_a_saved_classifier(family: str, tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", family)
    start, model = begin(tmp_path / "from", "classification", NAMES)
    saved = save(tmp_path / "saved", start, model)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    assert loaded.config.id2label == {0: "cat", 1: "dog", 2: "bird"}
    assert loaded.config.label2id == {"cat": 0, "dog": 1, "bird": 2}
    assert loaded.config.problem_type == "single_label_classification"
    assert loaded.dtype == torch.float32
    mask = torch.arange(5) < LENGTHS[:, None]
    ids = torch.where(mask, IDS, start.config.pad_id)
    with torch.no_grad():
        expected = loaded(input_ids=ids, attention_mask=mask.long()).logits.log_softmax(dim=1)
        assert_close(model(ids, LENGTHS), expected, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert tokenizer("word1 word2")["input_ids"] == start.tokenizer.encode("word1 word2").ids
    again = load(saved)
    assert isinstance(start.config, PretrainedConfig)
    assert again.config == dataclasses.replace(start.config, fields=again.config.fields, files=again.config.files)
    with torch.no_grad():
        assert torch.equal(again(ids, LENGTHS), model(ids, LENGTHS))


def test_weights_that_were_not_trained_are_saved_with_the_same_bits(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    for task in ("encoder", "classification"):
        saved = save(tmp_path / task, *begin(tmp_path / "from", task, NAMES if task == "classification" else None))
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
    saved = save(tmp_path / "saved", start, model)
    manifest = export(saved, tmp_path / "bundle")
    assert manifest.embedding is not None and manifest.verification is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == (pooling, True)
    assert manifest.limits.max_source_tokens == start.config.max_positions
    again = load(saved)
    with torch.no_grad():
        assert torch.equal(again.embed(IDS, LENGTHS), model.embed(IDS, LENGTHS))
        hidden = transformers.AutoModel.from_pretrained(saved)(input_ids=IDS[:1]).last_hidden_state[0]
    expected = hidden.mean(dim=0) if pooling == "mean" else hidden[0]
    assert_close(model.embed(IDS[:1], LENGTHS[:1])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3"])
def test_transformers_loads_a_saved_decoder(name: str, tmp_path: Path) -> None:
    write_decoder(tmp_path / "from", name)
    start, model = begin(tmp_path / "from", "language-model")
    saved = save(tmp_path / "saved", start, model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
    with torch.no_grad():
        assert_close(model(IDS), loaded(IDS).logits, rtol=0, atol=5e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert tokenizer("Hello you")["input_ids"] == start.tokenizer.encode("Hello you").ids


def test_the_configuration_of_a_run_is_read_back(tmp_path: Path) -> None:
    write_decoder(tmp_path / "from", template=TEMPLATE)
    start = start_from(tmp_path / "from", "language-model", chat_template="not used")
    (tmp_path / "config.json").write_text(model_config_to_json(start.config), encoding="utf-8")
    assert read_model_config(tmp_path / "config.json") == start.config
    check_tokenizer(start.tokenizer, start.config)
    changed = dataclasses.replace(start.config, dropout=0.2)
    assert isinstance(changed, PretrainedConfig)
    assert json.loads(checkpoint_texts(changed)["config.json"])["attention_dropout"] == 0.2


# Checkpoints in other forms


def test_weights_in_shards_pickles_and_old_names_are_equal(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert", "ForMaskedLM")
    weights = load_file(tmp_path / "from" / "model.safetensors")
    expected = begin(tmp_path / "from", "encoder")[1].state_dict()
    for kind in ("shards", "pickle", "old", "half"):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((tmp_path / "from" / name).read_bytes())
        if kind == "shards":
            names = sorted(weights)
            parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            for file, part in parts.items():
                save_file({name: weights[name] for name in part}, folder / file)
            index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        elif kind == "pickle":
            torch.save(weights, folder / "pytorch_model.bin")
        elif kind == "half":
            save_file({name: one.bfloat16() for name, one in weights.items()}, folder / "model.safetensors")
        else:
            renamed = {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
                for name, one in weights.items()
            }
            renamed["bert.embeddings.position_ids"] = torch.arange(23)
            save_file(renamed, folder / "model.safetensors")
        found = begin(folder, "encoder")[1].state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor.bfloat16().float() if kind == "half" else tensor)


def test_known_labels_keep_their_rows_and_new_ones_get_a_new_layer(tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, "bert", "ForSequenceClassification").state_dict()
    start, model = begin(tmp_path, "classification", ["LABEL_3", "LABEL_0"])
    assert torch.equal(model.classifier.weight, reference["classifier.weight"][[3, 0]])
    assert torch.equal(model.classifier.bias, reference["classifier.bias"][[3, 0]])
    start, model = begin(tmp_path, "classification", ["LABEL_3", "other"])
    assert start.notes[-1] == "the output layer is new, for the labels LABEL_3, other"
    assert model.classifier.weight.abs().max() < 0.1 and not model.classifier.bias.any()
    assert torch.equal(model.bert.pooler.dense.weight, reference["bert.pooler.dense.weight"])


def test_the_head_of_another_task_is_left_out(tmp_path: Path) -> None:
    for architecture in ("ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM"):
        reference = write_encoder(tmp_path / architecture, "roberta", architecture).state_dict()
        _, model = begin(tmp_path / architecture, "classification", NAMES)
        assert model.classifier.out_proj.weight.shape == (3, 30)
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


def test_a_run_starts_from_the_averaged_weights_of_another(run: Path, tokenizer_path: Path) -> None:
    start, model = begin(run, "classification", ["good", "bad", "fair"])
    before = load_file(run / "averaged" / "weights.safetensors")
    assert torch.equal(model.embedding.weight, before["embedding.weight"])
    assert torch.equal(model.output.weight, before["output.weight"][[1, 0, 2]])
    assert start.tokenizer.to_str() == load_model(run / "averaged")[1].to_str()
    assert start.notes == (f"starts from the weights of {run / 'averaged'}",)
    start, model = begin(run, "classification", ["ham", "spam"])
    assert model.output.weight.shape == (2, 16)
    assert torch.equal(model.embedding.weight, before["embedding.weight"])


def test_a_run_of_a_pretrained_model_is_continued(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert")
    first, model = begin(tmp_path / "from", "classification", NAMES)
    save(tmp_path / "run" / "averaged", first, model)
    second, continued = begin(tmp_path / "run", "classification", NAMES)
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in continued.state_dict().items())
    assert isinstance(second.config, PretrainedConfig) and second.config.labels == tuple(NAMES)


# Errors


def refused(folder: Path, task: str = "encoder", **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        begin(folder, task, ["a", "b"] if task == "classification" else None, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path / "none")
    assert f"{tmp_path} has no config.json" in refused(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:1000])
    assert f"{tmp_path / 'model.safetensors'} is damaged or truncated" in refused(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert f"{tmp_path} has no weights" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert f"{tmp_path / 'pytorch_model.bin'} cannot be read" in refused(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert f"{tmp_path / 'tokenizer.json'} is not a tokenizer" in refused(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert f"{tmp_path / 'tokenizer.json'} is missing; write it with transformers" in refused(tmp_path)


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": nn.Linear(1, 1)}, tmp_path / "pytorch_model.bin")
    assert "use a checkpoint with model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "t5"}, "model_type 't5' cannot be trained; supported are the encoders bert, roberta"),
        ({"model_type": None}, "model_type None cannot be trained"),
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type "relative_key" is not supported'),
        ({"is_decoder": True}, "is_decoder true is not supported"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported in training; supported are gelu"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number from 1 to 1000, got null"),
        ({"num_attention_heads": 7}, "hidden_size must be a multiple of num_attention_heads (7), got 30"),
        ({"vocab_size": 100}, "tokenizer.json has 211 tokens, but vocab_size in config.json is 100"),
        ({"hidden_size": 60}, "embeddings.LayerNorm.bias has the shape [30], but config.json gives [60]"),
        ({"num_hidden_layers": 4}, "lacks tensors: encoder.layer.3.attention.output.LayerNorm.bias"),
        ({"num_hidden_layers": 2}, "has unknown tensors: encoder.layer.2.attention.output.LayerNorm.bias"),
    ],
)
def test_configurations_that_cannot_be_trained(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    assert expected in refused(tmp_path)


def test_tasks_that_do_not_suit_the_family(tmp_path: Path, run: Path) -> None:
    write_encoder(tmp_path / "bert", "bert")
    write_decoder(tmp_path / "llama")
    assert "bert is an encoder, but the task language-model needs a decoder" in refused(
        tmp_path / "bert", "language-model"
    )
    assert "llama is a decoder, but the task encoder needs an encoder" in refused(tmp_path / "llama")
    assert "cannot be trained for the task translation" in refused(tmp_path / "bert", "translation")
    assert "architecture classifier, which cannot be trained for the task translation" in refused(run, "translation")


def test_rope_types_that_cannot_be_trained(tmp_path: Path) -> None:
    write_decoder(tmp_path, "llama-yarn")
    assert "the rope type 'yarn' is not supported in training" in refused(tmp_path, "language-model")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "the rope type llama3 needs a positive number low_freq_factor" in refused(tmp_path, "language-model")


def test_modules_that_cannot_be_trained(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    modules = [
        {"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Dense")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    assert "the modules Transformer, Pooling, Dense cannot be trained" in refused(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules[:2]), encoding="utf-8")
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text('{"pooling_mode_weightedmean_tokens": true}', encoding="utf-8")
    assert "the pooling pooling_mode_weightedmean_tokens cannot be trained" in refused(tmp_path)


def test_an_output_layer_that_contradicts_the_configuration_is_refused(tmp_path: Path) -> None:
    write_decoder(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
    assert "lm_head.weight that differs from the embedding" in refused(tmp_path, "language-model")


def test_a_template_is_added_where_there_is_none(tmp_path: Path) -> None:
    write_decoder(tmp_path)
    start = start_from(tmp_path, "language-model", chat_template=TEMPLATE)
    assert isinstance(start.config, PretrainedConfig)
    assert read_chat_template(start.config) is not None
    assert start.notes[-1] == f"{tmp_path} has no chat template, so that of Sightline is used"
    texts = checkpoint_texts(start.config)
    assert texts["chat_template.jinja"] == TEMPLATE
    assert json.loads(texts[GENERATION])["eos_token_id"] == [4, 7, 9]


def test_padding_is_no_token_that_ends_a_text(tmp_path: Path) -> None:
    """The padding id of many chat models is their end token, which would not be learnt."""
    write_decoder(tmp_path, pad_token_id=4, eos_token_id=4, bos_token_id=1, vocab_size=101)
    assert start_from(tmp_path, "language-model").config.pad_id == 3
    start = start_from(tmp_path, "language-model", chat_template=TEMPLATE)
    assert (start.config.eos_id, start.config.pad_id) == (4, 3)
    document = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] in (1, 4)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    assert "has no special token besides those that begin and end a text" in refused(tmp_path, "language-model")
