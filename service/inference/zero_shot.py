"""Zero-shot classification: scores of labels that a request names.

A model for natural language inference reads each input and, as the second text of a pair, a
hypothesis with one of the labels. The score of a label follows from the logit of entailment (Yin et
al. 2019, "Benchmarking Zero-shot Text Classification"). The calculation is that of Transformers'
`ZeroShotClassificationPipeline`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import is_entailment
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Call
from sightline.service.inference.classify import ClassifyOutput, ClassifyResult, apply_function, rank_scores
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources

DEFAULT_TEMPLATE = "This example is {}."


async def classify_zero_shot(
    call: Call,
    model: ServedModel,
    inputs: Texts,
    labels: Sequence[str],
    *,
    template: str,
    multi_label: bool,
    truncate: bool,
) -> ClassifyResult:
    """Return the score of each label for each input.

    In `template`, the text of the hypothesis, {} stands for a label. With `multi_label`, each label
    has a probability of its own, instead of scores that sum to 1. Hypotheses are never truncated.
    """
    manifest, count = model.manifest, len(labels)
    entailment = manifest.entailment
    if entailment is None:
        if any(map(is_entailment, manifest.labels)):
            reason = f"the bundle of {model.name} lacks the logits of its labels: export its checkpoint again"
        else:
            reason = f"the labels of {model.name} are {', '.join(manifest.labels)}"
        message = (
            "{candidate_labels} needs a model for natural language inference, one of whose labels begins with "
            f"entail; {reason}."
        )
        raise ApiError("unsupported_parameter", message, field="candidate_labels")
    limit = call.service.settings.max_inputs
    if len(inputs) * count > limit:
        message = (
            f"A call has at most {limit} pairs of an input and a label (SIGHTLINE_MAX_INPUTS), got {len(inputs)} "
            f"inputs and {count} labels."
        )
        raise ApiError("invalid_parameter", message, field="candidate_labels")
    hypotheses = tuple(template.replace("{}", label) for label in labels)
    pairs = Texts(
        tuple(text for text in inputs.texts for _ in labels),
        inputs.is_list,
        tuple(index for index in range(len(inputs)) for _ in labels),
        hypotheses * len(inputs),
    )
    sources = await read_sources(call, model, pairs, truncate=truncate, cuts_first=True, partner="the hypothesis")

    def convert(index: int, result: Encoded) -> NDArray[np.float32]:
        assert result.label_scores is not None
        return result.label_scores

    logits, usage, timings = await encode_sources(call, model, sources, convert, return_logits=True)
    outputs = [
        ClassifyOutput(
            index,
            rank_scores(
                labels,
                scores_of_labels(np.stack(logits[index * count : (index + 1) * count]), entailment, multi_label),
            ),
            None,
            None,
            None,
        )
        for index in range(len(inputs))
    ]
    return ClassifyResult(model.name, outputs, usage, timings)


def scores_of_labels(logits: NDArray[np.float32], entailment: int, multi_label: bool) -> NDArray[np.float64]:
    """Return the scores (N,) of labels from the logits (N, C) of their hypotheses.

    `entailment` is its column. Contradiction is the first column, or the last one if entailment is
    the first. With `multi_label`, and always for a single label, entailment is compared with
    contradiction for each label.
    """
    if multi_label or len(logits) == 1:
        contradiction = -1 if entailment == 0 else 0
        return apply_function(logits[:, [contradiction, entailment]], "softmax")[:, 1]
    return apply_function(logits[:, entailment], "softmax")
