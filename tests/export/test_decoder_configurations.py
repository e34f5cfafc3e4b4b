"""Configurations of decoder-only checkpoints: old forms, and forms that are not supported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.export.check.verify import ComparedTexts
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint
from tests.export.folders_of_others import word_tokenizer
from tests.support.tables import read_table
from tests.zoo.comparing import Imported, assert_equals_transformers, hf_outputs, import_folder, random_texts
from tests.zoo.models import DECODERS

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
EditAndImport = Callable[[str, Edit], tuple[Imported, Any]]


@pytest.fixture
def edited(tmp_path: Path) -> EditAndImport:
    """Return a function that saves a model, edits its configuration and tensors, and imports it."""

    def edit_and_import(name: str, edit: Edit) -> tuple[Imported, Any]:
        hf = DECODERS[name].save(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        tensors = load_file(tmp_path / "model.safetensors")
        edit(config, tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return import_folder(tmp_path), hf

    return edit_and_import


def assert_same_outputs(imported: Imported, hf: Any) -> None:
    assert_equals_transformers(imported, hf, random_texts(hf, [12]))


def older_form(config: dict[str, Any], rope_type_key: str = "rope_type") -> None:
    """Write the rotary options as transformers 4 does."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[rope_type_key] = scaling.pop("rope_type")
    config["rope_scaling"] = None if scaling[rope_type_key] == "default" else scaling


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-one-layer", "llama-yarn"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rotary_options_of_transformers_4(edited: EditAndImport, name: str, key: str) -> None:
    assert_same_outputs(*edited(name, lambda config, _: older_form(config, key)))


def test_gpt2_without_a_prefix_and_with_masks_and_a_copy_of_the_embedding(edited: EditAndImport) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        config |= {"n_ctx": 40, "task_specific_params": {}, "_num_labels": 1}

    imported, hf = edited("gpt2", edit)
    assert "output.weight" not in imported.weights
    assert_same_outputs(imported, hf)


def projection_alone(embedding: str) -> Edit:
    """Return an edit that stores the table of tokens as the projection only."""
    return lambda _, tensors: tensors.update({"lm_head.weight": tensors.pop(embedding)})


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("gpt2", projection_alone("transformer.wte.weight")),
        ("opt", projection_alone("model.decoder.embed_tokens.weight")),
        ("gpt-neox-sequential", projection_alone("gpt_neox.embed_in.weight")),
        ("gemma2", projection_alone("model.embed_tokens.weight")),
        ("olmo2-bias", projection_alone("model.embed_tokens.weight")),
        ("llama", lambda config, _: config.update(rope_scaling=config["rope_parameters"])),
        ("llama-yarn", lambda config, _: config.update(rope_scaling=config["rope_parameters"])),
        ("phi3", lambda config, _: config.update(lm_head_bias=True, mlp_bias=True)),
        ("gemma3", lambda config, _: config.update(attn_logit_softcapping=2.0)),
    ],
)
def test_forms_that_transformers_reads(name: str, edit: Edit, edited: EditAndImport) -> None:
    assert_same_outputs(*edited(name, edit))


def test_qwen_windows_without_layer_types(edited: EditAndImport) -> None:
    imported, hf = edited("qwen2", lambda config, _: config.pop("layer_types"))
    assert imported.model.decoder is not None
    assert [attention.window for attention in imported.model.decoder.attention] == [None, 4, 4]
    assert_same_outputs(imported, hf)


def test_smollm3_without_lists_of_layers(edited: EditAndImport) -> None:
    def edit(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        del config["no_rope_layers"], config["layer_types"]

    imported, hf = edited("smollm3", edit)
    assert imported.model.decoder is not None
    assert [attention.rotary is None for attention in imported.model.decoder.attention] == [False] * 3 + [True, False]
    assert [attention.window for attention in imported.model.decoder.attention] == [None, None, None, 6, None]
    assert_same_outputs(imported, hf)


def test_mistral_without_the_key_has_the_window_of_its_default(edited: EditAndImport) -> None:
    imported, _ = edited("mistral", lambda config, _: config.pop("sliding_window"))
    assert imported.model.decoder is not None
    assert imported.model.decoder.attention[0].window == 4096


def setting(**values: Any) -> Edit:
    return lambda config, _: config.update(values)


def rope(**values: Any) -> Edit:
    return lambda config, _: config["rope_parameters"].update(values)


def without(name: str) -> Edit:
    return lambda _, tensors: tensors.pop(name)  # type: ignore[return-value]


def adding(name: str, shape: list[int]) -> Edit:
    return lambda _, tensors: tensors.update({name: torch.ones(shape)})


def removing(key: str) -> Edit:
    return lambda config, _: config.pop(key)


EDITS = {edit.__name__: edit for edit in (setting, rope, without, adding, removing)}
HUGE = ["phi3", "rope", {"short_factor": [1.0] * 4 + [10**400]}, "short_factor must be a list of 5 positive"]
REJECTED: dict[str, list[Any]] = read_table(__file__) | {"huge factor": HUGE}


@pytest.mark.parametrize("case", REJECTED)
def test_other_variants_are_rejected(edited: EditAndImport, case: str) -> None:
    name, kind, values, message = REJECTED[case]
    with pytest.raises(ValueError, match=message) as caught:
        edited(name, EDITS[kind](**values))
    assert isinstance(caught.value, ImportFailedError) or "activation" in message


def change_beyond(imported: Imported, hf: Any) -> float:
    """Return the change of attention weights by one token more than the model reads.

    Transformers computes it. Up to that length, the imported model has the same weights.
    """
    limit = imported.model.max_positions
    beyond = random_texts(hf, [limit + 1])
    within = ComparedTexts((beyond.sources[0][:limit],), (beyond.sources[0][:limit],))
    assert_equals_transformers(imported, hf, within)
    short, long = (hf_outputs(hf, texts)["decoder.0"] for texts in (within, beyond))
    return float(np.abs(long[:, :, :limit, :limit] - short).max())


def test_longrope_is_limited_to_the_original_positions(edited: EditAndImport) -> None:
    """Transformers uses the other factors for longer texts, which changes all keys."""
    imported, hf = edited("phi3-partial", setting(max_position_embeddings=200))
    assert imported.model.max_positions == hf.config.original_max_position_embeddings == 40
    assert change_beyond(imported, hf) > 0.01


def test_an_import_says_that_longrope_limits_the_texts(tmp_path: Path) -> None:
    DECODERS["phi3-partial"].save(tmp_path / "checkpoint", scale=0.1)
    word_tokenizer(211).save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    exported = export_checkpoint(
        Export(tmp_path / "checkpoint", tmp_path / "bundle", BundleMetadata("phi", "a test", "MIT"))
    )
    assert exported.manifest.limits.max_source_tokens == exported.manifest.limits.max_target_tokens == 40
    assert [note for note in exported.notes if "at most 40 tokens instead of 200" in note]
    assert exported.manifest.verification is not None


def test_dynamic_frequencies_are_constant_up_to_the_positions(edited: EditAndImport) -> None:
    imported, hf = edited("llama-dynamic", setting())
    assert imported.model.max_positions == 40
    assert change_beyond(imported, hf) > 1e-3


def test_another_name_of_the_projection_of_gpt_neox(edited: EditAndImport) -> None:
    def edit(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 40, 40)
        tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(3)

    assert_same_outputs(*edited("gpt-neox", edit))


def test_several_end_tokens_and_a_hub_configuration_are_accepted(edited: EditAndImport) -> None:
    assert DECODERS["llama"].values["eos_token_id"] == [7, 9]
    hub = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "transformers.js_config": {}}
    assert_same_outputs(*edited("llama", setting(**hub, unsloth_fixed=True, temperature=0.6, max_length=20)))
