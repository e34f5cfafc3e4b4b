"""`sightline models check`: support of a model by its config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from sightline.__main__ import main
from sightline.base.errors import UsageError
from sightline.export.configurations import Support, check_configuration
from tests.support.tables import read_table

CONFIGURATIONS = sorted(Path("tests/data/configs").iterdir())
BERT = json.loads(Path("tests/data/configs/google-bert--bert-base-uncased.json").read_text())
GPT2 = json.loads(Path("tests/data/configs/openai-community--gpt2.json").read_text())


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


# Reasons of the configurations that are refused; all others are supported.
REFUSED = {
    "jinaai--jina-embeddings-v3": "lora_adaptations is not supported",
    "openai--gpt-oss-20b": "model_type 'gpt_oss' is not supported",
    "openai--whisper-small": "model_type 'whisper' is not supported",
    "Qwen--Qwen2.5-0.5B-Instruct-AWQ": "the weights are quantized",
    "Qwen--Qwen2.5-0.5B-Instruct-GPTQ-Int4": "the weights are quantized",
    "Qwen--Qwen3-30B-A3B": "model_type 'qwen3_moe' is not supported",
}


def test_there_are_fifty_configurations() -> None:
    assert len(CONFIGURATIONS) >= 50
    assert REFUSED.keys() <= {path.stem for path in CONFIGURATIONS}


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_well_known_model_is_supported_or_refused_with_a_sentence(path: Path) -> None:
    found, reason = check_configuration(path), REFUSED.get(path.stem, "")
    assert (found.kind == "") == bool(reason)
    assert found.reason == "" if not reason else found.reason.startswith(f"config.json: {reason}")
    assert found.model_type == json.loads(path.read_text())["model_type"]


@pytest.mark.parametrize(
    ("name", "kind"),
    read_table(__file__, "kinds"),
)
def test_the_kind_is_that_of_the_description(name: str, kind: str) -> None:
    assert check_configuration(Path(f"tests/data/configs/{name}.json")).kind == kind


UNKNOWN = "has 1 keys that are not known for its architecture"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "model_type '' is not supported"),
        (BERT | {"architectures": ["BertForNothing"]}, "architectures ['BertForNothing'] of model_type 'bert'"),
        (BERT | {"is_causal": True}, "config.json: is_causal is true, which is not supported"),
        (GPT2 | {"num_attention_heads": 6}, f"{UNKNOWN}: num_attention_heads"),  # read as n_head
        (GPT2 | {"layer_types": ["a"]}, f"{UNKNOWN}: layer_types; they may"),
        (BERT | {"note": "x", "auto_map": {"AutoModel": "a.B"}}, f"{UNKNOWN}: note"),
        (
            BERT | {"note": "x", "transformers_version": "5.99.0"},
            "so the checkpoint is not imported; --ignore-key NAME",
        ),
        (BERT | {"hidden_act": "maxout"}, "the activation maxout is not supported"),
        (BERT | {"num_attention_heads": 7}, "num_attention_heads must be a divisor of the width 768, got 7"),
        (GPT2 | {"eos_token_id": None}, "neither generation_config.json nor config.json has eos_token_id"),
        (GPT2 | {"guidance_scale": 2.0}, "guidance_scale"),
    ],
)
def test_a_refusal_names_the_reason(config: object, reason: str, tmp_path: Path) -> None:
    assert reason in check_configuration(write(tmp_path, config)).reason


@pytest.mark.parametrize(
    ("name", "changes"),
    read_table(__file__, "harmless"),
)
def test_a_key_that_transformers_does_not_read_refuses_nothing(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads(Path(f"tests/data/configs/{name}.json").read_text())
    if "classifier_pooling" in changes:
        config["architectures"] = ["ModernBertModel"]
    assert check_configuration(write(tmp_path, config | changes)).reason == ""


@pytest.mark.parametrize(
    ("text", "error"), [("[1]", "must be a JSON object"), ("{", "is not valid JSON"), (None, "cannot be read")]
)
def test_a_file_that_is_no_configuration_is_an_error(text: str | None, error: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=error):
        check_configuration(tmp_path)


def test_the_command_prints_lines_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert = str(write(tmp_path, BERT))
    whisper = "tests/data/configs/openai--whisper-small.json"
    assert main(["models", "check", bert]) == 0
    assert capsys.readouterr().out == f"{bert}: BertForMaskedLM: supported (encoder)\n"
    assert main(["models", "check", str(tmp_path), whisper]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("supported (encoder)")
    assert lines[1].startswith(f"{whisper}: WhisperForConditionalGeneration: not supported: config.json: model_type")
    assert main(["models", "check", bert, "--json"]) == 0
    assert [Support(**one) for one in json.loads(capsys.readouterr().out)] == [check_configuration(Path(bert))]
