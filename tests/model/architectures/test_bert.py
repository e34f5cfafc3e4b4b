"""Encoders like BERT equal those of transformers: outputs, gradients, dropout and names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from sightline.model.architectures.bert import BertClassifier, BertEncoder
from sightline.model.architectures.factory import build_model
from sightline.model.config import Pooling
from sightline.model.training.start import start_from
from tests.model.pretrained_folders import ENCODERS, LABELS, write_encoder

LENGTHS = torch.tensor([12, 7, 3])


def batch(pad_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids (3, 12) and the mask of those that are not padding."""
    ids = torch.randint(110, 211, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) < LENGTHS[:, None]
    return torch.where(mask, ids, pad_id), mask


def load(folder: Path, task: str) -> Any:
    start = start_from(folder, task, LABELS if task == "classification" else ())
    model = build_model(start.config)
    start.initialise(model)
    return model


@pytest.fixture(params=ENCODERS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_hidden_states_equal_transformers(family: str, tmp_path: Path) -> None:
    reference, model = write_encoder(tmp_path, family), load(tmp_path, "encoder")
    assert isinstance(model, BertEncoder)
    ids, mask = batch(model.config.pad_id)
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        assert_close(model.eval().hidden_states(ids, LENGTHS)[mask], expected[mask], rtol=0, atol=1e-5)


def test_log_probabilities_and_gradients_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, family, "ForSequenceClassification")
    model = load(tmp_path, "classification").eval()
    assert isinstance(model, BertClassifier)
    ids, mask = batch(model.config.pad_id)
    expected = reference(input_ids=ids, attention_mask=mask.long()).logits.log_softmax(dim=1)
    given = model(ids, LENGTHS)
    assert_close(given, expected, rtol=0, atol=1e-5)
    for one in (expected, given):
        one[[0, 1, 2], [4, 0, 2]].sum().backward()
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        # The largest gradient of a tensor sets the scale of its rounding errors.
        scale = gradients[name].grad.abs().max().item()
        assert_close(parameter.grad, gradients[name].grad, rtol=0, atol=1e-5 * max(scale, 1.0), msg=name)


def test_state_is_that_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    for task, architecture in (("encoder", "Model"), ("classification", "ForSequenceClassification")):
        folder = tmp_path / task
        reference = write_encoder(folder, family, architecture).state_dict()
        model = load(folder, task)
        assert model.state_dict().keys() == reference.keys()
        assert all(torch.equal(tensor, reference[name]) for name, tensor in model.state_dict().items())


def test_a_step_changes_all_weights(family: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, family, "ForSequenceClassification")
    model = load(tmp_path, "classification")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids, _ = batch(model.config.pad_id)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(ids, LENGTHS)[:, 0].sum().backward()
    optimizer.step()
    assert [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])] == []


def test_an_encoder_trains_all_weights_but_the_pooler(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    model = load(tmp_path, "encoder")
    ids, _ = batch(model.config.pad_id)
    model(ids, LENGTHS).square().sum().backward()
    assert [name for name, one in model.named_parameters() if one.grad is None] == [
        "pooler.dense.weight",
        "pooler.dense.bias",
    ]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", lambda row: row.mean(dim=0)),
        ("first", lambda row: row[0]),
        ("last", lambda row: row[-1]),
        ("max", lambda row: row.amax(dim=0)),
    ],
)
def test_pooling_ignores_padding(pooling: Pooling, expected: Any, tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    model = load(tmp_path, "encoder").eval()
    object.__setattr__(model.config, "pooling", pooling)
    ids, _ = batch(model.config.pad_id)
    with torch.no_grad():
        hidden, embedded = model.hidden_states(ids, LENGTHS), model.embed(ids, LENGTHS)
        for row, length in enumerate(LENGTHS):
            assert_close(embedded[row], expected(hidden[row, :length]))
            alone = model.embed(ids[row : row + 1, :length], LENGTHS[row : row + 1])[0]
            assert_close(embedded[row], alone, rtol=0, atol=1e-5)


def test_dropout_has_the_probabilities_of_the_configuration(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "hidden_dropout_prob": 0.25,
        "attention_probs_dropout_prob": 0.5,
        "classifier_dropout": 0.75,
    }
    write_encoder(tmp_path, "bert", "ForSequenceClassification", **options)
    model = load(tmp_path, "classification")
    layer = model.bert.encoder.layer[0]
    assert (model.bert.dropout.threshold, layer.dropout.threshold, model.dropout.threshold) == (64, 64, 192)
    assert layer.attention_dropout == 0.5
    ids, _ = batch(model.config.pad_id)
    with torch.no_grad():
        assert not torch.equal(model(ids, LENGTHS), model(ids, LENGTHS))
        model.eval()
        assert torch.equal(model(ids, LENGTHS), model(ids, LENGTHS))


@torch.no_grad()
def test_attention_dropout_leaves_the_mean_unchanged(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5, "num_hidden_layers": 1}
    write_encoder(tmp_path, "bert", scale=0.05, **options)
    model = load(tmp_path, "encoder")
    ids, _ = batch(model.config.pad_id)
    exact = model.eval().hidden_states(ids[:1], LENGTHS[:1])
    model.train()
    drawn = torch.stack([model.hidden_states(ids[:1], LENGTHS[:1]) for _ in range(150)])
    error = drawn.std(dim=0) / 150**0.5
    assert (drawn.std(dim=0) > 0).all()
    assert ((drawn.mean(dim=0) - exact).abs() < 6 * error + 1e-3).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_bfloat16_is_near_float32(name: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, name, scale=0.1)
    model = load(tmp_path, "encoder").eval()
    ids, _ = batch(model.config.pad_id)
    exact = model.embed(ids, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.embed(ids, LENGTHS)
    assert rounded.dtype == torch.float32
    assert_close(rounded, exact, rtol=0, atol=0.05)


def test_a_text_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    with pytest.raises(ValueError, match="input has 24 tokens, but max_positions is 23"):
        load(tmp_path, "encoder").embed(torch.zeros(1, 24, dtype=torch.long), torch.tensor([24]))
