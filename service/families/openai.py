"""OpenAI's POST /v1/completions and /v1/embeddings; its GET /v1/models and its errors are the service's own."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.calls import Call, json_answer
from service.errors import ApiError, ErrorCode
from service.families.naming import names_of_copies, naming
from service.families.openai_schemas import CompletionAnswer, CompletionBody, EmbeddingAnswer, EmbeddingBody
from service.fields import Texts
from service.routes.encode import encoded
from service.routes.generate import generated, stream_generated
from service.routing import add_route, check_body
from service.schemas import EncodeBody, GenerateBody
from service.serving import ServedModel
from service.streaming import DONE, StreamedOutput, frame
from service.tokenizer import TextStream

NAMES = {
    "inputs": "prompt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "top_logprobs": "logprobs",
}
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


async def completions(body: CompletionBody, call: Call) -> Response:
    """Complete each prompt: the source of an encoder-decoder, or what a causal model goes on with.

    With `stream: true` the answer is `text/event-stream`: one event a token, one at each choice's end, one with the
    usage where `stream_options` ask for it, then `[DONE]`.
    """
    model = call.service.model(body.model, "generate")
    if body.echo and not _goes_on(model):
        message = f"{model.name} does not go on with its prompt, but answers it: there is nothing to echo."
        raise ApiError("unsupported_parameter", message, param="echo")
    with naming(_names(body)):
        wanted = check_body(_generate_body(body, model), GenerateBody)
        completion = Completion(call, model, body)
        if wanted.stream:
            return await stream_generated(wanted, call, completion)
        return json_answer(completion.whole(await generated(wanted, call)))


def _goes_on(model: ServedModel) -> bool:
    return model.manifest.begins_with == "source"


def _names(body: CompletionBody) -> dict[str, str]:
    copies = body.num_draws
    names = NAMES | names_of_copies("inputs", body.prompt, copies)
    return names | (names_of_copies("target_prefix", body.target_prefix, copies) if body.target_prefix else {})


def _generate_body(body: CompletionBody, model: ServedModel) -> dict[str, Any]:
    """The same as `POST /v1/generate` takes it."""
    # A length that is given needs no look at all scores of every step, as a token that may never come does.
    is_fixed = body.ignore_eos and body.max_tokens is not None
    parameters: dict[str, Any] = {
        "max_new_tokens": body.max_tokens,
        "min_new_tokens": body.max_tokens if is_fixed else body.min_tokens,
        "stop": list(body.stop or ()),
        "num_beams": body.num_beams,
        "num_return_sequences": None if body.is_drawn else body.n,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "repetition_penalty": body.repetition_penalty,
        "no_repeat_ngram_size": body.no_repeat_ngram_size,
        "suppress_tokens": [model.manifest.tokens.end_id] if body.ignore_eos and not is_fixed else None,
        "target_prefix": _copies(body.target_prefix, body.num_draws) if body.target_prefix else None,
        "top_logprobs": body.logprobs,
    }
    if body.is_drawn:  # of the likeliest token alone, they would change nothing
        parameters |= {
            "do_sample": True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": max(0, body.top_k or 0),
            "seed": body.seed,
        }
    return {
        "model": model.name,
        "inputs": _copies(body.prompt, body.num_draws),
        "parameters": {name: value for name, value in parameters.items() if value is not None},
        "stream": bool(body.stream),
    }


def _copies(texts: Texts, num_copies: int) -> str | list[str]:
    """Each text so many times, one behind the other: each draw has a seed of its own, as inputs have."""
    if not texts.is_list and num_copies == 1:
        return texts.texts[0]
    return [text for text in texts.texts for _ in range(num_copies)]


class Completion:
    """One answer, whole or as Frames of a stream."""

    def __init__(self, call: Call, model: ServedModel, body: CompletionBody) -> None:
        self._body = body
        self._head = {
            "id": f"cmpl-{call.record.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        num_choices = len(body.prompt.texts) * body.num_choices
        self._choices = [Choice(model, body, index) for index in range(num_choices)]

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The service's own answer as OpenAI's."""
        choices = [
            choice.write(output["text"], output["tokens"], output["finish_reason"])
            for choice, output in zip(self._choices, answer["outputs"], strict=True)
        ]
        return {**self._head, "choices": choices, "usage": self._usage(**answer["usage"])}

    def event(self, output: StreamedOutput, event: dict[str, Any]) -> bytes:
        choice = self._choices[event["index"]]
        if "token" in event:
            written = choice.write(event["text"], [event["token"]], None)
        else:
            written = choice.write("", [], event["finish_reason"])
        content = {**self._head, "choices": [written]}
        options = self._body.stream_options
        if options and options.continuous_usage_stats:
            content["usage"] = _usage(output.num_input_tokens, output.num_tokens)
        elif options and options.include_usage:
            content["usage"] = None
        return frame(content)

    def end(self, outputs: Sequence[StreamedOutput]) -> bytes:
        options = self._body.stream_options
        if not (options and options.include_usage):
            return DONE
        input_tokens = sum(output.num_input_tokens for output in outputs)
        usage = self._usage(input_tokens, sum(output.num_tokens for output in outputs))
        return frame({**self._head, "choices": [], "usage": usage}) + DONE

    def error(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"

    def _usage(self, input_tokens: int, output_tokens: int) -> dict[str, int]:
        return _usage(input_tokens // self._body.num_draws, output_tokens)  # a prompt counts once


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Choice:
    """One text of an answer, written at once or token by token."""

    def __init__(self, model: ServedModel, body: CompletionBody, index: int) -> None:
        """`index` counts the choices of all prompts."""
        prompt = index // body.num_choices
        prefix = body.target_prefix.texts[prompt if body.target_prefix.is_list else 0] if body.target_prefix else ""
        prefix_ids = model.target_tokenizer.encode(prefix, add_special_tokens=False)
        self._index = index
        self._echo = body.prompt.texts[prompt] if body.echo else ""
        self._goes_on = _goes_on(model)
        self._prefix = model.target_tokenizer.decode(prefix_ids)
        self._wants_logprobs = body.logprobs is not None
        self._has_begun = False
        self._places = TextStream(model.target_tokenizer, prefix=prefix_ids)  # says where each token begins
        self._offset = 0  # of the next token
        self._num_read = 0  # characters of `_places`

    def write(self, text: str, tokens: Sequence[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        """The choice with this new text and these new tokens."""
        if not self._has_begun:
            self._has_begun = True
            text = self._echo + self._blank_before(tokens[0]) + text
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._wants_logprobs else None,
            "finish_reason": FINISH_REASONS[finish_reason] if finish_reason else None,
        }

    def _blank_before(self, token: dict[str, Any]) -> str:
        """What the text lacks where it goes on with a prompt: the service's own texts begin without their blank."""
        blank = " " if self._goes_on and (self._prefix or token["text"].startswith(" ")) else ""
        self._num_read = len(blank)
        self._offset = len(blank + self._prefix) if self._prefix else 0  # without a prefix the blank is the token's
        return blank

    def _logprobs(self, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._num_read += len(self._places.push(token["id"]))
            self._offset = self._num_read
        return {
            "tokens": [token["text"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {one["text"]: one["logprob"] for one in (token, *reversed(token.get("alternatives", ())))}
                for token in tokens
            ],
            "text_offset": offsets,
        }


async def embeddings(body: EmbeddingBody, call: Call) -> Response:
    """Encode each input to one vector: the mean over its tokens, of length 1."""
    with naming({"inputs": "input", "encoding": "encoding_format"}):
        wanted = {
            "model": body.model,
            "inputs": _copies(body.input, 1),
            "normalize": True,
            "encoding": body.encoding_format or "float",
        }
        answer = await encoded(check_body(wanted, EncodeBody), call)
    if body.dimensions not in (None, answer["dimensions"]):
        message = f"This model's vectors have {answer['dimensions']} dimensions and cannot be cut."
        raise ApiError("unsupported_parameter", message, param="dimensions")
    input_tokens = answer["usage"]["input_tokens"]
    data = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(answer["embeddings"])
    ]
    usage = {"prompt_tokens": input_tokens, "total_tokens": input_tokens}
    return json_answer({"object": "list", "model": answer["model"], "data": data, "usage": usage})


def add_routes(app: FastAPI) -> None:
    errors: tuple[ErrorCode, ...] = (
        *("empty_input", "input_too_long", "unsupported_parameter", "unsupported_task", "response_too_large"),
        *("queue_timeout", "loading", "draining", "engine_dead", "deadline_exceeded"),
    )
    add_route(
        app,
        "POST",
        "/v1/completions",
        completions,
        CompletionAnswer,
        errors=errors,
        also_answers=["text/event-stream"],
    )
    add_route(app, "POST", "/v1/embeddings", embeddings, EmbeddingAnswer, errors=errors)
