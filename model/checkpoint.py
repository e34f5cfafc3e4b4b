"""Reading and writing of checkpoints.

A checkpoint is a folder with `config.json`, `weights.safetensors` and `tokenizer.json`. That of a
model that others trained first has the layout of Hugging Face. No file is pickled.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from sightline.model.architectures.factory import build_model
from sightline.model.architectures.pretrained import PretrainedModel
from sightline.model.config import ArchitectureConfig, PretrainedConfig, model_config_to_json
from sightline.model.parts import CONFIG, PRETRAINED, PRETRAINED_WEIGHTS, TOKENIZER, WEIGHTS, load_parts, weights_file


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: an interrupted write leaves the old file."""
    with _replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """Write tensors and `facts`, which JSON can represent, atomically: a write that is interrupted
    or fails, for example because the disk is full (`OSError`), leaves the old file.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"facts": json.dumps(dict(facts or {})), "format": "pt"}  # the format is for transformers
    with _replacing(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
        temporary.chmod(mode)  # safetensors creates its file with mode 0600


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file that replaces `path` on success and is removed on failure."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    try:
        temporary.touch()
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_tensors(path: Path, *, only_shapes: bool = False) -> dict[str, Tensor]:
    """Read a file of tensors; with `only_shapes`, they are on the device "meta", without values.
    Raises `ValueError` if the file is damaged.
    """
    with _opened(path) as file:
        if not only_shapes:
            return dict(file.get_tensors())
        return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in file.keys()}  # noqa: SIM118


def load_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata that `save_tensors` wrote. Raises `ValueError` if the file is damaged."""
    with _opened(path) as file:
        return dict(json.loads((file.metadata() or {}).get("facts", "{}")))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors, which are read on demand and not mapped, so that only those in use
    take memory. Raises `ValueError` if the file is damaged.
    """
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from error


def save_checkpoint(
    folder: Path, config: ArchitectureConfig, weights: Mapping[str, Tensor], tokenizer: Path, facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint, in the layout of Hugging Face if others trained the model first, with
    `facts` (epoch, loss, ...) in the header of the weights file. `tokenizer` is that of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(config, PretrainedConfig):
        _save_pretrained(folder, config, weights, tokenizer.parent / PRETRAINED, facts)
        return
    for name, text in {CONFIG: model_config_to_json(config), TOKENIZER: tokenizer.read_text(encoding="utf-8")}.items():
        replace_text(folder / name, text)
    save_tensors(folder / WEIGHTS, weights, facts)


def _save_pretrained(
    folder: Path, config: PretrainedConfig, weights: Mapping[str, Tensor], files: Path, facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint of transformers, whose other files are those of the folder `files`."""
    with torch.device("meta"):
        model = build_model(config)
    assert isinstance(model, PretrainedModel)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        saved = Path(temporary)
        model.save(saved, weights)
        shutil.copytree(files, saved, dirs_exist_ok=True)
        shutil.copytree(saved, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(PRETRAINED_WEIGHTS))
        save_tensors(folder / PRETRAINED_WEIGHTS, load_tensors(saved / PRETRAINED_WEIGHTS), facts)


def load_model(folder: Path) -> tuple[Any, Tokenizer]:
    """Load a model in evaluation mode on the CPU, and its tokenizer.

    Raises `FileNotFoundError` for a missing file, and `ValueError` for one that cannot be read, or
    if the configuration does not match the tokenizer or the weights.
    """
    config, tokenizer = load_parts(folder)
    model = build_model(config)
    try:
        if isinstance(model, PretrainedModel):
            model.load(folder, model.config.labels)
        else:
            model.load_state_dict(load_tensors(weights_file(folder)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{folder} is not a checkpoint of this version of Sightline: {one_line(error)}; train it again"
        ) from error
    return model.eval(), tokenizer


def one_line(error: Exception) -> str:
    """Return the first two lines of an error message as one line. For mismatched weights, PyTorch
    names the class in the first line and the first mismatch in the second.
    """
    return " ".join(line.strip() for line in str(error).splitlines()[:2])


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of the weights in several files (Vaswani et al. 2017, section 6.1). The sum
    is computed in float64; the result is float32.
    """
    with ExitStack() as opened:
        files, mean = [opened.enter_context(_opened(path)) for path in paths], dict[str, Tensor]()
        for name in files[0].keys():  # noqa: SIM118
            total = torch.zeros(files[0].get_slice(name).get_shape(), dtype=torch.float64)
            for file in files:
                total += file.get_tensor(name)
            mean[name] = total.div_(len(paths)).float()
        return mean
