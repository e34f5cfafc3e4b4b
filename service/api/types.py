"""Types of fields that several endpoints have."""

from typing import Annotated, Any

from pydantic import Field

from sightline.service.body_fields import TextOrTexts, Texts, field_error

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

# JSON Schema of generation parameters that give one target for each input, see
# `check_one_sequence`. Some endpoints return its coverage, too.
ONE_COVERED_TARGET: dict[str, Any] = {
    "num_return_sequences": {"maximum": 1},
    "top_logprobs": {"maximum": 0},
    "return_attention": {"const": False},
    "split_sentences": {"const": False},
}
ONE_TARGET = ONE_COVERED_TARGET | {key: {"const": False} for key in ("return_coverage", "repair", "confirm_omissions")}


def check_targets(inputs: Texts, targets: Texts) -> None:
    """Check that there is one target for each input."""
    if (inputs.is_list, len(inputs)) != (targets.is_list, len(targets)):
        message = "inputs and targets must be both one string, or both lists of the same length"
        message += f", got {len(inputs)} and {len(targets)}." if inputs.is_list and targets.is_list else "."
        raise field_error("invalid_parameter", message, "targets")
