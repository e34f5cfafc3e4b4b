"""OpenAI's POST /v1/chat/completions, for models whose bundle has a chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from service.bundle import ChatTemplate
from service.calls import Call
from service.errors import ApiError
from service.families.naming import naming
from service.families.openai_chat_schemas import ChatBody, Message
from service.families.openai_text import NAMES, TextAnswer, answer_text, finish_reason_of, generate_body
from service.tokenizer import TextTokenizer


async def chat_completions(body: ChatBody, call: Call) -> Response:
    """Answer the last message of a dialogue.

    With `stream: true` the answer is `text/event-stream`: one event a token, one at each choice's end, one with the
    usage where `stream_options` ask for it, then `[DONE]`.
    """
    model = call.service.model(body.model, "generate")
    if model.manifest.chat is None:
        message = f"{model.name} has no chat template: it does not converse. GET /v1/models shows which models chat."
        raise ApiError("unsupported_task", message, param="model")
    prompt = write_dialogue(model.manifest.chat, body.messages)
    choices = [Choice(model.target_tokenizer, body, index) for index in range(body.num_choices)]
    with naming(_names(body)):
        wanted = generate_body(body, model, [prompt] * body.num_draws, top_logprobs=body.top_logprobs)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return await answer_text(call, wanted, TextAnswer(call, model, body, choices, kind, "chatcmpl"))


def write_dialogue(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """The text that the model goes on from with its answer.

    What the system says stands before the user's first message, as the instruction of Llama 2's Ghost Attention does
    (Touvron et al. 2023, section 3.3). A line break would end a message, so it is a blank.
    """
    texts = [" ".join(message.content.splitlines()) for message in messages]
    num_system = sum(message.is_system for message in messages)
    turns = [" ".join(texts[: num_system + 1]), *texts[num_system + 1 :]]
    forms = (template.user, template.assistant)
    return "".join(forms[place % 2].replace("{}", turn) for place, turn in enumerate(turns)) + template.reply


def _names(body: ChatBody) -> Mapping[str, str]:
    length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    inputs = {f"inputs[{place}]": "messages" for place in range(body.num_draws)}
    return {**NAMES, **inputs, "max_new_tokens": length}


class Choice:
    """One answer, written at once or token by token."""

    def __init__(self, tokenizer: TextTokenizer, body: ChatBody, index: int) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = bool(body.logprobs)
        self._index = index
        self._role = {"role": "assistant"}  # of a stream, in its first piece alone

    def whole(self, output: dict[str, Any]) -> dict[str, Any]:
        message = {**self._role, "content": output["text"], "refusal": None}
        return self._write("message", message, output["tokens"], finish_reason_of(output))

    def piece(self, event: dict[str, Any]) -> dict[str, Any]:
        if "token" not in event:
            return self._write("delta", {}, [], finish_reason_of(event))
        delta = {**self._role, "content": event["text"]}
        self._role = {}
        return self._write("delta", delta, [event["token"]], None)

    def _write(
        self, field: str, message: Mapping[str, Any], tokens: Sequence[dict[str, Any]], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            field: message,
            "logprobs": self._logprobs(tokens) if self._wants_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
        content = [
            self._named(token) | {"top_logprobs": [self._named(one) for one in token.get("alternatives", ())]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: dict[str, Any]) -> dict[str, Any]:
        data = self._tokenizer.bytes_of(token["id"])
        return {"token": token["text"], "logprob": token["logprob"], "bytes": list(data) or None}
