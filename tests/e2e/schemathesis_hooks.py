"""False failures of schemathesis, each with its reason; all else that it finds is one."""

import re
from collections.abc import Iterator
from typing import Any

import schemathesis
from schemathesis.core.failures import AcceptedNegativeData, Failure, ServerError
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import CoveragePhaseData, CoverageScenario
from schemathesis.openapi.checks import JsonSchemaError, RejectedPositiveData

from tests.support.tables import read_table

INVALID = (400, 422)  # statuses of values that are not allowed: OpenAI's API and the others
TIMEOUT, LENGTH = "X-Request-Timeout-Ms", "Inference-Header-Content-Length"
# Messages of errors for bodies that are valid in JSON Schema.
BEYOND_JSON_SCHEMA: list[str] = read_table(__file__)


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Failure, case: schemathesis.Case[Any], response: schemathesis.Response
) -> bool:
    """Return True if a failure is one."""
    match failure:
        case ServerError():
            return not is_short_of_time(case, response)
        case RejectedPositiveData():
            return not (
                is_beyond_json_schema(response)
                or is_integer_by_value(case, response)
                or is_of_another_task(case, response)
                or begins_with_no_json(case, response)
                or is_always_rejected(case, response)
            )
        case AcceptedNegativeData():
            return not (is_unknown_header(case) or response.status_code == 413)  # too long to be read
        case JsonSchemaError():
            return not failure.title.startswith("SSE event")  # OpenAPI 3.1 describes the text of the whole stream
    return True


def is_short_of_time(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """A call that took as long as its client lets it gets 504, as declared."""
    return response.status_code == 504 and response.elapsed * 1000 >= float(case.headers.get(TIMEOUT, "inf"))


def is_beyond_json_schema(response: schemathesis.Response) -> bool:
    return response.status_code in INVALID and any(re.search(words, response.text) for words in BEYOND_JSON_SCHEMA)


def is_integer_by_value(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """Return True if 3.0 was sent: an integer in JSON Schema, but not in this API."""
    has_one = any(isinstance(value, float) and value.is_integer() for value in leaves(case.body))
    is_rejected = (
        re.search(r"must be a valid integer|must be an integer|must be a list of token ids", response.text) is not None
    )
    return response.status_code in INVALID and is_rejected and has_one


def is_of_another_task(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """Return True for a body that POST / rejects because the model has another task."""
    return response.status_code in INVALID and case.operation.label == "POST /"


def is_always_rejected(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """Return True for operations that declare no 200 and return only errors."""
    return response.status_code in INVALID and "200" not in case.operation.definition.raw["responses"]


def begins_with_no_json(case: schemathesis.Case[Any], response: schemathesis.Response) -> bool:
    """Return True for a binary body or one that a header cuts.

    JSON Schema cannot express that such a body begins with a JSON object.
    """
    has_bytes = case.media_type == "application/octet-stream" or LENGTH in case.headers
    return has_bytes and (response.status_code == 400 or "The body must be a JSON object." in response.text)


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
