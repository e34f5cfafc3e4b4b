"""Gemma 1, 2 and 3 for text, and EmbeddingGemma, which is a Gemma 3 that is not causal.

Normalizations multiply by 1 + weight. The embeddings are scaled by the root of the width, which is
rounded to float32. From version 2 on, the results of sublayers are normalized, too.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sightline.export.families import Family
from sightline.export.families.causal_encoders import as_encoder, classes_of, family_of, generates_text
from sightline.export.families.decoders import (
    check_output,
    decoder_modules,
    head_size_of,
    model_prefix,
    rotary_from,
    rotary_of,
    rotary_options,
)
from sightline.export.families.description import (
    Attention,
    Description,
    FeedForward,
    Norm,
    Rotary,
    Stack,
    TokenEmbedding,
)
from sightline.export.families.values import LAYER_KINDS, MAX_WINDOW, activation, count, local_layers
from sightline.export.families.weights import AdaptedModule, Source
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors


def _gemma(config: Config, tensors: Tensors) -> Description:
    config.neutral("use_bidirectional_attention", None, False)
    # transformers reads `hidden_act`. Old configurations also have `hidden_activation`, and the
    # exact GELU under the former name, although the models were trained with its approximation.
    name = config.text("hidden_act", "gelu_pytorch_tanh")
    config.neutral("hidden_activation", None, "gelu_pytorch_tanh")
    layers, attention = count(config, "num_hidden_layers"), _attention(config)
    rotary = rotary_of(config, attention.head_size, config.integer("max_position_embeddings", 8192), 10000.0)
    attention = replace(attention, scale=attention.head_size**-0.5, rotary=rotary)
    return _describe(config, tensors, (attention,) * layers, "gelu_pytorch_tanh" if name == "gelu" else name)


def _gemma2(config: Config, tensors: Tensors) -> Description:
    config.neutral("use_bidirectional_attention", None, False)
    config.ignore("cache_implementation")
    attention = _attention(config, config.number("query_pre_attn_scalar", 256, above=0) ** -0.5)
    rotary = rotary_of(config, attention.head_size, config.integer("max_position_embeddings", 8192), 10000.0)
    attention = replace(attention, rotary=rotary, softcap=_cap(config, "attn_logit_softcapping", 50.0))
    window, is_local = _window(config), _local_layers(config, 2)
    config.neutral("sliding_window_size", None, window)  # an older name
    layers = tuple(replace(attention, window=window if local else None) for local in is_local)
    model = _describe(config, tensors, layers, config.text("hidden_activation", "gelu_pytorch_tanh"), version=2)
    config.ignore("hidden_act")  # transformers reads `hidden_activation` alone
    return replace(model, logits_softcap=_cap(config, "final_logit_softcapping", 30.0))


def _gemma3(config: Config, tensors: Tensors) -> Description:
    config.ignore("attn_logit_softcapping", "cache_implementation")  # transformers does not apply the first
    is_bidirectional = config.boolean("use_bidirectional_attention", False)
    config.ignore("_sliding_window_pattern")  # it is written with layer_types, which precedes it
    attention = _attention(config, config.number("query_pre_attn_scalar", 256, above=0) ** -0.5)
    norm = Norm("rms", _epsilon(config))
    window, is_local = _window(config), _local_layers(config, config.integer("sliding_window_pattern", 6, least=1))
    rotary = {local: _rotary(config, attention.head_size, local=local) for local in sorted(set(is_local))}
    layers = tuple(
        replace(attention, rotary=rotary[local], head_norm=norm, window=window if local else None) for local in is_local
    )
    model = _describe(config, tensors, layers, config.text("hidden_activation", "gelu_pytorch_tanh"), version=3)
    model = replace(model, logits_softcap=_cap(config, "final_logit_softcapping", None))
    if not is_bidirectional:
        return model
    if generates_text(config):
        raise ImportFailedError(
            "config.json: use_bidirectional_attention is true, but the architecture generates text; supported are an "
            "embedding model (Gemma3TextModel) and a classifier with it"
        )
    # A query sees `sliding_window // 2` positions on each side, like those of other encoders.
    model = as_encoder(model)
    return replace(model, encoder=replace(model.encoder_stack, is_causal=False))


def _attention(config: Config, scale: float = 1.0) -> Attention:
    heads, bias = count(config, "num_attention_heads"), config.boolean("attention_bias", False)
    kv_heads = count(config, "num_key_value_heads")
    size = head_size_of(config, heads, kv_heads, default=256)
    return Attention(heads, kv_heads, size, scale, has_bias=bias, has_output_bias=bias)


def _cap(config: Config, key: str, default: float | None) -> float | None:
    """Return the limit of scores or logits; null is no limit."""
    return None if config.get(key, default) is None else config.number(key, default, above=0)


def _window(config: Config) -> int:
    return config.integer("sliding_window", 4096, least=1, most=MAX_WINDOW)


def _epsilon(config: Config) -> float:
    return config.number("rms_norm_eps", 1e-6, above=0)


def _local_layers(config: Config, every: int) -> list[bool]:
    """Return for each layer whether it has a window.

    Without layer_types, each layer has one whose number, counted from 1, is no multiple of `every`.
    """
    return local_layers(config, [bool((layer + 1) % every) for layer in range(count(config, "num_hidden_layers"))])


def _rotary(config: Config, size: int, *, local: bool) -> Rotary:
    """Return the rotary embedding of layers with a window, or of the others.

    transformers 5 writes `rope_parameters` for each kind of layer. Earlier versions write
    `rope_theta` and `rope_scaling` of layers without a window, and `rope_local_base_freq`.
    """
    kind = "sliding_attention" if local else "full_attention"
    theta = config.number("rope_theta", 1_000_000.0, above=1), config.number("rope_local_base_freq", 10_000.0, above=1)
    shared, own = rotary_options(config), None
    if "rope_scaling" in config:
        own = None if local else shared
        if own is not None:  # unlike for other families, transformers ignores the older name `type`
            own.text("rope_type")
    elif "rope_parameters" in config:
        shared.ignore(*LAYER_KINDS)  # transformers reads those of the kinds that the layers have
        own = shared.section(kind)
    options = own or Config({}, "config.json")
    return rotary_from(options, size, config.integer("max_position_embeddings", 131_072), theta[local])


def _describe(
    config: Config, tensors: Tensors, layers: tuple[Attention, ...], hidden_act: str, version: int = 1
) -> Description:
    width, positions = config.integer("hidden_size"), 131_072 if version > 2 else 8192
    stack = Stack(
        width,
        Norm("rms", _epsilon(config)),
        "pre",
        layers,
        FeedForward(activation(hidden_act), config.integer("intermediate_size"), gated=True, has_bias=False),
        TokenEmbedding(scale=float(np.float32(width**0.5))),
        has_final_norm=True,
        has_output_norms=version > 1,
    )
    check_output(config, tensors, f"{model_prefix(tensors)}embed_tokens.weight", default=True)
    name = {1: "gemma", 2: "gemma2", 3: "gemma3_text"}[version]
    return Description(
        name, config.integer("vocab_size"), config.integer("max_position_embeddings", positions), decoder=stack
    )


def _modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    modules = dict(decoder_modules(model, tensors))
    layer = f"{model_prefix(tensors)}layers.{{}}"
    if model.first_stack.has_output_norms:
        modules |= {
            "decoder.{}.self_attention_output_norm": f"{layer}.post_attention_layernorm",
            "decoder.{}.feed_forward_norm": f"{layer}.pre_feedforward_layernorm",
            "decoder.{}.feed_forward_output_norm": f"{layer}.post_feedforward_layernorm",
        }
    return {
        name: AdaptedModule(source, offset=1.0) if name.endswith("norm") and isinstance(source, str) else source
        for name, source in modules.items()
    }


GEMMA = family_of("gemma", classes_of("Gemma"), _gemma, _modules, ("*rotary_emb.inv_freq",))
GEMMA2 = family_of("gemma2", classes_of("Gemma2"), _gemma2, _modules, ("*rotary_emb.inv_freq",))
GEMMA3 = family_of(
    "gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"), _gemma3, _modules
)
FAMILIES: tuple[Family, ...] = (GEMMA, GEMMA2, GEMMA3)
