"""Measure how gradients of recurrent models fall along the way from a target to a source token.

Without attention, the gradient of the loss of a target token reaches a source token through the
encoder's last states, one of each direction. The number of encoder steps is the distance of the
source token from the nearer end of the source. Where the last states are only the initial state of
the decoder, the decoder's steps come on top. With attention, each target token is connected with
each annotation directly.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from lab.bench.record import Result, Row, rounded
from lab.bench.report import table
from lab.study.bleu import interval, resamples, with_interval
from lab.study.runs import SOURCE, TARGET
from lab.zoo.data import corpus_folder
from lab.zoo.systems import SMALL
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.checkpoint import load_model
from sightline.model.data.batches import make_batch
from sightline.model.data.text import read_lines
from sightline.model.data.tokenizer_training import encode_lines
from sightline.model.evaluation.defaults import TEST_SPLIT

NAME = "vanishing"
SYSTEMS = ("small-initial-state", "small-fixed-context", "small-bahdanau")
SENTENCES = 200
SEED = 1  # of the run, and of the weights before the training
# First value of each group, and the end of the last.
DISTANCES = (0, 2, 4, 6, 10**6)  # of a source token from the nearer end of the source
STEPS = (0, 4, 8, 12, 10**6)  # of the decoder before the target token

Norms = NDArray[np.float64]  # (T, S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help=f"folder of run folders, SYSTEM-{SEED}, of {', '.join(SYSTEMS)}")
    parser.add_argument("data", type=Path, help="folder with the subfolder multi30k")


def measure(arguments: argparse.Namespace) -> Result:
    """Differentiate the loss of each target token of the test set before and after the training."""
    folder = corpus_folder(SMALL, arguments.data, arguments.runs)
    lines = [read_lines(folder / f"{TEST_SPLIT}.{language}")[:SENTENCES] for language in (SOURCE, TARGET)]
    rows: list[Row] = []
    for system in SYSTEMS:
        model, tokenizer = load_model(arguments.runs / f"{system}-{SEED}" / "averaged")
        assert isinstance(model, RecurrentModel), f"{system} must be a recurrent model"
        pairs = list(zip(*(encode_lines(tokenizer, texts) for texts in lines), strict=True))
        torch.manual_seed(SEED)
        for moment, recurrent in (("before", RecurrentModel(model.config).eval()), ("after", model)):
            norms = [gradients(recurrent, *pair) for pair in pairs]
            groups = {"distance": [by_distance(each) for each in norms], "step": [by_step(each) for each in norms]}
            rows += [
                {"system": system, "training": moment, "by": by, "ratios": ratios(np.array(sums))}
                for by, sums in groups.items()
            ]
    return Result(rows=rows)


def gradients(model: RecurrentModel, source: Sequence[int], target: Sequence[int]) -> Norms:
    """Return the norms (T, S) of the gradients of target tokens' losses for source embeddings."""
    batch = make_batch([(source, target)], model.config)
    embedded: list[Tensor] = []
    hook = model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    memory, _ = model.encode(batch.source, batch.source_lengths)
    hook.remove()
    features, *_ = model.decode(batch.target_input, memory, batch.source_lengths)
    losses = cross_entropy(model.logits(features[0]), batch.target_output[0], reduction="none")
    derivatives = [torch.autograd.grad(loss, embedded[0], retain_graph=True)[0][0] for loss in losses]
    norms: Norms = torch.stack(derivatives).norm(dim=-1).double().numpy()
    return norms


def by_distance(norms: Norms) -> Norms:
    """Return the number of values and their sum in each group of distances, (groups, 2)."""
    places = np.arange(norms.shape[1])
    return _grouped(norms, np.broadcast_to(np.minimum(places, places[::-1]), norms.shape), DISTANCES)


def by_step(norms: Norms) -> Norms:
    """Return the number of values and their sum in each group of decoder steps, (groups, 2)."""
    return _grouped(norms, np.broadcast_to(np.arange(len(norms))[:, None], norms.shape), STEPS)


def _grouped(norms: Norms, values: NDArray[np.int64], ends: Sequence[int]) -> Norms:
    groups = [norms[(values >= first) & (values < end)] for first, end in pairwise(ends)]
    return np.array([[group.size, group.sum()] for group in groups])


def ratios(groups: Norms) -> list[dict[str, Any]]:
    """Return the mean of each group divided by that of the first, with its 95 % interval over
    resampled sentences, from numbers of values and sums of each sentence (N, groups, 2).
    """
    samples = resamples(len(groups))

    def ratio(totals: Norms) -> Norms:
        means = totals[..., 1] / totals[..., 0]
        result: Norms = means / means[..., :1]
        return result

    values, drawn = ratio(groups.sum(axis=0)), ratio(np.tensordot(samples, groups, axes=1))
    return [
        {"value": rounded(value, 3), "interval": [rounded(end, 3) for end in interval(drawn[:, index])]}
        for index, value in enumerate(values)
    ]


def tables(result: Result) -> Mapping[str, str]:
    return {f"vanishing-{by}": _table(result, by, ends) for by, ends in (("distance", DISTANCES), ("step", STEPS))}


def _table(result: Result, by: str, ends: Sequence[int]) -> str:
    names = [f"{first} to {end - 1}" for first, end in pairwise(ends[:-1])] + [f"{ends[-2]} or more"]
    body = [
        [f"`{row['system'].partition('-')[2]}`", row["training"], *map(_cell, row["ratios"][1:])]
        for row in result.rows
        if row["by"] == by
    ]
    return table(["system", "training", *(f"{by} {name}" for name in names[1:])], body)


def _cell(ratio: Mapping[str, Any]) -> str:
    return with_interval(ratio["value"], ratio["interval"], digits=3)
