"""Bundles of models, and a service for them in this process."""

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx

from sightline.base.bundle import MANIFEST
from sightline.base.bundle_files import read_bundle, read_manifest, write_manifest
from sightline.export.options import BundleMetadata
from sightline.model.architectures.factory import Model, TranslationModel
from sightline.model.checkpoint import load_model, save_checkpoint
from sightline.model.rounding import Reference, reference
from sightline.service.app import create_app
from sightline.service.loading import load_backend
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.settings import Settings
from tests.support.training_runs import export_bundle


def write_bundles(folder: Path, models: Mapping[str, Model], tokenizer: Path) -> Path:
    """Write `checkpoints/NAME` and `bundles/NAME` of each model, which the tests compare."""
    for name, model in models.items():
        checkpoint = folder / "checkpoints" / name
        save_checkpoint(checkpoint, model.config, model.state_dict(), tokenizer, {})
        export_bundle(checkpoint, folder / "bundles" / name, BundleMetadata(name), (), check=False)
    return folder


def load_system(
    folder: Path, name: str, sentences: Sequence[str]
) -> tuple[TranslationModel, OnnxRunner, list[tuple[int, ...]]]:
    """Model of `write_bundles`, its bundle in ONNX Runtime, and sentences as sources."""
    model, tokenizer = load_model(folder / "checkpoints" / name)
    bundle = folder / "bundles" / name
    runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=1, max_rows=12)
    return model, runner, [tuple(encoding.ids) for encoding in tokenizer.encode_batch(list(sentences))]


@cache
def load_reference(folder: Path, name: str) -> Reference[Any]:
    """Model of `write_bundles` in float64 and its perturbed copies, which the tests share."""
    return reference(load_model(folder / "checkpoints" / name)[0])


@contextlib.asynccontextmanager
async def client_of(bundles: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Client of a service of all bundles of a folder, with unknown architecture names."""
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(shutil.copytree(bundles, folder, dirs_exist_ok=True))
        for path in copies.glob(f"*/{MANIFEST}"):
            renamed = read_manifest(path.parent).model_copy(update={"architecture": secrets.token_hex()})
            write_manifest(path.parent, renamed)
        # A machine that is slow is no fault.
        settings = Settings(bundles=copies, threads=1, queue_timeout_s=300, request_timeout_s=300)
        app = create_app(settings, load_backend)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
            asyncio.timeout(300),
        ):
            while app.state.service.unavailable_code is not None:
                await asyncio.sleep(0.01)
            yield client


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """Return the JSON of a response, which must be a success."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()
