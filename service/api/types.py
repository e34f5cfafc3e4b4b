"""Types of fields that several endpoints have."""

from typing import Annotated, Any

from pydantic import Field

from service.fields import TEXTS_SCHEMA, TextOrTexts, Texts, field_error, object_schema
from service.parameters import AT_MOST_ONE

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
Truncate = Annotated[bool, Field(description="Cut inputs that are too long instead of rejecting them.")]

# JSON Schema of `inputs` and `targets` that are both strings or both lists.
SAME_FORM: list[Any] = [object_schema(inputs={"type": kind}, targets={"type": kind}) for kind in ("string", "array")]

# JSON Schema of generation parameters that give one target for each input, see
# `check_one_sequence`.
ONE_TARGET: dict[str, Any] = {
    "num_return_sequences": AT_MOST_ONE,
    "top_logprobs": {"maximum": 0},
    "return_attention": {"const": False},
    "split_sentences": {"const": False},
}

# JSON Schema of `inputs` that may be blank only with `on_empty: pass`.
BLANKS_ONLY_IF_PASSED: dict[str, Any] = {
    "anyOf": [object_schema("on_empty", on_empty={"const": "pass"}), object_schema(inputs=TEXTS_SCHEMA)]
}


def check_targets(inputs: Texts, targets: Texts) -> None:
    """Check that there is one target for each input.

    Raises:
        PydanticCustomError: `inputs` and `targets` differ in form or length.
    """
    if (inputs.is_list, len(inputs)) != (targets.is_list, len(targets)):
        message = "inputs and targets must be both one string, or both lists of the same length"
        message += f", got {len(inputs)} and {len(targets)}." if inputs.is_list and targets.is_list else "."
        raise field_error("invalid_parameter", message, "targets")
