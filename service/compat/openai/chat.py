"""OpenAI's POST /v1/chat/completions, for models whose bundle has a chat template."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from sightline.service.api.endpoint import Call, EventStream
from sightline.service.api.messages import dialogue_of
from sightline.service.compat.common import FINISH_REASONS, blank_before, model_of_body
from sightline.service.compat.openai.chat_schemas import ChatBody, ChatCompletion, ChatLogprobs, ChatToken
from sightline.service.compat.openai.schemas import decoding_parameters
from sightline.service.compat.openai.text_response import TextResponse
from sightline.service.inference.generate import GenerateOutput
from sightline.service.inference.results import OutputToken, alternatives_of
from sightline.service.inference.service import ServedModel
from sightline.service.inference.streaming import StreamEnd, StreamToken


async def chat_completions(call: Call, body: ChatBody) -> ChatCompletion | EventStream:
    """Reply to the last message of a dialogue.

    With `stream: true` the response is `text/event-stream`: one event for each token, one at each
    choice's end, one with the usage if `stream_options` ask for it, then `[DONE]`.
    """
    model = await model_of_body(call, body.model, "generate", default_for="chat")
    prompt = dialogue_of(model, body.inputs)
    if body.max_completion_tokens is not None:
        call.field_names = {**call.field_names, "max_new_tokens": "max_completion_tokens"}
    parameters = decoding_parameters(call, body, model)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    response = TextResponse(call, model, body, partial(ChatChoiceWriter, model, body), kind, "chatcmpl")
    return cast(ChatCompletion | EventStream, await response.of(prompt, parameters))


class ChatChoiceWriter:
    """One message of a response, written at once or token by token."""

    def __init__(self, model: ServedModel, body: ChatBody, index: int) -> None:
        self._model = model
        self._continues = body.inputs[-1].role == "assistant"
        self._returns_logprobs = bool(body.logprobs)
        self._index = index
        self._role = {"role": "assistant"}  # in a stream, only in the first event

    def whole(self, output: GenerateOutput) -> dict[str, Any]:
        message = {**self._role, "content": self._blank_before(output.tokens) + output.text, "refusal": None}
        return self._write("message", message, output.tokens, output.finish_reason)

    def token(self, event: StreamToken) -> dict[str, Any]:
        delta = {**self._role, "content": self._blank_before([event.token]) + event.text}
        self._role = {}
        self._continues = False
        return self._write("delta", delta, [event.token], None)

    def end(self, event: StreamEnd) -> dict[str, Any]:
        return self._write("delta", {}, [], event.finish_reason)

    def _blank_before(self, tokens: Sequence[OutputToken]) -> str:
        """Return the space between the message that the model continues and its first new token."""
        return blank_before(self._model, tokens[0]) if self._continues else ""

    def _write(
        self, field: str, message: Mapping[str, Any], tokens: Sequence[OutputToken], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            field: message,
            "logprobs": self._logprobs(tokens) if self._returns_logprobs else None,
            "finish_reason": reason and FINISH_REASONS[reason],
        }

    def _logprobs(self, tokens: Sequence[OutputToken]) -> ChatLogprobs:
        return {
            "content": [
                {**self._named(token), "top_logprobs": [self._named(top) for top in alternatives_of(token)]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _named(self, token: OutputToken) -> ChatToken:
        data = self._model.target_tokenizer.bytes_of(token.id)
        return {"token": token.text, "logprob": token.logprob, "bytes": list(data) or None}
