"""OpenAI's POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from service.calls import Call
from service.families.common import blank_before, check_goes_on
from service.families.naming import names_of_copies, naming
from service.families.openai_schemas import CompletionBody
from service.families.openai_text import NAMES, TextAnswer, answer_text, finish_reason_of, generate_body
from service.serving import ServedModel
from service.tokenizer import TextStream


async def completions(body: CompletionBody, call: Call) -> Response:
    """Complete each prompt: the source of an encoder-decoder, or what a causal model goes on with.

    With `stream: true` the answer is `text/event-stream`: one event a token, one at each choice's end, one with the
    usage where `stream_options` ask for it, then `[DONE]`.
    """
    model = call.service.model(body.model, "generate")
    if body.echo:
        check_goes_on(model, "echo")
    copies = body.num_draws
    names = {**NAMES, "inputs": "prompt", "top_logprobs": "logprobs", **names_of_copies("inputs", body.prompt, copies)}
    prefix = None
    if body.target_prefix:
        # One prefix is of all texts; of a list, each is of one prompt.
        prefix_copies = copies if body.target_prefix.is_list else 1
        names |= names_of_copies("target_prefix", body.target_prefix, prefix_copies)
        prefix = body.target_prefix.copies(prefix_copies)
    with naming(names):
        wanted = generate_body(
            body, model, body.prompt.copies(copies), target_prefix=prefix, top_logprobs=body.logprobs
        )
        choices = [Choice(model, body, index) for index in range(body.num_prompts * body.num_choices)]
        return await answer_text(call, wanted, TextAnswer(call, model, body, choices, "text_completion", "cmpl"))


class Choice:
    """One text of an answer, written at once or token by token."""

    def __init__(self, model: ServedModel, body: CompletionBody, index: int) -> None:
        """`index` counts the choices of all prompts."""
        prompt = index // body.num_choices
        prefix = body.target_prefix.texts[prompt if body.target_prefix.is_list else 0] if body.target_prefix else ""
        prefix_ids = model.target_tokenizer.encode(prefix, add_special_tokens=False)
        self._model = model
        self._index = index
        self._echo = body.prompt.texts[prompt] if body.echo else ""
        self._prefix = model.target_tokenizer.decode(prefix_ids)
        self._wants_logprobs = body.logprobs is not None
        self._has_begun = False
        self._places = TextStream(model.target_tokenizer, prefix=prefix_ids)  # says where each token begins
        self._offset = 0  # of the next token
        self._num_read = 0  # characters of `_places`

    def whole(self, output: dict[str, Any]) -> dict[str, Any]:
        return self._write(output["text"], output["tokens"], finish_reason_of(output))

    def piece(self, event: dict[str, Any]) -> dict[str, Any]:
        if "token" in event:
            return self._write(event["text"], [event["token"]], None)
        return self._write("", [], finish_reason_of(event))

    def _write(self, text: str, tokens: Sequence[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        """The choice with this new text and these new tokens."""
        if not self._has_begun:
            self._has_begun = True
            text = self._echo + self._blank_before(tokens[0]) + text
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._wants_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _blank_before(self, token: dict[str, Any]) -> str:
        """The blank that the text may lack; places of tokens are counted with it."""
        blank = blank_before(self._model, token, self._prefix)
        self._num_read = len(blank)
        self._offset = len(blank + self._prefix) if self._prefix else 0  # without a prefix the blank is the token's
        return blank

    def _logprobs(self, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._num_read += len(self._places.push(token["id"]))
            self._offset = self._num_read + self._places.is_within_character
        return {
            "tokens": [token["text"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {one["text"]: one["logprob"] for one in (token, *reversed(token.get("alternatives", ())))}
                for token in tokens
            ],
            "text_offset": offsets,
        }
