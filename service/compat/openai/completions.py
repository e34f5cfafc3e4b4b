"""OpenAI's POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, cast

from sightline.base.text.stream import TextStream
from sightline.service.api.endpoint import Call, EventStream
from sightline.service.body_fields import Texts
from sightline.service.compat.common import FINISH_REASONS, blank_before, check_continues_prompt, named_model
from sightline.service.compat.openai import schemas
from sightline.service.compat.openai.text_response import TextResponse
from sightline.service.inference.generate import GenerateOutput
from sightline.service.inference.results import OutputToken, alternatives_of
from sightline.service.inference.service import ServedModel
from sightline.service.inference.streaming import StreamEnd, StreamToken


async def completions(call: Call, body: schemas.CompletionBody) -> schemas.Completion | EventStream:
    """Complete each prompt.

    A prompt is the source of an encoder-decoder, or the text that a decoder-only model continues.

    With `stream: true` the response is `text/event-stream`: one event for each token, one at each
    choice's end, one with the usage if `stream_options` ask for it, then `[DONE]`.
    """
    model = await call.model(named_model(call, body.model), "generate")
    if body.echo:
        check_continues_prompt(model, "echo")
    parameters = schemas.decoding_parameters(call, body, model)
    response = TextResponse(call, model, body, partial(CompletionWriter, model, body), "text_completion", "cmpl")
    is_whole = body.top_logprobs is not None  # `text_offset` counts the characters of the text
    inputs = replace(body.inputs, are_prompts=True) if isinstance(body.inputs, Texts) else body.inputs
    return cast(schemas.Completion | EventStream, await response.of(inputs, parameters, is_whole=is_whole))


class CompletionWriter:
    """One text of a response, written at once or token by token."""

    def __init__(self, model: ServedModel, body: schemas.CompletionBody, index: int) -> None:
        """`index` counts the choices of all prompts."""
        prompt = index // body.num_choices
        prefixes = body.target_prefix
        prefix = "" if prefixes is None else prefixes.texts[prompt if prefixes.is_list else 0]
        prefix_ids = model.target_tokenizer.encode(prefix, add_special_tokens=False) if prefix else []
        self._model = model
        self._index = index
        self._echo, inputs, tokenizer = "", body.inputs, model.source_tokenizer
        if body.echo:
            self._echo = inputs.texts[prompt] if isinstance(inputs, Texts) else tokenizer.decode(inputs.lists[prompt])
        self._prefix = model.target_tokenizer.decode(prefix_ids)
        self._returns_logprobs = body.top_logprobs is not None
        self._has_begun = False
        self._positions = TextStream(model.target_tokenizer, prefix=prefix_ids)  # gives the start of each token
        self._offset = 0  # of the next token
        self._num_read = 0  # characters that `_positions` has returned

    def whole(self, output: GenerateOutput) -> schemas.CompletionChoice:
        return self._write(output.text, output.tokens, output.finish_reason)

    def token(self, event: StreamToken) -> schemas.CompletionChoice:
        return self._write(event.text, [event.token], None)

    def end(self, event: StreamEnd) -> schemas.CompletionChoice:
        return self._write("", [], event.finish_reason)

    def _write(self, text: str, tokens: Sequence[OutputToken], reason: str | None) -> schemas.CompletionChoice:
        """Return the choice with new text and new tokens."""
        if not self._has_begun:
            self._has_begun = True
            text = self._echo + (self._blank_before(tokens[0]) if tokens else "") + text
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._returns_logprobs else None,
            "finish_reason": cast(Literal["stop", "length"] | None, reason and FINISH_REASONS[reason]),
        }

    def _blank_before(self, token: OutputToken) -> str:
        """Return the space before the text, if it needs one; token positions include it."""
        blank = blank_before(self._model, token, self._prefix)
        self._num_read = len(blank)
        # Without a prefix the space belongs to the token.
        self._offset = len(blank + self._prefix) if self._prefix else 0
        return blank

    def _logprobs(self, tokens: Sequence[OutputToken]) -> schemas.CompletionLogprobs:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._num_read += len(self._positions.push(token.id))
            self._offset = self._num_read + self._positions.is_within_character
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": offsets,
        }


def _by_text(token: OutputToken) -> dict[str, float]:
    """Return the log-probabilities of a token and of its alternatives, each with its own key."""
    logprobs: dict[str, float] = {}
    for top in {top.id: top for top in (token, *alternatives_of(token))}.values():
        logprobs[f"token_id:{top.id}" if top.text in logprobs else top.text] = top.logprob  # as vLLM names tokens
    return logprobs
