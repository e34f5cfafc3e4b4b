"""Verification compares the states of recurrent decoders step by step."""

import copy
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
import torch

from sightline.export.check.recurrent_check import forced_pass, verify
from sightline.export.check.sessions import Array, Sessions, open_sessions
from sightline.export.import_errors import VerificationError
from sightline.export.options import BundleMetadata
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import RecurrentConfig
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.rounding import reference
from tests.support.training_runs import export_bundle

READ = [1, *[7, 9, 30, 50, 11, 17] * 10]  # any tokens, many


def exported(folder: Path, tokenizer: Path, sentences: list[str], gain: float) -> tuple[RecurrentModel, Sessions]:
    """Random model with all states, with cell weights times `gain`, and its verified bundle."""
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
    manifest = export_bundle(folder / "checkpoint", folder / "bundle", BundleMetadata("recurrent"), sentences)
    return model, open_sessions(folder / "bundle", manifest)


@pytest.fixture(scope="module")
def stable(
    checkpoint: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RecurrentModel, Sessions]:
    """Folder of a verified bundle that tests only read, and its model, which they copy."""
    folder = tmp_path_factory.mktemp("recurrent")
    return folder, *exported(folder, checkpoint / "tokenizer.json", toy_sentences[:2], gain=1)


@pytest.mark.parametrize(
    "name", ["bridge.weight", "cell.weight_ih", "cell.weight_hh", "cell.bias_hh", "readout.inner.weight"]
)
def test_a_changed_weight_of_the_recurrent_state_is_found(
    stable: tuple[Path, RecurrentModel, Sessions], checkpoint: Path, toy_sentences: list[str], name: str
) -> None:
    _, unchanged, sessions = stable
    model = copy.deepcopy(unchanged)
    with torch.no_grad():
        dict(model.named_parameters())[name][3] += 0.3
    with pytest.raises(VerificationError, match="states differ"):
        verify(sessions, model, read_tokenizer(checkpoint / "tokenizer.json"), toy_sentences[1:2])


def test_annotations_are_projected_by_the_encoder_and_not_again_by_the_step(
    stable: tuple[Path, RecurrentModel, Sessions],
) -> None:
    for graph, has_it in (("encoder", True), ("step", False)):
        constants = onnx.load(stable[0] / "bundle" / f"{graph}.onnx", load_external_data=False).graph.initializer
        assert ("score.annotation.weight" in {one.name for one in constants}) == has_it


def test_a_model_that_amplifies_rounding_is_compared(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    """Test in float64 that the model amplifies differences, independent of the processor."""
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    model, sessions = exported(tmp_path, checkpoint / "tokenizer.json", toy_sentences[1:2], gain=8)
    sources = [tokenizer.encode(toy_sentences[1]).ids]
    models = reference(model)
    states = forced_pass(models.exact, sources, [READ])

    def logits_of(carried: Mapping[str, Array] | None) -> float:
        """Return the rounding limit of the logits, with given or own states before each step."""
        _, limits = models.limits(lambda one: {"logits": forced_pass(one, sources, [READ], carried)["logits"]})
        return limits["logits"]

    assert logits_of(None) > 100 * logits_of(states)
    with torch.no_grad():
        model.cell.weight_hh[3] += 0.3
    with pytest.raises(VerificationError, match="states differ"):
        verify(sessions, model, tokenizer, toy_sentences[1:2])
