import dataclasses
from pathlib import Path

import pytest
import torch

from sightline.model.architectures.encoder import TextEncoder, mean_pool
from sightline.model.architectures.factory import build_model
from sightline.model.config import EncoderConfig, model_config_to_json, read_model_config

CONFIG = EncoderConfig(40, d_model=16, num_heads=2, d_ff=32, max_positions=32)
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]])
LENGTHS = torch.tensor([5, 3])


@pytest.fixture
def encoder() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(CONFIG).eval()


def test_a_vector_is_the_mean_hidden_state_divided_by_its_norm(encoder: TextEncoder) -> None:
    hidden, _ = encoder.encode(SOURCE, LENGTHS)
    means = torch.stack([row[:length].mean(dim=0) for row, length in zip(hidden, LENGTHS, strict=True)])
    torch.testing.assert_close(encoder(SOURCE, LENGTHS), means / means.norm(dim=1, keepdim=True))
    torch.testing.assert_close(encoder(SOURCE, LENGTHS).norm(dim=1), torch.ones(2))


def test_padding_changes_no_vector(encoder: TextEncoder) -> None:
    vectors = encoder(SOURCE, LENGTHS)
    torch.testing.assert_close(encoder(SOURCE.masked_fill(SOURCE == 0, 33), LENGTHS), vectors)
    torch.testing.assert_close(encoder(SOURCE[1:, :3], LENGTHS[1:]), vectors[1:])


def test_words_are_dropped_in_training_only() -> None:
    torch.manual_seed(0)
    encoder = TextEncoder(dataclasses.replace(CONFIG, word_dropout=0.9, dropout=0.0))
    torch.manual_seed(3)
    dropped = encoder(SOURCE, LENGTHS)
    torch.manual_seed(3)
    mask = encoder.source_mask(SOURCE, LENGTHS)
    assert mask[0, 4] and mask[1, 2] and not mask[1, 3:].any() and mask.sum() < 8
    pooled = mean_pool(encoder._encode(SOURCE, mask)[0], mask)
    torch.testing.assert_close(dropped, pooled / pooled.norm(dim=1, keepdim=True))
    assert encoder.eval().source_mask(SOURCE, LENGTHS).sum() == 8


def test_its_configuration_can_be_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(model_config_to_json(CONFIG), encoding="utf-8")
    assert '"architecture": "encoder"' in (tmp_path / "config.json").read_text(encoding="utf-8")
    config = read_model_config(tmp_path / "config.json")
    assert config == CONFIG
    assert isinstance(build_model(config), TextEncoder)
