"""Decoding of many sequences at once, without a cache.

The results are those of `sightline.model.decoding.reference` for each sequence alone, unless two
tokens are almost equally likely: padding changes the order of sums.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.pretrained import PretrainedDecoder
from sightline.model.architectures.recurrent import Memory
from sightline.model.config import PretrainedConfig
from sightline.model.data.batches import pad


@dataclass
class _Search:
    """Beam search of one source: generated ids and sums of log-probabilities, best first."""

    beams: list[tuple[list[int], float]] = field(default_factory=lambda: [([], 0.0)])
    finished: list[tuple[list[int], float]] = field(default_factory=list)  # with penalised sums

    def step(self, totals: Tensor, end_id: int, is_last: bool, num_beams: int, length_penalty: float) -> None:
        """Extend the beams by one token, as `reference.beam` does with `early_stopping` False.
        `totals` (beams, V) are sums of log-probabilities of all extensions, which all end if
        `is_last`.
        """
        length, running = len(self.beams[0][0]) + 1, []
        best = totals.flatten().topk(min(2 * num_beams, totals.numel()))
        for rank, (total, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            row, token = divmod(index, totals.size(1))
            ids = [*self.beams[row][0], token]
            if token != end_id and not is_last:
                running.append((ids, total))
            elif rank < num_beams:
                self.finished.append((ids, total / length**length_penalty))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis[1])[:num_beams]
        self.beams = running[:num_beams]
        is_full = self.beams and len(self.finished) == num_beams
        if is_full and self.beams[0][1] / length**length_penalty <= self.finished[-1][1]:
            self.beams = []


@torch.inference_mode()
def translate_batch(
    model: TranslationModel,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Return the generated ids of each source, with the end token if it was generated.

    The model is in evaluation mode. Sources end with the end token; they and `max_new_tokens` are
    at most `max_positions` long, and more than the tokens that every target starts with. A sum of
    log-probabilities is divided by the length to the power of `length_penalty`.
    """
    assert not model.training
    config, device = model.config, next(model.parameters()).device
    prefix = list(config.target_prefix) if isinstance(config, PretrainedConfig) else []
    lengths = torch.tensor([len(source) for source in sources], device=device)
    memory: Any  # its type depends on the model
    memory, _ = model.encode(pad(sources, config.pad_id).to(device), lengths)
    searches = [_Search([(prefix, 0.0)]) for _ in sources]
    for length in range(len(prefix) + 1, max_new_tokens + 1):
        rows = [(number, ids, total) for number, search in enumerate(searches) for ids, total in search.beams]
        if not rows:
            break
        chosen = torch.tensor([number for number, _, _ in rows], device=device)
        prefixes = torch.tensor([[config.bos_id, *ids] for _, ids, _ in rows], device=device)
        decoded, _, _ = model.decode(prefixes, _rows(memory, chosen), lengths[chosen])
        totals = model.logits(decoded[:, -1]).log_softmax(dim=-1).double().cpu()  # (rows, V)
        totals += torch.tensor([[total] for _, _, total in rows], dtype=torch.float64)
        alive = [search for search in searches if search.beams]
        for search, part in zip(alive, totals.split_with_sizes([len(search.beams) for search in alive]), strict=True):
            search.step(part, config.eos_id, length == max_new_tokens, num_beams, length_penalty)
    return [search.finished[0][0] for search in searches]


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


def _rows(memory: Tensor | Memory, indices: Tensor) -> Any:
    """Return some rows of the encoder's output of a batch."""
    return memory[indices] if isinstance(memory, Tensor) else Memory(*(part[indices] for part in memory))
