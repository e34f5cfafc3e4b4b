import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.bench.growth import grow
from lab.bench.weights import read_model
from sightline.model.architectures.transformer import Transformer
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.decoding import translate_batch

SHIPPED = Path("bundles/multi30k-en-de")
BASE: dict[str, Any] = {"d_model": 512, "num_heads": 8, "d_ff": 2048, "encoder_layers": 6, "decoder_layers": 6}


@pytest.fixture(scope="module")
def small() -> Transformer:
    return read_model(SHIPPED)


@pytest.fixture
def large(small: Transformer) -> Transformer:
    return grow(small, dataclasses.replace(small.config, **BASE))


def test_a_grown_model_computes_the_same_with_equal_position_encodings(small: Transformer, large: Transformer) -> None:
    """With the position encodings of the small model, the outputs are the same."""
    pairs = torch.arange(512) // 2
    large.positions = small.positions[:, 2 * (pairs // 4) + torch.arange(512) % 2]
    source, lengths, target = torch.tensor([[5, 70, 800, 9, 2]]), torch.tensor([5]), torch.tensor([[1, 44, 5000, 8]])

    def logits(model: Transformer) -> Tensor:
        memory, _ = model.encode(source, lengths)
        return model.logits(model.decode(target, memory, lengths)[0])

    with torch.no_grad():
        torch.testing.assert_close(logits(large), logits(small), atol=2e-3, rtol=0)


def test_a_grown_model_generates_the_same_outputs(small: Transformer, large: Transformer, sentences: list[str]) -> None:
    tokenizer = read_tokenizer(SHIPPED / "tokenizer.json")
    sources = [tokenizer.encode(sentence).ids for sentence in sentences[:20]]
    outputs = (translate_batch(model, sources, 60) for model in (small, large))
    assert sum(one == other for one, other in zip(*outputs, strict=True)) >= 18
