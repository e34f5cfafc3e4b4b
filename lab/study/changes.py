"""Effect of single changes on BLEU, compared with a system trained as long without the change."""

from collections.abc import Mapping

from lab.bench.record import Result
from lab.bench.report import table
from lab.study.bleu import estimate, resamples
from lab.study.runs import rows_of_statistics, runs_by_system, test_set_of

# The baseline of each system, if it has one, and what is different from the baseline. Both runs of
# a pair read the same batches.
CONTROLS: Mapping[str, tuple[str | None, str]] = {
    "fixed-context-short": (None, "fixed context vector"),
    "bahdanau-short": ("fixed-context-short", "additive attention"),
    "multiplicative": ("bahdanau-short", "bilinear score"),
    "reduced-rank": ("bahdanau-short", "bilinear score of rank 32"),
    "luong-general-short": ("fixed-context-short", "Luong's decoder, bilinear score"),
    "luong-dot": ("luong-general-short", "dot product as score"),
    "luong-concat": ("luong-general-short", "concat (additive) score"),
    "luong-location": ("luong-general-short", "score without the content"),
    "luong-local-m": ("luong-general-short", "window that moves with the output"),
    "luong-local-p": ("luong-general-short", "window at a predicted position"),
    "hard-reinforce": ("luong-general-short", "hard, REINFORCE, no input feeding"),
    "hard-marginal": (None, "hard, exact sum, 6 epochs"),
    "post-norm-short": (None, "Transformer"),
    "pre-norm": ("post-norm-short", "normalization first"),
    "single-head": ("post-norm-short", "one head in the encoder"),
    "single-head-without-weights": ("post-norm-short", "the same without weights"),
    "linformer": ("post-norm-short", "32 projected keys in the encoder"),
}

# Differences that the table lacks, most of them between systems that differ in more than one thing.
FURTHER = (
    ("luong-concat", "luong-local-p"),
    ("hard-reinforce", "fixed-context-short"),
    ("hard-marginal", "hard-reinforce"),
    ("hard-marginal", "luong-general-short"),
)


def changes_table(result: Result) -> Mapping[str, str]:
    """Return the table of all systems with short training, on the same bootstrap samples."""
    test_set, systems = test_set_of(result), runs_by_system(result)
    samples = resamples(len(test_set.source_words))
    estimates = {
        name: estimate(rows_of_statistics(systems[name], test_set), samples) for name in CONTROLS if name in systems
    }
    body = []
    for name, bleu in estimates.items():
        control, text = CONTROLS[name]
        compared = [f"`{control}`", str(bleu - estimates[control])] if control in estimates else ["", ""]
        body.append([f"`{name}`", text, str(bleu), *compared])
    text = table(["system", "what it is", "tok-lc BLEU", "compared with", "difference"], body)
    further = [
        f"`{name}` minus `{other}` {estimates[name] - estimates[other]}"
        for name, other in FURTHER
        if {name, other} <= set(estimates)
    ]
    return {"changes": f"{text}\n\nFurther differences: {', '.join(further)}." if further else text}
