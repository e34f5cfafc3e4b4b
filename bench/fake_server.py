"""`python -m bench.fake_server`: the service with the deterministic fake in the place of its model.

What a request costs here, HTTP and scheduling cost anywhere. It reads the settings of `python -m service`; the
tokenizer is that of the first bundle.
"""

import sys
from collections.abc import Callable

from service.app import create_app
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.engine.worker import Worker
from service.http.server import DrainingServer, freezing
from service.inference.service import Backend, ServedModel
from service.loading import find_bundles
from service.logs import configure_logging
from service.settings import Settings, read_settings
from service.text.tokenizer import read_tokenizer
from tests.support.fake_runner import HIDDEN, FakeRunner, fake_manifest

MAX_ROWS = 32  # where the settings name no number


def load_fake(settings: Settings, observer_of: Callable[[str], EngineObserver]) -> Backend:
    """A backend with one model that takes no time."""
    folder, real = next(iter(find_bundles(settings.bundles, settings.default_model).items()))
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
    engines = {manifest.name: engine}
    return Backend({manifest.name: model}, engines, Worker(engines))


def main() -> None:
    settings = read_settings([])
    configure_logging(settings.log_level)
    DrainingServer(create_app(settings, freezing(load_fake), sys.exit), settings).run()


if __name__ == "__main__":
    main()
