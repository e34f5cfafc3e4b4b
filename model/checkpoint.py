"""A checkpoint: a folder with `config.json`, `weights.safetensors` and `tokenizer.json`. Nothing in it is pickled."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.config import ModelConfig, architecture_of, read_model_config, to_json
from model.factory import Model, TranslationModel, build_model
from model.tokenizer import read_tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "weights.safetensors", "tokenizer.json"


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, never a part."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """Write tensors, and facts that JSON can hold, so that a kill leaves the old file or the new one, never a part."""
    temporary = path.with_suffix(".tmp")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, temporary, metadata={"facts": json.dumps(dict(facts or {}))})
    os.replace(temporary, path)


def load_facts(path: Path) -> dict[str, Any]:
    """What `save_tensors` was given as facts."""
    with safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads((file.metadata() or {}).get("facts", "{}"))
    return facts


def save_checkpoint(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Path, facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint; `facts` (epoch, loss, ...) go into the weights' header."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / CONFIG, to_json(config))
    replace_text(folder / TOKENIZER, tokenizer.read_text(encoding="utf-8"))
    save_tensors(folder / WEIGHTS, weights, facts)


def load_checkpoint(folder: Path) -> tuple[TranslationModel, Tokenizer]:
    """`load_model` for a checkpoint that must translate.

    Raises:
        ValueError: it does something else; or as `load_model` does.
    """
    model, tokenizer = load_model(folder)
    if not isinstance(model, TranslationModel):
        raise ValueError(f"{folder} does not translate: it is a {architecture_of(model.config)}")
    return model, tokenizer


def load_model(folder: Path) -> tuple[Model, Tokenizer]:
    """Read a checkpoint; the model comes in evaluation mode, on the CPU.

    Raises:
        FileNotFoundError: a file of the three is missing; the message names it.
        ValueError: the weights cannot be read or do not fit the configuration, or one of the other files is not what it
            should be.
    """
    for name in (CONFIG, WEIGHTS, TOKENIZER):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a checkpoint: it has no {name}")
    try:
        model = build_model(read_model_config(folder / CONFIG))
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (TypeError, RuntimeError, SafetensorError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"{folder} is not a checkpoint that fits this version: {first_line}") from error
    return model.eval(), read_tokenizer(folder / TOKENIZER)


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in several files (Vaswani et al. 2017, section 6.1), summed in float64."""
    if not paths:
        raise ValueError("no checkpoints to average")
    total: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in load_file(path).items():
            total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}
