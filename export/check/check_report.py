"""Report of a verification: differences, their limits, and the error if one is exceeded."""

import math
from collections.abc import Mapping, Sequence

from sightline.export.import_errors import VerificationError

Difference = tuple[float, float]  # the largest difference of an output, and the limit that rounding explains

# Kinds of outputs, with their names in messages.
KINDS = {
    "hidden": "hidden",
    "logits": "logits",
    "labels": "labels",
    "label_logits": "labels",
    "predictions": "predictions of tokens",
    "attention": "attention maps",
    "encoder": "attention maps",
    "encoder_slots": "attention maps",
    "decoder": "attention maps",
    "cross": "attention maps",
    "states": "states",
    "contributions": "contributions",
}
MAPS = tuple(kind for kind, words in KINDS.items() if words == "attention maps")


def raise_if_exceeded(
    compared: str,
    differences: Mapping[str, Sequence[Difference]],
    different: int,
    tolerance: float | None,
    advice: str = "",
) -> None:
    """Raise `VerificationError` if differences exceed their limits, or generations differ.

    Args:
        compared: names of both sides, for the message.
        different: number of generations that differ although rounding does not explain it.
        tolerance: the limit of all differences, in place of their own.
    """
    failures: dict[str, str] = {}
    for kind, pairs in differences.items():
        if tolerance is not None:
            pairs = [(difference, tolerance) for difference, _ in pairs]
        exceeded = [pair for pair in pairs if not pair[0] <= pair[1]]  # so that NaN exceeds
        if exceeded:
            difference, limit = max(exceeded, key=lambda pair: (math.isnan(pair[0]), pair[0]))
            explained = "from the reference; float32 rounding explains at most"
            if tolerance is not None:
                explained = "from the reference, but the limit is"
            failures.setdefault(KINDS[kind], f"{KINDS[kind]} differ by {difference:.3g} {explained} {limit:.3g}")
    if different:
        failures["generations"] = f"{different} greedy generations differ"
    if failures:
        raise VerificationError(f"{compared} differ: {'; '.join(failures.values())}{advice}")
