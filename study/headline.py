"""The table of all systems that translate."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.record import Result, Row
from bench.report import table
from model.systems import COMPARED, PLAN
from study.bleu import interval, resampled_bleu, resamples
from study.runs import TRANSLATING, TestSet, rows_of_statistics, runs_by_system, test_set_of

ADDITIVE, TARGET = "bahdanau", 37.0  # tokenized, lowercased BLEU that the recurrent model must reach
PUBLISHED = {
    "bahdanau": "39.00 (Caglayan et al. 2017)",
    "post-norm": "41.02 (Wu et al. 2021)",
    "transformer": "41.02 (Wu et al. 2021)",
}
HEAD = ("system", "tok-lc BLEU", "13a BLEU", "chrF", "parameters", "epochs", "updates", "seeds", "published tok-lc")


def headline(result: Result) -> Mapping[str, str]:
    """Return the table of all systems with notes on how it was measured."""
    systems, test_set = runs_by_system(result), test_set_of(result)
    compared = [name for name in COMPARED if name in systems]
    order = [*compared, *(name for name in systems if name not in compared)]
    all_runs = [run for name in order for run in systems[name]]
    body = [_cells(name, systems[name]) for name in order]
    notes = [
        *_spread({name: systems[name] for name in compared}),
        *_target(systems.get(ADDITIVE, ())),
        _uncertainty([runs for name, runs in systems.items() if name in compared] or list(systems.values()), test_set),
        _missing(systems),
        _budget(all_runs),
        _precision(all_runs),
        _signatures(all_runs),
    ]
    return {"headline": "\n".join([table(HEAD, body), "", *(f"- {note}" for note in notes if note)])}


def _cells(name: str, runs: Sequence[Row]) -> list[str]:
    planned = PLAN[name].seeds
    return [
        f"`{name}`",
        _mean_and_each(runs, "tokenised_bleu"),
        *(f"{_mean(runs, metric):.2f}" for metric in ("bleu", "chrf")),
        _span(runs, "parameters"),
        _span(runs, "epochs"),
        _span(runs, "updates"),
        f"{len(runs)} of {planned}" if len(runs) < planned else str(len(runs)),
        PUBLISHED.get(name, ""),
    ]


def _mean(runs: Sequence[Row], metric: str) -> float:
    return statistics.fmean(run[metric]["value"] for run in runs)


def _mean_and_each(runs: Sequence[Row], metric: str) -> str:
    values = [f"{run[metric]['value']:.2f}" for run in runs]
    return values[0] if len(runs) == 1 else f"{_mean(runs, metric):.2f} ({', '.join(values)})"


def _span(runs: Sequence[Row], fact: str) -> str:
    """Format the only value of a fact, or its smallest and largest value."""
    values = sorted({run[fact] for run in runs})
    return " to ".join(f"{value:,}" for value in dict.fromkeys((values[0], values[-1])))


def _spread(compared: Mapping[str, Sequence[Row]]) -> list[str]:
    sizes = [run["parameters"] for runs in compared.values() for run in runs]
    if len(compared) < 2:
        return []
    names = ", ".join(f"`{name}`" for name in compared)
    return [
        f"{names} are comparable: the largest has {max(sizes) / min(sizes) - 1:.0%} more parameters than the smallest."
    ]


def _target(runs: Sequence[Row]) -> list[str]:
    if not runs:
        return []
    met = "reached" if _mean(runs, "tokenised_bleu") >= TARGET else "**not reached**"
    return [f"The target of the recurrent model with additive attention, {TARGET:g} tok-lc, is {met}."]


def _uncertainty(systems: Sequence[Sequence[Row]], test_set: TestSet) -> str:
    """Return a sentence on the uncertainty that comes from the choice of test sentences."""
    samples = resamples(len(test_set.source_words))
    halves = []
    for runs in systems:
        low, high = interval(resampled_bleu(rows_of_statistics(runs, test_set), samples))
        halves.append((high - low) / 2)
    least, greatest = (f"{value:.1f}" for value in (min(halves), max(halves)))
    width = least if least == greatest else f"{least} to {greatest}"
    return f"The 95 % interval of a tok-lc figure is about ±{width} (bootstrap over test sentences)."


def _budget(runs: Sequence[Row]) -> str:
    """Return a sentence on the batch size of an update, and on the systems that differ from the
    usual one.
    """
    counts = {run["system"]: run["batch_tokens"] for run in runs}
    usual = statistics.mode(counts.values())
    others = [f"`{name}` {count:,}" for name, count in counts.items() if count != usual]
    text = f"Each update reads at most {usual:,} padded tokens"
    return f"{text}; that of {', '.join(others)}." if others else f"{text}."


def _precision(runs: Sequence[Row]) -> str:
    rounded = [f"`{run['system']}-{run['seed']}`" for run in runs if run["precision"] == "bfloat16"]
    if not rounded:
        return ""
    return f"Trained with [products in bfloat16](training.md#precision): {', '.join(rounded)}; all others in float32."


def _missing(systems: Mapping[str, Sequence[Row]]) -> str:
    missing = [f"`{name}`" for name in TRANSLATING if name not in systems]
    return f"Not finished: {', '.join(missing)}." if missing else ""


def _signatures(runs: Sequence[Row]) -> str:
    names: dict[str, Callable[[Row], str]] = {
        "tok-lc": lambda run: run["tokenised_bleu"]["signature"],
        "13a": lambda run: run["bleu"]["signature"],
        "chrF": lambda run: run["chrf"]["signature"],
        "decoding": lambda run: f"beam {run['num_beams']}, length penalty {run['length_penalty']:g}",
    }
    found = {name: sorted({read(run) for run in runs}) for name, read in names.items()}
    return "; ".join(f"{name} `{'`, `'.join(values)}`" for name, values in found.items()) + "."
