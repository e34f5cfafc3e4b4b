"""OpenAI's routes to text and vectors; its GET /v1/models and its errors are the service's own."""

from fastapi import FastAPI

from service.errors import ErrorCode
from service.families.openai_chat import chat_completions
from service.families.openai_chat_schemas import ChatAnswer
from service.families.openai_completions import completions
from service.families.openai_embeddings import embeddings
from service.families.openai_schemas import CompletionAnswer, EmbeddingAnswer
from service.routing import TASK_ERRORS, add_route


def add_routes(app: FastAPI) -> None:
    errors: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")
    stream = ["text/event-stream"]
    add_route(app, "POST", "/v1/completions", completions, CompletionAnswer, errors=errors, also_answers=stream)
    add_route(app, "POST", "/v1/chat/completions", chat_completions, ChatAnswer, errors=errors, also_answers=stream)
    add_route(app, "POST", "/v1/embeddings", embeddings, EmbeddingAnswer, errors=(*errors, "response_too_large"))
