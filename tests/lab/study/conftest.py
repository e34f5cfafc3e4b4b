"""Fixtures that several tests of the study share."""

from pathlib import Path

import pytest

from lab.study.chats import LINES
from lab.zoo.dialogues import draw_dialogues
from lab.zoo.systems import bundle_name
from sightline.export.options import BundleMetadata
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import CausalConfig
from sightline.model.data.tokenizer_training import train_tokenizer
from tests.support.training_runs import export_bundle


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `checkpoint/`, a causal model with random weights, and `bundles/` with it under the
    names of all chat models.
    """
    import torch

    folder = tmp_path_factory.mktemp("chats")
    texts = [one.text_and_answers()[0] for one in draw_dialogues(1, 200, True)]
    trained = train_tokenizer(texts, vocab_size=400)
    trained.save(str(folder / "tokenizer.json"))
    config = CausalConfig(trained.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=2, max_positions=512)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        model = CausalModel(config)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.embedding.weight *= 0.5
    save_checkpoint(folder / "checkpoint", config, model.state_dict(), folder / "tokenizer.json", {})
    for name in map(bundle_name, LINES):
        export_bundle(folder / "checkpoint", folder / "bundles" / name, BundleMetadata(name), texts[:2])
    return folder
