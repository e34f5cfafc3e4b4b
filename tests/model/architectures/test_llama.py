"""Decoders like Llama equal those of transformers: logits, gradients and names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from sightline.model.architectures.factory import build_model
from sightline.model.architectures.llama import Llama
from sightline.model.training.loss import projected_cross_entropy
from sightline.model.training.start import start_from
from tests.model.pretrained_folders import DECODERS, write_decoder

IDS = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))


def load(folder: Path) -> Any:
    start = start_from(folder, "language-model")
    model = build_model(start.config)
    start.initialise(model)
    assert isinstance(model, Llama)
    return model


@pytest.fixture(params=DECODERS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_logits_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_decoder(tmp_path, name)
    model = load(tmp_path).eval()
    targets = IDS.roll(-1, dims=1)
    expected = reference(IDS).logits
    with torch.no_grad():
        assert_close(model(IDS), expected, rtol=0, atol=5e-5)  # logits reach 10
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]
    hidden, _ = model.hidden_states(IDS)
    projected_cross_entropy(hidden.flatten(0, 1), model.output_weight, targets.flatten(), 0.0, -1).backward()  # type: ignore[no-untyped-call]
    gradients = dict(reference.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        found = gradients[parameter_name].grad
        atol = 2e-5 * max(found.abs().max().item(), 1.0)
        assert_close(parameter.grad, found, rtol=0, atol=atol, msg=parameter_name)


def test_padding_on_the_right_changes_nothing(name: str, tmp_path: Path) -> None:
    write_decoder(tmp_path, name)
    model = load(tmp_path).eval()
    with torch.no_grad():
        assert_close(model(IDS)[:, :7], model(IDS[:, :7]), rtol=0, atol=5e-5)


def test_state_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    reference = write_decoder(tmp_path, name)
    model, tied = load(tmp_path), reference.config.tie_word_embeddings
    expected = {key: value for key, value in reference.state_dict().items() if not (tied and key == "lm_head.weight")}
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


def test_a_step_changes_all_weights(name: str, tmp_path: Path) -> None:
    write_decoder(tmp_path, name)
    model = load(tmp_path)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(IDS).logsumexp(dim=-1).sum().backward()
    optimizer.step()
    assert [key for key, tensor in model.state_dict().items() if torch.equal(tensor, before[key])] == []


def test_attention_dropout_is_that_of_the_configuration(tmp_path: Path) -> None:
    write_decoder(tmp_path, attention_dropout=0.25)
    model = load(tmp_path)
    assert model.model.layers[0].self_attn.dropout == 0.25
    with torch.no_grad():
        assert not torch.equal(model(IDS), model(IDS))
        model.eval()
        assert torch.equal(model(IDS), model(IDS))


@torch.no_grad()
def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    write_decoder(tmp_path, "qwen3")
    model = load(tmp_path).eval()
    exact = model.hidden_states(IDS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.hidden_states(IDS)[0]
    assert_close(rounded, exact, rtol=0, atol=0.05 * exact.abs().max().item())


def test_a_text_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    write_decoder(tmp_path)
    with pytest.raises(ValueError, match="input has 41 tokens, but max_positions is 40"):
        load(tmp_path).hidden_states(torch.zeros(1, 41, dtype=torch.long))
