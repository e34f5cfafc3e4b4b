"""Decoder-only families whose layers differ from Llama's: Phi-3, OLMo 2, Granite, GPT-NeoX and OPT.

Phi-3 and GPT-NeoX store queries, keys and values as one tensor, and may rotate a part of each head
only. The graphs rotate the first half of a head against the second. Queries and keys of a head are
therefore reordered, so that the dimensions that are not rotated are at the end of both halves. This
changes no score, because it is the same order for both.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sightline.export.families import Family
from sightline.export.families.causal_encoders import classes_of, family_of
from sightline.export.families.decoders import (
    Variant,
    check_output,
    decoder_modules,
    describe_relative,
    model_prefix,
    output_modules,
    rotary_from,
    rotary_options,
)
from sightline.export.families.description import Attention, Description, FeedForward, Norm, Stack, TokenEmbedding
from sightline.export.families.values import MAX_WINDOW, activation, check_rotary_head, count, equal_heads
from sightline.export.families.weights import (
    BART_LAYER,
    QUERY_KEY_VALUE,
    AdaptedModule,
    Source,
    equal_parts,
    layer_modules,
)
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors

_LAYER_NORM_EPSILON = 1e-5  # of a LayerNorm of PyTorch


def _phi3(config: Config, tensors: Tensors) -> Description:
    config.ignore("attention_bias", "full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias")  # never read
    for options in filter(None, map(config.section, ("rope_scaling", "rope_parameters"))):
        kind = options.text("rope_type", options.text("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ImportFailedError(
                f"config.json: the rope type {kind[:40]!r} is not one of Phi-3; supported are default and longrope"
            )
        if kind != "default":
            options.override("rope_type", "longrope")  # its usual name
    window = None
    if config.get("sliding_window", None) is not None:
        window = config.integer("sliding_window", least=1, most=MAX_WINDOW)
    variant = Variant(
        (window,) * count(config, "num_hidden_layers"), rotary_share=1.0, original_positions=4096, epsilon=1e-5
    )
    return describe_relative("phi3", config, tensors, variant)


def _phi3_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    layer = f"{model_prefix(tensors)}layers.{{}}"
    attention = model.first_stack.attention[0]
    modules = dict(decoder_modules(model, tensors))
    for part in QUERY_KEY_VALUE:
        modules[f"decoder.{{}}.self_attention.{part}"] = _rows_of(f"{layer}.self_attn.qkv_proj", attention, part)
    return modules | equal_parts("decoder.{}.feed_forward", ("gate", "inner"), f"{layer}.mlp.gate_up_proj")


def _rows_of(module: str, attention: Attention, part: str, *, by_head: bool = False) -> AdaptedModule:
    """Return the queries, keys or values of a module that stores all of them.

    `part` is "query", "key" or "value". With `by_head`, those of the same head are consecutive;
    otherwise all queries precede all keys.
    """
    size, counts = attention.head_size, (attention.heads, attention.kv_heads, attention.kv_heads)
    index = QUERY_KEY_VALUE.index(part)
    heads = np.arange(counts[index])[:, None]
    starts = (3 * heads + index) * size if by_head else (sum(counts[:index]) + heads) * size
    order = np.arange(size)
    if attention.rotary is not None and part != "value":
        pairs = len(attention.rotary.frequencies)
        middle = pairs + size // 2  # end of the dimensions that are not rotated in the first half
        order = np.r_[:pairs, 2 * pairs : middle, pairs : 2 * pairs, middle:size]
    rows = tuple(int(row) for row in (starts + order).reshape(-1))
    return AdaptedModule(module, rows=rows, stored_rows=sum(counts) * size)


def _olmo2(config: Config, tensors: Tensors) -> Description:
    bias, windows = config.boolean("attention_bias", False), (None,) * count(config, "num_hidden_layers")
    variant = Variant(windows, bias=bias, output_bias=bias, has_head_norm=True, epsilon=1e-5)
    model = describe_relative("olmo2", config, tensors, variant)
    stack = model.first_stack
    layers = tuple(replace(attention, joins_heads=True) for attention in stack.attention)
    return replace(model, decoder=replace(stack, norm_place="none", has_output_norms=True, attention=layers))


def _olmo2_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    layer = f"{model_prefix(tensors)}layers.{{}}"
    modules = dict(decoder_modules(model, tensors))
    del modules["decoder.{}.self_attention_norm"], modules["decoder.{}.feed_forward_norm"]
    return modules | {
        "decoder.{}.self_attention_output_norm": f"{layer}.post_attention_layernorm",
        "decoder.{}.feed_forward_output_norm": f"{layer}.post_feedforward_layernorm",
    }


def _granite(config: Config, tensors: Tensors) -> Description:
    bias, mlp_bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    windows = (None,) * count(config, "num_hidden_layers")
    model = describe_relative(
        "granite", config, tensors, Variant(windows, bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    )
    stack, scale = model.first_stack, config.number("attention_multiplier", 1.0)
    stack = replace(
        stack,
        attention=tuple(replace(attention, scale=scale) for attention in stack.attention),
        embedding=TokenEmbedding(scale=config.number("embedding_multiplier", 1.0)),
        residual_scale=config.number("residual_multiplier", 1.0),
    )
    return replace(model, decoder=stack, logits_scale=1 / config.number("logits_scaling", 1.0, above=0))


def _gpt_neox(config: Config, tensors: Tensors) -> Description:
    config.neutral("partial_rotary_factor", None)  # transformers reads rotary_pct
    width, layers = config.integer("hidden_size"), count(config, "num_hidden_layers")
    attention, bias = equal_heads(config, "num_attention_heads", width), config.boolean("attention_bias", True)
    check_rotary_head(attention.head_size)
    max_positions = config.integer("max_position_embeddings")
    base, share = config.number("rotary_emb_base", 10000.0, above=1), config.number("rotary_pct", 0.25, above=0)
    original = config.integer("original_max_position_embeddings", 0, least=0)
    rotary = rotary_from(rotary_options(config), attention.head_size, max_positions, base, original, share)
    attention = replace(attention, rotary=rotary, has_bias=bias, has_output_bias=bias)
    stack = Stack(
        width,
        Norm("layer", config.number("layer_norm_eps", 1e-5, above=0)),
        "pre",
        (attention,) * layers,
        FeedForward(activation(config.text("hidden_act", "gelu")), config.integer("intermediate_size")),
        TokenEmbedding(),
        has_final_norm=True,
        is_parallel=config.boolean("use_parallel_residual", True),
    )
    check_output(config, tensors, f"{_neox_start(tensors)}embed_in.weight", default=False, output=_neox_output(tensors))
    return Description("gpt_neox", config.integer("vocab_size"), max_positions, decoder=stack)


def _neox_start(tensors: Tensors) -> str:
    return "gpt_neox." if "gpt_neox.final_layer_norm.weight" in tensors else ""


def _neox_output(tensors: Tensors) -> str:
    """Return the name of the projection to the vocabulary: that of other families, or its own."""
    return "lm_head.weight" if "lm_head.weight" in tensors else "embed_out.weight"


def _neox_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    start, attention = _neox_start(tensors), model.first_stack.attention[0]
    layer = f"{start}layers.{{}}"
    tensors.check_equal("lm_head.weight", "embed_out.weight", "although both are the projection; remove the wrong one")
    names = "- - - attention.dense input_layernorm mlp.dense_h_to_4h mlp.dense_4h_to_h post_attention_layernorm"
    modules = layer_modules(layer, names, "decoder")
    modules |= {"embedding": f"{start}embed_in", "decoder.norm": f"{start}final_layer_norm"}
    for part in QUERY_KEY_VALUE:
        packed = _rows_of(f"{layer}.attention.query_key_value", attention, part, by_head=True)
        modules[f"decoder.{{}}.self_attention.{part}"] = packed
    return modules | output_modules(tensors, f"{start}embed_in.weight", _neox_output(tensors))


def _opt(config: Config, tensors: Tensors) -> Description:
    config.neutral("layer_norm_elementwise_affine", True)
    width, layers = config.integer("hidden_size"), count(config, "num_hidden_layers")
    inner = config.integer("word_embed_proj_dim", width)
    size = None if inner == width else inner
    bias, is_pre_norm = config.boolean("enable_bias", True), config.boolean("do_layer_norm_before", True)
    lacks_norm = config.boolean("_remove_final_layer_norm", False)
    attention = replace(equal_heads(config, "num_attention_heads", width), has_bias=bias, has_output_bias=bias)
    stack = Stack(
        width,
        Norm("layer", _LAYER_NORM_EPSILON),
        "pre" if is_pre_norm else "post",
        (attention,) * layers,
        FeedForward(activation(config.text("activation_function", "relu")), config.integer("ffn_dim"), has_bias=bias),
        TokenEmbedding(has_positions=True, projected_from=size, projects_tokens=size is not None),
        has_final_norm=is_pre_norm and not lacks_norm,
        projected_to=size,
    )
    check_output(config, tensors, f"{_opt_start(tensors)}embed_tokens.weight", default=True)
    return Description("opt", config.integer("vocab_size"), config.integer("max_position_embeddings"), decoder=stack)


def _opt_start(tensors: Tensors) -> str:
    return "model.decoder." if "model.decoder.embed_positions.weight" in tensors else "decoder."


def _opt_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    start = _opt_start(tensors)
    layer = f"{start}layers.{{}}"
    modules = layer_modules(layer, BART_LAYER, "decoder") | {
        "embedding": f"{start}embed_tokens",
        "decoder.positions": AdaptedModule(f"{start}embed_positions", skip=2),  # two rows that no token uses
        "decoder.embedding_projection": f"{start}project_in",
        "decoder.output_projection": f"{start}project_out",
        "decoder.norm": f"{start}final_layer_norm",
    }
    return modules | output_modules(tensors, f"{start}embed_tokens.weight")


_FREQUENCIES = "*rotary_emb.inv_freq"
PHI3 = family_of("phi3", classes_of("Phi3"), _phi3, _phi3_modules, (_FREQUENCIES,))
OLMO2 = family_of("olmo2", classes_of("Olmo2"), _olmo2, _olmo2_modules, (_FREQUENCIES,))
GRANITE = family_of("granite", ("GraniteForCausalLM", "GraniteModel"), _granite, decoder_modules, (_FREQUENCIES,))
GPT_NEOX = family_of(
    "gpt_neox",
    classes_of("GPTNeoX"),
    _gpt_neox,
    _neox_modules,
    (_FREQUENCIES, "*.attention.bias", "*.attention.masked_bias", "embed_out.weight"),
)
OPT = family_of("opt", classes_of("OPT"), _opt, _opt_modules)
FAMILIES: tuple[Family, ...] = (PHI3, OLMO2, GRANITE, GPT_NEOX, OPT)
