"""Decoders of Hugging Face like Llama.

Pre-norm decoder-only Transformers with RMS normalization, rotary positions (Su et al. 2021),
grouped keys and values, and gated feed-forward layers (Touvron et al. 2023). Modules have the names
of the checkpoints, so that a state dictionary is the content of `model.safetensors`. Shapes use B
batch, T tokens, M width of the model, H heads, K key heads, D width of one head, V vocabulary.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.model.architectures.bert import ACTIVATIONS
from sightline.model.config import PretrainedConfig
from sightline.model.data.pretrained import LLAMA3_KEYS
from sightline.model.layers.positions import rotate
from sightline.model.precision import at_least_float32

# Bases of rotary positions if config.json has none.
_ROPE_THETA = {"smollm3": 2_000_000.0}
_NORM_EPS = 1e-6


def rotary_frequencies(config: PretrainedConfig, head_size: int) -> Tensor:
    """Return the angles (D / 2,) by which neighbouring positions differ, in float32.

    `rope_parameters` of config.json, or `rope_scaling` and `rope_theta` of older files, choose the
    base and the scaling: "default", "linear", or "llama3", which divides the frequencies of long
    wavelengths only.
    """
    options: dict[str, Any] = config.value("rope_scaling", config.value("rope_parameters", {}))
    base = float(options.get("rope_theta", config.value("rope_theta", _ROPE_THETA.get(config.family, 10_000.0))))
    frequencies: Tensor = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "linear":
        return frequencies / float(options["factor"])
    if kind == "llama3":
        original = options.get("original_max_position_embeddings", config.max_positions)
        factor, low, high = (float(options[key]) for key in LLAMA3_KEYS)
        turns = original * frequencies / (2 * math.pi)  # rotations within the original length
        share = ((turns - low) / (high - low)).clamp(0, 1)  # of the unchanged frequency
        frequencies = (1 - share) * frequencies / factor + share * frequencies
    return frequencies


class RMSNorm(nn.Module):
    """Division by the root of the mean square, and a weight (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(at_least_float32(x), (x.size(-1),), self.weight, self.eps)


class LlamaAttention(nn.Module):
    """Causal self-attention, in which several queries share a key and a value head."""

    def __init__(self, config: PretrainedConfig, head_size: int, window: int | None, rotates: bool) -> None:
        super().__init__()
        width, heads = config.fields["hidden_size"], config.fields["num_attention_heads"]
        kv_heads = config.value("num_key_value_heads", _DEFAULT_KEYS.get(config.family, heads))
        bias = bool(config.value("attention_bias", False)) and config.family not in ("mistral", "qwen2")
        qkv_bias = bias or config.family == "qwen2"
        self.head_size, self.group, self.window, self.rotates = head_size, heads // kv_heads, window, rotates
        self.q_proj = nn.Linear(width, heads * head_size, bias=qkv_bias)
        self.k_proj = nn.Linear(width, kv_heads * head_size, bias=qkv_bias)
        self.v_proj = nn.Linear(width, kv_heads * head_size, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_size, width, bias=bias)
        self.q_norm = self.k_norm = None
        if config.family == "qwen3":
            eps = config.value("rms_norm_eps", _NORM_EPS)
            self.q_norm, self.k_norm = RMSNorm(head_size, eps), RMSNorm(head_size, eps)
        self.dropout = config.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(2, (-1, self.head_size)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, T, H, D), and (B, T, K, D) twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, D)
        if self.rotates:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (heads.repeat_interleave(self.group, dim=1) for heads in (k, v))
        p = self.dropout if self.training else 0.0
        mask = None
        if self.window is not None and x.size(1) > self.window:
            ones = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device)
            mask = ones.tril() & ones.triu(1 - self.window)
        attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=mask is None)
        result: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return result


_DEFAULT_KEYS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}  # key heads if config.json has none


class GatedFeedForward(nn.Module):
    """Gated feed-forward layer (Shazeer 2020)."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, inner = config.fields["hidden_size"], config.fields["intermediate_size"]
        bias = config.family in ("llama", "smollm3") and bool(config.value("mlp_bias", False))
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACTIVATIONS[config.value("hidden_act", "silu")]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return result


class LlamaLayer(nn.Module):
    """Attention and feed-forward layer, each after a normalization and with a residual."""

    def __init__(self, config: PretrainedConfig, head_size: int, window: int | None, rotates: bool) -> None:
        super().__init__()
        width, eps = config.fields["hidden_size"], config.value("rms_norm_eps", _NORM_EPS)
        self.self_attn = LlamaAttention(config, head_size, window, rotates)
        self.mlp = GatedFeedForward(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class LlamaStack(nn.Module):
    """Embedding, layers and final normalization."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        fields = config.fields
        width, heads = fields["hidden_size"], fields["num_attention_heads"]
        head_size = config.value("head_dim", 128 if config.family == "qwen3" else width // heads)
        self.embed_tokens = nn.Embedding(config.vocab_size, width, padding_idx=fields.get("pad_token_id"))
        self.layers = nn.ModuleList(
            LlamaLayer(config, head_size, window, rotates)
            for window, rotates in zip(_windows(config), _rotating(config), strict=True)
        )
        self.norm = RMSNorm(width, config.value("rms_norm_eps", _NORM_EPS))
        self.register_buffer("frequencies", rotary_frequencies(config, head_size), persistent=False)
        self.frequencies: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device)
        angles = (positions[:, None].float() * self.frequencies).repeat(1, 2)  # (T, D)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for layer in cast(Iterable[LlamaLayer], self.layers):
            x = layer(x, cos, sin)
        normalized: Tensor = self.norm(x)
        return normalized


def _rotating(config: PretrainedConfig) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    layers = config.fields["num_hidden_layers"]
    if config.family != "smollm3":
        return [True] * layers
    interval = config.value("no_rope_layer_interval", 4)
    # Despite its name, 1 stands for a layer with rotary positions.
    default = [(layer + 1) % interval for layer in range(layers)]
    return [bool(rotates) for rotates in config.value("no_rope_layers", default)[:layers]]


def _windows(config: PretrainedConfig) -> list[int | None]:
    """Return for each layer to how many tokens a query attends; None: to all before it."""
    layers, fields = config.fields["num_hidden_layers"], config.fields
    if config.family == "llama":
        return [None] * layers
    if config.family == "mistral":
        return [fields.get("sliding_window", 4096)] * layers
    window = config.value("sliding_window", None if config.family == "smollm3" else 4096)
    if not config.value("use_sliding_window", False):
        window = None
    if config.family == "smollm3":
        default = [not rotates for rotates in _rotating(config)]
    else:
        default = [layer >= config.value("max_window_layers", 28) for layer in range(layers)]
    types = config.value("layer_types", ["sliding_attention" if slides else "full_attention" for slides in default])
    return [window if kind == "sliding_attention" else None for kind in types[:layers]]


class Llama(nn.Module):
    """Causal language model."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaStack(config)
        self.is_tied = bool(config.value("tie_word_embeddings", config.family == "smollm3"))
        if not self.is_tied:
            self.lm_head = nn.Linear(config.fields["hidden_size"], config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """Weight (V, M) that projects hidden states to logits."""
        return (self.model.embed_tokens if self.is_tied else self.lm_head).weight

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, None]:
        """Compute the final hidden states of token ids (B, T), T at most `max_positions`.

        Padding on the right needs no mask, because no token attends to a later position. Returns
        normalized hidden states (B, T, M), the input of `logits`; and None in place of the
        attention weights of `CausalModel`.
        """
        if ids.size(1) > self.config.max_positions:
            raise ValueError(f"input has {ids.size(1)} tokens, but max_positions is {self.config.max_positions}")
        return self.model(ids), None

    def logits(self, features: Tensor) -> Tensor:
        """Project hidden states (..., M) to logits (..., V)."""
        return features @ self.output_weight.T

    def forward(self, ids: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) after each token of `ids` (B, T)."""
        return self.logits(self.hidden_states(ids)[0])
