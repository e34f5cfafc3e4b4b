"""POST /v1/classify: a score of each label for texts or for pairs of texts.

In zero-shot classification, a request names the labels. A model for natural language inference
reads each input and, as the second text of a pair, a hypothesis with one of the labels. The score
of a label follows from the logit of entailment (Yin et al. 2019, "Benchmarking Zero-shot Text
Classification"). The calculation is that of Transformers' `ZeroShotClassificationPipeline`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from sightline.base.bundle import is_entailment
from sightline.base.text.tokenizer import Offsets
from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import INPUTS_OR_PAIRS, ModelName, Truncate
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import MAX_INPUTS, RequestBody, Text, Texts, TextsOrPairs, field_error
from sightline.service.engine.request import Encoded
from sightline.service.inference.labels import apply_function, function_of
from sightline.service.inference.maps import AttentionMap, MapWriter
from sightline.service.inference.results import Outputs
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.parameters import ReturnAttention

DEFAULT_TEMPLATE = "This example is {}."  # of a hypothesis; {} stands for a label
CandidateLabels = Annotated[
    list[Text],
    Field(
        min_length=1,
        max_length=MAX_INPUTS,
        description="Labels of a zero-shot classification, which the request chooses; SIGHTLINE_MAX_INPUTS limits the "
        "number of inputs times the number of labels.",
    ),
]
TEMPLATE = r"[^{}]*\{\}[^{}]*"


def _check_template(value: str) -> str:
    if not re.fullmatch(TEMPLATE, value):
        message = "It must contain {} exactly once, where the label goes, and no other braces."
        raise field_error("invalid_parameter", message)
    return value


HypothesisTemplate = Annotated[
    str,
    Field(
        max_length=4096,
        description='Hypothesis about an input, in which {} stands for a label; by default "This example is {}.".',
        json_schema_extra={"pattern": f"^{TEMPLATE}$"},
    ),
    AfterValidator(_check_template),
]
MultiLabel = Annotated[
    bool,
    Field(description="Give each label a probability of its own; false, the default: the scores of an input sum to 1."),
]


class ClassifyBody(RequestBody):
    model: ModelName = None
    inputs: Annotated[TextsOrPairs, Field(description=INPUTS_OR_PAIRS)]
    return_attention: ReturnAttention = Field(
        default=None, description="The encoder's attention maps of each input; true returns all of them."
    )
    truncate: Truncate = False
    candidate_labels: CandidateLabels | None = None
    hypothesis_template: HypothesisTemplate | None = None
    multi_label: MultiLabel | None = None

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        """Check that fields with an effect on other outputs are absent."""
        if self.candidate_labels is None:
            for name in ("hypothesis_template", "multi_label"):
                if getattr(self, name) is not None:
                    raise field_error("unsupported_parameter", "It has an effect only with candidate_labels.", name)
        elif self.return_attention:
            message = (
                "It must be absent with candidate_labels; classify pairs, [text, hypothesis], to see their attention."
            )
            raise field_error("unsupported_parameter", message, "return_attention")
        elif self.inputs.second_texts is not None:
            message = "It must have no pairs of texts with candidate_labels, which make pairs of their own."
            raise field_error("invalid_parameter", message, "inputs")
        return self

    EXAMPLES = (
        {"model": "sst2-sentiment", "inputs": ["a stirring , funny film .", "a long string of cliches ."]},
        {
            "model": "sst2-sentiment",
            "inputs": "a stirring , funny film .",
            "return_attention": {"layers": [0], "reduce": "mean"},
        },
        {"model": "nli", "inputs": "The train was late again.", "candidate_labels": ["travel", "sports", "cooking"]},
        {"model": "sst2-sentiment", "inputs": [["a stirring , funny film .", "a long string of cliches ."]]},
    )


@dataclass(frozen=True)
class LabelScore:
    """A label and its score."""

    label: Annotated[str, Field(description="Name of the label.")]
    score: Annotated[float, Field(description="Probability of the label; with `label_kind` classes, they sum to 1.")]


@dataclass(frozen=True)
class ClassifyOutput:
    """The labels of one input."""

    index: Annotated[int, Field(description="Index of the input.")]
    labels: Annotated[list[LabelScore], Field(description="All labels, the highest score first.")]
    source_tokens: Annotated[list[str] | None, Field(description="Only with return_attention.")]
    source_offsets: Annotated[Offsets | None, Field(description="Only with return_attention.")]
    maps: Annotated[list[AttentionMap] | None, Field(description="Only with return_attention.")]


@dataclass(frozen=True)
class ClassifyResult(Outputs):
    """The labels of a call's inputs."""

    outputs: Annotated[list[ClassifyOutput], Field(description="One output for each input, in order.")]


async def classify_texts(call: Call, body: ClassifyBody) -> ClassifyResult:
    """Return the probability of each label for each input, the most probable label first.

    The scores of an input sum to 1 if the labels exclude each other (`label_kind` classes);
    otherwise each label has a probability of its own (`label_kind` independent).

    With `candidate_labels`, the labels are those of the request (zero-shot classification). The
    model must be one for natural language inference, which has a label of entailment.
    """
    if body.candidate_labels is None:
        return await classify(call, await call.model(body.model, "classify"), body)
    model = await call.model(body.model, "classify", "zero-shot")
    return await _classify_zero_shot(call, model, body, body.candidate_labels)


async def classify(call: Call, model: ServedModel, body: ClassifyBody, *, raw_scores: bool = False) -> ClassifyResult:
    """Return the score of each of the model's labels; `raw_scores` are logits, not probabilities.

    The labels of a reranker, which has one, can be scored too.
    """
    function = function_of(model.manifest.label_kind, raw_scores)
    if model.manifest.pair_template is not None and None in (body.inputs.second_texts or (None,)):
        message = f"It must have pairs of texts for {model.name}: [query, document]."
        raise ApiError("unsupported_parameter", message, field="inputs")
    maps = MapWriter(call, model, body.return_attention) if body.return_attention else None
    admitted, sources = await read_sources(call, model, body.inputs, truncate=body.truncate)
    if maps:
        await maps.read_offsets(call, body.inputs, sources)

    def convert(index: int, result: Encoded) -> ClassifyOutput:
        assert result.label_scores is not None
        labels = rank_scores(model.manifest.labels, apply_function(result.label_scores, function))
        if maps is None:
            return ClassifyOutput(index, labels, None, None, None)
        attention = maps.write_encoded(index, result)
        return ClassifyOutput(index, labels, attention.source_tokens, attention.source_offsets, attention.maps)

    return ClassifyResult(model.name, *await encode_sources(admitted, sources, convert, return_labels=True, maps=maps))


async def _classify_zero_shot(
    call: Call, model: ServedModel, body: ClassifyBody, labels: Sequence[str]
) -> ClassifyResult:
    """Return the score of each label of the request. Hypotheses are never truncated."""
    manifest, inputs, count = model.manifest, body.inputs, len(labels)
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
    template = body.hypothesis_template or DEFAULT_TEMPLATE
    hypotheses = tuple(template.replace("{}", label) for label in labels)
    pairs = Texts(
        tuple(text for text in inputs.texts for _ in labels),
        inputs.is_list,
        tuple(index for index in range(len(inputs)) for _ in labels),
        hypotheses * len(inputs),
    )
    admitted, sources = await read_sources(
        call, model, pairs, truncate=body.truncate, cut="first", partner="the hypothesis"
    )

    def convert(index: int, result: Encoded) -> NDArray[np.float32]:
        assert result.label_scores is not None
        return result.label_scores

    logits, usage, timings = await encode_sources(admitted, sources, convert, return_logits=True)
    outputs = []
    for index in range(len(inputs)):
        of_input = np.stack(logits[index * count : (index + 1) * count])
        scores = scores_of_labels(of_input, entailment, bool(body.multi_label))
        outputs.append(ClassifyOutput(index, rank_scores(labels, scores), None, None, None))
    return ClassifyResult(model.name, outputs, usage, timings)


def rank_scores(labels: Sequence[str], scores: NDArray[np.float64]) -> list[LabelScore]:
    """Return labels with their scores, the highest first; ties keep the order of `labels`."""
    return [LabelScore(labels[index], float(scores[index])) for index in np.argsort(-scores, kind="stable")]


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


ENDPOINTS = (Endpoint("POST", "/v1/classify", classify_texts, ClassifyResult, errors=OUTPUT_ERRORS),)
