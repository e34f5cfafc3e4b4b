"""A checkpoint: a folder with `config.json`, `weights.safetensors` and `tokenizer.json`. Nothing in it is pickled."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.architectures.factory import Model, TranslationModel, build_model
from model.config import ModelConfig, architecture_of, model_config_to_json, read_model_config
from model.data.tokenizer import check_tokenizer, read_tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "weights.safetensors", "tokenizer.json"


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, never a part."""
    with _replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """Write tensors, and facts that JSON can hold, so that a kill leaves the old file or the new one, never a part.

    Raises:
        OSError: the file cannot be written, as on a full disk; the old file is left.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"facts": json.dumps(dict(facts or {}))}
    with _replacing(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        temporary.chmod(mode)  # the library makes its own file, which no other user may read


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` that replaces it if all goes well, and is removed otherwise."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.unlink(missing_ok=True)  # that of a process that was killed
    try:
        temporary.touch()
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _damaged(path, error) from error


def load_facts(path: Path) -> dict[str, Any]:
    """Read the facts that `save_tensors` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads((file.metadata() or {}).get("facts", "{}"))
    except SafetensorError as error:
        raise _damaged(path, error) from error
    return facts


def _damaged(path: Path, error: SafetensorError) -> ValueError:
    return ValueError(f"{path} is damaged, it may have been cut off: {error}")


def save_checkpoint(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Path, facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint; `facts` (epoch, loss, ...) go into the weights' header."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / CONFIG, model_config_to_json(config))
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
        FileNotFoundError: as `load_parts` does.
        ValueError: as `load_parts` does, or the weights cannot be read or do not fit the configuration.
    """
    config, tokenizer = load_parts(folder)
    model = build_model(config)
    try:
        model.load_state_dict(load_tensors(folder / WEIGHTS))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder} is not a checkpoint that fits this version: {one_line(error)}") from error
    return model.eval(), tokenizer


def one_line(error: Exception) -> str:
    """Return the beginning of a message: PyTorch names the class in the first line, the first mismatch in the next."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2])


def load_parts(folder: Path) -> tuple[ModelConfig, Tokenizer]:
    """Read the configuration and the tokenizer of a checkpoint.

    Raises:
        FileNotFoundError: a file of the three is missing; the message names it.
        ValueError: one of the two cannot be read, or they do not fit each other.
    """
    for name in (CONFIG, WEIGHTS, TOKENIZER):
        if not (folder / name).is_file():
            trained = [part for part in ("averaged", "best") if (folder / part / WEIGHTS).is_file()]
            hint = f"; {folder / trained[0]} is one" if trained else ""
            raise FileNotFoundError(f"{folder} is not a checkpoint: it has no {name}{hint}")
    try:
        config = read_model_config(folder / CONFIG)
    except ValueError as error:
        raise ValueError(f"{folder} is not a checkpoint that fits this version: {error}") from error
    tokenizer = read_tokenizer(folder / TOKENIZER)
    check_tokenizer(tokenizer, config)
    return config, tokenizer


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in several files (Vaswani et al. 2017, section 6.1), summed in float64."""
    if not paths:
        raise ValueError("no checkpoints to average")
    total: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in load_tensors(path).items():
            total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}
