"""A bundle with the sizes of the paper's base model and random weights: for time, not for sense."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from export.bundle import Label, export_bundle
from model.checkpoint import save_checkpoint
from model.config import TransformerConfig
from model.tokenizer import read_tokenizer
from model.transformer import Transformer

SEED = 6


def write_random_bundle(bundle: Path, tokenizer: Path, sentences: Sequence[str]) -> None:
    """Write 6 + 6 layers of width 512 over an existing tokenizer, verified on the two shortest sentences."""
    config = TransformerConfig(read_tokenizer(tokenizer).get_vocab_size())
    torch.manual_seed(SEED)
    model = Transformer(config)
    with tempfile.TemporaryDirectory() as scratch:
        save_checkpoint(Path(scratch), config, model.state_dict(), tokenizer, {"seed": SEED})
        few = sorted(sentences, key=len)[:2]
        export_bundle(Path(scratch), bundle, Label(bundle.name, "random weights, for measuring time"), few, 1e-3)
