"""Serve models in this process and call their HTTP API without a network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from sightline.base.bundle import Manifest
from sightline.service.app import create_app
from sightline.service.discovery import find_bundles
from sightline.service.loading import load_backend
from sightline.service.settings import Settings

READY_INTERVAL_S = 0.05
INPUTS_PER_CALL = 32
# Long enough that no request times out on a busy machine.
PATIENCE_S = 3600


class Served:
    """The served models of a folder of bundles."""

    def __init__(self, client: httpx.AsyncClient, portal: BlockingPortal) -> None:
        self._client = client
        self._portal = portal

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[Any]:
        """Send requests at the same time and return their responses in order. Raises `ValueError`
        with the service's own message.
        """
        return self._portal.call(self._post, path, bodies)

    def outputs(
        self,
        path: str,
        body: Mapping[str, Any],
        inputs: Sequence[str],
        per_call: int = INPUTS_PER_CALL,
        **lists: Sequence[str],
    ) -> list[Any]:
        """Return the outputs of many inputs; each call has some of them, and of the other lists."""
        outputs: list[Any] = []
        for start in range(0, len(inputs), per_call):
            of_call = {name: list(each[start : start + per_call]) for name, each in {"inputs": inputs, **lists}.items()}
            (response,) = self.post(path, {**body, **of_call})
            outputs += response["outputs"]
        return outputs

    async def _post(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        return await asyncio.gather(*(self._post_one(path, body) for body in bodies))

    async def _post_one(self, path: str, body: Mapping[str, Any]) -> Any:
        response = await self._client.post(path, json=body)
        content = response.json()
        if response.is_error:
            raise ValueError(f"{path} failed with {response.status_code}: {content['error']['message']}")
        return content


@contextlib.contextmanager
def serve(bundles: Path, threads: int = 1) -> Iterator[Served]:
    """Serve a folder, each engine with some threads. Raises `ValueError` if it cannot be served."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_client_of_service(bundles, threads)) as client,
    ):
        yield Served(client, portal)


def served_models(*folders: Path) -> Iterator[tuple[Served, Manifest]]:
    """Serve one folder after another, and yield the models that the service loads when it starts.
    The study examines these in detail. The others, such as those of the small setting, are compared
    by their scores.
    """
    for folder in folders:
        with serve(folder) as served:
            for manifest in find_bundles(folder).values():
                if not manifest.lazy:
                    yield served, manifest


def served_translators(*folders: Path) -> Iterator[tuple[Served, Manifest]]:
    """Serve one folder after another, and yield the first translator of each."""
    for folder in folders:
        with serve(folder) as served:
            for manifest in find_bundles(folder).values():
                if manifest.languages is not None and manifest.cross_attention is not None:
                    yield served, manifest
                    break


@contextlib.asynccontextmanager
async def _client_of_service(bundles: Path, threads: int) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(bundles=bundles, threads=threads, request_timeout_s=PATIENCE_S, queue_timeout_s=PATIENCE_S)
    exit_codes: list[int] = []
    app = create_app(settings, load_backend, exit_codes.append)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client,
    ):
        while (await client.get("/health/ready")).is_error:
            if exit_codes:
                raise ValueError(f"{bundles} cannot be served; see the log for the reason")
            await asyncio.sleep(READY_INTERVAL_S)
        yield client
