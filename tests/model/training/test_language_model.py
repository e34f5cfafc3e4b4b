import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sightline.model.architectures.causal import CausalModel
from sightline.model.config import CausalConfig
from sightline.model.data.chat_template import CHAT_TOKENS
from sightline.model.data.encoding import encode
from sightline.model.data.examples import Example, MemoryExamples
from sightline.model.data.records import DialogueMessage, DialogueRecord, Record, TextRecord
from sightline.model.data.tokenizer_training import train_tokenizer
from sightline.model.evaluation.language import likelihoods
from sightline.model.training.language_model import IGNORED, LANGUAGE_MODEL, make_batch, token_loss

CONFIG = CausalConfig(400, d_model=16, num_heads=2, d_ff=16, layers=1, dropout=0.0, max_positions=128)
MESSAGES = (
    DialogueMessage("system", "Be brief."),
    DialogueMessage("user", "How are you?"),
    DialogueMessage("assistant", "Fine."),
    DialogueMessage("user", "And the dog?"),
    DialogueMessage("assistant", "It sleeps on the beach."),
)
RECORDS: list[Record] = [
    TextRecord("A man sleeps."),
    DialogueRecord(MESSAGES),
    TextRecord("Several people wait in the rain."),
    DialogueRecord(MESSAGES[1:3]),
]


@pytest.fixture(scope="module")
def tokenizer(sentences: list[str]) -> Tokenizer:
    return train_tokenizer(sentences[:100], 400, CHAT_TOKENS)


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> list[Example]:
    return encode(tokenizer, RECORDS)


@pytest.fixture
def model() -> CausalModel:
    torch.manual_seed(1)
    return CausalModel(CONFIG).eval()


def slow_loss(model: CausalModel, example: Example, smoothing: float = 0.0) -> Tensor:
    """Return the loss of one example, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    ids, is_counted = example
    log_probs = model(torch.tensor([list(ids)]))[0].double().log_softmax(-1)  # (T, V)
    for index in range(1, len(ids)):
        if is_counted[index]:
            before = log_probs[index - 1]
            total = total - (1 - smoothing) * before[ids[index]] - smoothing * before.mean()
    return total


def test_the_targets_are_the_next_tokens_that_have_loss() -> None:
    batch = make_batch([([1, 5, 6, 2], [0, 1, 1, 1]), ([7, 8, 9], [0, 0, 1])], CONFIG)
    assert batch.ids.tolist() == [[1, 5, 6], [7, 8, 0]]
    assert batch.targets.tolist() == [[5, 6, 2], [IGNORED, 9, IGNORED]]
    assert LANGUAGE_MODEL.count(batch, CONFIG.pad_id) == 4


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_equals_a_loop_over_tokens(model: CausalModel, examples: list[Example], smoothing: float) -> None:
    expected = torch.stack([slow_loss(model, example, smoothing) for example in examples]).sum()
    batch = make_batch(examples, CONFIG)
    torch.testing.assert_close(token_loss(model, batch, smoothing).double(), expected, rtol=1e-5, atol=1e-4)


def test_the_loss_of_a_batch_is_the_sum_over_its_examples(model: CausalModel, examples: list[Example]) -> None:
    alone = [token_loss(model, make_batch([example], CONFIG)) for example in examples]
    torch.testing.assert_close(token_loss(model, make_batch(examples, CONFIG)), torch.stack(alone).sum())


def test_only_hidden_states_before_tokens_with_loss_have_gradients(
    model: CausalModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(examples, CONFIG)
    features, _ = model.hidden_states(batch.ids)
    features = features.detach().requires_grad_()
    monkeypatch.setattr(model, "hidden_states", lambda ids: (features, None))
    token_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert torch.equal(features.grad.abs().sum(dim=-1) > 0, batch.targets != IGNORED)


def test_the_likelihood_of_the_evaluation_is_the_validation_loss(model: CausalModel, examples: list[Example]) -> None:
    batch = make_batch(examples, CONFIG)
    nats, count = (one.sum().item() for one in likelihoods(model, examples))
    assert nats == pytest.approx(LANGUAGE_MODEL.validation_loss(model, batch).item(), rel=1e-5)
    assert count == LANGUAGE_MODEL.count(batch, CONFIG.pad_id)


def test_the_size_of_an_example_is_its_length(examples: list[Example]) -> None:
    sizes = LANGUAGE_MODEL.sizes(MemoryExamples(examples).lengths)
    np.testing.assert_array_equal(sizes, [[len(ids)] for ids, _ in examples])
