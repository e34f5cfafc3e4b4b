"""Beam search over batches, and greedy decoding of prompts, without a cache.

The results are those of each sequence alone, unless two tokens are almost equally likely: padding
changes the order of sums.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.pretrained import PretrainedDecoder
from sightline.model.architectures.recurrent import Memory
from sightline.model.config import PretrainedConfig
from sightline.model.data.batches import pad

# Maps prefixes, which begin with the start token and have the same length, and the index of the
# source of each, to the logits (prefixes, V) of the next token.
NextLogits = Callable[[Sequence[Sequence[int]], Sequence[int]], Tensor | NDArray[Any]]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread: decoder steps over a few sequences gain nothing from more, and
    become up to a hundred times slower if other processes use the cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Search:
    """Beam search of one source: generated ids and sums of log-probabilities, best first."""

    beams: list[tuple[list[int], float]]
    finished: list[tuple[list[int], float]] = field(default_factory=list)  # with penalised sums

    def step(
        self, totals: Tensor, end_ids: Collection[int], is_last: bool, num_beams: int, length_penalty: float
    ) -> None:
        """Extend the beams by one token. `totals` (beams, V) are sums of log-probabilities of all
        extensions, which all end if `is_last`.
        """
        length, running = len(self.beams[0][0]) + 1, []
        best = totals.flatten().topk(min(max(2, 1 + len(end_ids)) * num_beams, totals.numel()))
        for rank, (total, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            row, token = divmod(index, totals.size(1))
            ids = [*self.beams[row][0], token]
            if token not in end_ids and not is_last:
                running.append((ids, total))
            elif rank < num_beams:
                self.finished.append((ids, total / length**length_penalty))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis[1])[:num_beams]
        self.beams = running[:num_beams]
        is_full = self.beams and len(self.finished) == num_beams
        if is_full and self.beams[0][1] / length**length_penalty <= self.finished[-1][1]:
            self.beams = []


def search(
    next_logits: NextLogits,
    num_sources: int,
    start_id: int,
    end_ids: Collection[int],
    max_new_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    *,
    prefix: Sequence[int] = (),
) -> list[list[int]]:
    """Return the best generated ids of each source, with the end token if it was generated; they
    begin with `prefix`.

    This is the beam search of Hugging Face transformers with `early_stopping` False. A sum of
    log-probabilities is divided by the length to the power of `length_penalty`. One beam is greedy
    decoding.
    """
    searches = [_Search([(list(prefix), 0.0)]) for _ in range(num_sources)]
    for length in range(len(prefix) + 1, max_new_tokens + 1):
        rows = [(number, ids, total) for number, one in enumerate(searches) for ids, total in one.beams]
        if not rows:
            break
        logits = next_logits([[start_id, *ids] for _, ids, _ in rows], [number for number, _, _ in rows])
        totals = torch.as_tensor(logits).log_softmax(dim=-1).double().cpu()  # (rows, V)
        totals += torch.tensor([[total] for _, _, total in rows], dtype=torch.float64)
        alive = [one for one in searches if one.beams]
        for one, part in zip(alive, totals.split_with_sizes([len(one.beams) for one in alive]), strict=True):
            one.step(part, end_ids, length == max_new_tokens, num_beams, length_penalty)
    return [one.finished[0][0] for one in searches]


@torch.inference_mode()
def translate_batch(
    model: TranslationModel,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Return what `search` finds for each source.

    The model is in evaluation mode. Sources end with the end token; they and `max_new_tokens` are
    at most `max_positions` long, and more than the tokens that every target starts with.
    """
    assert not model.training
    config, device = model.config, next(model.parameters()).device
    lengths = torch.tensor([len(source) for source in sources], device=device)
    memory: Any  # its type depends on the model
    memory, _ = model.encode(pad(sources, config.pad_id).to(device), lengths)

    def next_logits(prefixes: Sequence[Sequence[int]], numbers: Sequence[int]) -> Tensor:
        chosen = torch.tensor(numbers, device=device)
        rows: Any = memory[chosen] if isinstance(memory, Tensor) else Memory(*(part[chosen] for part in memory))
        decoded, _, _ = model.decode(torch.tensor(prefixes, device=device), rows, lengths[chosen])
        return model.logits(decoded[:, -1])

    prefix = config.target_prefix if isinstance(config, PretrainedConfig) else ()
    ends = [config.eos_id]
    return search(
        next_logits, len(sources), config.bos_id, ends, max_new_tokens, num_beams, length_penalty, prefix=prefix
    )


@torch.inference_mode()
def continue_greedily(
    model: CausalModel | PretrainedDecoder,
    prompts: Sequence[Sequence[int]],
    end_ids: Collection[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the generated ids of each prompt, with the end token if it was generated.

    The model is in evaluation mode. A sequence also ends when prompt and generated ids have
    `max_positions` tokens.
    """
    assert not model.training
    rows, device = [list(prompt) for prompt in prompts], next(model.parameters()).device
    for _ in range(max_new_tokens):
        is_open = [
            len(row) < model.config.max_positions and (len(row) == len(prompt) or row[-1] not in end_ids)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        read = [row for row, continues in zip(rows, is_open, strict=True) if continues]
        if not read:
            break
        features, _ = model.hidden_states(pad(read, model.config.pad_id).to(device))  # (B, T, M)
        last = torch.tensor([len(row) - 1 for row in read], device=device)
        chosen = model.logits(features[torch.arange(len(read), device=device), last]).argmax(dim=-1)
        for row, token in zip(read, chosen.tolist(), strict=True):
            row.append(token)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
