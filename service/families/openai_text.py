"""What OpenAI's two routes to text share: the body that they make of theirs, and the answer, whole or as a stream."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response

from service.bodies import check_body
from service.calls import Call, json_answer
from service.families.common import DataFrames
from service.families.openai_schemas import DecodingBody
from service.routes.generate import generated, stream_generated
from service.schemas import GenerateBody
from service.serving import ServedModel
from service.streaming import DONE, StreamedOutput, frame

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def generate_body(
    body: DecodingBody, model: ServedModel, prompts: str | Sequence[str], **parameters: Any
) -> GenerateBody:
    """The same as `POST /v1/generate` takes it, and checks it. What `parameters` have as None is left out."""
    # A length that is given needs no look at all scores of every step, as a token that may never come does.
    is_fixed = body.ignore_eos and body.length is not None
    parameters |= {
        "max_new_tokens": body.length,
        "min_new_tokens": body.length if is_fixed else body.min_tokens,
        "stop": list(body.stop or ()),
        "num_beams": body.num_beams,
        "num_return_sequences": None if body.is_drawn else body.n,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "repetition_penalty": body.repetition_penalty,
        "no_repeat_ngram_size": body.no_repeat_ngram_size,
        "suppress_tokens": [model.manifest.tokens.end_id] if body.ignore_eos and not is_fixed else None,
    }
    if body.is_drawn:  # of the likeliest token alone, they would change nothing
        parameters |= {
            "do_sample": True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": max(0, body.top_k or 0),
            "seed": body.seed,
        }
    wanted = {
        "model": model.name,
        "inputs": prompts,
        "parameters": {name: value for name, value in parameters.items() if value is not None},
        "stream": bool(body.stream),
    }
    return check_body(wanted, GenerateBody)


def finish_reason_of(output: dict[str, Any]) -> str | None:
    """None of what goes on."""
    return FINISH_REASONS[output["finish_reason"]] if "finish_reason" in output else None


class Choice(Protocol):
    """How one text is written. What is not yet said of it is kept here."""

    def whole(self, output: dict[str, Any]) -> dict[str, Any]:
        """Write an output of `POST /v1/generate`."""
        ...

    def piece(self, event: dict[str, Any]) -> dict[str, Any]:
        """Write one of its events: a token, or the end."""
        ...


class TextAnswer(DataFrames):
    """One answer, whole or as Frames of a stream."""

    def __init__(
        self, call: Call, model: ServedModel, body: DecodingBody, choices: Sequence[Choice], kind: str, prefix: str
    ) -> None:
        """`kind` is what OpenAI calls the object, `prefix` how its id begins."""
        self._body = body
        self._choices = choices
        self._head = {
            "id": f"{prefix}-{call.record.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The service's own answer as OpenAI's."""
        choices = [choice.whole(output) for choice, output in zip(self._choices, answer["outputs"], strict=True)]
        return {**self._head, "choices": choices, "usage": self._usage(**answer["usage"])}

    def event(self, output: StreamedOutput, event: dict[str, Any]) -> bytes:
        content = {**self._head, "choices": [self._choices[event["index"]].piece(event)]}
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

    def _usage(self, input_tokens: int, output_tokens: int) -> dict[str, int]:
        return _usage(input_tokens // self._body.num_draws, output_tokens)  # a prompt counts once


async def answer_text(call: Call, wanted: GenerateBody, answer: TextAnswer) -> Response:
    """Run what `generate_body` made."""
    if wanted.stream:
        return await stream_generated(wanted, call, answer)
    return json_answer(answer.whole(await generated(wanted, call)))


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
