"""Rejection of calls from their heads: a full service does not read bodies that it must reject."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI

from sightline.service.api_errors import ApiError
from sightline.service.http.dispatch import CallLog, EndpointRoute, ErrorSender
from sightline.service.http.http_call import HttpCall, number_of
from sightline.service.inference.service import DefaultTask, Model, Service

# Endpoints whose calls always use the engine, with the task of the model of calls that name none.
ENDPOINTS: Mapping[str, DefaultTask] = {
    **dict.fromkeys(("/v1/generate", "/v1/completions", "/generate", "/generate_stream"), "generate"),
    **dict.fromkeys(("/v1/encode", "/v1/embeddings", "/embed"), "encode"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank"), "rerank"),
    "/v1/chat/completions": "chat",
}
# With one of these, the response has other headers, or the size of the body is not known.
UNUSUAL_HEADERS = frozenset({b"origin", b"content-encoding", b"transfer-encoding"})
LANGUAGES = frozenset({"source_language", "target_language"})  # they may choose the model
MAX_PARSED_BYTES = 16 * 1024


class EarlyRejection:
    """Finds requests that can be rejected from their heads, and logs them like any others."""

    def __init__(self, app: FastAPI) -> None:
        routes = [route.declared for route in app.routes if isinstance(route, EndpointRoute)]
        self._endpoints = {one.path.encode(): one for one in routes if one.path in ENDPOINTS}
        self.service: Service = app.state.service
        self._check_access = ErrorSender(app, self.service).check_access
        self.log_end = CallLog(app, self.service).log_end

    def find(self, scope: Any, target: bytes, body: bytes | None) -> tuple[HttpCall, ApiError] | None:
        """Return the call of a request and its error if admission would certainly reject it.

        That is certain if not even one sequence fits into the queue of its model. `body` is None if
        it has not arrived completely. Requests that need another error, count towards a quota or
        are traced, must be read.
        """
        service, endpoint = self.service, self._endpoints.get(target)
        if endpoint is None or scope["method"] != endpoint.method or service.traces is not None:
            return None
        model = self._model_of(ENDPOINTS[endpoint.path], "?" if "model" in endpoint.takes else "model", body)
        if model is None or model.loaded is None or service.unavailable_code is not None or service.is_retiring:
            return None
        unused: Any = None
        call = HttpCall(service, scope, unused, unused)
        num_bytes = number_of(call.headers.get(b"content-length", b""))
        if num_bytes is None or num_bytes > service.settings.max_body_bytes or UNUSUAL_HEADERS & call.headers.keys():
            return None
        call.endpoint, call.error_format, call.model_name = endpoint, endpoint.error_format, model.name
        try:
            self._check_access(call, endpoint)
            if call.key is None or call.key.quota is None:
                model.admission.check_space(num_bytes, call.caller, call.address)
        except ApiError as error:
            if error.code == "overloaded":
                call.status = endpoint.error_format.status(error.code)
                call.fail(error)
                return call, error
        return None

    def _model_of(self, task: DefaultTask, field: str, body: bytes | None) -> Model | None:
        """Return the model that a call uses; None if it is not certain."""
        models, default = self.service.models, self.service.default_name(task) or ""
        if len(models) == 1:
            return models.get(default)  # none if the only model cannot do the task
        if body is None or len(body) > MAX_PARSED_BYTES:
            return None
        try:
            fields = orjson.loads(body)
            if LANGUAGES & (fields.get("parameters") or {}).keys():
                return None
            return models.get(fields.get(field, default))
        except (orjson.JSONDecodeError, AttributeError, TypeError):  # it needs another error
            return None
