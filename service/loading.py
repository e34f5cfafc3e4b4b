"""From a folder of bundles to a backend that can serve them: verified, loaded, and each graph run once."""

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from service.bundle import MANIFEST, BundleError, Manifest, Task, check_files, read_manifest
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.engine.request import (
    EncodeRequest,
    Event,
    Failed,
    GenerateRequest,
    Request,
    SimilarRequest,
)
from service.engine.worker import Worker
from service.inference.service import Backend, ServedModel, state_bytes
from service.machine import usable_threads
from service.parameters import GenerateParameters
from service.runtime.device import DeviceRunner
from service.runtime.memory import row_bytes, rows_within, trim_heap
from service.runtime.ort import OnnxRunner
from service.runtime.provider import Provider, choose_provider
from service.settings import Settings
from service.text.tokenizer import TextTokenizer, read_tokenizer

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
    bundles = find_bundles(settings.bundles, settings.default_model)
    max_rows = settings.max_rows or rows_within(state_bytes(settings), map(row_bytes, bundles.values()))
    settings = settings.model_copy(update={"max_rows": max_rows})
    for folder, manifest in bundles.items():
        started = time.perf_counter()
        try:
            models[manifest.name], runner = _load_model(folder, manifest, provider, settings, tokenizers)
        except BundleError:
            raise
        except Exception as error:
            raise BundleError(f"{folder} cannot be served: {type(error).__name__}: {error}") from error
        engines[manifest.name] = Engine(
            runner,
            max_batch_tokens=settings.max_batch_tokens,
            observer=observer_of(manifest.name),
        )
        logger.debug("loaded %s in %.2f s", manifest.name, time.perf_counter() - started)
    # What is loaded stays. The garbage collector would walk all of it, for some ten milliseconds, in the
    # middle of a first request.
    gc.collect()
    gc.freeze()
    trim_heap()  # loading and the largest shapes took more than serving needs
    return Backend(models, engines, Worker(engines))


def _load_model(
    folder: Path,
    manifest: Manifest,
    provider: Provider,
    settings: Settings,
    tokenizers: dict[str, TextTokenizer],
) -> tuple[ServedModel, OnnxRunner | DeviceRunner]:
    check_files(folder, manifest)
    source, target = _read_tokenizers(folder, manifest, tokenizers)
    runner = _open_runner(folder, manifest, provider, settings)
    if not settings.threads and runner.provider == "cpu":
        runner.choose_threads(folder, usable_threads())
    runner.warm_up(settings.max_batch_tokens)
    _rehearse(folder, runner)
    model = ServedModel(
        manifest.name,
        manifest,
        source,
        target,
        runner.provider,
        runner.hidden_size,
        runner.max_rows,
        runner.threads,
    )
    return model, runner


def _open_runner(folder: Path, manifest: Manifest, provider: Provider, settings: Settings) -> OnnxRunner | DeviceRunner:
    threads, max_rows = settings.threads or 1, settings.max_rows
    if manifest.rows is not None:
        return DeviceRunner(folder, manifest, provider=provider, num_threads=threads, max_rows=max_rows)
    if settings.provider == "cuda":
        raise BundleError(f"{folder} is {manifest.dtype}; CUDA runs what `python -m export half` writes")
    return OnnxRunner(folder, manifest, num_threads=threads, max_rows=max_rows)


def _rehearse(folder: Path, runner: OnnxRunner | DeviceRunner) -> None:
    """Run a known input through every graph, so that no request is the first to do so.

    Raises:
        BundleError: a result is missing or has numbers that are not finite.
    """
    engine = Engine(runner)
    events: list[Event] = []
    for task, request in _rehearsed_requests(runner.manifest):
        engine.submit(request, events.append)
        while engine.has_work:
            engine.step()
        if isinstance(events[-1], Failed):
            raise BundleError(
                f"{folder} cannot be served: a known input of the task {task} fails or gives numbers that are not "
                "finite; the log lines before this one say which"
            )


def _rehearsed_requests(manifest: Manifest) -> Iterator[tuple[Task, Request]]:
    name, limits = "rehearsal", manifest.limits
    source = (manifest.tokens.end_id,) * min(REHEARSED_TOKENS, limits.max_source_tokens)
    yield "encode", EncodeRequest(name, source, math.inf, wants_labels="classify" in manifest.tasks)
    if "similar" in manifest.tasks:
        yield "similar", SimilarRequest(name, source[:1], math.inf)
    if "generate" in manifest.tasks:
        source = source[: limits.max_target_tokens]
        parameters = GenerateParameters(max_new_tokens=len(source), min_new_tokens=len(source))
        for _ in range(2):  # Python and the processor's caches are slower the first time
            yield "generate", GenerateRequest(name, source, math.inf, parameters)


def find_bundles(folder: Path, default_model: str | None) -> dict[Path, Manifest]:
    """The bundles of a folder by their own folders, in the order of their names; their files are not opened yet.

    Raises:
        BundleError: see `load_backend`.
    """
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"there is no folder {folder} with bundles; set SIGHTLINE_BUNDLES") from None
    except OSError as error:
        raise BundleError(f"{folder} cannot be listed: {error.strerror}; {_permissions_needed()}") from None
    found = {path: read_manifest(path) for path in paths if _is_bundle(path)}
    if not found:
        raise BundleError(f"no folder in {folder} has a {MANIFEST}; `python -m export` writes bundles")
    names = [manifest.name for manifest in found.values()]
    for name in names:
        if names.count(name) > 1:
            raise BundleError(f"two bundles in {folder} are named {name}; names are what requests choose by")
    if default_model is not None and default_model not in names:
        raise BundleError(f"the default model {default_model} is not in {folder}, which has {', '.join(names)}")
    return found


def _is_bundle(path: Path) -> bool:
    """Return True for a folder with a manifest that is not hidden.

    Raises:
        BundleError: it cannot be told, because the folder cannot be entered.
    """
    try:
        (path / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if path.name.startswith("."):
            return False
        raise BundleError(f"{path} cannot be entered: {error.strerror}; {_permissions_needed()}, or move it") from None
    if path.name.startswith("."):
        logger.warning(
            "%s is hidden and not served: an interrupted export leaves such a folder, and the next export to the same "
            "place removes or restores it",
            path,
        )
        return False
    return True


def _permissions_needed() -> str:
    return f"give user {os.geteuid()}, as whom the service runs, permission to read and enter it"


def _read_tokenizers(
    folder: Path, manifest: Manifest, known: dict[str, TextTokenizer]
) -> tuple[TextTokenizer, TextTokenizer]:
    """The tokenizers of source and target; `known` has those read before, by their files' SHA-256, and gets new ones.

    Models of one language pair often have equal tokenizers, each of which takes some megabytes.
    """

    def read(name: str) -> TextTokenizer:
        digest = manifest.files[name].sha256
        if digest not in known:
            known[digest] = read_tokenizer(folder / name)
        return known[digest]

    source, target = read(manifest.source_tokenizer), read(manifest.target_tokenizer)
    for tokenizer in (source, target):
        if len(tokenizer) > manifest.limits.vocabulary:
            raise BundleError(
                f"{folder}: a tokenizer has {len(tokenizer)} tokens, the model knows {manifest.limits.vocabulary}"
            )
    return source, target
