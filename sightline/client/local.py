"""Bundles in this process as the transport of a client: operations of the service, without HTTP."""

import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from sightline.base.bundle import MANIFEST, BundleError
from sightline.base.errors import UsageError
from sightline.client.transport import Request, SightlineError, T
from sightline.service.api.endpoint import to_json
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import paths_of
from sightline.service.http.http_call import parse_body
from sightline.service.inference.call import Call
from sightline.service.loading import open_service
from sightline.service.settings import NO_LIMITS, make_settings
from sightline.service.tasks import attention, classify, encode, generate, rerank, tag, translate

TASKS = (attention, classify, encode, generate, rerank, tag, translate)
ENDPOINTS = {endpoint.path: endpoint for task in TASKS for endpoint in task.ENDPOINTS}


class LocalTransport:
    """Calls the operations of a service that has no other clients."""

    def __init__(self, bundles: str | Path, threads: int) -> None:
        """Load a bundle, or prepare those of a folder, which are loaded on their first use."""
        try:
            if not isinstance(bundles, str | os.PathLike) or not os.path.isdir(bundles):
                raise UsageError(f"there is no folder {str(bundles)!r}; name that of a bundle, or of several")
            folder = Path(bundles).resolve()
            settings = make_settings({**NO_LIMITS, "bundles": folder, "threads": threads}, {})
            self._service = open_service(settings, folder if os.path.isfile(folder / MANIFEST) else None)
        except (BundleError, UsageError) as error:
            raise SightlineError(None, "cannot_load", str(error).removeprefix("--")) from error  # no flag
        self._is_started = False

    async def send(self, request: Request[T]) -> T:
        async with self._respond(request) as response:
            return request.read(json.loads(to_json(response)))

    async def events(self, request: Request[T]) -> AsyncGenerator[T]:
        async with self._respond(request) as response, aclosing(aiter(response.stream)) as groups:
            async for events in groups:
                for _, event in events:
                    yield request.read(json.loads(to_json(event)))

    @asynccontextmanager
    async def _respond(self, request: Request[Any]) -> AsyncIterator[Any]:
        """Yield what an operation returns; errors of the service become those of the client."""
        if not self._is_started:
            self._is_started = True
            self._service.worker.start()
        endpoint = ENDPOINTS[request.path]
        assert endpoint.body_type is not None
        with closing(Call(self._service, secrets.token_hex(12))) as call:
            call.field_names = paths_of(endpoint.body_type)
            try:
                body = parse_body(request.body.encode(), endpoint.body_type)
                headers: Any = {"headers": {}} if "headers" in endpoint.takes else {}
                yield await endpoint.handler(call, body=body, **headers)
            except ApiError as error:
                message = complete_message(error.message(call.field_names), error.param(call.field_names))
                raise SightlineError(error.kind.status, error.code, message, call.request_id) from None

    async def close(self) -> None:
        await self._service.stop()
