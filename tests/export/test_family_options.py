"""Each option that a family reads is compared with Transformers, or a wrong value is refused.

The verification of an import cannot find an option that was misread, because the graphs and the
reference share the description. These cases compare the reference with Transformers, and
`test_families` compares the graphs with the reference.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray

from sightline.export.check.verify import ComparedTexts
from sightline.export.configurations import check_configuration
from sightline.export.families.decoders import ROPE_TYPES
from sightline.export.families.table import FAMILIES, find_family
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Folder
from tests.zoo.comparing import TOLERANCE, describe_folder, hf_outputs, import_folder
from tests.zoo.models import (
    BART_LIKE,
    BERT_LIKE,
    ENCODERS,
    GPT2_LIKE,
    LLAMA3,
    LLAMA_LIKE,
    LONGROPE,
    MODERNBERT,
    NEOX_LIKE,
    OPT_LIKE,
    ROTARY,
    T5_LIKE,
    YARN,
    edit_config,
    random_model,
)

Array = NDArray[Any]
Outputs = Mapping[str, Array]
Values = Mapping[str, Any]

# Options without an effect on the outputs for the same tokens: limits of their number, and the kind
# of labels. `test_kind_of_labels` and the tests of errors cover them.
WITHOUT_EFFECT = {
    "architectures",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "max_position_embeddings",
    "n_positions",
}
IDS = (3, 60, 17, 2, 44, 45, 46, 8, 9, 71, 30, 31, 12, 5, 6)
TEXTS = ComparedTexts((IDS,), (IDS,))
TARGETS = ComparedTexts((IDS,), ((4, 33, 21, 9, 70, 11),))  # of an encoder-decoder


@dataclass(frozen=True)
class Case:
    """A configuration that differs in a few options from the first one of its family."""

    changes: Values = field(default_factory=dict)  # for Transformers
    edits: Values = field(default_factory=dict)  # keys of config.json in other forms; None removes a key


@dataclass(frozen=True)
class FamilyCases:
    """A small model of a family, and others that differ from it."""

    start: str  # of the names of its classes
    task: str
    config: Values
    cases: tuple[Case, ...]
    slow_cases: tuple[Case, ...] = ()  # the same code as for another family


def case(**changes: Any) -> Case:
    return Case(changes)


def each(**changes: Any) -> tuple[Case, ...]:
    """Return a case for each of some options, in which the others do not change."""
    return tuple(Case({name: value}) for name, value in changes.items())


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = (
    case(rope_parameters={**ROPE, "rope_theta": 50.0}),
    case(rope_parameters={**ROPE, "rope_type": "linear", "factor": 3.0}),
    case(rope_parameters={**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 16}),
    case(
        rope_parameters={**LLAMA3, "factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0}
        | {"rope_theta": 500.0, "original_max_position_embeddings": 32}
    ),
    case(rope_parameters={**ROPE, **YARN}),
    case(rope_parameters={**ROPE, **YARN, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False}),
    case(rope_parameters={**ROPE, **YARN, "attention_factor": 0.5}),
    case(rope_parameters={**ROPE, **YARN, "mscale": 2.0, "mscale_all_dim": 0.5}),
    case(rope_parameters={**LONGROPE, "rope_theta": 500.0, "original_max_position_embeddings": 20}),
    # Frequencies change only in texts that are longer than an imported model allows.
    case(rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}),
    # The form of Transformers 4.
    Case({"rope_parameters": {**ROPE, "rope_theta": 50.0}}, {"rope_parameters": None, "rope_theta": 50.0}),
    Case(
        {"rope_parameters": {**ROPE, **YARN}},
        {"rope_parameters": None, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
        | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ),
)
ROPE_VARIANTS: tuple[Values, ...] = tuple(one.changes["rope_parameters"] for one in ROPES if not one.edits)
ROPE_TYPE_OPTIONS = {options["rope_type"]: options for options in ROPE_VARIANTS}
LLAMA_CASES = (
    case(num_attention_heads=4, head_dim=20),
    *each(num_key_value_heads=3, rms_norm_eps=0.1, hidden_act="gelu"),
)
TIED = case(tie_word_embeddings=True)
BERT_CASES = each(num_attention_heads=5, layer_norm_eps=0.1, hidden_act="relu")
PADDING = case(pad_token_id=4)
BART_CASES = (
    *each(encoder_attention_heads=4, decoder_attention_heads=2, scale_embedding=True, activation_function="relu"),
    case(tie_word_embeddings=False),
)
T5_CASES = each(relative_attention_max_distance=7, layer_norm_epsilon=0.1, feed_forward_proj="gated-silu")
MODERNBERT_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MODERNBERT_OLD = {"rope_parameters": None, "layer_types": None}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
ROTARY_CASES = (
    *each(type_vocab_size=3, rope_parameters=ROPE),
    Case({"rope_parameters": {**ROPE, "rope_theta": 50.0}}, {"rope_parameters": None, "rope_theta": 50.0}),
)
NEW = {"model_type": "new", "architectures": ["NewForSequenceClassification"], "rope_parameters": None}
LONGROPES: tuple[tuple[Values, Values], ...] = (
    ({}, {}),
    ({"attention_factor": 0.7}, {}),
    ({"factor": 3.0}, {}),
    ({}, {"max_position_embeddings": 400}),
    ({"short_factor": [1.0, 2.0, 1.0, 4.0, 1.0]}, {}),
)
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

CASES: Mapping[str, FamilyCases] = {
    "bert": FamilyCases("Bert", "ForSequenceClassification", BERT_LIKE, BERT_CASES),
    "roberta": FamilyCases("Roberta", "ForSequenceClassification", BERT_LIKE, (PADDING,), BERT_CASES),
    "xlm-roberta": FamilyCases("XLMRoberta", "ForSequenceClassification", BERT_LIKE, (PADDING,), BERT_CASES),
    "camembert": FamilyCases("Camembert", "ForSequenceClassification", BERT_LIKE, (PADDING,), BERT_CASES),
    "deberta-v2": FamilyCases(
        "DebertaV2",
        "ForSequenceClassification",
        ENCODERS["deberta-v2"].values,
        (
            *BERT_CASES,
            *each(norm_rel_ebd="none", pooler_hidden_act="tanh", pos_att_type="p2c"),
            *each(pos_att_type=["c2p"], position_biased_input=True, position_buckets=8),
            case(position_buckets=2 * BERT_LIKE["max_position_embeddings"]),
            case(position_buckets=-1),
            case(position_buckets=-1, max_relative_positions=7),
            *each(max_relative_positions=9, relative_attention=False),
            case(relative_attention=False, norm_rel_ebd="layer_norm", position_buckets=3, conv_groups=2),
            *each(share_att_key=False, type_vocab_size=2, conv_kernel_size=3),
            case(conv_kernel_size=3, conv_act="gelu"),
        ),
    ),
    "nomic_bert": FamilyCases("NomicBert", "ForSequenceClassification", ROTARY, (*BERT_CASES, *ROTARY_CASES)),
    "jina_embeddings_v3": FamilyCases(
        "JinaEmbeddingsV3", "ForSequenceClassification", ROTARY, (*BERT_CASES, *ROTARY_CASES)
    ),
    "gte": FamilyCases("Gte", "ForSequenceClassification", ROTARY, (*BERT_CASES, *ROTARY_CASES)),
    "new": FamilyCases(
        "Gte",
        "ForSequenceClassification",
        ROTARY,
        (
            Case(
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 60.0, "factor": 3.0**0.2}},
                NEW | {"rope_theta": 20.0, "rope_scaling": {"type": "ntk", "factor": 3.0}},
            ),
        ),
        (
            *(Case(one.changes, NEW | {"rope_theta": 160000.0}) for one in (*BERT_CASES, ROTARY_CASES[0])),
            Case({"rope_parameters": ROPE}, NEW | {"rope_theta": 10000.0}),
        ),
    ),
    "electra": FamilyCases("Electra", "ForSequenceClassification", BERT_LIKE | {"embedding_size": 14}, (), BERT_CASES),
    "mpnet": FamilyCases("MPNet", "ForSequenceClassification", BERT_LIKE, (), BERT_CASES),
    "distilbert": FamilyCases(
        "DistilBert",
        "ForSequenceClassification",
        ENCODERS["distilbert"].values,
        each(n_heads=5, activation="relu"),
    ),
    "albert": FamilyCases(
        "Albert",
        "ForSequenceClassification",
        BERT_LIKE | {"embedding_size": 14},
        (
            *BERT_CASES,
            *each(num_hidden_layers=2, num_hidden_groups=3, inner_group_num=2),
            case(num_hidden_layers=5, num_hidden_groups=3),
        ),
    ),
    "modernbert": FamilyCases(
        "ModernBert",
        "ForSequenceClassification",
        MODERNBERT,
        (
            *each(num_attention_heads=5, local_attention=3, norm_eps=0.1, hidden_activation="relu"),
            *each(classifier_activation="relu", classifier_pooling="mean", classifier_bias=True, attention_bias=True),
            *each(mlp_bias=True, norm_bias=True, layer_types=["sliding_attention", "full_attention"] * 2),
            case(rope_parameters=MODERNBERT_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 50.0}}),
            case(rope_parameters=MODERNBERT_ROPE | {"sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}),
            Case(
                {"layer_types": ["full_attention", "sliding_attention"] * 2},
                MODERNBERT_OLD | {"global_attn_every_n_layers": 2},
            ),
            Case(
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
                    }
                },
                {"rope_parameters": None, "global_rope_theta": 50.0, "local_rope_theta": 5.0},
            ),
        ),
    ),
    "gpt2": FamilyCases(
        "GPT2",
        "LMHeadModel",
        GPT2_LIKE,
        (
            *each(n_head=3, layer_norm_epsilon=0.1, activation_function="relu", scale_attn_weights=False),
            *each(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
        ),
    ),
    "llama": FamilyCases(
        "Llama", "ForCausalLM", LLAMA_LIKE, (*LLAMA_CASES, *ROPES, TIED, *each(attention_bias=True, mlp_bias=True))
    ),
    "smollm3": FamilyCases(
        "SmolLM3",
        "ForCausalLM",
        LLAMA_LIKE | {"num_hidden_layers": 5},
        (
            *each(attention_bias=True, mlp_bias=True, tie_word_embeddings=False, no_rope_layers=[0, 1, 1, 0, 1]),
            Case({"no_rope_layer_interval": 2}, {"no_rope_layers": None}),
            case(use_sliding_window=True, sliding_window=4),
            case(
                use_sliding_window=True,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
            ),
        ),
        (*ROPES, *LLAMA_CASES),
    ),
    "mistral": FamilyCases(
        "Mistral", "ForCausalLM", LLAMA_LIKE | {"head_dim": 10}, (TIED, case(sliding_window=5)), (*ROPES, *LLAMA_CASES)
    ),
    "qwen2": FamilyCases(
        "Qwen2",
        "ForCausalLM",
        LLAMA_LIKE,
        (
            TIED,
            case(**QWEN_WINDOWS),
            case(**QWEN_WINDOWS | {"sliding_window": 6}),
            Case(QWEN_WINDOWS | {"max_window_layers": 2}, {"layer_types": None}),
        ),
        (*ROPES, *LLAMA_CASES),
    ),
    "qwen3": FamilyCases(
        "Qwen3",
        "ForCausalLM",
        LLAMA_LIKE | {"head_dim": 10},
        (
            TIED,
            case(attention_bias=True),
            case(**QWEN_WINDOWS),
            case(**QWEN_WINDOWS | {"sliding_window": 6}),
            Case(QWEN_WINDOWS | {"max_window_layers": 2}, {"layer_types": None}),
        ),
        (*ROPES, *LLAMA_CASES),
    ),
    "gemma": FamilyCases(
        "Gemma",
        "ForCausalLM",
        LLAMA_LIKE | {"head_dim": 10, "hidden_act": "gelu_pytorch_tanh"},
        each(hidden_act="relu", tie_word_embeddings=False, attention_bias=True, head_dim=20),
        (*ROPES, *LLAMA_CASES[:3]),
    ),
    "gemma2": FamilyCases(
        "Gemma2",
        "ForCausalLM",
        LLAMA_LIKE | {"head_dim": 10, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0, "sliding_window": 5},
        (
            *each(query_pre_attn_scalar=3, attn_logit_softcapping=None),
            *each(attn_logit_softcapping=1.0, final_logit_softcapping=None),
            *each(final_logit_softcapping=2.0, sliding_window=6),
            case(layer_types=["full_attention", "full_attention", "sliding_attention"]),
            Case({}, {"layer_types": None}),
            *each(hidden_activation="relu", attention_bias=True, tie_word_embeddings=False),
        ),
        (*ROPES, *LLAMA_CASES[:3]),
    ),
    "gemma3_text": FamilyCases(
        "Gemma3",
        "ForCausalLM",
        LLAMA_LIKE
        | {"head_dim": 10, "query_pre_attn_scalar": 9, "sliding_window": 5, "num_hidden_layers": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": GEMMA3_ROPE},
        (
            *each(query_pre_attn_scalar=3, final_logit_softcapping=2.0, sliding_window=6, hidden_activation="relu"),
            *each(attention_bias=True, tie_word_embeddings=False),
            case(rope_parameters=GEMMA3_ROPE | {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}),
            *(
                case(rope_parameters=GEMMA3_ROPE | {"full_attention": options})
                for options in ROPE_TYPE_OPTIONS.values()
            ),
            Case(
                {"rope_parameters": {key: {**ROPE, "rope_type": "linear", "factor": 3.0} for key in GEMMA3_ROPE}},
                {
                    "rope_parameters": {
                        key: {"type": "linear", "factor": 3.0, "rope_theta": 10000.0} for key in GEMMA3_ROPE
                    }
                },
            ),
            # The form of Transformers 4.
            Case(
                {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
                {"layer_types": None, "sliding_window_pattern": 3},
            ),
            Case(
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 70.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
                    }
                },
                {"rope_parameters": None, "rope_theta": 70.0, "rope_local_base_freq": 5.0}
                | {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0}},
            ),
            Case(
                {"rope_parameters": GEMMA3_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 50.0}}},
                {
                    "rope_parameters": None,
                    "rope_theta": 70.0,
                    "rope_scaling": {"rope_type": "default", "rope_theta": 50.0},
                },
            ),
        ),
        (
            *(case(rope_parameters=GEMMA3_ROPE | {"full_attention": options}) for options in ROPE_VARIANTS),
            *LLAMA_CASES[:3],
        ),
    ),
    "phi3": FamilyCases(
        "Phi3",
        "ForCausalLM",
        LLAMA_LIKE,
        (
            TIED,
            *each(num_key_value_heads=3, sliding_window=5, hidden_act="gelu_accurate"),
            *(
                case(rope_parameters={**LONGROPE, **changes}, original_max_position_embeddings=40, **others)
                for changes, others in LONGROPES
            ),
            case(rope_parameters={**ROPE, "partial_rotary_factor": 0.4}),
            # The forms of Transformers 4.
            Case(
                {"rope_parameters": {**ROPE, "rope_theta": 50.0, "partial_rotary_factor": 0.4}},
                {"rope_parameters": None, "rope_theta": 50.0, "partial_rotary_factor": 0.4},
            ),
            *(
                Case(
                    {
                        "rope_parameters": LONGROPE,
                        "original_max_position_embeddings": 40,
                        "max_position_embeddings": 400,
                    },
                    {"rope_parameters": None, "rope_theta": 10000.0}
                    | {
                        "rope_scaling": {**{key: LONGROPE[key] for key in ("short_factor", "long_factor")}, "type": one}
                    },
                )
                for one in ("su", "yarn")
            ),
        ),
        (LLAMA_CASES[0], LLAMA_CASES[2], ROPES[0]),
    ),
    "olmo2": FamilyCases(
        "Olmo2",
        "ForCausalLM",
        LLAMA_LIKE,
        (TIED, case(attention_bias=True), *LLAMA_CASES[1:3]),
        (*ROPES, LLAMA_CASES[0], LLAMA_CASES[3]),
    ),
    "granite": FamilyCases(
        "Granite",
        "ForCausalLM",
        LLAMA_LIKE | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 0.5},
        (
            TIED,
            *each(attention_bias=True, mlp_bias=True, embedding_multiplier=1.0, attention_multiplier=0.4),
            *each(residual_multiplier=0.5, logits_scaling=2.0),
        ),
        (*ROPES, *LLAMA_CASES),
    ),
    "gpt_neox": FamilyCases(
        "GPTNeoX",
        "ForCausalLM",
        NEOX_LIKE,
        (
            TIED,
            case(num_attention_heads=5, rope_parameters={**ROPE, "partial_rotary_factor": 0.34}),
            *each(layer_norm_eps=0.1, attention_bias=False, use_parallel_residual=False, hidden_act="relu"),
            case(rope_parameters={**ROPE, "partial_rotary_factor": 0.6}),
            Case(
                {"rope_parameters": {**ROPE, "rope_theta": 50.0, "partial_rotary_factor": 0.6}},
                {"rope_parameters": None, "rotary_emb_base": 50.0, "rotary_pct": 0.6},
            ),
            Case({}, {"rope_parameters": None}),
            Case(
                {"rope_parameters": {**ROPE, **YARN, "partial_rotary_factor": 0.6}},
                {"rope_parameters": None, "rotary_pct": 0.6, "original_max_position_embeddings": 16}
                | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            ),
        ),
        tuple(
            case(rope_parameters={**one.changes["rope_parameters"], "partial_rotary_factor": 1.0})
            for one in ROPES
            if not one.edits
        ),
    ),
    "opt": FamilyCases(
        "OPT",
        "ForCausalLM",
        OPT_LIKE,
        (
            *each(num_attention_heads=5, do_layer_norm_before=False, word_embed_proj_dim=34),
            *each(_remove_final_layer_norm=True, activation_function="gelu", enable_bias=False),
            case(tie_word_embeddings=False),
        ),
    ),
    "marian": FamilyCases(
        "Marian",
        "MTModel",
        BART_LIKE,
        (*BART_CASES, case(decoder_vocab_size=83, share_encoder_decoder_embeddings=False, tie_word_embeddings=False)),
    ),
    "bart": FamilyCases("Bart", "ForConditionalGeneration", BART_LIKE, BART_CASES),
    "mbart": FamilyCases("MBart", "ForConditionalGeneration", BART_LIKE, (), BART_CASES),
    "m2m_100": FamilyCases(
        "M2M100",
        "ForConditionalGeneration",
        BART_LIKE,
        (
            *BART_CASES[:2],
            *each(scale_embedding=False, activation_function="gelu", tie_word_embeddings=False),
        ),
    ),
    "pegasus": FamilyCases("Pegasus", "ForConditionalGeneration", BART_LIKE, (), BART_CASES),
    "t5": FamilyCases(
        "T5",
        "ForConditionalGeneration",
        T5_LIKE,
        (
            *T5_CASES,
            *each(feed_forward_proj="gated-gelu", scale_decoder_outputs=False),
            Case({"scale_decoder_outputs": False}, {"scale_decoder_outputs": None, "tie_word_embeddings": False}),
        ),
    ),
    "mt5": FamilyCases("MT5", "ForConditionalGeneration", T5_LIKE, (), T5_CASES),
}


def make_config(family: FamilyCases, changes: Values) -> Any:
    """Return a configuration of Transformers, which would change nested values that it is given."""
    name = f"{family.start}{family.task}"
    values = copy.deepcopy({**family.config, **changes, "architectures": [name]})
    return getattr(transformers, name).config_class(**values)


def make_model(family: FamilyCases, changes: Values) -> Any:
    """Return a random model of Transformers; models of the same shapes have the same weights."""
    return random_model(make_config(family, changes), f"{family.start}{family.task}")


def write_config(config: Any, folder: Path, edits: Values) -> dict[str, Any]:
    """Write config.json with edited keys, and return all its keys."""
    config.save_pretrained(folder)
    return edit_config(folder, **edits)


def differ(first: Outputs, second: Outputs) -> bool:
    """Return True if a misread option would show: outputs differ by far more than the tolerance."""
    return any(
        array.shape != second[name].shape or np.abs(array - second[name]).max() > 30 * TOLERANCE
        for name, array in first.items()
    )


@pytest.mark.parametrize("name", CASES)
def test_each_option_changes_the_outputs_as_in_transformers(name: str, tmp_path: Path) -> None:
    compare(CASES[name], (Case(), *CASES[name].cases), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in CASES.items() if family.slow_cases])
def test_shared_options_change_the_outputs_as_in_transformers(name: str, tmp_path: Path) -> None:
    compare(CASES[name], CASES[name].slow_cases, tmp_path)


def compare(family: FamilyCases, cases: Iterable[Case], folder: Path) -> None:
    first = make_model(family, {})
    texts = TARGETS if first.config.is_encoder_decoder else TEXTS
    base = hf_outputs(first, texts)
    for one in cases:
        model = make_model(family, one.changes)
        model.save_pretrained(folder)
        edit_config(folder, **one.edits)
        expected, given = hf_outputs(model, texts), import_folder(folder, has_more_tensors=True).outputs(texts)
        assert given.keys() == expected.keys()
        assert differ(expected, base) == bool(one.changes), one
        for output, array in expected.items():
            limit = TOLERANCE * max(1.0, float(np.abs(array).max()))
            np.testing.assert_allclose(given[output], array, rtol=0, atol=limit, err_msg=f"{output} of {one}")


@pytest.mark.parametrize("name", CASES)
def test_each_rope_type_that_is_accepted_has_a_case(name: str, tmp_path: Path) -> None:
    family = CASES[name]
    changes = [flat(one.changes) for one in (*family.cases, *family.slow_cases)]
    compared = {value for one in changes for key, value in one.items() if key.endswith("rope_type")}
    is_nested = "full_attention" in family.config.get("rope_parameters", {}) or name == "modernbert"
    for kind in set(ROPE_TYPES) - compared - {"default"}:
        options = {"full_attention": ROPE_TYPE_OPTIONS[kind]} if is_nested else ROPE_TYPE_OPTIONS[kind]
        write_config(make_config(family, {}), tmp_path, {"rope_parameters": options})
        assert check_configuration(tmp_path).kind == "", kind


def read_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the keys of config.json that the family of a folder reads, with their values."""
    found: dict[str, Any] = {}
    original = Config.get

    def get(self: Config, key: str, default: Any = ...) -> Any:
        value = original(self, key, default)
        if self._values and not isinstance(value, dict):
            found[f"{self._file}.{key}".replace(": ", ".").removeprefix("config.json.")] = value
        return value

    opened = Folder(folder)
    with monkeypatch.context() as patch:
        family = find_family(opened.config)
        patch.setattr(Config, "get", get)
        with suppress(ImportFailedError):  # the tensors are those of the first case
            family.describe(opened.config, opened.tensors)
    return {key.replace("rope_scaling", "rope_parameters"): value for key, value in found.items()}


def flat(values: Values, start: str = "") -> dict[str, Any]:
    """Return nested values by paths such as "rope_parameters.rope_theta"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{start}{key}.") if isinstance(value, dict) else {f"{start}{key}": value}
    return found


def wrong_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (value + 1, value - 1, 2 * value, 1, 10**9) if other != value]
    return []


# Transformers has no implementation of `jina_bert`, whose options are those of BERT.
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.name != "jina_bert"])
def test_each_option_that_is_read_has_a_case_or_is_checked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option without a case must hold a size: each of its wrong values is refused."""
    family = CASES[name]
    configs, read = list[dict[str, Any]](), dict[str, Any]()
    model = make_model(family, {})
    model.save_pretrained(tmp_path)
    for one in (Case(), *family.cases, *family.slow_cases):
        configs.append(flat(write_config(make_config(family, one.changes), tmp_path, one.edits)))
        read = read_options(tmp_path, monkeypatch) | read
    varied = {key for config in configs for key in {*config, *configs[0]} if config.get(key) != configs[0].get(key)}
    varied |= {key.replace("rope_scaling", "rope_parameters") for key in varied}
    varied |= {key.partition(".")[0] for key in varied}
    values = write_config(model.config, tmp_path, {})
    for key in sorted(read.keys() - varied - WITHOUT_EFFECT):
        wrong = wrong_values(read[key])
        assert wrong, f"no case has another value of {key} than {read[key]!r}"
        for value in wrong:
            (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
            with suppress(ImportFailedError):
                describe_folder(Folder(tmp_path))  # without reading the tensors, which takes longer
                import_folder(tmp_path)
                pytest.fail(f"{key}: {value} is accepted in place of {read[key]!r}, and no case compares another value")
