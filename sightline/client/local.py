"""Bundles in this process as the transport of a client: operations of the service, without HTTP."""

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

from sightline.base.bundle import MANIFEST, BundleError
from sightline.base.errors import UsageError
from sightline.client.transport import Request, SightlineError, T, write_body
from sightline.service.api.endpoint import EventStream, to_json
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

    def __init__(self, bundles: Path, threads: int) -> None:
        """Load a bundle, or prepare those of a folder, which are loaded on their first use."""
        bundle = bundles if (bundles / MANIFEST).is_file() else None
        try:
            folder = {} if bundle else {"bundles": bundles.resolve()}
            self._service = open_service(make_settings({**NO_LIMITS, **folder, "threads": threads}, {}), bundle)
        except (BundleError, UsageError) as error:
            raise SightlineError(None, "cannot_load", str(error)) from error
        self._is_started = False

    async def send(self, request: Request[T]) -> T:
        with self._call() as call:
            return request.read(json.loads(to_json(await self._respond(call, request))))

    async def events(self, request: Request[Any]) -> AsyncGenerator[Any]:
        with self._call() as call:
            response = await self._respond(call, request)
            assert isinstance(response, EventStream)
            async with aclosing(aiter(response.stream)) as groups:
                async for events in groups:
                    for _, event in events:
                        yield json.loads(to_json(event))

    @contextmanager
    def _call(self) -> Iterator[Call]:
        """Yield a call; its errors become those of the client."""
        with closing(Call(self._service, secrets.token_hex(12))) as call:
            try:
                yield call
            except ApiError as error:
                message = complete_message(error.message(call.field_names), error.param(call.field_names))
                raise SightlineError(error.kind.status, error.code, message, call.request_id) from None

    async def _respond(self, call: Call, request: Request[Any]) -> Any:
        if not self._is_started:
            self._is_started = True
            self._service.worker.start()
        endpoint = ENDPOINTS[request.path]
        assert endpoint.body_type is not None
        call.field_names = paths_of(endpoint.body_type)
        body = parse_body(write_body(request.body), endpoint.body_type)
        return await endpoint.handler(call, body=body, **({"headers": {}} if "headers" in endpoint.takes else {}))

    async def close(self) -> None:
        await self._service.stop()
