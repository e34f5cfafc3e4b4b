"""Forms of encoders that are imported, and those that are refused; see also `test_families`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.testing import assert_array_equal

from sightline.export.check.verify import ComparedTexts
from sightline.export.families.description import Disentangled, RelativeBias
from sightline.export.families.table import describe, find_family
from sightline.export.graphs.disentangled import rows_of_distances
from sightline.export.graphs.relative import buckets
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Folder
from tests.support.tables import read_table
from tests.support.tensors import tensors_of
from tests.zoo.comparing import (
    CLS,
    SEP,
    TOKENIZER,
    assert_equals_transformers,
    assert_graphs_equal_the_reference,
    import_folder,
    random_texts,
)
from tests.zoo.models import ENCODERS, SEQ2SEQ, edit_config

CLASSIFIER = "BertForSequenceClassification"


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
    hf = ENCODERS["bert"].save(tmp_path, CLASSIFIER, **options)
    imported = import_folder(tmp_path)
    assert imported.model.head is not None
    assert imported.model.head.label_kind == kind
    assert imported.model.labels == tuple(f"LABEL_{index}" for index in range(options["num_labels"]))
    assert_equals_transformers(imported, hf, random_texts(hf, [9]))
    assert_graphs_equal_the_reference(imported, random_texts(hf, [9]))


def test_pooling_of_modernbert_classifier_is_mean_or_first(tmp_path: Path) -> None:
    pooling = {}
    for name in ("modernbert", "modernbert with biases"):
        ENCODERS[name].save(tmp_path, "ModernBertForSequenceClassification")
        head = import_folder(tmp_path).model.head
        pooling[name] = head and head.pooling
    assert pooling == {"modernbert": "first", "modernbert with biases": "mean"}


def test_shared_layers_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for layers in (2, 6):
        ENCODERS["albert"].save(tmp_path, num_hidden_layers=layers)
        import_folder(tmp_path).write_bundle()
        sizes.append((tmp_path / "weights.bin").stat().st_size)
    assert sizes[0] == sizes[1]


def test_names_of_tensorflow_are_read(tmp_path: Path) -> None:
    model = ENCODERS["bert"].save(tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array.numpy()
        for name, array in model.state_dict().items()
    }
    old = tensors_of(tensors)
    new = Folder(tmp_path)
    family = find_family(new.config)
    from_old, from_new = (describe(family, new.config, one, TOKENIZER)[1] for one in (old, new.tensors))
    for name in (
        "encoder.embedding_norm.weight",
        "encoder.1.feed_forward_norm.bias",
        "encoder.0.feed_forward.inner.bias",
    ):
        assert_array_equal(from_old.read(name), from_new.read(name))


def test_encoders_of_t5_read_more_positions_than_those_of_the_training(tmp_path: Path) -> None:
    hf = SEQ2SEQ["t5 as encoder"].save(tmp_path)
    with pytest.raises(ImportFailedError, match="--max-tokens must be at most 1,048,576, got 1,048,577"):
        import_folder(tmp_path, max_tokens=(1 << 20) + 1)
    assert import_folder(tmp_path).model.max_positions == 24
    imported = import_folder(tmp_path, max_tokens=40)
    assert_equals_transformers(imported, hf, random_texts(hf, [40, 7, 1]))
    assert_graphs_equal_the_reference(imported, random_texts(hf, [40, 7, 1]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("roberta", {"pad_token_id": CLS}),
        ("xlm-roberta", {"pad_token_id": SEP}),
        ("roberta", {"pad_token_id": 110}),
        ("mpnet", {}),
    ],
)
def test_padding_token_in_a_text_takes_no_position(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    hf = ENCODERS[name].save(tmp_path, **options, max_position_embeddings=133)
    padding = hf.config.pad_token_id if options else 1
    imported = import_folder(tmp_path)
    assert imported.model.max_positions == 132 - padding
    rows = [list(one) for one in random_texts(hf, [20, 12, 5, 1]).sources]
    rows[1][3] = rows[1][4] = padding
    texts = ComparedTexts(tuple(map(tuple, rows)))
    assert_equals_transformers(imported, hf, texts)
    assert_graphs_equal_the_reference(imported, texts)


def test_shorter_limit_does_not_move_positions(tmp_path: Path) -> None:
    ENCODERS["xlm-roberta"].save(tmp_path)
    folder = Folder(tmp_path)
    family = find_family(folder.config)
    whole, short = (
        describe(family, folder.config, folder.tensors, TOKENIZER, max_tokens=limit)[1].read("encoder.positions.weight")
        for limit in (None, 5)
    )
    assert_array_equal(short[:5], whole[:5])


def test_published_form_of_modernbert_config(tmp_path: Path) -> None:
    """Configurations of transformers 4 have two thetas and the distance of global layers."""
    ENCODERS["modernbert"].save(tmp_path)
    new = import_folder(tmp_path).model
    old: dict[str, Any] = {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": None}
    edit_config(tmp_path, rope_parameters=None, layer_types=None, **old)
    assert import_folder(tmp_path).model == new
    named: dict[str, Any] = {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
    }
    edit_config(tmp_path, **named)
    assert import_folder(tmp_path).model == new
    values = json.loads((tmp_path / "config.json").read_text()) | {"local_rope_theta": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ImportFailedError, match="local_rope_theta must be a number, got null"):
        import_folder(tmp_path)


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


ORIGINAL_NOMIC: dict[str, Any] = {
    "activation_function": "swiglu", "causal": False, "dense_seq_output": True, "fused_bias_fc": True,
    "fused_dropout_add_ln": True, "layer_norm_epsilon": 1e-12, "max_trained_positions": 23, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "n_embd": 30, "n_head": 3, "n_inner": 37, "n_layer": 2, "n_positions": 23,
    "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
    "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "use_flash_attn": True,
    "use_rms_norm": False, "use_xentropy": True, "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
}  # fmt: skip
ORIGINAL_GTE: dict[str, Any] = {
    "architectures": ["NewModel"], "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "layer_norm_type": "layer_norm", "logn_attention_clip1": False, "logn_attention_scale": False, "model_type": "new",
    "pack_qkv": True, "position_embedding_type": "rope", "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}  # fmt: skip
ORIGINAL_GTE_SHAPES = ("gte", "gte without types", "gte with two types")


def test_original_form_of_nomic_config(tmp_path: Path) -> None:
    ENCODERS["nomic_bert"].save(tmp_path)
    native = import_folder(tmp_path).model
    removed = (
        "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "layer_norm_eps",
        "hidden_act", "max_position_embeddings", "rope_parameters", "head_dim",
    )  # fmt: skip
    values = edit_config(tmp_path, **dict.fromkeys(removed)) | ORIGINAL_NOMIC
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert import_folder(tmp_path).model == native
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
            import_folder(tmp_path)


@pytest.mark.parametrize("name", ORIGINAL_GTE_SHAPES)
def test_original_form_of_gte(name: str, tmp_path: Path) -> None:
    """NTK scaling divides frequencies of a larger base by a constant, as linear scaling does."""
    factor, theta, sizes = 8.0, 20.0, ENCODERS[name].values
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    ropes = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / size)}
    hf = ENCODERS[name].save(tmp_path, "GteForSequenceClassification", rope_parameters=ropes)
    original = ORIGINAL_GTE | {"architectures": ["NewForSequenceClassification"], "rope_theta": theta}
    scaling: dict[str, Any] = {"rope_scaling": {"type": "ntk", "factor": factor}}
    values = edit_config(tmp_path, **original, **scaling, rope_parameters=None)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("gte.", "new.", 1): array for name, array in stored.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert_equals_transformers(import_folder(tmp_path), hf, random_texts(hf, [23]))
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
            import_folder(tmp_path)


def rejection(folder: Path, changes: dict[str, Any]) -> str:
    """Return the error of an import with changed keys of config.json; None removes a key."""
    edit_config(folder, **changes)
    with pytest.raises(ImportFailedError) as error:
        import_folder(folder)
    return str(error.value)


def implied(tensor: str, shape: list[int], expected: list[int]) -> str:
    return f"the tensor '{tensor}' has the shape {shape}, but config.json implies {expected}; its configuration may"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    read_table(__file__),
)
def test_unsupported_variant_is_rejected(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    ENCODERS[name].save(tmp_path)
    assert message in rejection(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, implied("classifier.weight", [5, 30], [2, 30])),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must map the numbers from 0"),
        (
            {"id2label": dict(zip("01234", ["entailment", *"abcd"], strict=True)), "label2id": {"entailment": 1}},
            "label2id differs from id2label",
        ),
        ({"id2label": dict.fromkeys("01234", "a")}, "two labels of the same name"),
        ({"problem_type": "regression"}, "problem_type is 'regression' with 5"),
    ],
)
def test_unsupported_labels_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    ENCODERS["bert"].save(tmp_path, CLASSIFIER)
    assert message in rejection(tmp_path, changes)


@pytest.mark.parametrize("name", ENCODERS)
def test_unknown_tensor_is_rejected(name: str, tmp_path: Path) -> None:
    hf = ENCODERS[name].make()
    hf.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    hf.save_pretrained(tmp_path)
    with pytest.raises(ImportFailedError, match="1 tensors that its architecture does not use: extra"):
        import_folder(tmp_path)


def test_classifier_saved_as_encoder_is_rejected(tmp_path: Path) -> None:
    ENCODERS["bert"].save(tmp_path, CLASSIFIER)
    edit_config(tmp_path, architectures=["BertModel"])
    with pytest.raises(ImportFailedError, match=r"2 tensors .* classifier.bias, classifier.weight"):
        import_folder(tmp_path)


def test_an_end_token_of_bart_beyond_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    SEQ2SEQ["bart as classifier"].save(tmp_path)
    edit_config(tmp_path, eos_token_id=97)
    with pytest.raises(ImportFailedError, match="eos_token_id must be from 0 to 96, got 97"):
        import_folder(tmp_path)
