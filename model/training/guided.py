"""Training of a head of the cross-attention to align words (guided alignment, Garg et al. 2019).

The links come from a file, or from the model itself after a first phase of the training, by the
prediction difference (Li et al. 2019, section 3.2).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import TransformerConfig
from sightline.model.data.batches import make_batch
from sightline.model.data.examples import DiskExamples, Example, Examples, ExampleWriter
from sightline.model.training.trainer import Trainer
from sightline.model.training.translation import guided_batch

# Updates before a model finds links: the smaller of a number of warm-ups and a share of the epochs.
WARMUPS, SHARE = 4, 0.4
MAX_ALIGNED = 5_000  # examples of which a model finds the links
LOGITS_TOKENS = 2_048  # whose logits are in memory at once
FOLDER = "alignment-after-"  # of the links that the model found after a number of updates


class GuidedTrainer(Trainer):
    """Trainer whose batches have links, which are the examples `links` (source and target tokens),
    or those that the model finds. Checkpoints from then on state that a head aligns words.
    """

    model_config: TransformerConfig

    def __init__(self, *arguments: Any, links: Examples | None, **options: Any) -> None:
        self._links = links
        super().__init__(*arguments, **options)

    @cached_property
    def _first_phase(self) -> int:
        if self._links is not None:  # of a file
            return 0
        if earlier := [path.name for path in self.folder.path.glob(f"{FOLDER}*[0-9]")]:
            return int(earlier[0].removeprefix(FOLDER))  # also if the run has other epochs now
        updates = math.ceil(len(self._buckets(self.train_examples, 1)) / self.config.accumulate)
        return min(WARMUPS * self.config.warmup_steps, int(SHARE * updates * self.config.epochs))

    @property
    def _is_guided(self) -> bool:
        return self.progress.step > self._first_phase

    def make_batch(self, examples: Examples, indices: NDArray[np.int64]) -> Any:
        batch = super().make_batch(examples, indices)
        if examples is not self.train_examples or not self._is_guided:
            return batch
        if self._links is None:
            self._links = self._own_links(self.folder.path / f"{FOLDER}{self._first_phase}")
        return guided_batch(batch, [self._links[int(index)] for index in indices])

    def observe(self, epoch: int) -> None:
        if self._is_guided:
            self.model_config = replace(self.model_config, guided_alignment=True)

    def fit(self) -> None:
        super().fit()
        if not self._is_guided:
            self._report.line("note: the training ended before a head was trained to align words; train longer")

    def _own_links(self, folder: Path) -> Examples:
        """Return the links that the model finds; a resumed run has those of its folder."""
        if not folder.exists():
            self._report.line("aligning the words of train, to guide a head of the cross-attention")
            links = find_links(self.model, self.model_config, self.train_examples)
            new = folder.with_suffix(".new")
            new.mkdir(exist_ok=True)
            with ExampleWriter(new, "links") as writer:
                writer.add(links)
            new.rename(folder)
        return DiskExamples(folder, "links")


@torch.inference_mode()
def find_links(model: Transformer, config: TransformerConfig, examples: Examples) -> list[Example]:
    """Return the linked source and target tokens of each example; of many examples, only those at
    equal distances have links. The mode of the model stays.

    The prediction difference of a source and a target token is the log-probability that the target
    token loses without the source token. A target token is linked to the source token with the
    largest geometric mean of two shares: of the differences of each of both.
    """
    is_training, links = model.training, list[Example]([((), ())] * len(examples))
    model.eval()
    chosen = range(0, len(examples), math.ceil(len(examples) / MAX_ALIGNED))
    for index in tqdm(chosen, desc="aligning", unit="pair", disable=None):
        source, target = examples[index]
        rows = [source, *([*source[:removed], *source[removed + 1 :]] for removed in range(len(source) - 1))]
        size = math.ceil(LOGITS_TOKENS / len(target))
        parts = [_log_probs(model, config, rows[start : start + size], target) for start in range(0, len(rows), size)]
        scores = torch.cat(parts)
        losses = (scores[:1] - scores[1:]).clamp_min(0.0)[:, :-1]  # (S - 1, T - 1), without the end tokens
        shares = losses * losses / losses.sum(dim=1, keepdim=True).clamp_min(1e-9)
        if shares.numel():
            best, sources = shares.max(dim=0)
            (targets,) = best.nonzero(as_tuple=True)
            links[index] = sources[targets].tolist(), targets.tolist()
    model.train(is_training)
    return links


def _log_probs(
    model: Transformer, config: TransformerConfig, sources: Sequence[Sequence[int]], target: Sequence[int]
) -> Tensor:
    """Return the log-probabilities of the tokens of a target given each source, (sources, T)."""
    batch = make_batch([(source, target) for source in sources], config).to(model.embedding.weight.device)
    logits: Tensor = model(batch.source, batch.source_lengths, batch.target_input)
    return logits.float().log_softmax(dim=-1).gather(2, batch.target_output.unsqueeze(2)).squeeze(2)
