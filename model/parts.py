"""Files of checkpoints, and their configuration and tokenizer, which can be read without PyTorch.

The export reads a checkpoint that others wrote as an import does, and writes a folder for the
training (`sightline.export.training_check`):

    config.json       configuration of the model, of this project
    tokenizer.json    tokenizer of sources
    pretrained/       files of the checkpoint besides the weights

A run keeps these files. Its checkpoints have the layout of Hugging Face.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer

from sightline.model.config import ArchitectureConfig, PretrainedConfig, read_model_config
from sightline.model.data.tokenizer_training import check_tokenizer, read_tokenizer

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "weights.safetensors"
PRETRAINED_WEIGHTS = "model.safetensors"
AVERAGED, BEST = "averaged", "best"  # folders of the checkpoints of a run
PRETRAINED = "pretrained"  # folder in that of a run


def is_pretrained(folder: Path) -> bool:
    """Return True for a folder in the layout of Hugging Face."""
    try:
        return "model_type" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def weights_file(folder: Path) -> Path:
    """Return the path of the weights of a checkpoint of Sightline or of Hugging Face."""
    return folder / (PRETRAINED_WEIGHTS if is_pretrained(folder) else WEIGHTS)


def checkpoint_of(path: Path) -> Path:
    """Return the averaged or else the best checkpoint of a run, or the folder itself."""
    return next((path / part for part in (AVERAGED, BEST) if (path / part / CONFIG).is_file()), path)


def load_parts(folder: Path) -> tuple[ArchitectureConfig, Tokenizer]:
    """Read the configuration and the tokenizer of a checkpoint. Those of a checkpoint in the layout
    of Hugging Face are in the folder of its run.

    Raises `FileNotFoundError` for a missing file, and `ValueError` for one that cannot be read, or
    if the configuration does not match the tokenizer.
    """
    checkpoint = folder
    if is_pretrained(folder):
        folder = folder.absolute().parent
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"{checkpoint} is a third-party checkpoint; train it first with --from {checkpoint}"
            )
    for name in (CONFIG, TOKENIZER) if folder is not checkpoint else (CONFIG, WEIGHTS, TOKENIZER):
        if not (folder / name).is_file():
            trained = [part for part in (AVERAGED, BEST) if weights_file(folder / part).is_file()]
            hint = f"use {folder / trained[0]}" if trained else "name the folder of a run, or of one of its checkpoints"
            raise FileNotFoundError(f"{folder} is not a checkpoint: it has no {name}; {hint}")
    try:
        config = read_model_config(folder / CONFIG)
    except ValueError as error:
        raise ValueError(f"{folder} is not a checkpoint of this version of Sightline: {error}") from error
    if isinstance(config, PretrainedConfig) != (folder is not checkpoint):
        raise ValueError(f"{checkpoint} is not a checkpoint of the run in {folder}; name the folder of a run")
    tokenizer = read_tokenizer(folder / TOKENIZER)
    check_tokenizer(tokenizer, config)
    return config, tokenizer
