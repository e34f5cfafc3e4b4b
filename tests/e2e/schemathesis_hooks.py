"""What schemathesis takes for a failure and is none, each with its reason; all else that it finds is one."""

import re
from collections.abc import Iterator
from typing import Any

import schemathesis
from schemathesis.core.failures import AcceptedNegativeData, Failure, ServerError
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import CoveragePhaseData, CoverageScenario
from schemathesis.openapi.checks import RejectedPositiveData

TIMEOUT, LENGTH = "X-Request-Timeout-Ms", "Inference-Header-Content-Length"
# Refusals of bodies that JSON Schema cannot call wrong, by what their messages say.
BEYOND_JSON_SCHEMA = (
    # What a model can do is its own.
    r"cannot do the task",
    r"\d+ tokens; the model takes at most",
    r"must be at most \d+ for [\w-]+, got \d+",
    r"A token id of this model is below",
    r"vectors have \d+ dimensions",
    r"It is \d+ tokens of this model, and must be one",
    r"has no attention maps",
    r"attention has only 0 to \d+",
    r"generates no text",
    r"does not go on with its prompt",
    r"has no chat template",
    r"No model translates between these languages",
    r"outputs\[\d+\]\.name: The model has ",
    r"Parameter has no effect on the requested outputs",
    r"at least \d+ numbers; a response holds at most",
    # It compares no two values.
    r"must be at most [\w.]+ \(\d+\), got \d+",
    r"A call generates at most \d+ sequences, got \d+",
    r"There are \d+ prefixes for \d+ inputs",
    r"It has \d+ rows, and the data (more|fewer) texts",
    r"max_tokens and max_completion_tokens are one thing",
    r"outputs\[\d+\]\.name: Duplicate output name",
    r"both lists of the same length",
    r"best_of can only be n",
    r"These are \d+ texts; a call makes at most",
    # It knows no turns.
    r"The system comes first, then user and assistant in turn",
    r"The last message must be the user's",
    # It counts no bytes.
    r"It must be the number of bytes that are JSON",
    r"\d+ bytes come after the JSON",
)


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Failure, case: schemathesis.Case[Any], response: schemathesis.Response
) -> bool:
    """Whether it is one."""
    match failure:
        case ServerError():
            return not is_short_of_time(case, response)
        case RejectedPositiveData():
            return not (
                is_beyond_json_schema(response)
                or is_integer_by_value(case, response)
                or is_of_another_task(case, response)
                or begins_with_no_json(case, response)
                or is_always_refused(case, response)
            )
        case AcceptedNegativeData():
            return not is_unknown_header(case)
    return True


def is_short_of_time(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """A call that took as long as its client lets it gets 504, as declared."""
    return response.status_code == 504 and response.elapsed * 1000 >= float(case.headers.get(TIMEOUT, "inf"))


def is_beyond_json_schema(response: schemathesis.Response) -> bool:
    return response.status_code == 422 and any(re.search(words, response.text) for words in BEYOND_JSON_SCHEMA)


def is_integer_by_value(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """To JSON Schema 3.0 is an integer, to this API it is not."""
    has_one = any(isinstance(value, float) and value.is_integer() for value in leaves(case.body))
    is_refused = re.search(r"should be a valid integer|must be an integer", response.text) is not None
    return response.status_code == 422 and is_refused and has_one


def is_of_another_task(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """POST / takes the body of the route that the model's task chooses; with those routes each is tried as well."""
    return response.status_code == 422 and case.operation.label == "POST /"


def is_always_refused(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """An operation that declares no 200 has nothing but refusals."""
    return response.status_code == 422 and "200" not in case.operation.definition.raw["responses"]


def begins_with_no_json(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """Of a binary body, or one that a header cuts, JSON Schema cannot say that it begins with JSON."""
    has_bytes = case.media_type == "application/octet-stream" or LENGTH in case.headers
    return response.status_code == 400 and has_bytes


def is_unknown_header(case: schemathesis.Case[Any]) -> bool:
    """A header that nobody knows is no fault of a request: HTTP has them ignored."""
    phase = case.meta.phase.data if case.meta else None
    return (
        isinstance(phase, CoveragePhaseData)
        and phase.scenario is CoverageScenario.OBJECT_UNEXPECTED_PROPERTIES
        and phase.parameter_location is ParameterLocation.HEADER
    )


def leaves(value: Any) -> Iterator[Any]:
    """The values of a JSON document that hold no others."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value
