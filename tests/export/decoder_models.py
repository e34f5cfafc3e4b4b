"""Small decoder-only models of transformers with random weights, and their imported graphs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from sightline.export.check.sessions import DecoderSession, zero_states
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.decoder import decoder_graph, states
from sightline.export.sources.checkpoint import Folder, open_folder

Array = NDArray[Any]
Ids = Sequence[int]
POSITIONS = 40
VOCABULARY = 211
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "hidden_size": 60,
    "intermediate_size": 71,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "eos_token_id": [7, 9],
    "bos_token_id": 5,
    "pad_token_id": None,
}
GPT2_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": 60,
    "n_head": 5,
    "n_layer": 3,
    "n_inner": 71,
    "bos_token_id": 5,
    "eos_token_id": 7,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.4, 2.0, 3.5],
    "long_factor": [2.0, 3.0, 4.0, 8.0, 9.0],
    "rope_theta": 10000.0,
}
NEOX_SMALL = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
# The layout of OPT names sizes differently.
OPT_SMALL: dict[str, Any] = {
    **{key: value for key, value in NEOX_SMALL.items() if key != "intermediate_size"},
    "ffn_dim": 71,
    "word_embed_proj_dim": 60,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, Any] = {
    "gpt2": GPT2Config(**GPT2_SMALL),
    "gpt2-untied": GPT2Config(
        **GPT2_SMALL | {"n_layer": 1, "n_head": 4, "n_inner": None, "activation_function": "relu"},
        tie_word_embeddings=False,
    ),
    "gpt2-scales": GPT2Config(**GPT2_SMALL, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False),
    "llama": LlamaConfig(**SMALL, head_dim=12),
    "llama-biases": LlamaConfig(
        **SMALL,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 16},
    ),
    "llama-one-layer": LlamaConfig(
        **SMALL | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        head_dim=26,
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
    ),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters={**YARN, "rope_theta": 10000.0}),
    "mistral": MistralConfig(**SMALL, head_dim=14, sliding_window=5),
    "mistral-no-window": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen2-one-layer": Qwen2Config(
        **SMALL | {"num_hidden_layers": 1, "num_attention_heads": 5, "num_key_value_heads": 5}
    ),
    "qwen3": Qwen3Config(**SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1}, head_dim=24),
    "qwen3-windows": Qwen3Config(
        **SMALL,
        head_dim=20,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={**YARN, "rope_theta": 1000.0, "attention_factor": 0.8, "truncate": False},
    ),
    "gemma": GemmaConfig(**SMALL | {"num_key_value_heads": 1}, head_dim=14),
    "gemma-biases": GemmaConfig(
        **SMALL | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        head_dim=22,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma2": Gemma2Config(
        **SMALL,
        head_dim=12,
        query_pre_attn_scalar=30,
        sliding_window=5,
        attn_logit_softcapping=2.5,
        final_logit_softcapping=4.0,
    ),
    "gemma2-biases": Gemma2Config(
        **SMALL | {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3},
        head_dim=26,
        attention_bias=True,
        hidden_activation="silu",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=1,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
    ),
    "gemma3": Gemma3TextConfig(
        **SMALL,
        head_dim=18,
        query_pre_attn_scalar=11,
        sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma3-softcap": Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=16,
        sliding_window=6,
        attention_bias=True,
        final_logit_softcapping=3.0,
    ),
    "llama-dynamic": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, hidden_act="mish"
    ),
    "phi3": Phi3Config(
        **SMALL, rope_parameters={**LONGROPE}, original_max_position_embeddings=POSITIONS, sliding_window=9
    ),
    # Positions were extended from 40, so that cosines and sines have a factor.
    "phi3-partial": Phi3Config(
        **SMALL
        | {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"max_position_embeddings": 5 * POSITIONS, "original_max_position_embeddings": POSITIONS},
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
    "phi3-small": Phi3Config(**SMALL | {"num_attention_heads": 5, "num_key_value_heads": 5}, hidden_act="relu2"),
    "gpt-neox": GPTNeoXConfig(
        **NEOX_SMALL | {"num_attention_heads": 3},
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.3},
    ),
    "gpt-neox-sequential": GPTNeoXConfig(
        **NEOX_SMALL | {"num_hidden_layers": 2},
        use_parallel_residual=False,
        hidden_act="gelu_python",
        tie_word_embeddings=True,
    ),
    "gpt-neox-no-bias": GPTNeoXConfig(
        **NEOX_SMALL | {"num_attention_heads": 5},
        attention_bias=False,
        hidden_act="gelu_fast",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    ),
    "opt": OPTConfig(**OPT_SMALL),
    "opt-post-norm": OPTConfig(
        **OPT_SMALL | {"num_attention_heads": 4, "num_hidden_layers": 2, "word_embed_proj_dim": 34},
        do_layer_norm_before=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "opt-no-bias": OPTConfig(
        **OPT_SMALL | {"num_attention_heads": 3}, enable_bias=False, _remove_final_layer_norm=True
    ),
    "olmo2": Olmo2Config(**SMALL),
    "olmo2-bias": Olmo2Config(
        **SMALL | {"num_attention_heads": 3, "num_key_value_heads": 3}, attention_bias=True, tie_word_embeddings=True
    ),
    "olmo2-one-key": Olmo2Config(**SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 1}, rms_norm_eps=0.01),
    "granite": GraniteConfig(
        **SMALL, embedding_multiplier=3.0, attention_multiplier=0.21, residual_multiplier=0.37, logits_scaling=2.5
    ),
    "granite-biases": GraniteConfig(
        **SMALL | {"num_attention_heads": 3, "num_key_value_heads": 3},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        logits_scaling=0.5,
    ),
    "granite-one-layer": GraniteConfig(
        **SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 3}, residual_multiplier=2.0, attention_multiplier=0.5
    ),
    "smollm3": SmolLM3Config(
        **SMALL | {"num_hidden_layers": 5}, use_sliding_window=True, sliding_window=6, attention_bias=True
    ),
    "smollm3-one-key": SmolLM3Config(
        **SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 1}, no_rope_layers=[0, 1], tie_word_embeddings=False
    ),
}


def hf_model(config: Any, scale: float = 0.3) -> Any:
    """Return a model of transformers whose parameters, biases and norms included, are random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    is_gemma = config.model_type.startswith("gemma")  # it normalizes with 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") and not is_gemma else 0.0
            parameter.normal_(centre, scale)
    return model


class Rows:
    """A decoder graph with the states of some rows."""

    def __init__(self, graph: Path, model: Description, rows: int, positions: int, fill: float = 0.0) -> None:
        self._decoder = DecoderSession(graph, states(model))
        self._buffers = zero_states(states(model), rows, positions)
        for buffer in self._buffers.values():
            buffer.fill(fill)

    def run(self, first: int, token_ids: Array, lengths: Sequence[int], outputs: Sequence[str]) -> dict[str, Array]:
        """Run the graph on consecutive rows from `first` on."""
        rows = {name: buffer[first : first + len(token_ids)] for name, buffer in self._buffers.items()}
        return self._decoder.run(rows, token_ids, lengths, outputs)


@dataclass(frozen=True)
class Imported:
    """A checkpoint of transformers and the graph that was built from it."""

    hf: Any
    folder: Path
    model: Description
    weights: Weights
    graph: Path

    def session(self, rows: int = 1, positions: int = POSITIONS, fill: float = 0.0) -> Rows:
        return Rows(self.graph, self.model, rows, positions, fill)


@contextmanager
def import_model(hf: Any, folder: Path) -> Iterator[Imported]:
    """Save a model of transformers, and build the graph of the checkpoint."""
    hf.save_pretrained(folder)
    with open_folder(folder) as opened:
        yield import_folder(hf, folder, opened)


def import_folder(hf: Any, folder: Path, opened: Folder) -> Imported:
    family = find_family(opened.config)
    model, weights = describe(family, opened.config, opened.tensors)
    graph = folder / "decoder.onnx"
    with WeightFile(folder / "weights.bin") as file:
        onnx.save_model(decoder_graph(model, weights, file), graph)
    opened.tensors.check_all_read()
    opened.config.check_all_read()
    return Imported(hf, folder, model, weights, graph)


def random_ids(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return [int(one) for one in np.random.default_rng((seed, length)).integers(vocabulary, size=length)]


def hf_outputs(hf: Any, texts: Sequence[Ids]) -> dict[str, Array]:
    """Run transformers on each text alone.

    Returns:
        `hidden.i` (S, M) after the final norm, `logits.i` (S, V) and `decoder.i` (L, H, S, S) of
        each text.
    """
    outputs: dict[str, Array] = {}
    for number, ids in enumerate(texts):
        with torch.no_grad():
            result = hf(torch.tensor([list(ids)]), output_attentions=True, output_hidden_states=True, use_cache=False)
        outputs[f"hidden.{number}"] = result.hidden_states[-1][0].numpy()
        outputs[f"logits.{number}"] = result.logits[0].numpy()
        outputs[f"decoder.{number}"] = np.stack([one[0].numpy() for one in result.attentions])
    return outputs


def graph_outputs(session: Rows, texts: Sequence[Ids], chunk: int, vocabulary: int = VOCABULARY) -> dict[str, Array]:
    """Prefill row 0 with each text in chunks, and return the arrays of `hf_outputs`.

    Logits exist only for the last token of a chunk; others are NaN.
    """
    outputs: dict[str, Array] = {}
    for number, ids in enumerate(texts):
        hidden, logits, maps = [], np.full((len(ids), vocabulary), np.nan, np.float32), None
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            given = session.run(0, np.array([part]), [start], ("hidden", "logits", "decoder_attention"))
            hidden.append(given["hidden"][0])
            end = start + len(part)
            logits[end - 1] = given["logits"][0]
            own = given["decoder_attention"][0].swapaxes(0, 1)  # (L, H, S, columns)
            if maps is None:
                maps = np.zeros((*own.shape[:2], len(ids), len(ids)), np.float32)
            maps[:, :, start:end, :end] = own[..., :end]
        outputs[f"hidden.{number}"], outputs[f"logits.{number}"] = np.concatenate(hidden), logits
        assert maps is not None
        outputs[f"decoder.{number}"] = maps
    return outputs
