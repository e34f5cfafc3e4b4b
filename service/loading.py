"""Loading of bundles: verify each one, open its graphs, and run each graph once.

Loading has two stages. In the first, the files of several bundles are verified and their graphs are
opened at the same time, in as many threads as the process may use processors; this does not hold
Python's global lock. In the second, the graphs of one bundle after another are run: other work at
the same time would disturb the measurement of threads, and would add up the memory of the largest
runs.
"""

import gc
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from sightline import __version__
from sightline.base.bundle import MAX_BEAMS, BundleError, Manifest, Task
from sightline.base.bundle_files import check_file, check_files, read_manifest
from sightline.base.machine import usable_threads
from sightline.base.text.prompt import ChatTemplateError
from sightline.base.text.sentences import split_sentences
from sightline.base.text.tokenizer import TextTokenizer, read_tokenizer
from sightline.base.threads import INTERRUPTIONS, run_in_threads, start
from sightline.service.discovery import OnFailure, find_bundles, raise_failure
from sightline.service.engine.checks import TEST_INPUT_TOKENS
from sightline.service.engine.engine import Engine
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import (
    EncodeRequest,
    Event,
    Failed,
    GenerateRequest,
    Request,
)
from sightline.service.engine.worker import Worker
from sightline.service.inference.changes import new_service
from sightline.service.inference.dense import read_dense
from sightline.service.inference.service import Backend, LoadedModel, ServedModel, Service, default_models
from sightline.service.metrics import Metrics
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.device import DeviceRunner
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.provider import Provider, choose_provider
from sightline.service.runtime.state_memory import fitted_rows, row_bytes, rows_within, trim_heap
from sightline.service.runtime.thread_counts import ThreadPlan
from sightline.service.settings import ALL_MODELS, Settings

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class TokenizerCache:
    """Tokenizers by the SHA-256 of their file.

    Models of one language pair often have equal tokenizers, each of which takes some megabytes, so
    they share one. The cache keeps a tokenizer only as long as a loaded model uses it.
    """

    def __init__(self) -> None:
        self._tokenizers = WeakValueDictionary[str, TextTokenizer]()
        # Two threads must not read equal tokenizers; others are read at the same time.
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def read(self, path: Path, sha256: str) -> TextTokenizer:
        """Return a tokenizer; read its file only if no equal one was read before.

        Raises `BundleError` if the file is not a tokenizer.
        """
        with self._locks[sha256]:
            tokenizer = self._tokenizers.get(sha256)
            if tokenizer is None:
                tokenizer = self._tokenizers[sha256] = read_tokenizer(path)
            return tokenizer


def load_backend(
    settings: Settings, observer_of: Callable[[str], EngineObserver], plan: ThreadPlan | None = None
) -> Backend:
    """Load the bundles of a folder. The worker is not started yet.

    A bundle that fails to load is logged and left out, unless the settings ask for strict loading.
    Of models that are loaded on their first use, only the manifests are read. Without a `plan`, the
    numbers of threads are measured.

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
        bundles = find_bundles(settings.bundles, settings.default_model_names, on_failure, settings.only)
    except BundleError as error:
        raise BundleError("; ".join(dict.fromkeys([str(error), *failed.values()]))) from None
    backend = load_bundles(bundles, settings, observer_of, on_failure, plan) if bundles else None
    failed = dict(sorted(failed.items()))
    served = {} if backend is None else backend.manifests
    if backend is None or not served:
        raise BundleError("; ".join(failed.values()))
    for name in settings.default_model_names:
        if name not in served:
            raise BundleError(f"the default model {name} failed to load: {'; '.join(failed.values())}")
    for reason in failed.values():
        logger.error("a bundle is not served: %s", reason)
    _warn_of_changed_defaults(bundles.values(), backend, settings.default_model_names)
    for name in settings.lazy_model_names:
        if name != ALL_MODELS and name not in served:
            logger.warning("SIGHTLINE_LAZY_MODELS names %s, but no bundle with this name is served", name)
    return replace(backend, failed=failed)


def open_service(settings: Settings, folder: Path | None = None) -> Service:
    """Return a service without HTTP: of the bundle of a folder, or of all in the folder of the
    settings, each of which its first use loads.

    The caller starts and stops its worker. Raises the errors of `load_backend`.
    """
    chosen = {"lazy_models": ALL_MODELS}
    load: Callable[[Settings, Callable[[str], EngineObserver]], Backend] = load_backend
    if folder is not None:
        manifest = read_manifest(folder)
        chosen, load = {"lazy_models": "", "default_model": manifest.name}, partial(load_bundles, {folder: manifest})
    settings = settings.model_copy(update=chosen)
    service = new_service(settings, Metrics(__version__))
    service.attach(load(settings, service.metrics.for_model))
    return service


def _warn_of_changed_defaults(manifests: Iterable[Manifest], backend: Backend, chosen: Sequence[str]) -> None:
    """Log a warning for tasks whose default model changed or is missing because a bundle failed."""
    defaults = default_models(backend.manifests.values(), chosen)
    expected = default_models(manifests, chosen)
    changes: dict[str, list[str]] = {}  # tasks by effect
    for task in dict.fromkeys([*expected, *defaults]):
        name = defaults.get(task)
        if name != expected.get(task):
            effect = f"use {name}, because others failed to load"
            if name is None:
                effect = f"fail, because {expected.get(task)} failed to load"
            changes.setdefault(effect, []).append(task)
    for effect, tasks in changes.items():
        logger.warning("requests for %s that name no model %s", ", ".join(tasks), effect)


def _escaped(text: str) -> str:
    """Escape what JSON cannot hold: bytes of a file name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def load_bundles(
    bundles: Mapping[Path, Manifest],
    settings: Settings,
    observer_of: Callable[[str], EngineObserver],
    on_failure: OnFailure = raise_failure,
    plan: ThreadPlan | None = None,
) -> Backend:
    """Load bundles by their folders, except those that are loaded on their first use. The worker is
    not started yet.

    Models and failures are in the order of the bundles, however long each of them takes. Rows
    follow from the memory for all models, so that the memory suffices when every model is loaded.
    `on_failure` is called for each bundle that fails to load; it raises by default. Without a
    `plan`, the numbers of threads are measured. Raises `RuntimeUnavailableError`.
    """
    started = time.perf_counter()
    plan = plan or ThreadPlan(usable_threads())
    repository = BundleRepository(settings, observer_of, plan)
    if not settings.max_rows:
        bundles = _with_enough_memory(bundles, settings.max_state_bytes, on_failure)
    # Bundles that are lazy by their manifest are many, and few of them are used.
    counted = [bundle for bundle in bundles.values() if not bundle.lazy] or list(bundles.values())
    max_rows = settings.max_rows or rows_within(settings.max_state_bytes, map(row_bytes, counted), repository.provider)
    settings = settings.model_copy(update={"max_prefix_cache_bytes": _prefix_cache_share(settings, counted)})
    lazy = {bundle.name: bundle for bundle in bundles.values() if bundle.lazy or settings.is_lazy(bundle.name)}
    bundles = {folder: manifest for folder, manifest in bundles.items() if manifest.name not in lazy}

    opens = [
        partial(
            _attempt,
            folder,
            settings,
            partial(repository.open, folder, manifest, _with_rows(settings, manifest, max_rows)),
        )
        for folder, manifest in bundles.items()
    ]
    opened = run_in_threads(opens, usable_threads())
    trim_heap()  # opening took more memory than the open graphs need
    loaded: dict[str, LoadedModel] = {}
    for folder, run_graphs in zip(bundles, opened, strict=True):
        result = run_graphs if isinstance(run_graphs, BundleError) else _attempt(folder, settings, run_graphs)
        if isinstance(result, BundleError):
            on_failure(folder, result)
        else:
            loaded[result.model.name] = result
    logger.debug("loaded %d bundles in %.2f s", len(loaded), time.perf_counter() - started)
    gc.collect()
    trim_heap()  # loading and the largest shapes took more memory than serving needs
    worker = Worker({name: model.engine for name, model in loaded.items()}, plan.activity)
    return Backend(loaded, max_rows, worker, repository, lazy=lazy)


class BundleRepository:
    """The bundles folder, from which single models are loaded while the service runs."""

    def __init__(self, settings: Settings, observer_of: Callable[[str], EngineObserver], plan: ThreadPlan) -> None:
        self._settings = settings
        self.provider = choose_provider(settings.provider)
        self._tokenizers = TokenizerCache()
        self._observer_of = observer_of
        self._plan = plan

    def find(self) -> Mapping[str, Manifest]:
        """See `Repository.find`."""
        return {manifest.name: manifest for manifest in self._find().values()}

    def check(self, name: str) -> None:
        """See `Repository.check`."""
        for folder, manifest in self._find().items():
            if manifest.name == name:
                check_files(folder, manifest)

    def load(self, name: str, reserved_bytes: int) -> LoadedModel:
        """See `Repository.load`.

        The model gets the rows that fit into the memory for decoder states beside the other loaded
        models, but at least `MAX_BEAMS` if that number fits without the others, as at start. The
        setting `max_rows` replaces the number. The rows of loaded models do not change.
        """
        bundles = self._find()
        matches = {folder: manifest for folder, manifest in bundles.items() if manifest.name == name}
        if not matches:
            raise BundleError(f"no bundle in {self._settings.bundles} is named {name}")
        ((folder, manifest),) = matches.items()
        limit = self._settings.max_state_bytes
        if not self._settings.max_rows:
            _with_enough_memory(matches, limit, raise_failure)
        max_rows = rows_within(max(0, limit - reserved_bytes), [row_bytes(manifest)], self.provider)
        share = _prefix_cache_share(self._settings, bundles.values())
        settings = self._settings.model_copy(update={"max_prefix_cache_bytes": share})
        settings = _with_rows(settings, manifest, max_rows)
        # Calls may wait for the model, so that they do not wait for the largest shapes, too.
        loaded = _attempt(folder, settings, lambda: self.open(folder, manifest, settings, warms_up=False)())
        if isinstance(loaded, BundleError):
            raise loaded
        trim_heap()  # loading and the largest shapes took more memory than serving needs
        return loaded

    def open(
        self, folder: Path, manifest: Manifest, settings: Settings, *, warms_up: bool = True
    ) -> Callable[[], LoadedModel]:
        """Verify a bundle, read its tokenizers, open its graphs, and return the second stage.

        Raises `BundleError` if a file is damaged, a tokenizer has more tokens than the model, or a
        layer after pooling has another size than the hidden states.
        """
        started = time.perf_counter()
        # Python's global lock is free while files are hashed and ONNX Runtime opens graphs.
        opening = start(partial(_open_runner, folder, manifest, self.provider, settings))
        tokenizers = list[TextTokenizer]()
        for name in (manifest.source_tokenizer, manifest.target_tokenizer):
            check_file(folder, manifest, name)
            tokenizers.append(self._tokenizers.read(folder / name, manifest.files[name].sha256))
        source, target = tokenizers
        limits = manifest.limits
        for tokenizer, size in ((source, limits.source_vocabulary or limits.vocabulary), (target, limits.vocabulary)):
            if len(tokenizer) > size:
                raise BundleError(
                    f"{folder}: a tokenizer has {len(tokenizer)} tokens, the model knows {size}; export the bundle "
                    "again"
                )
        if manifest.training_unit == "sentence" and manifest.languages:
            split_sentences(".", manifest.languages.source, max_sentences=1)  # reads the rules of the language
        dense = () if manifest.embedding is None else manifest.embedding.dense
        layers = tuple(read_dense(folder, layer) for layer in dense)
        runner = opening.result()
        if dense and dense[0].inputs != runner.hidden_size:
            raise BundleError(
                f"{folder}: embedding.dense reads vectors of {dense[0].inputs} numbers, but the hidden states have "
                f"{runner.hidden_size}; export the bundle again"
            )
        opening_s = time.perf_counter() - started

        def run_graphs() -> LoadedModel:
            """Choose the threads of each graph, run it with its largest shapes, and check it.

            Raises `BundleError` if a run fails, or gives numbers that are not finite.
            """
            started = time.perf_counter()
            if not settings.threads and runner.provider == "cpu":
                runner.choose_threads(folder, self._plan)
            if warms_up:
                runner.warm_up(settings.max_batch_tokens)
            _check_known_inputs(folder, runner)
            observer = self._observer_of(manifest.name)
            engine = Engine(runner, max_batch_tokens=settings.max_batch_tokens, observer=observer)
            model = ServedModel(
                manifest.name,
                manifest,
                source,
                target,
                runner.provider,
                runner.hidden_size,
                runner.max_rows,
                runner.threads,
                runner.threads_alone,
                layers,
                load_seconds=opening_s + time.perf_counter() - started,
            )
            try:
                model.tool_format  # noqa: B018 - compiles the chat template, which takes too long for a call
            except ChatTemplateError as error:
                raise BundleError(f"{folder}: the chat template cannot be used: {error}; export it again") from None
            return LoadedModel(model, engine)

        return run_graphs

    def _find(self) -> dict[Path, Manifest]:
        def log_failure(folder: Path, error: BundleError) -> None:
            logger.debug("a bundle is not listed: %s", error)

        try:
            return find_bundles(self._settings.bundles, on_failure=log_failure)
        except BundleError as error:
            logger.error("the bundles folder cannot be used: %s", error)
            return {}


def _attempt(folder: Path, settings: Settings, load: Callable[[], Result]) -> Result | BundleError:
    """Return what a step of loading returns, or the error that names the bundle."""
    try:
        return start(load).result(settings.load_timeout_s)
    except INTERRUPTIONS:
        raise
    except BundleError as error:
        return error
    except TimeoutError:
        return BundleError(
            f"{folder} did not load within {settings.load_timeout_s:g} seconds; remove it, or put it on a faster disk"
        )
    except BaseException as error:  # also panics of libraries, which are not subclasses of Exception
        reason = BundleError(f"{folder} cannot be served: {type(error).__name__}: {error}")
        reason.__cause__ = error
        return reason


def _with_enough_memory(
    bundles: Mapping[Path, Manifest], num_bytes: int, on_failure: OnFailure
) -> dict[Path, Manifest]:
    """Return the bundles of which at least one row fits into the memory for decoder states."""
    fitting: dict[Path, Manifest] = {}
    for folder, manifest in bundles.items():
        row = row_bytes(manifest)
        if row <= num_bytes:
            fitting[folder] = manifest
            continue
        reason = BundleError(
            f"{folder} needs {row:,} bytes of decoder state for a sequence of {manifest.limits.max_target_tokens} "
            f"tokens, but {num_bytes:,} bytes are allowed; import the model again with a lower "
            "--max-tokens, or allow more memory (SIGHTLINE_MEMORY_BYTES)"
        )
        on_failure(folder, reason)
    return fitting


def _with_rows(settings: Settings, manifest: Manifest, most: int) -> Settings:
    """Return the settings of one bundle, with its rows: `most`, or fewer if only these fit."""
    rows = settings.max_rows or fitted_rows(most, settings.max_state_bytes, manifest)
    if rows < MAX_BEAMS and not settings.max_rows:
        logger.warning(
            "%s decodes at most %d sequences or beams at once, because the state of each may need %s bytes and %s are "
            "allowed; set SIGHTLINE_MEMORY_BYTES to more, or import the model again with a lower --max-tokens",
            manifest.name,
            rows,
            f"{row_bytes(manifest):,}",
            f"{settings.max_state_bytes:,}",
        )
    return settings.model_copy(update={"max_rows": rows})


def _prefix_cache_share(settings: Settings, manifests: Iterable[Manifest]) -> int:
    """Return the bytes of the prefix cache of each model that can have one."""
    return settings.max_prefix_cache_bytes // max(1, sum(manifest.has_prefix_states for manifest in manifests))


def _open_runner(folder: Path, manifest: Manifest, provider: Provider, settings: Settings) -> OnnxRunner | DeviceRunner:
    """Check all files of a bundle, and open its graphs."""
    check_files(folder, manifest)
    threads, max_rows = settings.threads or 1, settings.max_rows
    if manifest.rows is not None:
        return DeviceRunner(folder, manifest, provider=provider, num_threads=threads, max_rows=max_rows)
    if settings.provider == "cuda":
        raise BundleError(f"{folder} is {manifest.dtype}, but CUDA needs float16; see `sightline quantize --bits 16`")
    prefix_bytes = settings.max_prefix_cache_bytes
    return OnnxRunner(folder, manifest, num_threads=threads, max_rows=max_rows, prefix_cache_bytes=prefix_bytes)


def _check_known_inputs(folder: Path, runner: OnnxRunner | DeviceRunner) -> None:
    """Run a known input through every graph, so that no request pays for a graph's first run.

    Raises `BundleError` if a run fails, or gives numbers that are not finite.
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
    yield "encode", EncodeRequest(name, source, math.inf, return_labels=bool(manifest.labels))
    if "sparse" in manifest.tasks:
        yield "sparse", EncodeRequest(name, source, math.inf, return_largest=True)
    if "generate" in manifest.tasks:
        source = source[: limits.max_target_tokens]
        parameters = GenerateParameters(max_new_tokens=len(source), min_new_tokens=len(source))
        for _ in range(2):  # Python and the processor's caches are slower the first time
            yield "generate", GenerateRequest(name, source, math.inf, parameters)
