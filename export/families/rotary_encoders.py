"""Encoders with rotary positions: nomic-embed, GTE from version 1.5 on, and Jina embeddings v3.

Their repositories have Python code, which is never run. All are post-norm, like BERT; the first two
have gated layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from sightline.export.families import Family
from sightline.export.families.description import Description, FeedForward, Norm, Rotary, Stack, TokenEmbedding
from sightline.export.families.encoders import (
    HeadModules,
    add_head,
    check_common,
    classes_of,
    describe_encoder,
    embedding_modules,
    head_modules,
    prefix_of,
    with_gates,
)
from sightline.export.families.values import activation, check_rotary_head, count, equal_heads
from sightline.export.families.weights import QUERY_KEY_VALUE, Source, equal_parts, layer_modules
from sightline.export.sources.opened_checkpoint import Config, Tensors


def _rotary(config: Config, head_size: int, default_base: float) -> Rotary:
    """Return the rotary embedding.

    Transformers 5 writes `rope_parameters`. The code of GTE reads `rope_theta` and `rope_scaling`,
    whose only type is fixed NTK scaling: other frequencies, which do not depend on the text.
    """
    check_rotary_head(head_size)
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
    return Rotary(tuple(float(frequency) for frequency in frequencies))


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
        TokenEmbedding(types=config.integer("type_vocab_size", 2, least=0), has_norm=True),
    )
    model = Description("nomic_bert", config.integer("vocab_size"), positions, stack)
    return add_head(model, config, HeadModules("", "tanh", ""))


def _nomic_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "nomic_bert.", "bert.")
    layer = f"{prefix}encoder.layers.{{}}"
    modules = layer_modules(layer, "- - - attn.out_proj norm1 mlp.fc11 mlp.fc2 norm2")
    modules |= {"encoder.embedding_norm": f"{prefix}emb_ln", "encoder.{}.feed_forward.gate": f"{layer}.mlp.fc12"}
    modules |= equal_parts("encoder.{}.self_attention", QUERY_KEY_VALUE, f"{layer}.attn.Wqkv")
    head = head_modules(model, HeadModules(f"{prefix}pooler.dense", "tanh", "classifier"))
    return embedding_modules(f"{prefix}embeddings") | modules | head


# GTE from version 1.5 on: model_type "new" in its repositories, "gte" in Transformers


def _gte(family: str, config: Config, tensors: Tensors) -> Description:
    config.ignore("unpad_inputs", "use_memory_efficient_attention")
    config.neutral("layer_norm_type", "layer_norm")
    config.neutral("logn_attention_clip1", False)
    config.neutral("logn_attention_scale", False)
    config.neutral("pack_qkv", True)
    embedding = TokenEmbedding(types=config.integer("type_vocab_size", 1, least=0), has_norm=True)
    model = describe_encoder(config, family, embedding, positions="rope", max_positions=8192)
    stack = _rotated(config, with_gates(model.encoder_stack), 160_000.0 if family == "gte" else 10_000.0)
    return add_head(replace(model, encoder=stack), config, HeadModules("", "tanh", ""))


def _rotated(config: Config, stack: Stack, default_base: float) -> Stack:
    """Return an encoder with rotary positions in all layers."""
    rotary = _rotary(config, stack.attention[0].head_size, default_base)
    return replace(stack, attention=tuple(replace(layer, rotary=rotary) for layer in stack.attention))


def _gte_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "new.", "gte.")
    layer = f"{prefix}encoder.layer.{{}}"
    modules = layer_modules(layer, "- - - attention.o_proj attn_ln - mlp.down_proj mlp_ln")
    modules |= equal_parts("encoder.{}.self_attention", QUERY_KEY_VALUE, f"{layer}.attention.qkv_proj")
    modules |= equal_parts("encoder.{}.feed_forward", ("inner", "gate"), f"{layer}.mlp.up_gate_proj")
    head = head_modules(model, HeadModules(f"{prefix}pooler.dense", "tanh", "classifier"))
    return embedding_modules(f"{prefix}embeddings") | modules | head


# Jina embeddings v3 (Sturua et al. 2024), without its adapters: XLM-R with rotary positions

_JINA_HEAD = HeadModules("classifier.dense", "tanh", "classifier.out_proj")


def _jina(config: Config, tensors: Tensors) -> Description:
    embedding = TokenEmbedding(types=config.integer("type_vocab_size", 1, least=0), has_norm=True)
    model = describe_encoder(config, "jina_embeddings_v3", embedding)
    return add_head(replace(model, encoder=_rotated(config, model.encoder_stack, 20_000.0)), config, _JINA_HEAD)


def _jina_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "roberta.")
    layer = f"{prefix}encoder.layers.{{}}"
    modules = layer_modules(layer, "- - - mixer.out_proj norm1 mlp.fc1 mlp.fc2 norm2")
    modules["encoder.embedding_norm"] = f"{prefix}emb_ln"
    modules |= equal_parts("encoder.{}.self_attention", QUERY_KEY_VALUE, f"{layer}.mixer.Wqkv")
    return embedding_modules(f"{prefix}embeddings") | modules | head_modules(model, _JINA_HEAD)


_IGNORED = ("*position_ids", "*token_type_ids", "*inv_freq", "pooler.*", "*.pooler.*", "cls.*", "lm_head.*")
NOMIC_BERT = Family("nomic_bert", classes_of("NomicBert", "ForPreTraining"), _nomic, _nomic_modules, _IGNORED)
GTE = Family("gte", classes_of("Gte"), partial(_gte, "gte"), _gte_modules, _IGNORED)
NEW = replace(GTE, name="new", architectures=classes_of("New"), describe=partial(_gte, "new"))
JINA_EMBEDDINGS_V3 = Family("jina_embeddings_v3", classes_of("JinaEmbeddingsV3"), _jina, _jina_modules, _IGNORED)
FAMILIES = (NOMIC_BERT, GTE, NEW, JINA_EMBEDDINGS_V3)
