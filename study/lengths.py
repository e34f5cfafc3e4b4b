"""BLEU by source length, with and without attention, as in figure 2 of Bahdanau et al. (2015)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from bench.record import Result
from bench.report import table
from bench.style import BLACK, BLUE, GREEN, ORANGE, WIDTH, LineLabel, describe, label_lines, save, style
from study.bleu import Counts, Estimate, estimate, resamples
from study.runs import rows_of_statistics, runs_by_system, test_set_of

MOST = 10**6
# First and last number of source words in each bucket, chosen so that each has at least fifty
# sentences.
BUCKETS = ((1, 8), (9, 10), (11, 12), (13, 15), (16, 18), (19, MOST))
LINES = {  # by system: label, colour, marker
    "fixed-context": ("fixed context", ORANGE, "s"),
    "bahdanau": ("Bahdanau", BLUE, "o"),
    "post-norm": ("Transformer, same budget", GREEN, "^"),
    "transformer": ("Transformer, shipped", BLACK, "D"),
}
WITHOUT, WITH = "fixed-context", "bahdanau"  # systems without and with attention


@dataclass(frozen=True)
class Bucket:
    """Sentences of similar length, and the BLEU of the systems on them."""

    name: str
    num_sentences: int
    bleu: Mapping[str, Estimate]  # by system


def buckets_of(result: Result) -> list[Bucket]:
    """Return the buckets; within each, all systems and seeds use the same bootstrap samples."""
    test_set, systems = test_set_of(result), runs_by_system(result)
    rows = {name: rows_of_statistics(systems[name], test_set) for name in LINES if name in systems}
    inside = [(first <= test_set.source_words) & (test_set.source_words <= last) for first, last in BUCKETS]
    return [_bucket(number, places, rows) for number, places in enumerate(inside) if places.any()]


def _bucket(number: int, inside: NDArray[np.bool_], rows: Mapping[str, Sequence[Counts]]) -> Bucket:
    samples = resamples(int(inside.sum()), stream=number)
    bleu = {name: estimate([run[inside] for run in runs], samples) for name, runs in rows.items()}
    first, last = BUCKETS[number]
    return Bucket(f"{first} or more" if last == MOST else f"{first} to {last}", int(inside.sum()), bleu)


def lengths_table(result: Result) -> Mapping[str, str]:
    buckets = buckets_of(result)
    names = list(buckets[0].bleu)
    has_both = {WITHOUT, WITH} <= set(names)
    gaps = [bucket.bleu[WITH] - bucket.bleu[WITHOUT] for bucket in buckets] if has_both else []
    head = ["source words", "sentences", *(f"`{name}`" for name in names)]
    body = [
        [bucket.name, str(bucket.num_sentences), *(f"{bucket.bleu[name].value:.1f}" for name in names)]
        for bucket in buckets
    ]
    if not has_both:
        return {"lengths": table(head, body)}
    body = [[*cells, str(gap)] for cells, gap in zip(body, gaps, strict=True)]
    text = table([*head, f"`{WITH}` minus `{WITHOUT}`"], body)
    growth = gaps[-1] - gaps[0]
    return {"lengths": f"{text}\n\nFrom the shortest sentences to the longest, the last column changes by {growth}."}


def draw_lengths(result: Result, folder: Path) -> None:
    """Write `length.svg`."""
    buckets = buckets_of(result)
    names = list(buckets[0].bleu)
    with style():
        figure, axes = pyplot.subplots(figsize=(WIDTH, 3.9))
        labels = []
        for index, name in enumerate(names):
            label, colour, marker = LINES[name]
            estimates = [bucket.bleu[name] for bucket in buckets]
            x = np.arange(len(buckets)) + 0.08 * (index - (len(names) - 1) / 2)
            values = np.array([estimate.value for estimate in estimates])
            ends = np.array([estimate.interval for estimate in estimates]).T  # (2, buckets)
            axes.errorbar(x, values, np.abs(ends - values), color=colour, marker=marker, elinewidth=1)
            labels.append(LineLabel(label, float(x[-1]), float(values[-1]), colour))
        axes.set_xticks(range(len(buckets)), [f"{bucket.name}\n({bucket.num_sentences})" for bucket in buckets])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("words of the English source (number of sentences)")
        axes.set_ylabel("BLEU, tokenised and lowercased")
        note = "Points are means over the training runs of a system. Bars are 95 % bootstrap intervals."
        describe(figure, "Translation quality by the length of the source", note)
        label_lines(axes, labels)
        save(figure, folder / "length.svg")
