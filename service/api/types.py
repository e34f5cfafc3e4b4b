"""Types of fields that several endpoints have."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from sightline.service.body_fields import MAX_INPUTS, Text, TextOrTexts, Texts, field_error

INPUTS = "A text, or a list of texts; SIGHTLINE_MAX_INPUTS can limit their number further."
INPUTS_OR_PAIRS = f"{INPUTS} A pair of texts in the list is a list of two, `[text, pair]`."
Inputs = Annotated[TextOrTexts, Field(description=INPUTS)]
ModelName = Annotated[
    str | None, Field(max_length=128, description="Name of the model; the default model for the task if absent.")
]
PromptName = Annotated[
    str | None,
    Field(
        max_length=128,
        description="Name of the model's prompt that is put before each input; the model's default prompt if absent.",
    ),
]
FailedModels = Annotated[
    list[str], Field(description="Folders of the bundles that failed to load; the log has the reasons.")
]
Truncate = Annotated[bool, Field(description="Cut inputs that are too long instead of rejecting them.")]

CandidateLabels = Annotated[
    list[Text],
    Field(
        min_length=1,
        max_length=MAX_INPUTS,
        description="Labels of a zero-shot classification, which the request chooses; SIGHTLINE_MAX_INPUTS limits the "
        "number of inputs times the number of labels.",
    ),
]
MAX_TEMPLATE_CHARACTERS = 4096


def _check_template(value: str) -> str:
    if not re.fullmatch(TEMPLATE, value):
        message = "It must contain {} exactly once, where the label goes, and no other braces."
        raise field_error("invalid_parameter", message)
    return value


TEMPLATE = r"[^{}]*\{\}[^{}]*"
HypothesisTemplate = Annotated[
    str,
    Field(
        max_length=MAX_TEMPLATE_CHARACTERS,
        description='Hypothesis about an input, in which {} stands for a label; by default "This example is {}.".',
        json_schema_extra={"pattern": f"^{TEMPLATE}$"},
    ),
    AfterValidator(_check_template),
]
MultiLabel = Annotated[
    bool,
    Field(description="Give each label a probability of its own; false, the default: the scores of an input sum to 1."),
]

# JSON Schema of generation parameters that give one target for each input, see
# `check_one_sequence`.
ONE_TARGET: dict[str, Any] = {
    "num_return_sequences": {"maximum": 1},
    "top_logprobs": {"maximum": 0},
    "return_attention": {"const": False},
    "split_sentences": {"const": False},
}


def check_targets(inputs: Texts, targets: Texts) -> None:
    """Check that there is one target for each input."""
    if (inputs.is_list, len(inputs)) != (targets.is_list, len(targets)):
        message = "inputs and targets must be both one string, or both lists of the same length"
        message += f", got {len(inputs)} and {len(targets)}." if inputs.is_list and targets.is_list else "."
        raise field_error("invalid_parameter", message, "targets")
