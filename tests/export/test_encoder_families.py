"""Imported encoders compute what transformers computes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from sightline.export.check.reference import log_softmax
from sightline.export.errors import ImportFailedError
from sightline.export.families.description import Disentangled, RelativeBias
from sightline.export.families.table import describe, find_family
from sightline.export.graphs.disentangled import rows_of_distances
from sightline.export.graphs.relative import buckets
from sightline.export.sources.checkpoint import Tensors, open_folder
from sightline.model.rounding import reference
from tests.export.encoder_models import (
    CLS,
    FAMILIES,
    SEP,
    SHAPES,
    TOKENIZER,
    UNIT_ROUNDOFF_RATIO,
    check_rows,
    compute,
    import_folder,
    make_model,
    random_rows,
)

ROTARY_TYPES = ("modernbert", "nomic_bert", "gte", "jina_embeddings_v3")


def num_types(model: Any) -> int:
    """Return the number of token types that the tests pass to a model."""
    has_types = model.config.model_type in (
        "bert",
        "electra",
        "albert",
        "xlm-roberta",
        "deberta-v2",
        "nomic_bert",
        "gte",
        "jina_embeddings_v3",
    )
    return int(getattr(model.config, "type_vocab_size", 1)) if has_types else 1


def as_logprobs(outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Replace logits by log-probabilities."""
    return {name: log_softmax(array) if name == "labels" else array for name, array in outputs.items()}


CASES = [(name, task) for name, case in FAMILIES.items() for task in case.tasks]


@pytest.mark.parametrize(("name", "task"), [*CASES, *((name, "ForSequenceClassification") for name in SHAPES)])
def test_graph_and_numpy_equal_transformers(name: str, task: str, tmp_path: Path) -> None:
    case = (FAMILIES | SHAPES)[name]
    model = make_model(case, task)
    model.save_pretrained(tmp_path)
    imported = import_folder(tmp_path, tmp_path)
    rows = random_rows(model.config.vocab_size, [12, case.longest, 1] if task == "ForSequenceClassification" else [12])
    results = imported.run(rows)
    models = reference(model, pairs=1)
    for index, ids in enumerate(rows):

        def run(model: Any, ids: list[int] = ids) -> dict[str, NDArray[Any]]:
            return as_logprobs(compute(model, ids, num_types(model)))

        expected, limits = models.limits(run)
        given = imported.row(results, index, len(ids))
        twin = imported.reference.encode(ids)
        doubles: dict[str, Any] = {"hidden": twin.hidden, "maps": twin.maps}
        doubles |= {"labels": twin.labels, "spans": twin.labels, "predictions": twin.predictions}
        assert given.keys() == expected.keys()
        for part, array in expected.items():
            assert 0.03 < np.abs(array).mean() < 10 or part == "maps"
            assert limits[part] < 1e-4 * max(1.0, np.abs(array).max())
            assert_allclose(given[part], array, rtol=0, atol=limits[part], err_msg=part)
            # In all models of transformers, the softmax of these is float32, and cosines of rotary
            # embedding are, too.
            is_float32 = case.is_causal or model.config.model_type in ROTARY_TYPES
            limit = limits[part] * (1 if is_float32 else UNIT_ROUNDOFF_RATIO)
            assert_allclose(doubles[part], array, rtol=0, atol=limit, err_msg=part)


@pytest.mark.parametrize("name", FAMILIES)
def test_row_does_not_depend_on_its_batch(name: str, tmp_path: Path) -> None:
    case = FAMILIES[name]
    task = "ForSequenceClassification"
    make_model(case, task if task in case.tasks else "Model").save_pretrained(tmp_path)
    imported = import_folder(tmp_path, tmp_path)
    rows = random_rows(211, [12, case.longest, 1, 7, 2])
    batch = imported.run(rows)
    for index, ids in enumerate(rows):
        alone = imported.row(imported.run([ids]), 0, len(ids))
        for part, array in imported.row(batch, index, len(ids)).items():
            assert_array_equal(alone[part], array, err_msg=f"{part} of {len(ids)} tokens")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"num_labels": 1}, "score"),
        ({"num_labels": 1, "problem_type": "regression"}, "score"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, "independent"),
        ({"num_labels": 2, "problem_type": "single_label_classification"}, "classes"),
    ],
)
def test_kind_of_labels(options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES["bert"], "ForSequenceClassification", **options)
    model.save_pretrained(tmp_path)
    imported = import_folder(tmp_path, tmp_path)
    assert imported.model.head is not None
    assert imported.model.head.label_kind == kind
    assert imported.model.labels == tuple(f"LABEL_{index}" for index in range(options["num_labels"]))
    (ids,) = random_rows(211, [9])
    given = imported.row(imported.run([ids]), 0, len(ids))["labels"]
    expected, limits = reference(model, pairs=1).limits(lambda model: {"labels": compute(model, ids, 2)["labels"]})
    if kind == "classes":
        given = given - given[0] + expected["labels"][0]  # log-probabilities differ from logits by a constant
    assert_allclose(given, expected["labels"], rtol=0, atol=2 * limits["labels"])


def test_pooling_of_modernbert_classifier_is_mean_or_first(tmp_path: Path) -> None:
    pooling = {}
    for name in ("modernbert", "modernbert with biases"):
        folder = tmp_path / name
        make_model(FAMILIES[name], "ForSequenceClassification").save_pretrained(folder)
        head = import_folder(folder, folder).model.head
        pooling[name] = head and head.pooling
    assert pooling == {"modernbert": "first", "modernbert with biases": "mean"}


PRETRAINING = ("bert", "electra", "albert")


@pytest.mark.parametrize("name", PRETRAINING)
def test_classes_of_pretraining_are_encoders(name: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES[name], "ForPreTraining")
    model.save_pretrained(tmp_path)
    imported = import_folder(tmp_path, tmp_path)
    assert imported.model.head is None
    (ids,) = random_rows(211, [12])
    expected, given = compute(model, ids, num_types(model)), imported.row(imported.run([ids]), 0, len(ids))
    for part in ("hidden", "maps"):
        assert_allclose(given[part], expected[part], rtol=0, atol=1e-4, err_msg=part)


def test_shared_layers_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for layers in (2, 6):
        make_model(FAMILIES["albert"], "Model", num_hidden_layers=layers).save_pretrained(tmp_path)
        sizes.append(import_folder(tmp_path, tmp_path).weights_bytes)
    assert sizes[0] == sizes[1]


def test_names_of_tensorflow_are_read(tmp_path: Path) -> None:
    model = make_model(FAMILIES["bert"], "Model")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array.numpy()
        for name, array in model.state_dict().items()
    }
    old = Tensors.of_arrays(tensors)
    model.save_pretrained(tmp_path)
    new = open_folder(tmp_path)
    with new:
        family = find_family(new.config)
        from_old, from_new = (describe(family, new.config, one, TOKENIZER)[1] for one in (old, new.tensors))
        for name in (
            "encoder.embedding_norm.weight",
            "encoder.1.feed_forward_norm.bias",
            "encoder.0.feed_forward.inner.bias",
        ):
            assert_array_equal(from_old.read(name), from_new.read(name))


T5_ENCODERS = ("T5", "MT5")


@pytest.mark.parametrize("family", T5_ENCODERS)
def test_encoders_of_t5(family: str, tmp_path: Path) -> None:
    """Their distances reach the last bucket, and more positions than those of the training."""
    sizes = {"d_model": 36, "d_kv": 12, "num_heads": 5, "d_ff": 71, "num_layers": 3, "vocab_size": 211}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}EncoderModel")(getattr(transformers, f"{family}Config")(**sizes, **buckets))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval().set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    edited = json.loads((tmp_path / "config.json").read_text()) | {"n_positions": 20}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    with pytest.raises(ImportFailedError, match="--max-tokens must be at most 1,048,576, got 1,048,577"):
        import_folder(tmp_path, tmp_path, max_tokens=(1 << 20) + 1)
    assert import_folder(tmp_path, tmp_path).model.max_positions == 20
    imported = import_folder(tmp_path, tmp_path, max_tokens=30)
    rows = random_rows(211, [1, 30, 7])
    results = imported.run(rows)
    for row, ids in enumerate(rows):
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_attentions=True)
        expected = {"hidden": output.last_hidden_state[0], "maps": torch.stack(output.attentions)[:, 0]}
        given, exact = imported.row(results, row, len(ids)), imported.reference.encode(ids)
        for name, array in expected.items():
            assert_allclose(given[name], array.numpy(), rtol=0, atol=1e-4, err_msg=name)
        assert_allclose(given["hidden"], exact.hidden, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("roberta", {"pad_token_id": CLS}),
        ("xlm-roberta", {"pad_token_id": SEP}),
        ("roberta", {"pad_token_id": 110}),
        ("mpnet", {}),
    ],
)
def test_padding_token_in_a_text_takes_no_position(name: str, options: dict[str, int], tmp_path: Path) -> None:
    model = make_model(FAMILIES[name], "Model", **(options | {"max_position_embeddings": 133}))
    model.save_pretrained(tmp_path)
    padding = model.config.pad_token_id if options else 1
    imported = import_folder(tmp_path, tmp_path)
    assert imported.model.max_positions == 132 - padding
    rows = random_rows(211, [12, 5, 1, 20])
    rows[0][3] = rows[0][4] = padding
    check_rows(imported, model, rows, lambda model, ids: compute(model, ids, num_types(model)), UNIT_ROUNDOFF_RATIO)


def test_shorter_limit_does_not_move_positions(tmp_path: Path) -> None:
    make_model(FAMILIES["xlm-roberta"], "Model").save_pretrained(tmp_path)
    with open_folder(tmp_path) as folder:
        family = find_family(folder.config)
        whole, short = (
            describe(family, folder.config, folder.tensors, TOKENIZER, max_tokens=limit)[1].read(
                "encoder.positions.weight"
            )
            for limit in (None, 5)
        )
    assert_array_equal(short[:5], whole[:5])


def test_published_form_of_modernbert_config(tmp_path: Path) -> None:
    """Configurations of transformers 4 have two thetas and the distance of global layers."""
    case = FAMILIES["modernbert"]
    make_model(case, "Model").save_pretrained(tmp_path)
    new = import_folder(tmp_path, tmp_path).model
    values = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types"):
        del values[key]
    old = {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": None}
    (tmp_path / "config.json").write_text(json.dumps(values | old))
    assert import_folder(tmp_path, tmp_path).model == new
    named = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(values | old | named))
    assert import_folder(tmp_path, tmp_path).model == new
    (tmp_path / "config.json").write_text(json.dumps(values | named | {"local_rope_theta": None}))
    with pytest.raises(ImportFailedError, match="local_rope_theta must be a number, got null"):
        import_folder(tmp_path, tmp_path)


def test_buckets_of_mpnet_equal_transformers() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = np.arange(-700, 701)
    expected = MPNetEncoder.relative_position_bucket(torch.tensor(distances)).numpy()
    assert_array_equal(buckets(RelativeBias(32, 128, bidirectional=True), distances), expected)


@pytest.mark.parametrize(("buckets", "reach"), [(256, 512), (6, 23), (15, 40), (32, 128), (127, 1000)])
def test_rows_of_distances_equal_transformers(buckets: int, reach: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    tokens = torch.zeros(1, 1 + 2 * reach, 1)
    expected = build_relative_position(tokens, tokens, buckets, reach)[0].numpy()
    rows = rows_of_distances(
        Disentangled(buckets, reach, has_keys=True, has_queries=True, has_norm=False, is_shared=False),
        np.arange(len(expected))[:, None] - np.arange(len(expected)),
    )
    assert_array_equal(rows, np.clip(expected + buckets, 0, 2 * buckets - 1))


ORIGINAL_NOMIC = {
    "activation_function": "swiglu", "causal": False, "dense_seq_output": True, "fused_bias_fc": True,
    "fused_dropout_add_ln": True, "layer_norm_epsilon": 1e-12, "max_trained_positions": 23, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "n_embd": 30, "n_head": 3, "n_inner": 37, "n_layer": 2, "n_positions": 23,
    "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
    "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "use_flash_attn": True,
    "use_rms_norm": False, "use_xentropy": True, "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
}  # fmt: skip
ORIGINAL_GTE = {
    "architectures": ["NewModel"], "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "layer_norm_type": "layer_norm", "logn_attention_clip1": False, "logn_attention_scale": False, "model_type": "new",
    "pack_qkv": True, "position_embedding_type": "rope", "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}  # fmt: skip
ORIGINAL_GTE_SHAPES = ("gte", "gte without types", "gte with two types")


def rewrite_config(folder: Path, original: Mapping[str, Any], removed: tuple[str, ...]) -> dict[str, Any]:
    """Replace the keys that Transformers writes by those of the repositories."""
    values = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in values.items() if key not in removed}
    (folder / "config.json").write_text(json.dumps(kept | dict(original)))
    return kept | dict(original)


def test_original_form_of_nomic_config(tmp_path: Path) -> None:
    make_model(FAMILIES["nomic_bert"], "Model").save_pretrained(tmp_path)
    native = import_folder(tmp_path, tmp_path).model
    removed = (
        "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "layer_norm_eps",
        "hidden_act", "max_position_embeddings", "rope_parameters", "head_dim",
    )  # fmt: skip
    values = rewrite_config(tmp_path, ORIGINAL_NOMIC, removed)
    assert import_folder(tmp_path, tmp_path).model == native
    for key, value, message in [
        ("rotary_scaling_factor", 2, "rotary_scaling_factor is 2"),
        ("moe_every_n_layers", 2, "moe_every_n_layers is 2"),
        ("activation_function", "glu", 'activation_function is "glu"'),
        ("rotary_emb_fraction", 0.5, "rotary_emb_fraction is 0.5"),
        ("prenorm", True, "prenorm is true"),
        ("new_option", 1, "1 keys that are not known for its architecture: new_option"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
        with pytest.raises(ImportFailedError, match=message):
            import_folder(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ORIGINAL_GTE_SHAPES)
def test_original_form_of_gte(name: str, tmp_path: Path) -> None:
    """NTK scaling divides frequencies of a larger base by a constant, as linear scaling does."""
    factor, theta, case = 8.0, 20.0, FAMILIES[name]
    size = case.config["hidden_size"] // case.config["num_attention_heads"]
    ropes = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / size)}
    model = make_model(case, "ForSequenceClassification", rope_parameters=ropes)
    model.save_pretrained(tmp_path)
    original = ORIGINAL_GTE | {"architectures": ["NewForSequenceClassification"], "rope_theta": theta}
    scaling = {"rope_scaling": {"type": "ntk", "factor": factor}}
    values = rewrite_config(tmp_path, original | scaling, ("rope_parameters",))
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("gte.", "new.", 1): array for name, array in stored.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    imported = import_folder(tmp_path, tmp_path)
    (ids,) = random_rows(211, [23])
    given = imported.row(imported.run([ids]), 0, len(ids))
    for part, array in as_logprobs(compute(model, ids, num_types(model))).items():
        assert_allclose(given[part], array, rtol=0, atol=1e-4, err_msg=part)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b is 0.6"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'type is "dynamic"'),
        ({"position_embedding_type": "absolute"}, 'position_embedding_type is "absolute"'),
        ({"layer_norm_type": "rms_norm"}, 'layer_norm_type is "rms_norm"'),
        ({"logn_attention_scale": True}, "logn_attention_scale is true"),
        ({"pack_qkv": False}, "pack_qkv is false"),
    ]
    for changes, message in cases:
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        with pytest.raises(ImportFailedError, match=message):
            import_folder(tmp_path, tmp_path)


def rejection(folder: Path, name: str, task: str = "Model", **changes: Any) -> str:
    """Return the error of an import with changed keys of config.json; None removes a key."""
    make_model(FAMILIES[name], task).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values = {key: value for key, value in {**values, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ImportFailedError) as error:
        import_folder(folder, folder)
    return str(error.value)


def implied(tensor: str, shape: list[int], expected: list[int]) -> str:
    return f"the tensor '{tensor}' has the shape {shape}, but config.json implies {expected}; its configuration may"


@pytest.mark.parametrize(
    ("name", "task", "changes", "message"),
    [
        ("bert", "Model", {"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
        ("bert", "Model", {"position_embedding_type": "alibi"}, 'position_embedding_type is "alibi"'),
        ("bert", "Model", {"is_decoder": True}, "is_decoder is true"),
        ("bert", "Model", {"add_cross_attention": True}, "add_cross_attention is true"),
        ("bert", "Model", {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ("bert", "Model", {"hidden_act": "elu"}, "the activation elu is not supported"),
        ("bert", "Model", {"logn_attention_scale": True}, "logn_attention_scale"),
        (
            "bert",
            "Model",
            {"vocab_size": 212},
            implied("embeddings.word_embeddings.weight", [211, 30], [212, 30]),
        ),
        (
            "bert",
            "Model",
            {"max_position_embeddings": 24},
            implied("embeddings.position_embeddings.weight", [23, 30], [24, 30]),
        ),
        (
            "bert",
            "Model",
            {"intermediate_size": 38},
            implied("encoder.layer.0.intermediate.dense.weight", [37, 30], [38, 30]),
        ),
        ("bert", "Model", {"num_attention_heads": 4}, "num_attention_heads must be a divisor of the width 30, got 4"),
        ("bert", "Model", {"architectures": ["BertLMHeadModel"]}, "'BertLMHeadModel'"),
        ("bert", "Model", {"architectures": ["BertForMultipleChoice"]}, "supported are BertModel, BertForMaskedLM"),
        (
            "bert",
            "ForSequenceClassification",
            {"id2label": {"0": "a", "1": "b"}},
            implied("classifier.weight", [5, 30], [2, 30]),
        ),
        (
            "bert",
            "ForSequenceClassification",
            {"id2label": {"0": "a", "2": "b"}},
            "id2label must map the numbers from 0",
        ),
        (
            "bert",
            "ForSequenceClassification",
            {"id2label": dict(zip("01234", ["entailment", *"abcd"], strict=True)), "label2id": {"entailment": 1}},
            "label2id differs from id2label",
        ),
        ("bert", "ForSequenceClassification", {"id2label": dict.fromkeys("01234", "a")}, "two labels of the same name"),
        ("bert", "ForSequenceClassification", {"problem_type": "regression"}, "problem_type is 'regression' with 5"),
        ("deberta-v2", "Model", {"pos_att_type": ["c2p", "p2p"]}, "pos_att_type must have c2p, p2c or both"),
        ("deberta-v2", "Model", {"pos_att_type": None}, "relative_attention needs a pos_att_type"),
        ("deberta-v2", "Model", {"share_att_key": False}, "no tensor 'encoder.layer.0.attention.self.pos_key"),
        ("deberta-v2", "Model", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd must be none or layer_norm"),
        ("deberta-v2", "Model", {"position_buckets": 3}, "position_buckets must be at least 4 and less than twice"),
        ("deberta-v2", "Model", {"embedding_size": 20}, "embedding_size is 20"),
        ("deberta-v2", "Model", {"conv_kernel_size": 4}, "conv_kernel_size must be odd, got 4"),
        ("deberta-v2", "Model", {"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups is 2"),
        ("deberta-v2 with own projections", "Model", {"relative_attention": False}, "tensors that its"),
        ("mpnet", "Model", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets is 16"),
        (
            "electra",
            "Model",
            {"embedding_size": 15},
            implied("embeddings_project.weight", [30, 14], [30, 15]),
        ),
        ("albert", "Model", {"num_hidden_groups": 2}, "num_hidden_groups is 2, but"),
        ("albert", "Model", {"gap_size": 1}, "gap_size is 1"),
        ("modernbert", "Model", {"attention_bias": True}, "no tensor 'layers.0.attn.Wqkv.bias', which its arch"),
        ("modernbert", "Model", {"norm_bias": True}, "no tensor 'embeddings.norm.bias', which its architecture needs"),
        ("modernbert", "Model", {"layer_types": ["full_attention"]}, "layer_types must have 4 values"),
        (
            "modernbert",
            "Model",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            'rope_type is "yarn"',
        ),
        ("modernbert", "Model", {"classifier_pooling": "max"}, "classifier_pooling must be cls or mean, got 'max'"),
        ("bert", "Model", {"model_type": "t6"}, "model_type 't6' is not supported; supported are albert, bart, bert"),
        ("bert", "Model", {"model_type": "whisper"}, "model_type 'whisper' is not supported; it reads audio, and"),
        ("bert", "Model", {"model_type": "mixtral"}, "model_type 'mixtral' is not supported; it is a mixture of exp"),
        ("bert", "Model", {"model_type": "deberta"}, "the second and third one (deberta-v2), which are supported"),
        ("xlm-roberta", "Model", {"lora_adaptations": ["retrieval.query"]}, "choose one of the adapters"),
        ("bert", "Model", {"model_type": "gliner"}, "GLiNER compares spans of words with labels"),
        ("bert", "Model", {"model_type": "gemma3_text"}, "model_type 'gemma3_text' is not supported"),
    ],
)
def test_unsupported_variant_is_rejected(
    name: str, task: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in rejection(tmp_path, name, task, **changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_unknown_tensor_is_rejected(name: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES[name], "Model")
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    model.save_pretrained(tmp_path)
    with pytest.raises(ImportFailedError, match="1 tensors that its architecture does not use: extra"):
        import_folder(tmp_path, tmp_path)


def test_classifier_saved_as_encoder_is_rejected(tmp_path: Path) -> None:
    model = make_model(FAMILIES["bert"], "ForSequenceClassification")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(ImportFailedError, match=r"2 tensors .* classifier.bias, classifier.weight"):
        import_folder(tmp_path, tmp_path)


REALISTIC = {
    "bert": {"vocab_size": 30522, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "xlm-roberta": {"vocab_size": 25001, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "mpnet": {"vocab_size": 30527, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "albert": {"vocab_size": 30000, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "modernbert": {
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "local_attention": 128,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_shape_equals_transformers(name: str, tmp_path: Path) -> None:
    """Compare a random model of realistic width and length within 1e-4."""
    options = {"num_hidden_layers": 4, "max_position_embeddings": 520}
    model = make_model(FAMILIES[name], "ForSequenceClassification", scale=0.02, **(options | REALISTIC[name]))
    model.save_pretrained(tmp_path)
    imported = import_folder(tmp_path, tmp_path)
    rows = random_rows(model.config.vocab_size, [509, 64, 1, 233])
    results = imported.run(rows)
    for index, ids in enumerate(rows):
        expected = as_logprobs(compute(model, ids, num_types(model)))
        given = imported.row(results, index, len(ids))
        for part, array in expected.items():
            assert_allclose(given[part], array, rtol=0, atol=1e-4, err_msg=part)
    alone = imported.row(imported.run([rows[3]]), 0, len(rows[3]))
    for part, array in imported.row(results, 3, len(rows[3])).items():
        assert_array_equal(alone[part], array, err_msg=part)
