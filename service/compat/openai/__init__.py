"""OpenAI's text and embedding endpoints. GET /v1/models and the form of errors are native."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sightline.service.api.endpoint import EVENTS, JSON, NATIVE_ERRORS, OUTPUT_ERRORS, PARAMETER_ERRORS, Endpoint
from sightline.service.compat.openai.chat import chat_completions
from sightline.service.compat.openai.chat_schemas import ChatCompletion
from sightline.service.compat.openai.completions import completions
from sightline.service.compat.openai.embeddings import embeddings
from sightline.service.compat.openai.responses import responses
from sightline.service.compat.openai.responses_schemas import ModelResponse
from sightline.service.compat.openai.schemas import Completion, EmbeddingList

ERRORS = replace(NATIVE_ERRORS, invalid_status=400)
_TEXT: Mapping[str, Any] = {"errors": PARAMETER_ERRORS, "media_types": (JSON, EVENTS)}
ENDPOINTS = (
    Endpoint("POST", "/v1/completions", completions, Completion, **_TEXT),
    Endpoint("POST", "/v1/chat/completions", chat_completions, ChatCompletion, **_TEXT),
    Endpoint("POST", "/v1/responses", responses, ModelResponse, **_TEXT),
    Endpoint("POST", "/v1/embeddings", embeddings, EmbeddingList, errors=OUTPUT_ERRORS),
)
