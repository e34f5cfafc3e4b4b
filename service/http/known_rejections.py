"""Repetition of rejections: a full service does not read requests that it must reject again."""

import re
import time
from typing import Any

from fastapi import FastAPI

from sightline.service.api_errors import ApiError
from sightline.service.http.dispatch import CallLog
from sightline.service.http.http_call import HttpCall, number_of
from sightline.service.inference.service import Model, Service

# Endpoints whose calls always use the engine, with the model that their field `model` names.
PATHS = frozenset(
    {"/v1/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/generate_stream"}
    | {"/v1/encode", "/v1/embeddings", "/embed", "/v1/rerank", "/v2/rerank"}
)
# With one of these, another response is needed, or the head is probably unique.
UNUSUAL_HEADERS = {b"origin", b"content-encoding", b"transfer-encoding", b"expect", b"upgrade", b"x-request-id"}
# The fields of a body that choose its model
CHOICE = re.compile(rb'"(model|source_language|target_language)"\s*:\s*("[^"]*"|[^,}]*)')
MAX_BYTES = 16 * 1024  # of a request
MAX_KNOWN = 1024
KNOWN_S = 5.0  # later, an API key may have been removed


class KnownRejections:
    """Calls that a full queue has rejected, by the origins of their connections and their heads."""

    def __init__(self, app: FastAPI) -> None:
        self.service: Service = app.state.service
        self.log_end = CallLog(app, self.service).log_end
        self._known: dict[tuple[Any, bytes], tuple[HttpCall, Model, int, list[Any]]] = {}
        self._forget_at = 0.0

    def learn(self, origin: tuple[Any, str], data: bytes, call: HttpCall) -> None:
        """Remember a rejected call, unless others with its head may differ, as with a quota."""
        head, _, body = data.partition(b"\r\n\r\n")
        model = self.service.models.get(call.model_name or "")
        length, connection = (call.headers.get(name, b"") for name in (b"content-length", b"connection"))
        if number_of(length) != len(body) or connection.lower() not in (b"", b"keep-alive"):
            return
        if UNUSUAL_HEADERS & call.headers.keys() or call.scope["http_version"] != "1.1":
            return
        has_quota = call.key is not None and call.key.quota is not None
        if model is None or has_quota or self.service.traces is not None or call.route not in PATHS:
            return
        if time.monotonic() > self._forget_at or len(self._known) == MAX_KNOWN:
            self._known, self._forget_at = {}, time.monotonic() + KNOWN_S
        unused: Any = None  # the connection of the rejected call is not kept
        scope = {name: call.scope[name] for name in ("method", "path", "headers", "client")}
        kept = HttpCall(self.service, scope, unused, unused)
        kept.endpoint, kept.error_format, kept.model_name = call.endpoint, call.error_format, call.model_name
        kept.key, kept.caller = call.key, call.caller
        self._known[origin, head] = kept, model, len(body), CHOICE.findall(body)

    def find(self, origin: tuple[Any, str], data: bytes) -> tuple[HttpCall, ApiError] | None:
        """Return a known call and its error if admission would reject it with a single sequence."""
        head, _, body = data.partition(b"\r\n\r\n")
        call, model, num_bytes, choice = self._known.get((origin, head), (None, None, 0, []))
        if call is None or model is None or len(body) != num_bytes or CHOICE.findall(body) != choice:
            return None
        service = self.service
        if service.models.get(model.name) is not model or service.unavailable_code or service.is_retiring:
            return None
        try:
            model.admission.check_space(num_bytes, call.caller, call.address)
        except ApiError as error:
            return call, error
        return None
