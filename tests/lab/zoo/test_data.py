"""Tests of the chat task: the tokens of the loss, and a training run."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lab.zoo.data import counted_tokens, read_data
from lab.zoo.dialogues import draw_dialogues
from lab.zoo.systems import SYSTEMS
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model
from sightline.model.config import CausalConfig
from sightline.model.data.batches import bucket
from sightline.model.data.examples import Example, MemoryExamples, TrainingData
from sightline.model.data.tokenizer_training import decode_ids, encode_lines, prompt_tokenizer
from sightline.model.training.language_model import IGNORED, LANGUAGE_MODEL, make_batch, token_loss
from sightline.model.training.options import TrainConfig
from sightline.model.training.trainer import Trainer

CONFIG = TrainConfig(batch_tokens=2048, max_length_tokens=1024, label_smoothing=0.0)


@pytest.fixture(scope="module")
def data() -> TrainingData:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lab.zoo.data.DIALOGUES", {"train": (10, 0), "dev": (1_000, 500_000)})
        return read_data(SYSTEMS["chat-gatt"], Path(), Path("none"), CONFIG, 700)


@pytest.fixture(scope="module")
def tokenizer(data: TrainingData) -> Tokenizer:
    return data.tokenizer


@pytest.fixture(scope="module")
def examples(data: TrainingData) -> list[Example]:
    return [data.dev[index] for index in range(len(data.dev))]


def num_prompt(example: Example) -> int:
    """Return the number of tokens before the first token of the loss."""
    return list(example[1]).index(1)


def test_only_the_last_response_and_its_end_token_have_loss(tokenizer: Tokenizer, examples: list[Example]) -> None:
    drawn = draw_dialogues(CONFIG.seed + 500_000, len(examples), True)
    for dialogue, example in zip(drawn[:200], examples[:200], strict=True):
        batch = make_batch([example], CausalConfig(700))
        (targets,) = batch.targets.tolist()
        assert len(targets) == batch.ids.size(1) == len(example[0]) - 1
        counted = [token for token in targets if token != IGNORED]
        assert targets == [IGNORED] * (len(targets) - len(counted)) + counted
        assert decode_ids(tokenizer, counted) == dialogue.turns[-1].answer
        assert counted[-1] == 2 and 2 not in counted[:-1]
        # The service encodes the prompt alone; its tokens are the same.
        (read,) = encode_lines(prompt_tokenizer(tokenizer), [dialogue.prompt])
        assert example[0][: num_prompt(example)] == read


def test_the_loss_may_include_all_responses(tokenizer: Tokenizer) -> None:
    for one in draw_dialogues(1, 20, True):
        text, spans = one.text_and_answers()
        encoding = tokenizer.encode(text)
        counted = counted_tokens(encoding.offsets, spans)
        ids = [id_ for id_, is_counted in zip(encoding.ids, counted, strict=True) if is_counted]
        assert ids[-1] == 2
        assert tokenizer.decode(ids) == "".join(f" {turn.answer}" for turn in one.turns)


def test_each_target_follows_the_tokens_read_before_it(examples: list[Example]) -> None:
    batch = make_batch(examples[:8], CausalConfig(700))
    for row, example in enumerate(examples[:8]):
        ids = example[0]
        for index in range(num_prompt(example) - 1, len(ids) - 1):
            assert batch.ids[row, : index + 1].tolist() == ids[: index + 1]
            assert batch.targets[row, index] == ids[index + 1]


def test_the_loss_has_no_gradient_from_earlier_turns(examples: list[Example]) -> None:
    """Only the logits of the last answer change the loss."""
    long = max(examples[:100], key=num_prompt)
    torch.manual_seed(1)
    model = CausalModel(CausalConfig(700, d_model=16, num_heads=2, d_ff=16, layers=1)).eval()
    batch = make_batch([long], CausalConfig(700))
    logprobs = model(batch.ids)[0].log_softmax(-1)
    expected = -sum(logprobs[index, long[0][index + 1]] for index in range(num_prompt(long) - 1, len(long[0]) - 1))
    torch.testing.assert_close(token_loss(model, batch), torch.as_tensor(expected))


def test_batches_contain_each_example_once_within_their_size(examples: list[Example]) -> None:
    buckets = bucket(LANGUAGE_MODEL.sizes(MemoryExamples(examples).lengths), 2048, 1)
    config = CausalConfig(700, d_model=16, num_heads=2)
    batches = [LANGUAGE_MODEL.make_batch([examples[index] for index in indices], config) for indices in buckets]
    assert sum(batch.ids.size(0) for batch in batches) == len(examples)
    assert all(batch.ids.numel() <= 2048 for batch in batches)
    assert sum(LANGUAGE_MODEL.count(batch, 0) for batch in batches) == sum(sum(counted) for _, counted in examples)


def test_dialogues_of_twenty_turns_fit_the_positions(examples: list[Example]) -> None:
    assert max(len(ids) for ids, _ in examples) < 800 < CausalConfig(700).max_positions


def test_a_run_learns_and_its_checkpoint_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.zoo.data.DIALOGUES", {"train": (64, 0), "dev": (16, 500_000)})
    config = TrainConfig(epochs=5, batch_tokens=1024, max_length_tokens=1024, warmup_steps=10, average_last=1)

    data = read_data(SYSTEMS["chat-baseline"], tmp_path, tmp_path / "run", config, 500)
    model_config = CausalConfig(
        data.tokenizer.get_vocab_size(), d_model=32, num_heads=2, d_ff=32, layers=1, dropout=0.0
    )
    trainer = Trainer(tmp_path / "run", config, LANGUAGE_MODEL, data, model_config, torch.device("cpu"))
    before = trainer.validate()
    trainer.fit()
    assert trainer.validate() < 0.8 * before
    model, _ = load_model(tmp_path / "run" / "best")
    assert isinstance(model, CausalModel)
