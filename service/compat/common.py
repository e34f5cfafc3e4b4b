"""Parts that several compatibility APIs share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, Field

from sightline.base.bundle import Manifest, Task
from sightline.service.api.endpoint import ErrorFormat
from sightline.service.api_errors import ApiError, ErrorCode, ErrorType, complete_message
from sightline.service.body_fields import MAX_ID
from sightline.service.inference.call import Call
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.results import OutputToken
from sightline.service.inference.service import DefaultTask, ServedModel, models_by_task
from sightline.service.parameters import FILTERS, NEUTRAL, GenerateParameters

T = TypeVar("T")

# Names that clients send to servers with a single model, when the API requires a name: "tgi" and
# "text-embeddings-inference" in the OpenAI examples of TGI and TEI, "dummy" by `huggingface_hub`'s
# InferenceClient, and "model" by clients that have no setting for it.
PLACEHOLDER_MODELS = frozenset({"tgi", "text-embeddings-inference", "dummy", "model"})
# A field that has no effect, whatever its value.
Ignored = Annotated[T | None, Field(description="Accepted for compatibility; ignored.")]
Dimensions = Annotated[
    int | None,
    Field(
        ge=1,
        le=MAX_ID,
        description="Length of the vectors: that of the model, or a smaller one that it was trained for (Matryoshka).",
    ),
]
# Finish reasons of OpenAI and Ollama, by the service's own.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def named_model(call: Call, name: str | None) -> str | None:
    """Return the name of a model in a body; None for a placeholder."""
    return None if name in PLACEHOLDER_MODELS and name not in call.service.models else name


async def model_of_query(call: Call, name: str | None, task: Task | None = None) -> ServedModel:
    """Return the model that the query `?model=` names, or the default model."""
    return await call.model(manifest_of_query(call, name, task).name, task)


def manifest_of_query(
    call: Call, name: str | None, task: Task | None = None, default_for: DefaultTask | None = None
) -> Manifest:
    """Return the manifest of the model that the query `?model=` names, or of the default model."""
    try:
        return call.service.find_manifest(name, task, default_for)
    except ApiError as error:
        able = models_by_task(call.service.manifests).get(default_for or task)
        if error.code not in ("unsupported_task", "invalid_parameter") or not able:
            raise
        advice = "Choose a model in the URL: ?model=NAME."
        raise ApiError(error.code, f"{error.message({})} {advice}", field="model") from None


class SentenceError(BaseModel):
    error: str = Field(description="Explanation, after the path of the value at fault.")


SENTENCE_ERRORS = ErrorFormat(
    lambda error, message, param, request_id: orjson.dumps({"error": complete_message(message, param)}), SentenceError
)


def typed_errors(
    types: Mapping[ErrorType, str], types_of_codes: Mapping[ErrorCode, str], response: type[BaseModel]
) -> ErrorFormat:
    """Return the format of errors with a message and a type in the terms of the API."""

    def write(error: ApiError, message: str, param: str | None, request_id: str) -> bytes:
        error_type = types_of_codes.get(error.code) or types[error.kind.type]
        return orjson.dumps({"error": complete_message(message, param), "error_type": error_type})

    return ErrorFormat(write, response)


def parameters_by_temperature(
    model: ServedModel, requested: Mapping[str, Any], temperature: float | None, *, stream: bool
) -> GenerateParameters:
    """Return the parameters of an API in which the temperature decides whether tokens are sampled.

    A temperature above 0 samples, and 0 does not; it may also be in `requested`. Without one the
    model's default applies, unless parameters of the request need samples: these are then drawn as
    with OpenAI's own default, a temperature of 1, or with the model's.
    """
    if temperature is not None:
        requested = {**requested, "do_sample": temperature > 0}
    parameters = parameters_for(model, requested, stream=stream, is_lenient=True)
    if parameters.do_sample or temperature is not None or requested.get("num_beams", 1) > 1:
        return parameters
    if parameters.num_return_sequences > parameters.num_beams or needs_samples(requested, FILTERS):
        return parameters_for(model, {**requested, "do_sample": True}, stream=stream, is_lenient=True)
    return parameters


def needs_samples(requested: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return True if a request sets one of these sampling parameters to a value with an effect."""
    return any(name in requested and requested[name] != getattr(NEUTRAL, name) for name in names)


def check_continues_prompt(model: ServedModel, path: str) -> None:
    """Reject a request to return the prompt if the model does not continue its prompt."""
    if not model.manifest.is_decoder_only:
        message = f"It is supported only by decoder-only models, and {model.name} is an encoder-decoder; leave it out."
        raise ApiError("unsupported_parameter", message, path=path)


def blank_before(model: ServedModel, token: OutputToken, target_prefix: str = "") -> str:
    """Return the space between a prompt and its continuation.

    Generated texts lack it if the tokenizer strips leading spaces. The text starts with
    `target_prefix`, or with `token` if there is no prefix.
    """
    if not (model.manifest.is_decoder_only and model.target_tokenizer.strips_leading_space):
        return ""
    return " " if target_prefix or token.text.startswith(" ") else ""
