"""Chat task: generated dialogues, and the cross-entropy of their last answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from model.architectures.causal import CausalModel
from model.config import ModelConfig
from model.data.batches import bucket, pad
from model.data.dialogues import draw_examples
from model.data.tokenizer import encode_lines, prompt_tokenizer
from model.training.config import TrainConfig
from model.training.loss import projected_cross_entropy
from model.training.task import Task

# Number of dialogues of a split, and the offset that is added to the seed of the run to generate
# them.
SPLITS = {"train": (40_000, 0), "val": (1_000, 500_000)}
TOKENIZER_DIALOGUES = 5_000


@dataclass(frozen=True)
class Example:
    """Token ids of a dialogue, ending with the end token.

    The first `num_prompt` tokens are not part of the loss.
    """

    ids: list[int]
    num_prompt: int


@dataclass(frozen=True)
class ChatBatch:
    """Padded dialogues without their last token (B, T), and their targets (B, T).

    A target is the next token, or the padding id if the token is not part of the loss.
    """

    ids: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "ChatBatch":
        return ChatBatch(self.ids.to(device), self.targets.to(device))


def _draw(
    split: str, config: TrainConfig, has_ghost_attention: bool, count: int | None = None
) -> list[tuple[str, str]]:
    most, offset = SPLITS[split]
    return draw_examples(config.seed + offset, count or most, has_ghost_attention)


def _texts(folder: Path, config: TrainConfig, *, has_ghost_attention: bool) -> list[str]:
    drawn = _draw("train", config, has_ghost_attention, TOKENIZER_DIALOGUES)
    return [f"{prompt} {answer}" for prompt, answer in drawn]


def _examples(
    folder: Path,
    split: str,
    tokenizer: Tokenizer,
    config: TrainConfig,
    model_config: ModelConfig,
    *,
    has_ghost_attention: bool,
) -> list[Example]:
    prompts, answers = zip(*_draw(split, config, has_ghost_attention), strict=True)
    prompt_ids = encode_lines(prompt_tokenizer(tokenizer), prompts)
    pairs = zip(prompt_ids, encode_lines(tokenizer, answers), strict=True)
    return [Example([*prompt, *answer], len(prompt)) for prompt, answer in pairs]


def _length(example: Example) -> int:
    return len(example.ids)


def make_batch(examples: Sequence[Example], pad_id: int) -> ChatBatch:
    targets = [[pad_id] * (one.num_prompt - 1) + one.ids[one.num_prompt :] for one in examples]
    return ChatBatch(pad([one.ids[:-1] for one in examples], pad_id), pad(targets, pad_id))


def _batches(examples: Sequence[Example], batch_tokens: int, seed: int, config: ModelConfig) -> Iterator[ChatBatch]:
    for indices in bucket([(len(one.ids),) for one in examples], batch_tokens, seed):
        yield make_batch([examples[i] for i in indices], config.pad_id)


def _count(batch: ChatBatch, pad_id: int) -> int:
    return int((batch.targets != pad_id).sum())


def answer_loss(model: CausalModel, batch: ChatBatch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross-entropies over the tokens of the last answers, in nats."""
    features, _ = model.hidden_states(batch.ids)
    return projected_cross_entropy(
        features.flatten(0, 1), model.embedding.weight, batch.targets.flatten(), smoothing, model.config.pad_id
    )


def chat_task(has_ghost_attention: bool) -> Task[Example, ChatBatch, CausalModel]:
    """Return the chat task.

    It ignores the data folder of a run, because the seed determines the dialogues.
    """
    return Task(
        validation_split="val",
        read_texts=partial(_texts, has_ghost_attention=has_ghost_attention),
        read_examples=partial(_examples, has_ghost_attention=has_ghost_attention),
        length=_length,
        batches=_batches,
        count=_count,
        training_loss=answer_loss,
        validation_loss=answer_loss,
    )
