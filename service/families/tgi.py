"""Text Generation Inference's POST /generate and /generate_stream; what it shares with TEI is in `huggingface`."""

from typing import Any

from fastapi import FastAPI
from fastapi.sse import EventSourceResponse
from starlette.responses import Response

from service.bodies import check_body
from service.calls import Call, json_answer
from service.errors import ErrorCode
from service.families.common import DataFrames, blank_before, check_goes_on, model_of_query, typed_errors
from service.families.tgi_schemas import (
    StreamedTextGenerationBody,
    TextGenerationAnswer,
    TextGenerationBody,
    TextGenerationError,
    TextGenerationParameters,
)
from service.routes.generate import generated, stream_generated
from service.routing import TASK_ERRORS, add_route
from service.schemas import GenerateBody
from service.serving import ServedModel
from service.streaming import StreamedOutput, frame

FINISH_REASONS = {"eos": "eos_token", "stop": "stop_sequence", "length": "length"}
ERRORS = typed_errors(
    {"invalid_request_error": "validation", "overloaded_error": "overloaded", "server_error": "generation"},
    {"deadline_exceeded": "incomplete_generation"},
    TextGenerationError,
)


async def generate(body: TextGenerationBody, call: Call) -> Response:
    """Generate a text from a prompt: the source of an encoder-decoder, or what a causal model goes on with.

    With `stream: true` the answer is `text/event-stream`: one event a token, the last with the whole text.
    """
    if body.stream:
        wanted, generation = _begin(body, call)
        return await stream_generated(wanted, call, generation)
    return json_answer(await text_generated(body, call))


async def generate_stream(body: StreamedTextGenerationBody, call: Call) -> Response:
    """Generate a text token by token: one event each, the last with the whole text."""
    return await generate(body, call)


async def text_generated(body: TextGenerationBody, call: Call) -> dict[str, Any]:
    """The whole answer, for any door."""
    wanted, generation = _begin(body, call)
    return generation.whole(await generated(wanted, call))


def _begin(body: TextGenerationBody, call: Call) -> tuple[GenerateBody, "Generation"]:
    model = model_of_query(call, "generate")
    parameters = body.parameters or TextGenerationParameters()
    if parameters.return_full_text:
        check_goes_on(model, "parameters.return_full_text")
    generation = Generation(model, body.inputs, parameters)
    wanted = {
        "model": model.name,
        "inputs": body.inputs,
        "parameters": _generate_parameters(parameters),
        "stream": bool(body.stream),
    }
    return check_body(wanted, GenerateBody), generation


def _generate_parameters(wanted: TextGenerationParameters) -> dict[str, Any]:
    """The same as `POST /v1/generate` takes them."""
    parameters: dict[str, Any] = {
        "max_new_tokens": wanted.max_new_tokens,
        "stop": list(wanted.stop or ()),
        "repetition_penalty": wanted.repetition_penalty,
        "top_logprobs": wanted.top_n_tokens,
    }
    if wanted.is_drawn:  # of the likeliest token alone, they would change nothing
        parameters |= {
            "do_sample": True,
            "temperature": wanted.temperature,
            "top_k": wanted.top_k,
            "top_p": wanted.top_p,
            "seed": wanted.seed,
        }
    return {name: value for name, value in parameters.items() if value is not None}


class Generation(DataFrames):
    """One answer, whole or as Frames of a stream."""

    def __init__(self, model: ServedModel, prompt: str, parameters: TextGenerationParameters) -> None:
        self._model = model
        self._before = prompt if parameters.return_full_text else ""
        self._wants_details = bool(parameters.details)
        self._wants_top_tokens = bool(parameters.top_n_tokens)
        self._blank = ""
        self._last: dict[str, Any] = {}  # the last event

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The service's own answer as Text Generation Inference's."""
        (output,) = answer["outputs"]
        tokens = output["tokens"]
        written = {"generated_text": self._before + blank_before(self._model, tokens[0]) + output["text"]}
        if not self._wants_details:
            return written
        details = self._details(output, len(tokens))
        details |= {"prefill": [], "tokens": [self._token(token) for token in tokens]}
        if self._wants_top_tokens:
            details["top_tokens"] = [self._top_tokens(token) for token in tokens]
        return written | {"details": details}

    def event(self, output: StreamedOutput, event: dict[str, Any]) -> bytes:
        if "token" not in event:
            details = self._details(event, output.num_tokens) | {"input_length": output.num_input_tokens}
            text = self._before + self._blank + event["text"]
            return frame(self._last | {"generated_text": text, "details": details if self._wants_details else None})
        token, text = event["token"], event["text"]
        if output.num_tokens == 1:
            self._blank = blank_before(self._model, token)
            text = self._blank + text
        # Clients join the tokens' texts: so each is what is new, as an event of the service's own has it.
        self._last = {"index": output.num_tokens, "token": self._token(token) | {"text": text}}
        if self._wants_top_tokens:
            self._last["top_tokens"] = self._top_tokens(token)
        self._last |= {"generated_text": None, "details": None}
        return b"" if output.has_last_token else frame(self._last)  # the last comes with the whole text

    def _details(self, ended: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        return {
            "finish_reason": FINISH_REASONS[ended["finish_reason"]],
            "generated_tokens": num_tokens,
            "seed": ended.get("seed"),
        }

    def _token(self, token: dict[str, Any]) -> dict[str, Any]:
        is_special = self._model.target_tokenizer.is_special(token["id"])
        return {"id": token["id"], "text": token["text"], "logprob": token["logprob"], "special": is_special}

    def _top_tokens(self, token: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._token(one) for one in token["alternatives"]]


def add_routes(app: FastAPI) -> None:
    errors: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")
    add_route(
        app,
        "POST",
        "/generate",
        generate,
        TextGenerationAnswer,
        errors=errors,
        also_answers=["text/event-stream"],
        error_shape=ERRORS,
        model_in_query=True,
    )
    add_route(
        app,
        "POST",
        "/generate_stream",
        generate_stream,
        errors=errors,
        response_class=EventSourceResponse,
        error_shape=ERRORS,
        model_in_query=True,
    )
