"""Models that others trained first equal those of transformers: outputs, gradients and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from sightline.model.architectures.factory import build_model
from sightline.model.config import Pooling
from sightline.model.data.batches import LabelledBatch, pad
from sightline.model.training.classification import label_loss
from sightline.model.training.loss import output_cross_entropy
from tests.model.pretrained_folders import (
    LABELS,
    TRANSLATORS,
    begin,
    write_decoder,
    write_encoder,
    write_translator,
)
from tests.zoo.models import DECODERS, ENCODERS

LENGTHS = torch.tensor([12, 7, 3])
IDS = torch.randint(110, 190, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < LENGTHS[:, None]


def assert_trained(model: Any, loss: Tensor, reference: Any, expected: Tensor) -> None:
    """Compare a loss and its gradients with those of transformers."""
    assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = {name: one.grad for name, one in reference.named_parameters() if one.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in model.module.named_parameters():
        if name in gradients:
            assert_close(parameter.grad, gradients[name], rtol=0, atol=2e-4 * max(largest, 1.0), msg=name)


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path / "from", name)
    _, model = begin(tmp_path / "from", "encoder")
    ids = torch.where(MASK, IDS, model.config.pad_id)
    with torch.no_grad():
        hidden = reference(input_ids=ids, attention_mask=MASK.long()).last_hidden_state
        for row, length in enumerate(LENGTHS):
            text = hidden[row, :length].mean(dim=0)
            assert_close(model.embed(ids, LENGTHS)[row], text, rtol=0, atol=5e-5)


CLASSIFIERS = [name for name, model in ENCODERS.items() if "ForSequenceClassification" in model.tasks]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_log_probabilities_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path / "from", name, "ForSequenceClassification")
    _, model = begin(tmp_path / "from", "classification", LABELS)
    ids, labels = torch.where(MASK, IDS, model.config.pad_id), torch.tensor([4, 0, 2])
    reference.config.pad_token_id = model.config.pad_id
    expected = functional.cross_entropy(reference(input_ids=ids, attention_mask=MASK.long()).logits, labels)
    assert_trained(model, functional.nll_loss(model(ids, LENGTHS), labels), reference, expected)


@pytest.mark.parametrize(
    ("name", "architecture"), [("bert", "Model"), ("bert", "ForSequenceClassification"), ("roberta", "Model")]
)
def test_scores_of_pairs_equal_transformers(name: str, architecture: str, tmp_path: Path) -> None:
    """The token types of a pair are those of its tokenizer; a layer for one score is kept."""
    options = {} if architecture == "Model" else {"num_labels": 1}
    reference = write_encoder(tmp_path / "from", name, architecture, **options)
    start, model = begin(tmp_path / "from", "reranking")
    pairs = [("word1 word2", "word3"), ("word4", "word5 word6 word7")]
    encodings = start.tokenizer.encode_batch(pairs)
    ids, lengths = (
        pad([one.ids for one in encodings], model.config.pad_id),
        torch.tensor([len(one) for one in encodings]),
    )
    if architecture == "Model":
        model.save(tmp_path / "saved", model.state_dict())
        reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    inputs = {"token_type_ids": pad([one.type_ids for one in encodings], 0)} if name == "bert" else {}
    with torch.no_grad():
        expected = reference(ids, attention_mask=(torch.arange(ids.size(1)) < lengths[:, None]).long(), **inputs).logits
        assert expected.shape == (2, 1)
        assert_close(model(ids, lengths), expected[:, 0], rtol=0, atol=5e-5)


TAGGERS = [name for name, model in ENCODERS.items() if "ForTokenClassification" in model.tasks]


@pytest.mark.parametrize("name", TAGGERS)
def test_log_probabilities_of_tokens_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path / "from", name, "ForTokenClassification")
    _, model = begin(tmp_path / "from", "tagging", LABELS[:3])
    source, tags = torch.where(MASK, IDS, model.config.pad_id), torch.where(MASK, IDS % 3, -1)
    logits = reference(input_ids=source, attention_mask=MASK.long()).logits
    expected = functional.cross_entropy(logits[MASK], tags[MASK], reduction="sum")
    assert_trained(model, label_loss(model, LabelledBatch(source, LENGTHS, tags)), reference, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_losses_of_decoders_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_decoder(tmp_path / "from", name)
    _, model = begin(tmp_path / "from", "language-model")
    targets = IDS.roll(-1, dims=1).masked_fill(~MASK, -100).flatten()
    expected = functional.cross_entropy(
        reference(IDS).logits.flatten(0, 1), targets, label_smoothing=0.1, reduction="sum"
    )
    features = model.hidden_states(IDS)[0].flatten(0, 1)
    assert_trained(model, output_cross_entropy(model, features, targets, 0.1, -100), reference, expected)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_losses_of_translators_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write_translator(tmp_path / "from", name)
    _, model = begin(tmp_path / "from", "translation", pair=("en", "de"))
    source, target = (ids % 30 + 4 for ids in (IDS, IDS.flip(1)))
    outputs = reference(input_ids=source, attention_mask=MASK.long(), decoder_input_ids=target)
    expected = functional.cross_entropy(outputs.logits.flatten(0, 1), target.roll(1).flatten(), reduction="sum")
    memory, _ = model.encode(source, LENGTHS)
    features = model.decode(target, memory, LENGTHS)[0].flatten(0, 1)
    assert_trained(
        model, output_cross_entropy(model, features, target.roll(1).flatten(), 0.0, -100), reference, expected
    )


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
    reference = write_encoder(tmp_path / "from", "bert")
    _, model = begin(tmp_path / "from", "encoder")
    object.__setattr__(model.config, "pooling", pooling)
    with torch.no_grad():
        embedded = model.embed(IDS, LENGTHS)
        for row, length in enumerate(LENGTHS):
            hidden = reference(input_ids=IDS[row : row + 1, :length]).last_hidden_state[0]
            assert_close(embedded[row], expected(hidden), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-softcap", "gpt-neox", "m2m100", "t5"])
def test_merged_weights_compute_what_the_adapters_do(name: str, tmp_path: Path) -> None:
    is_decoder = name in DECODERS
    (write_decoder if is_decoder else write_translator)(tmp_path / "from", name)
    start, model = begin(tmp_path / "from", "language-model" if is_decoder else "translation", pair=("en", "de"))

    def outputs(model: Any) -> Tensor:
        with torch.no_grad():
            if is_decoder:
                return torch.as_tensor(model(IDS))
            ids = IDS % 30 + 4
            return torch.as_tensor(model.logits(model.decode(ids, model.encode(ids, LENGTHS)[0], LENGTHS)[0]))

    before, weights = outputs(model), dict(model.state_dict())
    model.add_adapters(4)
    assert torch.equal(outputs(model), before)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for parameter in trained.values():
        parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    assert all("lora" in name for name in trained)
    plain = build_model(start.config).eval()
    plain.load_state_dict(model.merged_weights())
    assert plain.state_dict().keys() == weights.keys()
    assert_close(outputs(plain), outputs(model), rtol=1e-4, atol=1e-4)
    assert (outputs(plain) - before).abs().max() > 0.01


def test_dropout_has_the_probability_of_the_configuration(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "bert", hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.5)
    start, model = begin(tmp_path / "from", "encoder")
    layer = model.module.encoder.layer[0]
    assert (start.config.dropout, layer.output.dropout.threshold, layer.attention.self.dropout.p) == (0.25, 64, 0.5)
    with torch.no_grad():
        assert torch.equal(model(IDS, LENGTHS), model(IDS, LENGTHS))
        model.train()
        assert not torch.equal(model(IDS, LENGTHS), model(IDS, LENGTHS))


@torch.no_grad()
def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    write_encoder(tmp_path / "from", "mpnet", scale=0.1)
    _, model = begin(tmp_path / "from", "encoder")
    exact = model.embed(IDS, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.embed(IDS, LENGTHS)
    assert rounded.dtype == torch.float32
    assert_close(rounded, exact, rtol=0, atol=0.05)
