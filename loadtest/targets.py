"""Endpoints that a load can call, of the native API and of three others, and their requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import orjson

Message = dict[str, str]
Prompt = str | Sequence[Message]  # a text, or the messages of a chat
TargetName = Literal[
    "generate", "encode", "attention", "openai-chat", "openai-completions", "openai-embeddings", "tei-embed",
    "oip-infer",
]  # fmt: skip


@dataclass(frozen=True)
class RequestOptions:
    """Options of all requests of a load; None stands for the server's default."""

    model: str | None = None
    is_streamed: bool = False
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class LoadTarget:
    """Endpoint of an API.

    Args:
        path: path of the endpoint; `{model}` stands for the name of the model.
        generates: the endpoint generates tokens, so that their number can be limited.
        reads_chats: a prompt may be the messages of a chat.
        model_in_query: a request names the model in the query of the URL, if at all.
        reports_usage: responses have the numbers of tokens, and streams end with `[DONE]`.
    """

    path: str
    fields: Callable[[Prompt, RequestOptions], dict[str, Any]]
    can_stream: bool = False
    generates: bool = False
    needs_model: bool = False
    reads_chats: bool = False
    model_in_query: bool = False
    reports_usage: bool = True

    def path_for(self, options: RequestOptions) -> str:
        model = "" if options.model is None else quote(options.model, safe="")
        return self.path.format(model=model) + (f"?model={model}" if self.model_in_query and model else "")

    def body(self, prompt: Prompt, options: RequestOptions) -> bytes:
        return orjson.dumps(self.fields(prompt, options))


def _native(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    fields = _present(model=options.model, inputs=prompt, stream=options.is_streamed or None)
    if options.max_new_tokens is not None:
        fields["parameters"] = {"max_new_tokens": options.max_new_tokens}
    return fields


def _encode(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    return _native(prompt, options) | {"pooling": "mean"}


def _openai(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    fields = _present(model=options.model, max_tokens=options.max_new_tokens)
    if options.is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _completions(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    return _openai(prompt, options) | {"prompt": prompt}


def _chat(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return _openai(prompt, options) | {"messages": messages}


def _embeddings(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    return {"model": options.model, "input": prompt}


def _tei(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    return {"inputs": prompt}


def _infer(prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
    return {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}]}


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


TARGETS: Mapping[TargetName, LoadTarget] = {
    "generate": LoadTarget("/v1/generate", _native, can_stream=True, generates=True),
    "encode": LoadTarget("/v1/encode", _encode),
    "attention": LoadTarget("/v1/attention", _native, generates=True),
    "openai-chat": LoadTarget(
        "/v1/chat/completions", _chat, can_stream=True, generates=True, needs_model=True, reads_chats=True
    ),
    "openai-completions": LoadTarget(
        "/v1/completions", _completions, can_stream=True, generates=True, needs_model=True
    ),
    "openai-embeddings": LoadTarget("/v1/embeddings", _embeddings, needs_model=True),
    "tei-embed": LoadTarget("/embed", _tei, model_in_query=True, reports_usage=False),
    "oip-infer": LoadTarget("/v2/models/{model}/infer", _infer, needs_model=True, reports_usage=False),
}
