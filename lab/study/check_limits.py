"""Experiment with the verification of bundles: random right models, and planted errors.

    python -m lab.study.check_limits --models 500 --planted-every 3

Right models must be accepted, so the ratio of each difference to its limit must be at most 1. Each
planted error should be found, but its effect can be smaller than rounding. Decision record 26 has a
table of results.
"""

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from sightline.export.check.verify import ComparedTexts, GraphRunner, differences_of, random_inputs, rounding_limits
from sightline.export.families.description import Attention, Description, Stack
from sightline.export.families.table import describe, find_family
from sightline.export.families.weights import Weights
from sightline.export.sources.opened_checkpoint import Folder
from tests.export.graph_bundles import write_bundle

Array = NDArray[Any]
Options = dict[str, Any]
SCALES = (0.02, 0.1, 0.3, 0.5, 1.0)  # standard deviations of weights
POSITIONS = (30, 64, 150)


def _sizes(draw: np.random.Generator) -> tuple[int, int, int]:
    """Return a number of heads, their size, and the inner size of feed-forward layers."""
    return int(draw.integers(1, 7)), int(draw.choice([8, 10, 12, 16, 24])), int(draw.integers(20, 200))


def _bert(draw: np.random.Generator) -> tuple[str, Options]:
    (heads, size, inner), name = _sizes(draw), draw.choice(["Bert", "Roberta", "Electra", "MPNet"])
    return f"{name}{draw.choice(['Model', 'ForSequenceClassification'])}", {
        "hidden_size": heads * size,
        "num_attention_heads": heads,
        "num_hidden_layers": int(draw.integers(1, 5)),
        "intermediate_size": inner,
        "vocab_size": 211,
        "max_position_embeddings": 152 if name == "MPNet" else 66,
        "hidden_act": str(draw.choice(["gelu", "gelu_new", "relu"])),
        "layer_norm_eps": float(draw.choice([1e-5, 1e-6, 1e-12])),
    }


def _modernbert(draw: np.random.Generator) -> tuple[str, Options]:
    heads, size, inner = _sizes(draw)
    return "ModernBertModel", {
        "hidden_size": heads * size,
        "num_attention_heads": heads,
        "num_hidden_layers": int(draw.integers(2, 5)),
        "intermediate_size": inner,
        "vocab_size": 211,
        "max_position_embeddings": 64,
        "local_attention": 6,
        "pad_token_id": 0,
    }


def _llama(draw: np.random.Generator) -> tuple[str, Options]:
    heads, size, inner = _sizes(draw)
    return f"{draw.choice(['Llama', 'Qwen3'])}ForCausalLM", {
        "vocab_size": 211,
        "max_position_embeddings": 64,
        "hidden_size": heads * size,
        "intermediate_size": inner,
        "num_hidden_layers": int(draw.integers(1, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(draw.choice([number for number in range(1, heads + 1) if heads % number == 0])),
        "head_dim": size,
        "rms_norm_eps": float(draw.choice([1e-5, 1e-6])),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(draw.choice([1e2, 1e4, 1e6]))},
    }


def _gpt2(draw: np.random.Generator) -> tuple[str, Options]:
    heads, size, inner = _sizes(draw)
    layers = int(draw.integers(1, 5))
    sizes = {"n_embd": heads * size, "n_head": heads, "n_layer": layers, "n_inner": inner}
    return "GPT2LMHeadModel", {"vocab_size": 211, "n_positions": 64, **sizes}


def _t5(draw: np.random.Generator) -> tuple[str, Options]:
    (heads, size, inner), name = _sizes(draw), draw.choice(["T5", "MT5"])
    return f"{name}ForConditionalGeneration", {
        "d_model": int(draw.choice([36, 64, 80, 96])),
        "d_kv": size,
        "num_heads": heads,
        "d_ff": inner,
        "num_layers": int(draw.integers(1, 4)),
        "num_decoder_layers": int(draw.integers(1, 4)),
        "vocab_size": int(draw.choice([97, 211, 701])),
        "decoder_start_token_id": 0,
        "feed_forward_proj": "gated-gelu" if name == "MT5" else str(draw.choice(["gated-gelu", "relu"])),
        "tie_word_embeddings": name == "T5" and bool(draw.integers(2)),
    }


def _bart(draw: np.random.Generator) -> tuple[str, Options]:
    heads, size, inner = _sizes(draw)
    name = draw.choice(["Bart", "Marian", "MBart", "M2M100", "Pegasus"])
    pad, start, end = {"Marian": (210, 210, 0), "Pegasus": (0, 0, 1)}.get(name, (1, 2, 2))
    return f"{name}{'MTModel' if name == 'Marian' else 'ForConditionalGeneration'}", {
        "d_model": 2 * heads * size,
        "encoder_layers": int(draw.integers(1, 4)),
        "decoder_layers": int(draw.integers(1, 4)),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner + 3,
        "vocab_size": 211,
        "max_position_embeddings": 64,
        "pad_token_id": pad,
        "bos_token_id": 0,
        "eos_token_id": end,
        "decoder_start_token_id": start,
        "scale_embedding": bool(draw.integers(2)),
        **({"activation_function": str(draw.choice(["swish", "relu"]))} if name == "Marian" else {}),
    }


FAMILIES = {"bert": _bert, "modernbert": _modernbert, "llama": _llama, "gpt2": _gpt2, "t5": _t5, "bart": _bart}


def random_options(family: str, seed: int) -> tuple[str, Options]:
    """Return a class of transformers, and options of its configuration, of random sizes."""
    return FAMILIES[family](np.random.default_rng([seed, *family.encode()]))


def save_random(folder: Path, architecture: str, options: Options, seed: int, scale: float) -> None:
    """Save a model with random weights of the standard deviation `scale`."""
    cls = getattr(transformers, architecture)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = cls._from_config(cls.config_class(**options), attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and architecture.startswith(("Marian", "Pegasus")):
                continue  # computed, not trained
            is_norm = ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight")
            centre, deviation = (1.0, min(scale, 0.5)) if is_norm else (0.0, scale)
            parameter.copy_(centre + deviation * torch.randn_like(parameter))
    model.save_pretrained(folder)


class ChangedWeights(Weights):
    """Weights of which one is changed."""

    def __init__(self, weights: Weights, name: str, change: Callable[[Array], Array]) -> None:
        self._weights = weights
        self._name = name
        self._change = change

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def read(self, name: str) -> NDArray[np.float32]:
        array = self._weights.read(name)
        return self._change(array.copy()).astype(np.float32) if name == self._name else array


Wrong = tuple[Description, Weights]
Plant = Callable[[Description, Weights, np.random.Generator], Wrong | None]


def _last_stack(model: Description) -> str:
    return "encoder" if model.decoder is None else "decoder"


def _stacks(change: Callable[[Stack], Stack], *, only_last: bool = False) -> Plant:
    """Change all stacks, or only the last one."""

    def plant(model: Description, weights: Weights, draw: np.random.Generator) -> Wrong | None:
        names = [_last_stack(model)] if only_last else ["encoder", "decoder"]
        stacks: dict[str, Any] = {name: change(stack) for name in names if (stack := getattr(model, name)) is not None}
        changed = replace(model, **stacks)
        return None if changed == model else (changed, weights)

    return plant


def _attention(change: Callable[[Attention], Attention]) -> Plant:
    """Change the attention of the last layer."""
    return _stacks(
        lambda stack: replace(stack, attention=(*stack.attention[:-1], change(stack.attention[-1]))), only_last=True
    )


def _matrix(change: Callable[[Array, np.random.Generator], Array]) -> Plant:
    """Change one matrix of a random layer."""

    def plant(model: Description, weights: Weights, draw: np.random.Generator) -> Wrong:
        names = [name for name in ("encoder", "decoder") if getattr(model, name) is not None]
        name = str(draw.choice(names))
        parts = ("self_attention.query", "self_attention.value", "self_attention.output")
        part = draw.choice([*parts, "feed_forward.inner", "feed_forward.outer"])
        matrix = f"{name}.{draw.integers(getattr(model, name).layers)}.{part}.weight"
        seed = int(draw.integers(1 << 30))
        return model, ChangedWeights(weights, matrix, lambda array: change(array, np.random.default_rng(seed)))

    return plant


def _positions(model: Description, weights: Weights, draw: np.random.Generator) -> Wrong | None:
    name = _last_stack(model)
    if not getattr(model, name).embedding.has_positions:
        return None
    return model, ChangedWeights(weights, f"{name}.positions.weight", lambda array: np.roll(array, 1, axis=0))


def _other_base(attention: Attention) -> Attention:
    if attention.rotary is None:
        return attention
    frequencies = tuple(frequency**1.02 for frequency in attention.rotary.frequencies)
    return replace(attention, rotary=replace(attention.rotary, frequencies=frequencies))


def _other_gelu(stack: Stack) -> Stack:
    others: Mapping[str, Any] = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}
    activation = stack.feed_forward.activation
    return replace(stack, feed_forward=replace(stack.feed_forward, activation=others.get(activation, activation)))


def _epsilon(change: Callable[[float], float]) -> Plant:
    return _stacks(lambda stack: replace(stack, norm=replace(stack.norm, epsilon=change(stack.norm.epsilon))))


def _add_to_one(array: Array, draw: np.random.Generator, deviations: float) -> Array:
    array.flat[draw.integers(array.size)] += deviations * array.std()
    return array


ERRORS: Mapping[str, Plant] = {
    "missing scale": _attention(lambda attention: replace(attention, scale=1.0)),
    "scale 0.1 % off": _attention(lambda attention: replace(attention, scale=1.001 * attention.scale)),
    "rope base": _attention(_other_base),
    "positions off by one": _positions,
    "one weight by 1 deviation": _matrix(lambda array, draw: _add_to_one(array, draw, 1.0)),
    "one weight by 0.01 deviations": _matrix(lambda array, draw: _add_to_one(array, draw, 0.01)),
    "one matrix in float16": _matrix(lambda array, draw: array.astype(np.float16)),
    "other gelu": _stacks(_other_gelu),
    "epsilon x 100": _epsilon(lambda epsilon: 100 * epsilon),
    "epsilon 1e-5 for 1e-6": _epsilon(lambda epsilon: 1e-5 if epsilon == 1e-6 else epsilon),
}


def check_model(
    architecture: str, options: Options, seed: int, scale: float, *, plants_errors: bool = False
) -> tuple[float, dict[str, float]]:
    """Check the right graphs of a random model, and graphs with planted errors. Returns the largest
    ratio of a difference to its limit, NaN included as infinity, and that of each error that the
    model can have.
    """
    draw = np.random.default_rng([seed, 7])
    positions = int(draw.choice(POSITIONS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random(folder, architecture, options, seed, scale)
        opened = Folder(folder)
        model, weights = describe(find_family(opened.config), opened.config, opened.tensors, input_names=())
        known: dict[ComparedTexts, tuple[dict[str, Array], dict[str, float]]] = {}

        def ratio(built: Description, used: Weights) -> float:
            """Return the ratio for graphs of a changed model."""
            manifest = write_bundle(folder, built, used, positions)
            texts, outputs = GraphRunner(folder, manifest, built).run(*random_inputs(manifest, built, seed))
            if texts not in known:
                known[texts] = rounding_limits(model, weights, texts)
            exact, limits = known[texts]
            ratios = [difference / limits[name] for name, difference in differences_of(outputs, exact).items()]
            return max(math.inf if math.isnan(quotient) else quotient for quotient in ratios)

        right, planted = ratio(model, weights), dict[str, float]()
        for error, plant in ERRORS.items() if plants_errors else ():
            wrong = plant(model, weights, draw)
            if wrong is not None:
                planted[error] = ratio(*wrong)
    return right, planted


def main() -> None:
    """Check random models and print a table."""
    parser = argparse.ArgumentParser(prog="python -m lab.study.check_limits", description=__doc__)
    parser.add_argument("--models", type=int, default=350, help="number of models (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first model (default: %(default)s)")
    parser.add_argument("--planted-every", type=int, default=3, help="models for each one with planted errors")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    ratios, planted, detected = [], Counter[str](), Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.models):
        scale = SCALES[seed // len(FAMILIES) % len(SCALES)]
        architecture, options = random_options(list(FAMILIES)[seed % len(FAMILIES)], seed)
        has_errors = (seed // len(FAMILIES) + seed) % arguments.planted_every == 0
        right, wrong = check_model(architecture, options, seed, scale, plants_errors=has_errors)
        ratios.append(right)
        planted.update(wrong.keys())
        detected.update(error for error, ratio in wrong.items() if ratio > 1)
        if right > 0.5:
            print(f"{architecture}, seed {seed}, weights of scale {scale}: {right:.2g} of the limit")
    rejected = sum(ratio > 1 for ratio in ratios)
    print(f"{len(ratios)} right models: {rejected} rejected, largest ratio {max(ratios):.2g}")
    for error, count in planted.items():
        print(f"{error}: {detected[error]} of {count} found")


if __name__ == "__main__":
    main()
