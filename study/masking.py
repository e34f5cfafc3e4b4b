"""Measure how a translation changes if the token with the largest attention weight is removed, or
another one.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from bench.record import Result
from model.architectures.factory import TranslationModel
from model.checkpoint import load_checkpoint
from model.data.text import read_lines
from model.data.tokenizer import decode_ids, encode_lines
from model.decoding.reference import one_thread
from model.evaluation.defaults import TEST_SPLIT
from study.bleu import interval, resamples
from study.leave_one_out import REMOVALS, Explained, FloatArray, check, explain, kendall_tau
from study.masking_report import masking_tables
from study.runs import SOURCE
from study.sentence import SENTENCE
from study.sentence_picture import token_labels
from study.step import no_pictures

NAME = "masking"
# For each model: the number of target tokens, and the sum of each quantity over them.
Sums = Mapping[str, tuple[float, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder with the test set")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders written by training, each named after its run")
    parser.add_argument("--sentences", type=int, default=300, help="number of test sentences, from the first one")
    parser.add_argument("--example", default=SENTENCE, help="sentence of the example table")


def measure(arguments: argparse.Namespace) -> Result:
    """Explain the first sentences of the test set and the example.

    Raises:
        FileNotFoundError, ValueError: A run cannot be read, or its attention does not allow
            removals.
    """
    if arguments.sentences < 1:
        raise ValueError(f"--sentences must be at least 1, got {arguments.sentences}")
    sentences = read_lines(arguments.data / f"{TEST_SPLIT}.{SOURCE}")[: arguments.sentences]
    rows: list[Mapping[str, Any]] = []
    for run in arguments.runs:
        model, tokenizer = load_checkpoint(run / "averaged")
        check(model)
        with one_thread():
            explained = _explain_all(model, tokenizer, sentences)
            rows += [{"kind": "figures", "model": run.name, **figure} for figure in figures(explained)]
            rows.append({"kind": "example", "model": run.name, **_example(model, tokenizer, arguments.example)})
    return Result(rows=rows)


def _explain_all(model: TranslationModel, tokenizer: Tokenizer, sentences: Sequence[str]) -> list[Explained]:
    sources = encode_lines(tokenizer, sentences)
    return [explain(model, source) for source in tqdm(sources, unit="sentence", leave=False, disable=None)]


def figures(explained: Sequence[Explained]) -> list[dict[str, Any]]:
    """Return means over target tokens, with intervals from resampling the sentences."""
    found = []
    for removal in (None, *REMOVALS):
        sums = [_attention(one) if removal is None else _removal(one, removal) for one in explained]
        for name in sums[0]:
            pairs = np.array([one[name] for one in sums])  # (N, 2)
            count, total = pairs.sum(axis=0)
            if count == 0:
                continue
            drawn = resamples(len(pairs)) @ pairs  # (R, 2)
            drawn = drawn[drawn[:, 0] > 0]
            low, high = interval(drawn[:, 1] / drawn[:, 0])
            found.append(
                {
                    "removal": removal,
                    "figure": name,
                    "tokens": int(count),
                    "value": round(total / count, 4),
                    "interval": [round(low, 4), round(high, 4)],
                }
            )
    return found


def _attention(one: Explained) -> Sums:
    """Sum the statistics of the attention weights; the last source token is the end token."""
    size = len(one.target)
    return {
        "largest on end": (size, float(_is_end(one).sum())),
        "weight of end": (size, float(one.weights[:, -1].sum())),
        "end unlike the token before": (size, float(np.abs(one.weights[:, -1] - one.weights[:, -2]).sum())),
        "largest weight": (size, float(one.weights.max(axis=1).sum())),
    }


def _is_end(one: Explained) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return (T,): True if the end token has the largest weight."""
    is_end: np.ndarray[Any, np.dtype[np.bool_]] = one.weights.argmax(axis=1) == one.weights.shape[1] - 1
    return is_end


def _removal(one: Explained, removal: str) -> Sums:
    effect, size = one.effects[removal], len(one.target)
    changes = (effect.predictions != np.array(one.target)[:, None]).astype(np.float64)  # (T, S)
    rows, most, least = np.arange(size), one.weights.argmax(axis=1), one.weights.argmin(axis=1)
    is_end = _is_end(one)
    sums: dict[str, tuple[float, float]] = {}
    for name, matrix in (("changed", changes), ("drop", effect.drops)):
        chosen = matrix[rows, most]
        others = (matrix.sum(axis=1) - chosen) / (matrix.shape[1] - 1)  # mean effect of a random other token
        sums[f"{name}, most attended"] = size, float(chosen.sum())
        sums[f"{name}, most attended, a word"] = float((~is_end).sum()), float(chosen[~is_end].sum())
        sums[f"{name}, most attended, end"] = float(is_end.sum()), float(chosen[is_end].sum())
        sums[f"{name}, random other"] = size, float(others.sum())
        sums[f"{name}, least attended"] = size, float(matrix[rows, least].sum())
    sums["tau"] = size, float(kendall_tau(one.weights, effect.drops).sum())
    sums["most attended is most important"] = size, float((effect.drops.argmax(axis=1) == most).sum())
    return sums


def _example(model: TranslationModel, tokenizer: Tokenizer, sentence: str) -> dict[str, Any]:
    (source,) = encode_lines(tokenizer, [sentence])
    one = explain(model, source)
    return {
        "sentence": sentence,
        "text": decode_ids(tokenizer, one.target),
        "tokens": [_token(one, index, source, tokenizer) for index in range(len(one.target))],
    }


def _token(one: Explained, index: int, source: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the token that one output token attends to most, and those that it depends on most."""

    def name(id_: int) -> str:
        (label,) = token_labels([tokenizer.decode([id_], skip_special_tokens=False)])
        return label

    most = int(one.weights[index].argmax())
    facts: dict[str, Any] = {
        "token": name(one.target[index]),
        "probability": _probability(one.log_probs[index]),
        "most_attended": name(source[most]),
        "weight": round(float(one.weights[index, most]), 3),
    }
    for removal, effect in one.effects.items():
        important = int(effect.drops[index].argmax())
        facts[removal] = {
            "probability": _probability(one.log_probs[index] - effect.drops[index, most]),
            "prediction": name(int(effect.predictions[index, most])),
            "most_important": name(source[important]),
            "its_probability": _probability(one.log_probs[index] - effect.drops[index, important]),
        }
    return facts


def _probability(log_prob: FloatArray | float) -> float:
    return round(float(np.exp(log_prob)), 3)


tables = masking_tables
draw = no_pictures
