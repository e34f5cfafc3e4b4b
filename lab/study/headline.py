"""The table of the systems that are compared with each other, and of the shipped one."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import Estimate, estimate, resamples
from lab.study.runs import SHIPPED, rows_of_statistics, runs_by_system, test_set_of
from lab.zoo.systems import COMPARED, PLAN

FIXED = "fixed-context"
ADDITIVE, TARGET = "bahdanau", 37.0  # tokenized, lowercased BLEU that the recurrent model must reach
TEXTS = {
    "fixed-context": "GRU, fixed context vector",
    "bahdanau": "GRU, additive attention",
    "luong-general": "GRU, general attention",
    "post-norm": "Transformer",
    "transformer": "Transformer, as shipped",
}
_PRECISIONS = {"float32": "float32", "bfloat16": "[bfloat16](../../docs/research/training.md#precision)"}
HEAD = (
    "system",
    "what it is",
    "tok-lc BLEU",
    "of each seed",
    f"minus `{FIXED}`",
    "13a BLEU",
    "chrF",
    "epochs",
)


def headline(result: Result) -> Mapping[str, str]:
    """Return the table of the main systems, and notes on how all systems were measured."""
    systems, test_set = runs_by_system(result), test_set_of(result)
    main = [name for name in (*COMPARED, SHIPPED) if name in systems]
    samples = resamples(len(test_set.source_words))
    bleu = {name: estimate(rows_of_statistics(systems[name], test_set), samples) for name in main}
    body = [_cells(name, systems[name], bleu) for name in main]
    all_runs = [run for runs in systems.values() for run in runs]
    notes = [*_differences(bleu), *_deviations([systems[name] for name in main])]
    trainings = [
        *_spread({name: systems[name] for name in main if name in COMPARED}),
        *_target(systems.get(ADDITIVE, ())),
        _budget(all_runs),
        _precision(all_runs),
        _signatures(all_runs),
    ]
    return {"headline": f"{table(HEAD, body)}\n\n{_listed(notes)}", "trainings": _listed(trainings)}


def _listed(notes: Sequence[str]) -> str:
    return "\n".join(f"- {note}" for note in notes if note)


def _cells(name: str, runs: Sequence[Row], bleu: Mapping[str, Estimate]) -> list[str]:
    seeds = [f"{run['tokenised_bleu']['value']:.1f}" for run in runs]
    return [
        f"`{name}`",
        TEXTS[name],
        str(bleu[name]),
        ", ".join(seeds) if PLAN[name].seeds > 1 else "",
        str(bleu[name] - bleu[FIXED]) if FIXED in bleu and name not in (FIXED, SHIPPED) else "",
        *(f"{_mean(runs, metric):.1f}" for metric in ("bleu", "chrf")),
        "/".join(dict.fromkeys(str(run["epochs"]) for run in runs)),
    ]


def _mean(runs: Sequence[Row], metric: str) -> float:
    return statistics.fmean(run[metric]["value"] for run in runs)


def _spread(compared: Mapping[str, Sequence[Row]]) -> list[str]:
    sizes = [run["parameters"] for runs in compared.values() for run in runs]
    if len(compared) < 2:
        return []
    names = ", ".join(f"`{name}`" for name in compared)
    return [
        f"{names} are comparable: the largest has {max(sizes) / min(sizes) - 1:.0%} more parameters than the smallest."
    ]


def _differences(bleu: Mapping[str, Estimate]) -> list[str]:
    """Return a sentence on the differences between systems with attention."""
    if ADDITIVE not in bleu:
        return []
    others = [name for name in COMPARED if name in bleu and name not in (FIXED, ADDITIVE)]
    texts = [f"`{name}` by {bleu[name] - bleu[ADDITIVE]}" for name in others]
    return [f"Better than `{ADDITIVE}`: {', '.join(texts)} tok-lc."] if texts else []


def _target(runs: Sequence[Row]) -> list[str]:
    if not runs:
        return []
    met = "reached" if _mean(runs, "tokenised_bleu") >= TARGET else "**not reached**"
    return [f"The target of the recurrent model with additive attention, {TARGET:g} tok-lc, is {met}."]


def _budget(runs: Sequence[Row]) -> str:
    """Return a sentence on the batch size of an update, and on the systems that differ in it."""
    counts = {run["system"]: run["batch_tokens"] for run in runs}
    usual = statistics.mode(counts.values())
    others = [f"`{name}` {count:,}" for name, count in counts.items() if count != usual]
    text = f"Each update reads at most {usual:,} padded tokens"
    return f"{text}; that of {', '.join(others)}." if others else f"{text}."


def _precision(runs: Sequence[Row]) -> str:
    """Return a sentence that names the runs of the rarer precision."""
    names: dict[str, list[str]] = {"float32": [], "bfloat16": []}
    for run in runs:
        names[run["precision"]].append(f"`{run['system']}-{run['seed']}`")
    rarer, other = sorted(names, key=lambda precision: len(names[precision]))
    if not names[rarer]:
        return f"All runs were trained in {_PRECISIONS[other]}."
    return f"Trained in {_PRECISIONS[rarer]}: {', '.join(names[rarer])}; all others in {_PRECISIONS[other]}."


def _deviations(systems: Sequence[Sequence[Row]]) -> list[str]:
    """Return a sentence on the spread of the seeds of a system."""
    scores = [[run["tokenised_bleu"]["value"] for run in runs] for runs in systems if len(runs) > 1]
    if not scores:
        return []
    stdevs = [statistics.stdev(values) for values in scores]
    return [f"The standard deviation over the seeds of a system is {min(stdevs):.1f} to {max(stdevs):.1f} tok-lc."]


def _signatures(runs: Sequence[Row]) -> str:
    names: dict[str, Callable[[Row], str]] = {
        "tok-lc": lambda run: run["tokenised_bleu"]["signature"],
        "13a": lambda run: run["bleu"]["signature"],
        "chrF": lambda run: run["chrf"]["signature"],
        "decoding": lambda run: f"beam {run['num_beams']}, length penalty {run['length_penalty']:g}",
    }
    signatures = {name: sorted({read(run) for run in runs}) for name, read in names.items()}
    return "; ".join(f"{name} `{'`, `'.join(values)}`" for name, values in signatures.items()) + "."
