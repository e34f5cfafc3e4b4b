"""Loading of bundles: verify each one, open its graphs, and run each graph once."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from service.bundle import BundleError, Manifest, Task, check_files
from service.discovery import OnFailure, find_bundles, raise_failure
from service.engine.checks import TEST_INPUT_TOKENS
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


def load_backend(settings: Settings, observer_of: Callable[[str], EngineObserver]) -> Backend:
    """Load the bundles of a folder. The worker is not started yet.

    A bundle that fails to load is logged and left out, unless the settings ask for strict loading.

    Args:
        settings: settings of the process.
        observer_of: returns the observer of a model's engine.

    Raises:
        BundleError: no bundle can be served, the default model is missing or fails to load, or any
            bundle fails to load while `strict_loading` is set.
        RuntimeUnavailableError: the installed ONNX Runtime cannot use the requested provider.
    """
    failed: dict[str, str] = {}

    def on_failure(folder: Path, error: BundleError) -> None:
        if settings.strict_loading:
            raise error
        failed[_escaped(folder.name)] = _escaped(str(error))

    try:
        bundles = find_bundles(settings.bundles, settings.default_model, on_failure)
    except BundleError as error:
        raise BundleError("; ".join(dict.fromkeys([str(error), *failed.values()]))) from None
    backend = load_bundles(bundles, settings, observer_of, on_failure) if bundles else None
    if backend is None or not backend.models:
        raise BundleError("; ".join(failed.values()))
    if settings.default_model is not None and settings.default_model not in backend.models:
        raise BundleError(f"the default model {settings.default_model} failed to load: {'; '.join(failed.values())}")
    for reason in failed.values():
        logger.error("a bundle is not served: %s", reason)
    first = min(manifest.name for manifest in bundles.values())
    if settings.default_model is None and first not in backend.models:
        logger.warning("requests that name no model use %s, because %s failed to load", min(backend.models), first)
    return replace(backend, failed=failed)


def _escaped(text: str) -> str:
    """Escape what JSON cannot hold: bytes of a file name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def load_bundles(
    bundles: Mapping[Path, Manifest],
    settings: Settings,
    observer_of: Callable[[str], EngineObserver],
    on_failure: OnFailure = raise_failure,
) -> Backend:
    """Load bundles by their folders. The worker is not started yet.

    Args:
        bundles: the manifests by folder.
        settings: settings of the process.
        observer_of: returns the observer of a model's engine.
        on_failure: called for each bundle that fails to load; raises by default.

    Raises:
        RuntimeUnavailableError: the installed ONNX Runtime cannot use the requested provider.
    """
    provider = choose_provider(settings.provider)
    models: dict[str, ServedModel] = {}
    engines: dict[str, Engine] = {}
    tokenizers: dict[str, TextTokenizer] = {}
    max_rows = settings.max_rows or rows_within(state_bytes(settings), map(row_bytes, bundles.values()))
    settings = settings.model_copy(update={"max_rows": max_rows})
    for folder, manifest in bundles.items():
        started = time.perf_counter()
        try:
            model, runner = _load_model(folder, manifest, provider, settings, tokenizers)
        except BundleError as error:
            on_failure(folder, error)
            continue
        except Exception as error:
            reason = BundleError(f"{folder} cannot be served: {type(error).__name__}: {error}")
            reason.__cause__ = error
            on_failure(folder, reason)
            continue
        models[manifest.name] = model
        engines[manifest.name] = Engine(
            runner,
            max_batch_tokens=settings.max_batch_tokens,
            observer=observer_of(manifest.name),
        )
        logger.debug("loaded %s in %.2f s", manifest.name, time.perf_counter() - started)
    # The loaded objects stay until the end. Without this the garbage collector would walk all of
    # them, for some ten milliseconds, in the middle of a request.
    gc.collect()
    gc.freeze()
    trim_heap()  # loading and the largest shapes took more memory than serving needs
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
    _check_known_inputs(folder, runner)
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
        raise BundleError(
            f"{folder} is {manifest.dtype}, but CUDA needs a float16 bundle; `python -m export half` writes one"
        )
    return OnnxRunner(folder, manifest, num_threads=threads, max_rows=max_rows)


def _check_known_inputs(folder: Path, runner: OnnxRunner | DeviceRunner) -> None:
    """Run a known input through every graph, so that no request pays for a graph's first run.

    Raises:
        BundleError: a run fails, or gives numbers that are not finite.
    """
    engine = Engine(runner)
    events: list[Event] = []
    for task, request in _known_requests(runner.manifest):
        engine.submit(request, events.append)
        while engine.has_work:
            engine.step()
        if isinstance(events[-1], Failed):
            raise BundleError(
                f"{folder} cannot be served: a known input of the task {task} fails or gives numbers that are not "
                "finite; the log lines before this one have the details"
            )


def _known_requests(manifest: Manifest) -> Iterator[tuple[Task, Request]]:
    name, limits = "known-input", manifest.limits
    source = (manifest.tokens.end_id,) * min(TEST_INPUT_TOKENS, limits.max_source_tokens)
    yield "encode", EncodeRequest(name, source, math.inf, return_labels="classify" in manifest.tasks)
    if "similar" in manifest.tasks:
        yield "similar", SimilarRequest(name, source[:1], math.inf)
    if "generate" in manifest.tasks:
        source = source[: limits.max_target_tokens]
        parameters = GenerateParameters(max_new_tokens=len(source), min_new_tokens=len(source))
        for _ in range(2):  # Python and the processor's caches are slower the first time
            yield "generate", GenerateRequest(name, source, math.inf, parameters)


def _read_tokenizers(
    folder: Path, manifest: Manifest, known: dict[str, TextTokenizer]
) -> tuple[TextTokenizer, TextTokenizer]:
    """Return the tokenizers of source and target.

    Models of one language pair often have equal tokenizers, each of which takes some megabytes, so
    they share one.

    Args:
        folder: folder of the bundle.
        manifest: its manifest.
        known: tokenizers read so far by the SHA-256 of their file; gets the new ones.

    Raises:
        BundleError: a tokenizer cannot be read, or has more tokens than the model.
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
                f"{folder}: a tokenizer has {len(tokenizer)} tokens, the model knows {manifest.limits.vocabulary}; "
                "export the bundle again"
            )
    return source, target
