"""The systems of `lab.zoo.systems` with smaller widths and fewer layers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.zoo.systems import PLAN, SYSTEMS
from sightline.model.architectures.factory import Model, build_model
from sightline.model.config import ArchitectureConfig, RecurrentConfig
from sightline.model.data.tokenizer_training import read_tokenizer

# All widths shrink by the same factor, so that sizes keep their ratios.
WIDTHS = ("embedding_size", "encoder_size", "decoder_size", "attention_size", "d_model", "d_ff")
SHRINK = 4  # leaves heads 8 wide, and ONNX Runtime's GroupQueryAttention takes none that are narrower
DEPTHS = ("encoder_layers", "decoder_layers", "layers")
MAX_LAYERS = 2  # one that reads what another wrote

MakeConfig = Callable[[int], ArchitectureConfig]  # from the size of the vocabulary


def small(name: str, **changes: Any) -> MakeConfig:
    """Return a system of the zoo with smaller sizes and some changes."""

    def make_config(vocab_size: int) -> ArchitectureConfig:
        config = SYSTEMS[name].make_config(vocab_size)
        widths = {field: getattr(config, field) // SHRINK for field in WIDTHS if hasattr(config, field)}
        depths = {field: min(getattr(config, field), MAX_LAYERS) for field in DEPTHS if hasattr(config, field)}
        return replace(config, **{**widths, **depths, **changes})

    return make_config


def small_systems(kind: type[ArchitectureConfig], **changes: Any) -> dict[str, MakeConfig]:
    """Return the systems of an architecture, without those that differ in training or sizes."""
    names: dict[ArchitectureConfig, str] = {}
    for name in PLAN:
        names.setdefault(without_sizes(full_config(name)), name)
    return {name: small(name, **changes) for config, name in names.items() if isinstance(config, kind)}


def without_sizes(config: ArchitectureConfig) -> ArchitectureConfig:
    """Return a configuration with the same sizes as all others, and without dropout."""
    sizes: dict[str, Any] = {
        field: 8 for field in (*WIDTHS, *DEPTHS, "linformer_size", "max_positions") if hasattr(config, field)
    }
    sizes |= {field: 0.0 for field in ("dropout", "word_dropout") if hasattr(config, field)}
    if isinstance(config, RecurrentConfig):
        sizes |= {"encoder_size": 4}
    return replace(config, **sizes)


def full_config(name: str) -> ArchitectureConfig:
    """Return the configuration of a system in the zoo."""
    return SYSTEMS[name].make_config(1000)


def random_models(systems: Mapping[str, MakeConfig], tokenizer: Path, noise: float) -> dict[str, Model]:
    """Return a model of each system, with random weights and biases."""
    vocab_size = read_tokenizer(tokenizer).get_vocab_size()
    return {name: _random_model(make_config(vocab_size), noise) for name, make_config in systems.items()}


def _random_model(config: ArchitectureConfig, noise: float) -> Model:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        model = build_model(config).eval()
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        if norms:  # left alone, tied embeddings repeat the token that was read last
            norms[-1].weight.normal_()
    return model
