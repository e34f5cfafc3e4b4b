"""Files of checkpoints that others wrote, and texts as their models read them.

The export reads such a checkpoint as an import does, and writes a folder for the training
(`sightline.export.training_check`):

    config.json       configuration of the model, of this project
    tokenizer.json    tokenizer of sources
    pretrained/       files of the checkpoint besides the weights

A run keeps these files. Its checkpoints have the layout of Hugging Face.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from sightline.model.config import PretrainedConfig
from sightline.model.data.examples import Example
from sightline.model.data.records import PairRecord
from sightline.model.data.tokenizer_training import encode_lines

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
PRETRAINED = "pretrained"  # folder in that of a run


def is_pretrained(folder: Path) -> bool:
    """Return True for a folder in the layout of Hugging Face."""
    try:
        return "model_type" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def target_tokenizer(config: PretrainedConfig, source: Tokenizer) -> Tokenizer:
    """Return the tokenizer of the targets of a translation, given that of its sources."""
    if not config.target_tokenizer:
        return source
    tokenizer = Tokenizer.from_str(config.target_tokenizer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_pairs(config: PretrainedConfig, tokenizer: Tokenizer, records: Sequence[PairRecord]) -> list[Example]:
    """Encode pairs of a translation, each target with its first tokens and its end."""
    sources = encode_lines(tokenizer, [record.source for record in records])
    targets = target_tokenizer(config, tokenizer).encode_batch_fast(
        [record.target for record in records], add_special_tokens=False
    )
    return [
        (source, [*config.target_prefix, *target.ids, config.eos_id])
        for source, target in zip(sources, targets, strict=True)
    ]
