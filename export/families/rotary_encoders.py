"""Encoders with rotary positions and gated layers: nomic-embed, and GTE from version 1.5 on.

Their repositories have Python code, which is never run. Both are post-norm, like BERT.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from export.errors import ImportFailedError
from export.families import Family
from export.families.description import Description, Embedding, FeedForward, Norm, Rotary, Stack
from export.families.encoders import HeadModules, add_head, check_common, classes_of, head_modules
from export.families.values import MAX_HEAD_SIZE, activation, count, equal_heads
from export.families.weights import Part, Source
from export.sources.checkpoint import Config, Tensors


def _prefix(tensors: Tensors, *prefixes: str) -> str:
    """Return the start of all names of the encoder: classes with a head add one of the prefixes."""
    return next((one for one in prefixes if f"{one}embeddings.word_embeddings.weight" in tensors), "")


def _rotary(config: Config, head_size: int, default_base: float) -> Rotary:
    """Return the rotary embedding.

    Transformers 5 writes `rope_parameters`. The code of GTE reads `rope_theta` and `rope_scaling`,
    whose only type is fixed NTK scaling: other frequencies, which do not depend on the text.
    """
    if head_size % 2 or head_size > MAX_HEAD_SIZE:
        raise ImportFailedError(
            f"config.json: the size of a head must be even and at most {MAX_HEAD_SIZE} for rotary embedding, got "
            f"{head_size}"
        )
    base, divisor = config.number("rope_theta", default_base, above=1), 1.0
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if parameters is not None:
        parameters.neutral("rope_type", "default")
        base = parameters.number("rope_theta", base, above=1)
    if scaling is not None:
        scaling.neutral("type", "ntk")
        scaling.neutral("mixed_b", None)
        factor = scaling.number("factor", above=0)
        if factor > 1:  # as in that code, a smaller one has no effect
            base, divisor = base * factor, factor ** (2 / head_size)
    frequencies = (base ** (-2 * np.arange(head_size // 2) / head_size) / divisor).astype(np.float32)
    return Rotary(tuple(float(one) for one in frequencies))


# nomic-embed-text: its configuration has the keys of GPT-2, or those of Transformers 5

_NOMIC_NEUTRAL = {
    "activation_function": ("swiglu",),
    "causal": (False,),
    "moe_every_n_layers": (0, None),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "num_experts": (0, None),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_rms_norm": (False, None),
}
# Implementations of the same calculation, and settings of training.
_NOMIC_IGNORED = (
    "dense_seq_output", "fused_*", "last_layer_subset", "max_trained_positions", "n_ctx", "pad_vocab_size_multiple",
    "parallel_block_tied_norm", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy",
)  # fmt: skip


def _nomic(config: Config, tensors: Tensors) -> Description:
    check_common(config)
    if "n_embd" in config:
        for key, values in _NOMIC_NEUTRAL.items():
            config.neutral(key, *values)
        config.ignore(*_NOMIC_IGNORED)
        width, heads, layers = config.integer("n_embd"), "n_head", "n_layer"
        inner, epsilon, positions = config.integer("n_inner"), "layer_norm_epsilon", config.integer("n_positions")
        function, base = "silu", config.number("rotary_emb_base", 10_000.0, above=1)
    else:
        width, heads, layers = config.integer("hidden_size"), "num_attention_heads", "num_hidden_layers"
        inner, epsilon = config.integer("intermediate_size"), "layer_norm_eps"
        positions = config.integer("max_position_embeddings", 2048)
        function, base = config.text("hidden_act", "silu"), 1000.0
    attention = equal_heads(config, heads, width)
    config.neutral("head_dim", attention.head_size, None)
    rotary = _rotary(config, attention.head_size, base)
    attention = replace(attention, rotary=rotary, has_bias=False, has_output_bias=False)
    stack = Stack(
        width,
        Norm("layer", config.number(epsilon, 1e-12, above=0)),
        "post",
        (attention,) * count(config, layers),
        FeedForward(activation(function), inner, gated=True, has_bias=False),
        Embedding(types=config.integer("type_vocab_size", 2, least=0), has_norm=True),
    )
    model = Description("nomic_bert", config.integer("vocab_size"), positions, stack)
    return add_head(model, config, HeadModules("", "tanh", ""))


def _nomic_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = _prefix(tensors, "nomic_bert.", "bert.")
    layer = f"{prefix}encoder.layers.{{}}"
    modules: dict[str, Source] = {
        "embedding": f"{prefix}embeddings.word_embeddings",
        "encoder.types": f"{prefix}embeddings.token_type_embeddings",
        "encoder.embedding_norm": f"{prefix}emb_ln",
        "encoder.{}.self_attention.output": f"{layer}.attn.out_proj",
        "encoder.{}.self_attention_norm": f"{layer}.norm1",
        "encoder.{}.feed_forward.inner": f"{layer}.mlp.fc11",
        "encoder.{}.feed_forward.gate": f"{layer}.mlp.fc12",
        "encoder.{}.feed_forward.outer": f"{layer}.mlp.fc2",
        "encoder.{}.feed_forward_norm": f"{layer}.norm2",
    }
    for index, part in enumerate(("query", "key", "value")):
        modules[f"encoder.{{}}.self_attention.{part}"] = Part(f"{layer}.attn.Wqkv", index=index, count=3)
    return modules | head_modules(model, HeadModules(f"{prefix}pooler.dense", "tanh", "classifier"))


# GTE from version 1.5 on: model_type "new" in its repositories, "gte" in Transformers


def _gte(family: str, config: Config, tensors: Tensors) -> Description:
    # `check_common` expects absolute positions, and the code of GTE names rotary ones.
    config.neutral("position_embedding_type", "rope")
    config.ignore("pooler_*", "tie_*", "sentence_transformers", "unpad_inputs", "use_memory_efficient_attention")
    config.neutral("layer_norm_type", "layer_norm")
    config.neutral("logn_attention_clip1", False)
    config.neutral("logn_attention_scale", False)
    config.neutral("pack_qkv", True)
    width = config.integer("hidden_size")
    attention = equal_heads(config, "num_attention_heads", width)
    default_base = 160_000.0 if family == "gte" else 10_000.0
    stack = Stack(
        width,
        Norm("layer", config.number("layer_norm_eps", 1e-12, above=0)),
        "post",
        (replace(attention, rotary=_rotary(config, attention.head_size, default_base)),)
        * count(config, "num_hidden_layers"),
        FeedForward(
            activation(config.text("hidden_act", "gelu")),
            config.integer("intermediate_size"),
            gated=True,
            has_bias=False,
            has_output_bias=True,
        ),
        Embedding(types=config.integer("type_vocab_size", 1, least=0), has_norm=True),
    )
    positions = config.integer("max_position_embeddings", 8192)
    model = Description(family, config.integer("vocab_size"), positions, stack)
    return add_head(model, config, HeadModules("", "tanh", ""))


def _gte_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = _prefix(tensors, "new.", "gte.")
    layer = f"{prefix}encoder.layer.{{}}"
    modules: dict[str, Source] = {
        "embedding": f"{prefix}embeddings.word_embeddings",
        "encoder.types": f"{prefix}embeddings.token_type_embeddings",
        "encoder.embedding_norm": f"{prefix}embeddings.LayerNorm",
        "encoder.{}.self_attention.output": f"{layer}.attention.o_proj",
        "encoder.{}.self_attention_norm": f"{layer}.attn_ln",
        "encoder.{}.feed_forward.inner": Part(f"{layer}.mlp.up_gate_proj", index=0, count=2),
        "encoder.{}.feed_forward.gate": Part(f"{layer}.mlp.up_gate_proj", index=1, count=2),
        "encoder.{}.feed_forward.outer": f"{layer}.mlp.down_proj",
        "encoder.{}.feed_forward_norm": f"{layer}.mlp_ln",
    }
    for index, part in enumerate(("query", "key", "value")):
        modules[f"encoder.{{}}.self_attention.{part}"] = Part(f"{layer}.attention.qkv_proj", index=index, count=3)
    return modules | head_modules(model, HeadModules(f"{prefix}pooler.dense", "tanh", "classifier"))


def _gte_native(config: Config, tensors: Tensors) -> Description:
    return _gte("gte", config, tensors)


def _gte_new(config: Config, tensors: Tensors) -> Description:
    return _gte("new", config, tensors)


_IGNORED = ("*position_ids", "*token_type_ids", "*inv_freq", "pooler.*", "*.pooler.*", "cls.*", "lm_head.*")
NOMIC_BERT = Family("nomic_bert", classes_of("NomicBert", "ForPreTraining"), _nomic, _nomic_modules, _IGNORED)
GTE = Family("gte", classes_of("Gte"), _gte_native, _gte_modules, _IGNORED)
NEW = replace(GTE, name="new", architectures=classes_of("New"), describe=_gte_new)
FAMILIES = (NOMIC_BERT, GTE, NEW)
