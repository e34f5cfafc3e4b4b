"""Toy corpora and checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import TransformerConfig
from sightline.model.data.tokenizer_training import read_tokenizer, train_tokenizer

WHO = [("A dog", "Ein Hund"), ("A cat", "Eine Katze"), ("The girl", "Das Mädchen"), ("Two men", "Zwei Männer")]
WHAT = [("sleeps", "schlafen"), ("runs quickly", "rennen schnell"), ("sings", "singen"), ("eats bread", "essen Brot")]
WHERE = [("in the park", "im Park"), ("at home", "zu Hause"), ("by the sea", "am Meer")]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus of some dozen pairs with train, val and test splits and a tokenized test reference."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = [
        (f"{who} {what} {where}.", f"{wer} {was} {wo}.")
        for who, wer in WHO
        for what, was in WHAT
        for where, wo in WHERE
    ]
    for split, rows in {"train": pairs, "val": pairs[::5], "test": pairs[:6]}.items():
        for side, ending in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in rows)
            (folder / f"{split}.{ending}").write_text(text, encoding="utf-8")
    tokenised = "".join(german.lower().replace(".", " .") + "\n" for _, german in pairs[:6])
    (folder / "test.lc.norm.tok.de").write_text(tokenised, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(sentences[::2], vocab_size=400).save(str(path))
    return path


@pytest.fixture
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return read_tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def toy_config() -> Callable[[int], TransformerConfig]:
    def make(vocab_size: int) -> TransformerConfig:
        return TransformerConfig(
            vocab_size, d_model=16, num_heads=2, d_ff=32, encoder_layers=2, decoder_layers=2, max_positions=128
        )

    return make


@pytest.fixture
def toy_model(toy_config: Callable[[int], TransformerConfig]) -> Transformer:
    torch.manual_seed(0)
    return Transformer(toy_config(40)).eval()


@pytest.fixture
def checkpoint(tmp_path: Path, toy_config: Callable[[int], TransformerConfig], tokenizer_path: Path) -> Path:
    """Checkpoint of a random model with the vocabulary of the toy tokenizer."""
    torch.manual_seed(0)
    config = toy_config(400)
    save_checkpoint(tmp_path / "checkpoint", config, Transformer(config).state_dict(), tokenizer_path, {"epoch": 1})
    return tmp_path / "checkpoint"
