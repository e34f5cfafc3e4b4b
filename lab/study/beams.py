"""Compare greedy decoding with beam search, by the number of beams and the length penalty."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.record import Result
from lab.bench.report import table
from lab.study.bleu import Statistics, estimate, format_ends, interval, resamples, statistics_of
from lab.study.runs import TARGET, sources_and_references
from lab.study.served import Served, serve
from lab.zoo.systems import MULTI30K
from sightline.model.evaluation.bleu import moses_lines

NAME = "beams"
WIDTHS = (2, 4, 8)
PENALTIES = (0.0, 0.5, 1.0, 1.5)
Setting = tuple[int, float | None]  # number of beams and length penalty; greedy decoding has none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {MULTI30K.name}")
    parser.add_argument("data", type=Path, help="folder with the test set")
    parser.add_argument("--sentences", type=int, help="number of test sentences, from the first one (default: all)")


def measure(arguments: argparse.Namespace) -> Result:
    """Translate the test set with every setting over the service's HTTP API."""
    sources, references = sources_and_references(arguments.data, arguments.sentences)
    settings: list[Setting] = [(1, None), *((width, penalty) for width in WIDTHS for penalty in PENALTIES)]
    with serve(arguments.bundles) as served:
        outputs = {setting: _translate(served, setting, sources) for setting in settings}
    rows = {
        setting: statistics_of(moses_lines([output["text"] for output in of_setting], TARGET), references)
        for setting, of_setting in outputs.items()
    }
    return Result(rows=[_row(setting, rows, outputs) for setting in settings])


def _translate(served: Served, setting: Setting, sources: Sequence[str]) -> list[Any]:
    width, penalty = setting
    beams = {} if penalty is None else {"num_beams": width, "length_penalty": penalty}
    parameters = {"split_sentences": False, **beams}
    print(f"{width} beams, length penalty {penalty}", flush=True)
    return served.outputs("/v1/generate", {"model": MULTI30K.name, "parameters": parameters}, sources)


def _row(
    setting: Setting, statistics: Mapping[Setting, Statistics], outputs: Mapping[Setting, Sequence[Any]]
) -> dict[str, Any]:
    """Return the scores of a setting and its differences from greedy decoding, the first one."""
    greedy, ours, samples = next(iter(outputs)), statistics[setting], resamples(len(outputs[setting]))
    bleu = {compared: estimate([statistics[compared].rows], samples) for compared in (setting, greedy)}
    lengths, references = ours.output_lengths, ours.reference_lengths
    ratios = (samples @ lengths) / (samples @ references)
    pairs = list(zip(outputs[setting], outputs[greedy], strict=True))
    # The score of a beam is divided by a power of its length; the sum over its tokens is not.
    gains = [_log_probability(output) - _log_probability(other) for output, other in pairs]
    return {
        "num_beams": setting[0],
        "length_penalty": setting[1],
        "sentences": len(pairs),
        "bleu": bleu[setting].ends,
        "gain": (bleu[setting] - bleu[greedy]).ends,
        "length_ratio": [round(float(value), 4) for value in (lengths.sum() / references.sum(), *interval(ratios))],
        "same_text": sum(output["text"] == other["text"] for output, other in pairs),
        "less_likely": sum(gain < -1e-4 for gain in gains),
        "nats_gained": round(float(np.mean(gains)), 4),
    }


def _log_probability(output: Mapping[str, Any]) -> float:
    return float(sum(token["logprob"] for token in output["tokens"]))


def tables(result: Result) -> Mapping[str, str]:
    """Return a table with a row for each length penalty, and sentences on greedy decoding."""
    by_setting = {(row["num_beams"], row["length_penalty"]): row for row in result.rows}
    greedy = by_setting.pop((1, None))
    widths, penalties = (list(dict.fromkeys(key[place] for key in by_setting)) for place in (0, 1))
    head = [
        "length penalty",
        *(f"BLEU gained, {width} beams" for width in widths),
        *(f"length, {width} beams" for width in widths),
    ]
    body = [
        [
            f"{penalty:g}",
            *(format_ends(by_setting[width, penalty]["gain"]) for width in widths),
            *(f"{by_setting[width, penalty]['length_ratio'][0]:.2f}" for width in widths),
        ]
        for penalty in penalties
    ]
    gains = [f"{by_setting[width, penalties[0]]['nats_gained']:.2f}" for width in widths]
    text = (
        f"Greedy decoding: {format_ends(greedy['bleu'])} tok-lc BLEU, length {greedy['length_ratio'][0]:.2f} of "
        f"the reference's. With penalty {penalties[0]:g}, the log-probability of translations with beams is higher by "
        f"{', '.join(gains)} nats on average."
    )
    return {NAME: f"{table(head, body)}\n\n{text}"}
