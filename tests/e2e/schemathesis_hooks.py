"""False failures of schemathesis, each with its reason; all else that it finds is one."""

import re
from collections.abc import Iterator
from typing import Any

import schemathesis
from schemathesis.core.failures import AcceptedNegativeData, Failure, ServerError
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import CoveragePhaseData, CoverageScenario
from schemathesis.openapi.checks import JsonSchemaError, RejectedPositiveData

INVALID = (400, 422)  # statuses of values that are not allowed: OpenAI's API and the others
TIMEOUT, LENGTH = "X-Request-Timeout-Ms", "Inference-Header-Content-Length"
# Messages of errors for bodies that are valid in JSON Schema.
BEYOND_JSON_SCHEMA = (
    # Rules between fields: the document only has rules of single fields.
    r"cannot be combined with",
    r"cannot be streamed: set",
    r"has no effect (with|in a stream, which has no beam search)",
    r"has an effect only with",
    r"(must be absent|must have no pairs of texts) with candidate_labels",
    r"is required, unless messages are given",
    r"model is required\.",  # its older name can take its place
    r"must be one string for messages",
    r"inputs and targets must be both one string",
    r"Give one of token and analogy",
    r"Give the texts either here, or as bytes after the JSON",
    r"needs (a temperature of 0|logprobs: true|stream: true)",
    r"is empty or contains only whitespace",
    # The tasks and limits depend on the model.
    r"cannot do the task",
    r"No model of this service can do the task",
    r"must have at most \d+ tokens for this model( together with [\w. ]+)?, got",
    r"must be at most \d+, the rows of [\w-]+ \(SIGHTLINE_MAX_ROWS\), got \d+",
    r"cannot score targets, which needs the task generate",
    r"must be at most \d+ for [\w-]+, got \d+",
    r"must be at most \d+ for this model, got \d+",
    r"the dimensions of the model's vectors",
    r"is \d+ tokens of this model, and must be one",
    r"must have ids of the model's tokens, from 0 to \d+, got \d+",
    r"has no attention maps",
    r"must be from -\d+ to \d+ for \w+ attention, got -?\d+",
    r"must not repeat a (layer|head) of \w+ attention",
    r"must be from -\d+ to \d+ for an input of \d+ tokens, got -?\d+",
    r"must not repeat a token: -?\d+ is the same token as an earlier index",
    r"must leave at least one of the \d+ tokens of each input visible",
    r"hidden_source_tokens is not supported by [\w-]+: ",
    r"does not generate text",
    r"supported only by decoder-only models",
    r"supported only by models that translate",
    r"_language must be one of [\w, -]+ for [\w-]+",
    r"is not the name of a prompt of [\w-]+: it has",
    r"has no chat template",
    r"No model translates between these languages",
    r"No model of this service translates",
    r"outputs\[\d+\]\.name must be an output of [\w-]+:",
    r"has no effect on the requested outputs",
    r"inputs must include (text_input|query)",
    # Its default decoding method too.
    r"has no effect without [\w.]+(: true| above 1)",
    r"must be at most [\w.]+ \(1\) without [\w.]+: true, got \d+",
    r"n above 1 needs a temperature above 0, or num_beams",
    r"at least \d+ numbers; a response holds at most",
    r"The attention maps have more than \d+ numbers",
    r"The attention maps of this call are too large",
    r"cannot align words, because it has no cross-attention",
    r"must have no pairs of texts, because [\w-]+ generates text from a single text",
    # A picture shows one map.
    r"A picture shows one (input|kind of attention)",
    r"A picture of this view shows one layer",
    # It compares no two values.
    r"must be at most [\w.]+ \(\d+\), got \d+",
    # The description does not contain the settings.
    r"must have at most \d+ (entries|strings) \(SIGHTLINE_MAX_INPUTS\), got \d+",
    r"A call generates at most \d+ sequences \(SIGHTLINE_MAX_INPUTS\), got \d+",
    r"A call generates at most \d+ sequences from sentences",
    r"must be one string, or a list with a string for each input \(\d+\), got \d+",
    r"must be the number of texts in the data \((at least )?\d+\), got \d+",
    r"max_tokens and max_completion_tokens are the same parameter",
    r"max_tokens is the same parameter as max_new_tokens",
    r"outputs\[\d+\]\.name must not repeat another output",
    r"both lists of the same length",
    r"best_of must equal n",
    # It knows no turns.
    r"System messages come first, then messages of user and assistant",
    r"At least one message must be the user's",
    # It counts no bytes.
    r"must be the number of bytes that are JSON",
    r"must be the number of bytes after the JSON \(\d+\), got \d+",
)


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
