"""From a folder of bundles to a backend that can serve them: verified, loaded, and each graph run once."""

import gc
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from service.bundle import MANIFEST, BundleError, Manifest, check_files, read_manifest, sha256_of
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.engine.request import DecodingParameters, GenerateRequest
from service.engine.worker import Worker
from service.runtime.device import DeviceRunner
from service.runtime.memory import trim_heap
from service.runtime.ort import OnnxRunner
from service.runtime.provider import Provider, choose_provider
from service.serving import Backend, ServedModel
from service.settings import Settings
from service.tokenizer import TextTokenizer, read_tokenizer

logger = logging.getLogger(__name__)

REHEARSED_TOKENS = 16


def load_backend(settings: Settings, observer_of: Callable[[str], EngineObserver]) -> Backend:
    """Load every bundle of the settings' folder; the worker is not started yet.

    Raises:
        BundleError: a bundle that cannot be served, none at all, or no default model of that name.
        RuntimeUnavailableError: the installed onnxruntime cannot use the provider that is asked for.
    """
    provider = choose_provider(settings.provider)
    models: dict[str, ServedModel] = {}
    engines: dict[str, Engine] = {}
    tokenizers: dict[str, TextTokenizer] = {}
    for folder, manifest in find_bundles(settings.bundles, settings.default_model).items():
        started = time.perf_counter()
        check_files(folder, manifest)
        source, target = _read_tokenizers(folder, manifest, tokenizers)
        runner = _open_runner(folder, manifest, provider, settings)
        runner.warm_up(settings.max_batch_tokens)
        _rehearse(runner)
        models[manifest.name] = ServedModel(manifest.name, manifest, source, target, runner.provider)
        engines[manifest.name] = Engine(
            runner,
            max_batch_tokens=settings.max_batch_tokens,
            queue_timeout_s=settings.queue_timeout_s,
            observer=observer_of(manifest.name),
        )
        logger.debug("loaded %s in %.2f s", manifest.name, time.perf_counter() - started)
    # What is loaded stays. The garbage collector would walk all of it, for some ten milliseconds, in the
    # middle of a first request.
    gc.collect()
    gc.freeze()
    trim_heap()  # loading and the largest shapes took more than serving needs
    return Backend(models, engines, Worker(engines))


def _open_runner(folder: Path, manifest: Manifest, provider: Provider, settings: Settings) -> OnnxRunner | DeviceRunner:
    threads, max_rows = settings.threads, settings.max_rows
    if manifest.rows is not None:
        return DeviceRunner(folder, manifest, provider=provider, num_threads=threads, max_rows=max_rows)
    if settings.provider == "cuda":
        raise BundleError(f"{folder} is {manifest.dtype}; CUDA runs what `python -m export half` writes")
    return OnnxRunner(folder, manifest, num_threads=threads, max_rows=max_rows)


def _rehearse(runner: OnnxRunner | DeviceRunner) -> None:
    """Generate a little, so that no request pays for what Python and the processor's caches do a first time."""
    manifest = runner.manifest
    if "generate" not in manifest.tasks:
        return
    length = min(REHEARSED_TOKENS, manifest.limits.max_target_tokens, manifest.limits.max_source_tokens)
    engine, parameters = Engine(runner), DecodingParameters(max_new_tokens=length, min_new_tokens=length)
    source = (manifest.tokens.end_id,) * length
    for _ in range(2):
        engine.submit(GenerateRequest("rehearsal", source, math.inf, parameters), lambda event: None)
        while engine.has_work:
            engine.step()


def find_bundles(folder: Path, default_model: str | None) -> dict[Path, Manifest]:
    """The bundles of a folder by their own folders, in the order of their names; their files are not opened yet.

    Raises:
        BundleError: see `load_backend`.
    """
    if not folder.is_dir():
        raise BundleError(f"there is no folder {folder} with bundles; set SIGHTLINE_BUNDLES")
    found = {path.parent: read_manifest(path.parent) for path in sorted(folder.glob(f"*/{MANIFEST}"))}
    if not found:
        raise BundleError(f"no folder in {folder} has a {MANIFEST}; `python -m export` writes bundles")
    names = [manifest.name for manifest in found.values()]
    for name in names:
        if names.count(name) > 1:
            raise BundleError(f"two bundles in {folder} are named {name}; names are what requests choose by")
    if default_model is not None and default_model not in names:
        raise BundleError(f"the default model {default_model} is not in {folder}, which has {', '.join(names)}")
    return found


def _read_tokenizers(
    folder: Path, manifest: Manifest, known: dict[str, TextTokenizer]
) -> tuple[TextTokenizer, TextTokenizer]:
    """The tokenizers of source and target; `known` has those read before, by their files' SHA-256, and gets new ones.

    Models of one language pair often have equal tokenizers, each of which takes some megabytes.
    """

    def read(name: str) -> TextTokenizer:
        path = folder / name
        digest = sha256_of(path)
        if digest not in known:
            known[digest] = read_tokenizer(path)
        return known[digest]

    source, target = read(manifest.source_tokenizer), read(manifest.target_tokenizer)
    for tokenizer in (source, target):
        if len(tokenizer) > manifest.limits.vocabulary:
            raise BundleError(
                f"{folder}: a tokenizer has {len(tokenizer)} tokens, the model knows {manifest.limits.vocabulary}"
            )
    return source, target
