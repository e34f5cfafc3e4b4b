"""The effect of single changes on BLEU: each system is compared with one trained as long without
the change.
"""

from collections.abc import Mapping

from bench.record import Result
from bench.report import table
from study.bleu import estimate, resamples
from study.runs import rows_of_statistics, runs_by_system, test_set_of

# The baseline of each system, and the change that separates them. Both runs of a pair read the same
# batches.
CONTROLS: Mapping[str, tuple[str, str]] = {
    "bahdanau-short": ("fixed-context-short", "additive attention"),
    "luong-general-short": ("fixed-context-short", "Luong's decoder, general attention"),
    "multiplicative": ("bahdanau-short", "the bilinear score"),
    "reduced-rank": ("bahdanau-short", "the bilinear score of rank 32"),
    "luong-dot": ("luong-general-short", "the score dot"),
    "luong-concat": ("luong-general-short", "the score concat"),
    "luong-location": ("luong-general-short", "the score location"),
    "luong-local-m": ("luong-general-short", "a window that moves with the output position"),
    "luong-local-p": ("luong-general-short", "a window at a predicted position"),
    "hard-reinforce": ("luong-general-short", "one position by REINFORCE, no input feeding"),
    "pre-norm": ("post-norm-short", "normalisation first"),
    "single-head": ("post-norm-short", "one head in the encoder"),
    "single-head-without-weights": ("post-norm-short", "one head and no weights in the encoder"),
    "linformer": ("post-norm-short", "32 projected keys in the encoder"),
}


def changes_table(result: Result) -> Mapping[str, str]:
    """Return the table of all pairs that have been trained; all of them use the same bootstrap
    samples.
    """
    test_set, systems = test_set_of(result), runs_by_system(result)
    samples = resamples(len(test_set.source_words))
    body = []
    for name, (control, change) in CONTROLS.items():
        if name in systems and control in systems:
            ours, theirs = (estimate(rows_of_statistics(systems[one], test_set), samples) for one in (name, control))
            body.append([f"`{name}`", change, f"`{control}`", f"{theirs.value:.1f}", str(ours - theirs)])
    return {"changes": table(["system", "change", "compared with", "its tok-lc BLEU", "difference [95 %]"], body)}
