"""BLEU by source length, as in figure 2 of Bahdanau et al. (2015)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from lab.bench.record import Result
from lab.bench.report import table
from lab.bench.style import BLACK, BLUE, GREEN, ORANGE, WIDTH, LineLabel, describe, label_lines, save, style
from lab.study.bleu import Counts, Estimate, estimate, resamples
from lab.study.runs import rows_of_statistics, runs_by_system, test_set_of

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


def buckets_of(
    words: NDArray[np.int64], limits: Sequence[tuple[int, int]], runs: Mapping[str, Sequence[Counts]]
) -> list[Bucket]:
    """Return the buckets that have sentences, given the first and last number of words of each, the
    source words of each sentence (N,), and the statistics of the runs of each system. Within a
    bucket, all systems and seeds use the same bootstrap samples.
    """
    buckets = []
    for number, (first, last) in enumerate(limits):
        inside = (first <= words) & (words <= last)
        if inside.any():
            samples = resamples(int(inside.sum()), stream=number)
            bleu = {name: estimate([run[inside] for run in rows], samples) for name, rows in runs.items()}
            name = f"{first} or more" if last == MOST else f"{first} to {last}"
            buckets.append(Bucket(name, int(inside.sum()), bleu))
    return buckets


def caption_buckets(result: Result) -> list[Bucket]:
    test_set, systems = test_set_of(result), runs_by_system(result)
    rows = {name: rows_of_statistics(systems[name], test_set) for name in LINES if name in systems}
    return buckets_of(test_set.source_words, BUCKETS, rows)


def lengths_table(result: Result) -> Mapping[str, str]:
    buckets = caption_buckets(result)
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
    draw_buckets(caption_buckets(result), LINES, folder / "length.svg")


def draw_buckets(buckets: Sequence[Bucket], lines: Mapping[str, tuple[str, str, str]], path: Path) -> None:
    """Draw the BLEU of systems by source length; lines have label, colour and marker by system."""
    names = list(buckets[0].bleu)
    with style():
        figure, axes = pyplot.subplots(figsize=(WIDTH, 3.9))
        labels = []
        for index, name in enumerate(names):
            label, colour, marker = lines[name]
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
        save(figure, path)
