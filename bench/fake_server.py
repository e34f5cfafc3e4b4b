"""Serve with a deterministic fake in place of the model, to measure the cost of HTTP and
scheduling.

Usage: `python -m bench.fake_server`. It reads the settings of `python -m service` and uses the
tokenizer of the first bundle.
"""

import gc
import sys
from collections.abc import Callable, Mapping

from service.app import create_app
from service.bundle import BundleError, Manifest
from service.discovery import find_bundles
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.engine.worker import Worker
from service.inference.service import Backend, LoadedModel, ServedModel
from service.logs import configure_logging
from service.server import DrainingServer
from service.settings import Settings, read_settings
from service.text.tokenizer import read_tokenizer
from tests.support.fake_runner import HIDDEN, FakeRunner, fake_manifest

MAX_ROWS = 32  # if the settings give no number


def load_fake(settings: Settings, observer_of: Callable[[str], EngineObserver]) -> Backend:
    """Return a backend with one model whose computation takes no time."""
    folder, real = next(iter(find_bundles(settings.bundles, settings.default_model_names).items()))
    limits = real.limits
    manifest = fake_manifest(max_source_tokens=limits.max_source_tokens, max_target_tokens=limits.max_target_tokens)
    tokenizer = read_tokenizer(folder / real.source_tokenizer)
    max_rows = settings.max_rows or MAX_ROWS
    engine = Engine(
        FakeRunner(manifest, max_rows),
        max_batch_tokens=settings.max_batch_tokens,
        observer=observer_of(manifest.name),
    )
    model = ServedModel(manifest.name, manifest, tokenizer, tokenizer, "cpu", HIDDEN, max_rows, threads={})
    gc.collect()
    gc.freeze()  # as the service does after loading
    loaded = {manifest.name: LoadedModel(model, engine)}
    return Backend(loaded, max_rows, Worker({manifest.name: engine}), NoRepository())


class NoRepository:
    """A repository without bundles, because no models are loaded later."""

    def find(self) -> Mapping[str, Manifest]:
        return {}

    def load(self, name: str, reserved_bytes: int) -> LoadedModel:
        raise BundleError("there are no bundles to load models from")


def main() -> None:
    settings = read_settings([])
    configure_logging(settings.log_level)
    DrainingServer(create_app(settings, load_fake, sys.exit), settings).run()


if __name__ == "__main__":
    main()
