"""Tests of the chat task: the tokens of the loss, and a training run."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from model.architectures.causal import CausalModel
from model.checkpoint import load_model
from model.config import CausalConfig
from model.data.dialogues import draw_examples
from model.data.tokenizer import decode_ids, train_tokenizer
from model.training.chat import Example, answer_loss, chat_task, make_batch
from model.training.config import TrainConfig
from model.training.trainer import Trainer

CONFIG = TrainConfig(vocab_size=700, batch_tokens=2048, max_length_tokens=1024, label_smoothing=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(chat_task(has_ghost_attention=True).read_texts(Path(), CONFIG), CONFIG.vocab_size)


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> list[Example]:
    return chat_task(has_ghost_attention=True).read_examples(Path(), "val", tokenizer, CONFIG, CausalConfig(700))


def test_only_the_last_response_and_its_end_token_have_loss(tokenizer: Tokenizer, examples: list[Example]) -> None:
    drawn = draw_examples(CONFIG.seed + 500_000, len(examples), True)
    for (read, answer), example in zip(drawn[:200], examples[:200], strict=True):
        batch = make_batch([example], 0)
        (targets,) = batch.targets.tolist()
        assert len(targets) == batch.ids.size(1) == len(example.ids) - 1
        counted = [token for token in targets if token != 0]
        assert targets == [0] * (len(targets) - len(counted)) + counted
        assert decode_ids(tokenizer, counted) == answer
        assert counted[-1] == 2 and 2 not in counted[:-1]
        assert example.ids[0] == 1
        assert decode_ids(tokenizer, example.ids[: example.num_prompt]) == read


def test_each_target_follows_the_tokens_read_before_it(examples: list[Example]) -> None:
    batch = make_batch(examples[:8], 0)
    for row, example in enumerate(examples[:8]):
        for index in range(example.num_prompt - 1, len(example.ids) - 1):
            assert batch.ids[row, : index + 1].tolist() == example.ids[: index + 1]
            assert batch.targets[row, index] == example.ids[index + 1]


def test_the_loss_has_no_gradient_from_earlier_turns(examples: list[Example]) -> None:
    """Only the logits of the last answer change the loss."""
    long = max(examples[:100], key=lambda one: one.num_prompt)
    torch.manual_seed(1)
    model = CausalModel(CausalConfig(700, d_model=16, num_heads=2, d_ff=16, layers=1)).eval()
    batch = make_batch([long], 0)
    logprobs = model(batch.ids)[0].log_softmax(-1)
    expected = -sum(logprobs[index, long.ids[index + 1]] for index in range(long.num_prompt - 1, len(long.ids) - 1))
    torch.testing.assert_close(answer_loss(model, batch), torch.as_tensor(expected))


def test_batches_contain_each_example_once_within_their_size(examples: list[Example]) -> None:
    task = chat_task(has_ghost_attention=True)
    batches = list(task.batches(examples, 2048, 1, CausalConfig(700, d_model=16, num_heads=2)))
    assert sum(batch.ids.size(0) for batch in batches) == len(examples)
    assert all(batch.ids.numel() <= 2048 for batch in batches)
    assert sum(task.count(batch, 0) for batch in batches) == sum(len(one.ids) - one.num_prompt for one in examples)


def test_dialogues_of_twenty_turns_fit_the_positions(examples: list[Example]) -> None:
    assert max(len(one.ids) for one in examples) < 700 < CausalConfig(700).max_positions


def test_a_run_learns_and_its_checkpoint_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.training.chat.SPLITS", {"train": (64, 0), "val": (16, 500_000)})
    config = TrainConfig(
        vocab_size=500, max_epochs=5, batch_tokens=1024, max_length_tokens=1024, warmup_steps=10, average_last=1
    )

    def make(vocab_size: int) -> CausalConfig:
        return CausalConfig(vocab_size, d_model=32, num_heads=2, d_ff=32, layers=1, dropout=0.0)

    task = chat_task(has_ghost_attention=False)
    trainer = Trainer(tmp_path / "run", config, task, tmp_path, make, torch.device("cpu"))
    before = trainer.validate()
    trainer.fit()
    assert trainer.validate() < 0.8 * before
    model, _ = load_model(tmp_path / "run" / "best")
    assert isinstance(model, CausalModel)
