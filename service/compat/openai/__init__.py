"""OpenAI's text and embedding endpoints. GET /v1/models and the errors are the native ones."""

from service.api.endpoint import EVENTS, JSON, TASK_ERRORS, Endpoint
from service.compat.openai.chat import chat_completions
from service.compat.openai.chat_schemas import ChatCompletion
from service.compat.openai.completions import completions
from service.compat.openai.embeddings import embeddings
from service.compat.openai.schemas import Completion, EmbeddingList
from service.errors import ErrorCode

_ERRORS: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")
_STREAMED = (JSON, EVENTS)
ENDPOINTS = (
    Endpoint("POST", "/v1/completions", completions, Completion, errors=_ERRORS, media_types=_STREAMED),
    Endpoint("POST", "/v1/chat/completions", chat_completions, ChatCompletion, errors=_ERRORS, media_types=_STREAMED),
    Endpoint("POST", "/v1/embeddings", embeddings, EmbeddingList, errors=(*_ERRORS, "response_too_large")),
)
