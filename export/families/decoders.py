"""Families of decoder-only models: GPT-2, and Llama with its relatives."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sightline.export.families import Family
from sightline.export.families.causal_encoders import classes_of, family_of, generates_text
from sightline.export.families.description import (
    Attention,
    Description,
    FeedForward,
    Norm,
    Rotary,
    Stack,
    TokenEmbedding,
)
from sightline.export.families.values import (
    MAX_HEAD_SIZE,
    MAX_WINDOW,
    activation,
    count,
    equal_heads,
    local_layers,
    of_layers,
)
from sightline.export.families.weights import QUERY_KEY_VALUE, AdaptedModule, Source, equal_parts, layer_modules
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Tensors

Frequencies = NDArray[np.float64]
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OWN_KEYS = ("llama", "phi3", "olmo2", "granite")  # without num_key_value_heads, each query head has its own key


@dataclass(frozen=True)
class Variant:
    """Options in which the relatives of Llama differ."""

    windows: tuple[int | None, ...]  # of each layer
    rotates: tuple[bool, ...] = ()  # True for each layer with rotary embedding; empty: all layers
    rope_theta: float = 10000.0  # used if the configuration has none
    rotary_share: float | None = None  # the same for the share of a head that is rotated; None: always all of it
    original_positions: int = 0  # the same for original_max_position_embeddings
    epsilon: float = 1e-6  # the same
    bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False  # of the output projection of attention
    mlp_bias: bool = False
    has_head_norm: bool = False


def _llama(config: Config, tensors: Tensors) -> Description:
    bias, mlp_bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    config.neutral("rope_interleaved", False)
    windows = (None,) * count(config, "num_hidden_layers")
    return describe_relative("llama", config, tensors, Variant(windows, bias=bias, output_bias=bias, mlp_bias=mlp_bias))


def _mistral(config: Config, tensors: Tensors) -> Description:
    config.neutral("layer_types", None)
    window = None
    if config.get("sliding_window", 4096) is not None:
        window = config.integer("sliding_window", 4096, least=1, most=MAX_WINDOW)
    return describe_relative("mistral", config, tensors, Variant((window,) * count(config, "num_hidden_layers")))


def _qwen2(config: Config, tensors: Tensors) -> Description:
    config.neutral("use_mrope", False)
    return describe_relative("qwen2", config, tensors, Variant(_qwen_windows(config), bias=True))


def _qwen3(config: Config, tensors: Tensors) -> Description:
    config.integer("head_dim")  # the default of the others, width / heads, is not the one of Qwen3
    bias, windows = config.boolean("attention_bias", False), _qwen_windows(config)
    return describe_relative(
        "qwen3", config, tensors, Variant(windows, bias=bias, output_bias=bias, has_head_norm=True)
    )


def _smollm3(config: Config, tensors: Tensors) -> Description:
    bias, mlp_bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    layers, interval = count(config, "num_hidden_layers"), config.integer("no_rope_layer_interval", 4, least=1)
    defaults = [(layer + 1) % interval for layer in range(layers)]
    # Despite the name of the key, 1 stands for a layer with rotary embedding.
    rotates = tuple(map(bool, of_layers(config, "no_rope_layers", (0, 1), layers) or defaults))
    config.ignore("max_window_layers")
    variant = Variant(
        _windows(config, [not rotating for rotating in rotates]),
        rotates,
        rope_theta=2000000.0,
        bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
    )
    return describe_relative("smollm3", config, tensors, variant)


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Return the windows of layers: the first `max_window_layers` layers have none."""
    first = config.integer("max_window_layers", 28)
    return _windows(config, [layer >= first for layer in range(count(config, "num_hidden_layers"))])


def _windows(config: Config, defaults: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the window of each layer; without `layer_types`, `defaults` has those with one."""
    window: int | None = config.integer("sliding_window", 0, least=0, most=MAX_WINDOW) or None
    if not config.boolean("use_sliding_window", False):
        window = None
    has_window = local_layers(config, [window is not None and default for default in defaults])
    if any(has_window) and window is None:
        raise ImportFailedError(
            "config.json: layer_types has sliding_attention, which needs use_sliding_window true and an integer "
            "sliding_window"
        )
    return tuple(window if has else None for has in has_window)


def describe_relative(family: str, config: Config, tensors: Tensors, variant: Variant) -> Description:
    width, heads, layers = config.integer("hidden_size"), count(config, "num_attention_heads"), len(variant.windows)
    # For other families, the key may be null, but not absent.
    has_own_keys = family in _OWN_KEYS or config.get("num_key_value_heads") is None
    kv_heads = count(config, "num_key_value_heads", heads if has_own_keys else None)
    head_size = head_size_of(config, heads, kv_heads, default=width // heads)
    max_positions = config.integer("max_position_embeddings")
    norm = Norm("rms", config.number("rms_norm_eps", variant.epsilon, above=0))
    rotary = rotary_of(
        config, head_size, max_positions, variant.rope_theta, variant.rotary_share, variant.original_positions
    )
    stack = Stack(
        width,
        norm,
        "pre",
        tuple(
            Attention(
                heads,
                kv_heads,
                head_size,
                head_size**-0.5,
                rotary if rotating else None,
                norm if variant.has_head_norm else None,
                window,
                has_bias=variant.bias,
                has_output_bias=variant.output_bias,
            )
            for rotating, window in zip(variant.rotates or (True,) * layers, variant.windows, strict=True)
        ),
        FeedForward(
            activation(config.text("hidden_act", "silu")),
            config.integer("intermediate_size"),
            gated=True,
            has_bias=variant.mlp_bias,
        ),
        TokenEmbedding(),
        has_final_norm=True,
    )
    check_output(config, tensors, f"{model_prefix(tensors)}embed_tokens.weight", default=family == "smollm3")
    return Description(family, config.integer("vocab_size"), max_positions, decoder=stack)


def head_size_of(config: Config, heads: int, kv_heads: int, default: int) -> int:
    """Return the size of a head with rotary embedding; query heads must share the keys equally."""
    size = config.integer("head_dim", default, least=2, most=MAX_HEAD_SIZE)
    if heads % kv_heads:
        raise ImportFailedError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
        )
    if size % 2:
        raise ImportFailedError(f"config.json: head_dim must be even, got {size}")
    return size


def check_output(
    config: Config, tensors: Tensors, embedding: str, default: bool, output: str = "lm_head.weight"
) -> None:
    """Check that the projection to the vocabulary exists.

    Like transformers, a projection in the checkpoint is used even if the configuration states that
    it is the embedding, and as the embedding if that is missing.
    """
    is_tied = config.boolean("tie_word_embeddings", default)
    if is_tied and generates_text(config) and embedding not in tensors and output in tensors:
        tensors.rename(output, embedding)
    if not is_tied and output not in tensors and generates_text(config):
        raise ImportFailedError(
            f"the checkpoint has no tensor {output!r}, although tie_word_embeddings in config.json is false; if "
            f"the model uses {embedding!r} in its place, set tie_word_embeddings to true"
        )


def rotary_of(
    config: Config,
    head_size: int,
    max_positions: int,
    default_base: float,
    default_share: float | None = None,
    default_original: int = 0,
) -> Rotary:
    """Return the rotary embedding.

    transformers 5 writes `rope_parameters`, which contains `rope_theta`. Earlier versions write
    `rope_theta` and `rope_scaling`. Defaults apply where the configuration has no value.

    Args:
        default_share: share of a head that is rotated. None: the family always rotates whole heads.
        default_original: positions before they were extended.
    """
    if default_share is None:
        config.neutral("partial_rotary_factor", None, 1.0)
    else:
        default_share = config.number("partial_rotary_factor", default_share, above=0)
    base = config.number("rope_theta", default_base, above=1)
    original = config.integer("original_max_position_embeddings", default_original, least=0)
    return rotary_from(rotary_options(config), head_size, max_positions, base, original, default_share)


def rotary_options(config: Config) -> Config:
    """Return `rope_parameters` or `rope_scaling`, or an empty object; both may not differ."""
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    if scaling is not None and parameters is not None:
        base = {"rope_theta": config.get("rope_theta", None)}
        first, second = (
            base | {"rope_type" if key == "type" else key: value for key, value in config.get(name).items()}
            for name in ("rope_scaling", "rope_parameters")
        )
        if first != second:
            raise ImportFailedError(
                "config.json has both rope_scaling and rope_parameters, which differ; remove the one that is wrong"
            )
        parameters.ignore("*")
    return scaling or parameters or Config({}, "config.json")


def rotary_from(
    options: Config, head_size: int, max_positions: int, base: float, original: int = 0, share: float | None = None
) -> Rotary:
    """Return the rotary embedding of `rope_parameters`, or of `rope_scaling`.

    Args:
        base: used if the object has none.
        original: positions before they were extended; 0 if only the object has it.
        share: share of a head that is rotated if the object has none. None: always all of it.
    """
    if share is None:
        options.neutral("partial_rotary_factor", None, 1.0)
    else:
        head_size = _rotated(head_size, options.number("partial_rotary_factor", share, above=0))
    kind = options.text("rope_type", options.text("type", "default"))
    base = options.number("rope_theta", base, above=1)
    frequencies = base ** (-2 * np.arange(head_size // 2) / head_size)
    if kind == "default":
        return Rotary(_float32(frequencies))
    if kind == "linear":
        return Rotary(_float32(frequencies / options.number("factor", above=0)))
    if kind == "dynamic":
        return _dynamic(options, head_size, max_positions, base)
    original = original or options.integer("original_max_position_embeddings", max_positions, least=1)
    options.ignore("original_max_position_embeddings")
    if kind == "longrope":
        return _longrope(options, frequencies, original, max_positions)
    if kind == "llama3":
        return Rotary(_float32(_llama3_frequencies(options, frequencies, original)))
    if kind == "yarn":
        return _yarn(options, frequencies, original, base)
    raise ImportFailedError(
        f"config.json: the rope type {kind[:40]!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
    )


def _rotated(head_size: int, share: float) -> int:
    """Return the number of dimensions of a head that are rotated."""
    rotated = int(head_size * share)
    if not 2 <= rotated <= head_size or rotated % 2:
        raise ImportFailedError(
            f"config.json: the rotary share {share:g} of a head of {head_size} gives {rotated} dimensions; supported "
            f"are even numbers from 2 to {head_size}"
        )
    return rotated


def _dynamic(options: Config, size: int, max_positions: int, base: float) -> Rotary:
    """Return the rotary embedding of dynamic NTK scaling up to the positions of the model.

    For a longer text, transformers computes other frequencies for each length, while the keys in
    its cache keep those of the lengths at which they were computed.
    """
    factor = options.number("factor", above=0)
    stretch = factor * max_positions / max_positions - (factor - 1)  # 1, as transformers rounds it
    base *= stretch ** (size / (size - 2)) if size > 2 else 1.0
    return Rotary(_float32(base ** (-2 * np.arange(size // 2) / size)), max_positions=max_positions)


def _longrope(options: Config, frequencies: Frequencies, original: int, max_positions: int) -> Rotary:
    """Return the rotary embedding of LongRoPE (Ding et al. 2024) for texts of the original length.

    transformers divides the frequencies by `short_factor`, and for a text that is longer by
    `long_factor`. A text that grows beyond the original length during generation therefore needs
    new keys for all its tokens.
    """
    short, _ = (_factors(options, key, len(frequencies)) for key in ("short_factor", "long_factor"))
    factor = options.number("factor", max_positions / original, above=0)
    scale = 1.0
    if factor > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else math.inf
    scale = options.number("attention_factor", scale, above=0)
    if not math.isfinite(scale):
        raise ImportFailedError("config.json: longrope needs original_max_position_embeddings above 1")
    return Rotary(_float32(frequencies / short), scale, max_positions=original)


def _factors(options: Config, key: str, count: int) -> Frequencies:
    values = options.get(key)
    is_valid = isinstance(values, list) and len(values) == count
    if not is_valid or not all(isinstance(value, int | float) and 0 < value <= sys.float_info.max for value in values):
        raise ImportFailedError(f"config.json: {key} must be a list of {count} positive numbers, one for each pair")
    return np.array(values, np.float64)


def _float32(frequencies: Frequencies) -> tuple[float, ...]:
    """Round to float32: a checkpoint was trained with rounded frequencies."""
    return tuple(float(frequency) for frequency in frequencies.astype(np.float32))


def _llama3_frequencies(options: Config, frequencies: Frequencies, original: int) -> Frequencies:
    """Return the frequencies of Llama 3.1: only long wavelengths are stretched.

    Wavelengths above original / low_freq_factor are stretched by `factor`, those below original /
    high_freq_factor are unchanged, and those between are interpolated.
    """
    factor, low, high = (options.number(key, above=0) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise ImportFailedError(
            f"config.json: low_freq_factor must be less than high_freq_factor, got {low:g} and {high:g}"
        )
    turns = original * frequencies / (2 * math.pi)  # rotations within the original length
    share: Frequencies = np.clip((turns - low) / (high - low), 0, 1)  # share of the unchanged frequency
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(options: Config, frequencies: Frequencies, original: int, base: float) -> Rotary:
    """Return YaRN's rotary embedding (Peng et al. 2023, sections 3.2 to 3.4)."""
    factor, half = options.number("factor", above=0), len(frequencies)
    scale, scale_all = options.number("mscale", 0.0), options.number("mscale_all_dim", 0.0)
    attention_factor = options.number("attention_factor", above=0) if "attention_factor" in options else None
    options.ignore("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_scale(factor, 1.0)
        if scale and scale_all:
            attention_factor = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
    # The dimension that rotates a given number of times within the original length.
    low, high = (
        half * math.log(original / (turns * 2 * math.pi)) / math.log(base)
        for turns in (options.number("beta_fast", 32.0) or 32.0, options.number("beta_slow", 1.0) or 1.0)
    )
    if options.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    share = 1 - np.clip((np.arange(half) - low) / (high - low), 0, 1)  # share of the unchanged frequency
    return Rotary(_float32((1 - share) * frequencies / factor + share * frequencies), attention_factor)


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_LLAMA_LAYER = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj input_layernorm mlp.up_proj mlp.down_proj "
    "post_attention_layernorm"
)


def decoder_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    start = model_prefix(tensors)
    layer = f"{start}layers.{{}}"
    modules = layer_modules(layer, _LLAMA_LAYER, "decoder") | {
        "embedding": f"{start}embed_tokens",
        "decoder.norm": f"{start}norm",
        "decoder.{}.self_attention.query_norm": f"{layer}.self_attn.q_norm",
        "decoder.{}.self_attention.key_norm": f"{layer}.self_attn.k_norm",
        "decoder.{}.feed_forward.gate": f"{layer}.mlp.gate_proj",
    }
    return modules | output_modules(tensors, f"{start}embed_tokens.weight")


def model_prefix(tensors: Tensors) -> str:
    """Return the start of the names of tensors; classes without a head have none."""
    return "model." if "model.norm.weight" in tensors else ""


def output_modules(tensors: Tensors, embedding: str, output: str = "lm_head.weight") -> dict[str, Source]:
    """Return the module of the projection to the vocabulary, if it is not the embedding."""
    if output not in tensors:
        return {}
    is_tied = np.array_equal(tensors.read(output), tensors.read(embedding))
    return {} if is_tied else {"output.weight": output}


def _gpt2(config: Config, tensors: Tensors) -> Description:
    config.ignore("n_ctx", "summary_*", "reorder_and_upcast_attn")
    width = config.integer("n_embd")
    attention, layers = equal_heads(config, "n_head", width), count(config, "n_layer")
    scale = attention.scale if config.boolean("scale_attn_weights", True) else 1.0
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx", False)
    stack = Stack(
        width,
        Norm("layer", config.number("layer_norm_epsilon", 1e-5, above=0)),
        "pre",
        tuple(replace(attention, scale=scale / (layer + 1 if by_layer else 1)) for layer in range(layers)),
        FeedForward(activation(config.text("activation_function", "gelu_new")), config.integer("n_inner", 4 * width)),
        TokenEmbedding(has_positions=True),
        has_final_norm=True,
    )
    check_output(config, tensors, f"{_gpt2_start(tensors)}wte.weight", default=True)
    return Description("gpt2", config.integer("vocab_size"), config.integer("n_positions"), decoder=stack)


def _gpt2_start(tensors: Tensors) -> str:
    """Return the start of the names of tensors; older checkpoints have none."""
    return "transformer." if "transformer.ln_f.weight" in tensors else ""


def _gpt2_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    start = _gpt2_start(tensors)
    layer = f"{start}h.{{}}"
    modules = layer_modules(layer, "- - - - ln_1 - - ln_2", "decoder")
    modules |= {"embedding": f"{start}wte", "decoder.positions": f"{start}wpe", "decoder.norm": f"{start}ln_f"}
    for ours, theirs in (
        ("self_attention.output", "attn.c_proj"),
        ("feed_forward.inner", "mlp.c_fc"),
        ("feed_forward.outer", "mlp.c_proj"),
    ):
        modules[f"decoder.{{}}.{ours}"] = AdaptedModule(f"{layer}.{theirs}", transposed=True)
    modules |= equal_parts("decoder.{}.self_attention", QUERY_KEY_VALUE, f"{layer}.attn.c_attn", transposed=True)
    return modules | output_modules(tensors, f"{start}wte.weight")


def _relative(name: str, start: str, describe: Callable[[Config, Tensors], Description]) -> Family:
    return family_of(name, classes_of(start), describe, decoder_modules, ("*rotary_emb.inv_freq",))


GPT2 = family_of(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification"),
    _gpt2,
    _gpt2_modules,
    ("*.attn.bias", "*.attn.masked_bias"),
)
LLAMA = _relative("llama", "Llama", _llama)
SMOLLM3 = _relative("smollm3", "SmolLM3", _smollm3)
MISTRAL = _relative("mistral", "Mistral", _mistral)
QWEN2 = _relative("qwen2", "Qwen2", _qwen2)
QWEN3 = _relative("qwen3", "Qwen3", _qwen3)
FAMILIES = (GPT2, LLAMA, SMOLLM3, MISTRAL, QWEN2, QWEN3)
