"""What a recurrent decoder carries is compared step by step: differences neither hide nor grow from one to the next."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from export.bundle import Label, export_bundle
from export.sessions import Sessions, onnx_steps, open_sessions
from export.verify import VerificationError, verify
from model.checkpoint import save_checkpoint
from model.config import RecurrentConfig
from model.recurrent import RecurrentModel
from model.reference import pytorch_steps
from model.tokenizer import read_tokenizer

READ = [1, *[7, 9, 30, 50, 11, 17] * 10]  # any tokens, many


def exported(folder: Path, tokenizer: Path, sentences: list[str], gain: float) -> tuple[RecurrentModel, Sessions]:
    """A random model that carries all there is to carry, its cell's weights times `gain`, and its verified bundle."""
    config = RecurrentConfig(
        read_tokenizer(tokenizer).get_vocab_size(),
        embedding_size=12,
        encoder_size=8,
        decoder_size=16,
        cell="lstm",
        attention="general",
        query="current",
        input_feeding=True,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = RecurrentModel(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        for parameter in model.cell.parameters():
            parameter.mul_(gain)
    save_checkpoint(folder / "checkpoint", config, model.state_dict(), tokenizer, {})
    manifest = export_bundle(folder / "checkpoint", folder / "bundle", Label("recurrent"), sentences)
    return model, open_sessions(folder / "bundle", manifest)


@pytest.mark.parametrize(
    "name", ["bridge.weight", "cell.weight_ih", "cell.weight_hh", "cell.bias_hh", "readout.inner.weight"]
)
def test_a_weight_of_the_carried_state_that_is_not_the_bundles_is_found(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str], name: str
) -> None:
    tokenizer = checkpoint / "tokenizer.json"
    model, sessions = exported(tmp_path, tokenizer, toy_sentences[:2], gain=1)
    with torch.no_grad():
        dict(model.named_parameters())[name][3] += 0.3
    with pytest.raises(VerificationError, match="states differ"):
        verify(sessions, model, read_tokenizer(tokenizer), toy_sentences[:2])


def test_annotations_are_projected_by_the_encoder_and_not_again_by_the_step(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    exported(tmp_path, checkpoint / "tokenizer.json", toy_sentences[:2], gain=1)
    for graph, has_it in (("encoder", True), ("step", False)):
        constants = onnx.load(tmp_path / "bundle" / f"{graph}.onnx", load_external_data=False).graph.initializer
        assert ("score.annotation.weight" in {one.name for one in constants}) == has_it


def test_a_model_that_magnifies_rounding_is_compared_all_the_same(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    tokenizer = checkpoint / "tokenizer.json"
    model, sessions = exported(tmp_path, tokenizer, toy_sentences[:1], gain=8)
    ids = read_tokenizer(tokenizer).encode(toy_sentences[0]).ids
    expected, given = (steps([READ])[0] for steps in (pytorch_steps(model, ids), onnx_steps(sessions, ids)))
    assert sessions.manifest.verification is not None
    of_one_step = sessions.manifest.verification.max_logit_difference
    assert np.abs(expected - given).max() > 10 * of_one_step > 0
