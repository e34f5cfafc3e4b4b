"""BLEU from the statistics of each sentence, with bootstrap confidence intervals.

Shapes use N sentences, O = 4 orders of n-grams, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

ORDERS = 4
SEED = 1
RESAMPLES = 1000

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Statistics:
    """Sufficient statistics of BLEU (Papineni et al. 2002, section 2.3), one row per sentence."""

    matches: Counts  # (N, O), n-grams that also occur in the reference
    output_lengths: Counts  # (N,), in tokens
    reference_lengths: Counts  # (N,), in tokens

    @property
    def rows(self) -> Counts:
        """(N, 2 O + 2): matches, n-grams, and both lengths. The sum over sentences gives the
        statistics of a corpus.
        """
        possible = np.maximum(self.output_lengths[:, None] - np.arange(ORDERS), 0)  # (N, O)
        return np.column_stack((self.matches, possible, self.output_lengths, self.reference_lengths))


def statistics_of(outputs: Sequence[str], references: Sequence[str]) -> Statistics:
    """Return sacreBLEU's statistics of tokenized outputs."""
    metric = BLEU(tokenize="none", force=True, effective_order=True)  # as sacreBLEU requires for single sentences
    scores = [metric.sentence_score(output, [reference]) for output, reference in zip(outputs, references, strict=True)]
    return Statistics(
        matches=np.array([score.counts for score in scores], dtype=np.int64),
        output_lengths=np.array([score.sys_len for score in scores], dtype=np.int64),
        reference_lengths=np.array([score.ref_len for score in scores], dtype=np.int64),
    )


def corpus_bleu(total: Counts) -> float:
    """Return the score in percent that sacreBLEU computes from summed rows (2 O + 2,)."""
    values = [int(value) for value in total]
    matches, possible, (output_length, reference_length) = values[:ORDERS], values[ORDERS:-2], values[-2:]
    return BLEU.compute_bleu(matches, possible, output_length, reference_length, smooth_method="exp").score


def resamples(num_sentences: int, stream: int = 0) -> Counts:
    """Draw bootstrap samples with replacement (Koehn 2004), the same ones in each call: how often
    each sentence is in each sample, (R, N). Samples of different streams are independent.
    """
    shares = np.full(num_sentences, 1 / num_sentences)
    return np.random.default_rng((SEED, stream)).multinomial(num_sentences, shares, size=RESAMPLES)


def resampled_bleu(rows: Sequence[Counts], samples: Counts) -> NDArray[np.float64]:
    """Return the mean score (R,) of outputs of the same sentences, each with rows (N, 2 O + 2), in
    each of the `resamples` (R, N).
    """
    scores = np.array([[corpus_bleu(total) for total in samples @ of_output] for of_output in rows])  # (outputs, R)
    means: NDArray[np.float64] = scores.mean(axis=0)
    return means


def mean_bleu(rows: Sequence[Counts]) -> float:
    """Return the mean score of several outputs."""
    return float(np.mean([corpus_bleu(of_output.sum(axis=0)) for of_output in rows]))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the ends of the middle 95 % of resampled values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def mean_with_interval(pairs: NDArray[np.float64]) -> dict[str, Any] | None:
    """Return `count`, `value` and `interval` of the mean over the parts of sentences, with its
    interval over resampled sentences, for a result; None if there are no parts. `pairs` (N, 2) are
    the number of parts (tokens, rows, words) of each sentence and the sum of the quantity over
    them.
    """
    count, total = pairs.sum(axis=0)
    if count == 0:
        return None
    drawn = resamples(len(pairs)) @ pairs  # (R, 2)
    drawn = drawn[drawn[:, 0] > 0]
    low, high = interval(drawn[:, 1] / drawn[:, 0])
    return {"count": int(count), "value": round(total / count, 4), "interval": [round(low, 4), round(high, 4)]}


@dataclass(frozen=True)
class Estimate:
    """The mean score of several outputs, with its values in all bootstrap samples."""

    value: float
    resampled: NDArray[np.float64]  # (R,)

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.resampled)

    @property
    def ends(self) -> list[float]:
        """The value and the ends of its interval, rounded for a result."""
        return [round(value, 3) for value in (self.value, *self.interval)]

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value - other.value, self.resampled - other.resampled)

    def __str__(self) -> str:
        return with_interval(self.value, self.interval)


def estimate(rows: Sequence[Counts], samples: Counts) -> Estimate:
    """Estimate the mean score of several outputs of the same sentences; see `resampled_bleu`."""
    return Estimate(mean_bleu(rows), resampled_bleu(rows, samples))


def with_interval(value: float, limits: Sequence[float], digits: int = 1) -> str:
    """Format a value with its interval: its longer side after "±", or both ends in brackets if the
    sides differ by more than a fifth and one unit of the last digit, or if only the longer side
    would contain 0.
    """
    low, high = limits
    longer, shorter = max(value - low, high - value), min(value - low, high - value)
    center, half = round(value, digits), round(longer, digits)
    crosses_zero = (center < half and low >= 0) or (center > -half and high <= 0)
    if crosses_zero or longer - shorter > max(0.2 * longer, 1.001 * 10**-digits):
        value, low, high = (round(number, digits) + 0.0 for number in (value, low, high))  # no -0.0
        return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{center + 0.0:.{digits}f} ± {half:.{digits}f}"


def format_ends(ends: Sequence[float]) -> str:
    """Format a value and the ends of its interval, see `Estimate.ends`."""
    return with_interval(ends[0], ends[1:])


def percent(value: float, limits: Sequence[float], digits: int = 0) -> str:
    """Format a share and its interval in percent, without the sign."""
    return with_interval(100 * value, [100 * limit for limit in limits], digits)
