"""The served models and the state of the process: loading, ready or draining."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from sightline.base.bundle import GenerationDefaults, Manifest, SentenceEmbedding, Task
from sightline.base.errors import list_of
from sightline.base.text.tokenizer import TextTokenizer
from sightline.base.text.tool_calls import ToolFormat, find_tool_format
from sightline.base.threads import run_in_daemon_thread
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.engine.engine import Engine
from sightline.service.engine.throughput import Throughput
from sightline.service.engine.worker import Worker
from sightline.service.inference.admission import AdmissionController, RejectionPacer, ResponseMemory
from sightline.service.inference.dense import DenseLayer
from sightline.service.inference.document_store import MAX_BODIES, DocumentStore
from sightline.service.keys import KeyRing
from sightline.service.metrics import Metrics
from sightline.service.peers import Peers
from sightline.service.runtime.state_memory import ModelMemory, fitted_rows, prefix_block_bytes, row_bytes
from sightline.service.settings import Settings
from sightline.service.traces import SHUTDOWN_TIMEOUT_S, Traces, traces_endpoint

if TYPE_CHECKING:
    from sightline.base.text.chat import ChatFormatter
    from sightline.service.constraints import Constraint
    from sightline.service.inference.masks import TokenMatcher

DefaultTask = Task | Literal["chat", "zero-shot"]
ENCODER_TASKS = frozenset[Task]({"encode", "attention"})  # of a model without a decoder and without a head
# What a model needs for a task that is not in its list of tasks.
NEEDS: Mapping[DefaultTask | None, str] = {
    "chat": "it needs a model with a chat template, whose `chat` in GET /v1/models is true",
    "zero-shot": "it needs a model for natural language inference, one of whose labels begins with entail",
}


@dataclass(frozen=True)
class ServedModel:
    """A loaded bundle, as the use cases see it."""

    name: str
    manifest: Manifest
    source_tokenizer: TextTokenizer
    target_tokenizer: TextTokenizer
    provider: Literal["cpu", "cuda"]
    hidden_size: int  # M of `Encoded.hidden`
    max_rows: int  # rows of the decoder's batch: one for each sequence, or one for each beam
    threads: Mapping[str, int]  # number of threads for each graph
    threads_alone: int = 1  # the same while the other workers are idle, if it is more
    dense: tuple[DenseLayer, ...] = ()  # layers of pooled vectors
    load_seconds: float = 0.0  # duration of its load
    original: "ServedModel | None" = None  # of `with_markers`

    @cached_property
    def has_generation_defaults(self) -> bool:
        """True if the model has defaults for parameters that a request omits."""
        return self.manifest.generation != GenerationDefaults()

    @cached_property
    def chat(self) -> "ChatFormatter | None":
        """The format of dialogues; None for a model that does not chat.

        Raises `ChatTemplateError` if the chat template is not valid.
        """
        if self.manifest.chat is None:
            return None
        from sightline.base.text.chat import ChatFormatter  # Jinja is loaded only for models that chat

        return ChatFormatter(self.manifest.chat, self.source_tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of calls of tools; None if the chat template takes no tools."""
        if self.chat is None or self.manifest.chat is None or not self.manifest.chat.takes_tools:
            return None
        return find_tool_format(self.chat.template)

    @cached_property
    def _marking_tokenizer(self) -> TextTokenizer:
        assert self.tool_format is not None
        return self.target_tokenizer.showing(self.tool_format.markers, self.manifest.tokens.end_ids)

    def with_markers(self) -> "ServedModel":
        """Return the model for a call with tools: its texts have special tokens that mark calls."""
        model = replace(self, target_tokenizer=self._marking_tokenizer, original=self)
        # Both are compiled once. A grammar has the ids of special tokens.
        vars(model).update(chat=self.chat, compile_constraint=lambda constraint: self.compile_constraint(constraint))
        return model

    @cached_property
    def compile_constraint(self) -> "Callable[[Constraint], TokenMatcher]":
        """The function that compiles a constraint on generated texts; see `compiler_of`."""
        from sightline.service.inference.masks import compiler_of  # the library is loaded only when it is needed

        manifest = self.manifest
        return compiler_of(self.target_tokenizer, manifest.limits.vocabulary, manifest.tokens.end_ids)

    @property
    def translates(self) -> bool:
        """True if the inputs of generations are sources of translations, not prompts."""
        return self.manifest.languages is not None or self.manifest.training_unit == "sentence"

    @property
    def embedding_size(self) -> int:
        """Size of a pooled vector."""
        return len(self.dense[-1].weight) if self.dense else self.hidden_size


ModelState = Literal["ready", "loading", "unloaded", "failed"]  # of models that clients can name


@dataclass(frozen=True)
class LoadedModel:
    """A loaded bundle with its engine."""

    model: ServedModel
    engine: Engine

    def memory(self) -> ModelMemory:
        model, engine, row = self.model, self.engine, row_bytes(self.model.manifest)
        block = prefix_block_bytes(model.manifest)
        return ModelMemory(
            model.manifest.weight_bytes,
            state_per_row=row,
            max_state=model.max_rows * row,
            state_in_use=engine.num_rows_in_use * row,
            max_prefix_cache=engine.num_prefix_blocks * block,
            prefix_cache_in_use=engine.num_prefix_blocks_in_use * block,
        )


@dataclass(eq=False)
class Model:
    """All that the process knows of a model, by its name; `changes` has the table of the states.

    A call keeps the `ServedModel` that it began with, because the model may be unloaded meanwhile.
    """

    name: str
    manifest: Manifest = field(init=False)  # set when clients can name the model, as the next two
    max_rows: int = field(init=False)  # rows for which memory for decoder state is reserved
    admission: AdmissionController = field(init=False)  # of the calls that use the model, or wait for its load
    state: ModelState | Literal["absent", "replaced"] = "absent"
    loaded: LoadedModel | None = None  # while it is ready; the only reference to it
    load: asyncio.Task[None] | None = None  # the load in progress for which calls wait
    retry_at: float | None = None  # time of `time.monotonic` before which a failed load is not repeated
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is loaded, replaced or unloaded
    is_lazy: bool = False  # it may be unloaded until its next use, if another model needs the memory
    used_at: float = 0.0  # start of the last call that used it


class Repository(Protocol):
    """The bundles folder, from which models can be loaded. Its methods may take seconds."""

    def find(self) -> Mapping[str, Manifest]:
        """Return the manifests of all bundles by name, without those that cannot be read."""
        ...

    def check(self, name: str) -> None:
        """Check the files of a bundle. Raises `BundleError` if one is damaged or missing."""
        ...

    def load(self, name: str, reserved_bytes: int) -> LoadedModel:
        """Load a bundle by its name. Raises `BundleError` if there is none, or it cannot be served.

        `reserved_bytes` is the decoder state of the other loaded models, in all their rows.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """The models by name, and the worker that runs their engines."""

    loaded: Mapping[str, LoadedModel]
    max_rows: int  # rows of each model, of which a model with long sequences may have fewer
    worker: Worker
    repository: Repository
    failed: Mapping[str, str] = field(default_factory=dict)  # bundles that failed to load, with the reason
    lazy: Mapping[str, Manifest] = field(default_factory=dict)  # models that the repository loads on their first use

    @property
    def manifests(self) -> dict[str, Manifest]:
        return {**self.lazy, **{name: loaded.model.manifest for name, loaded in self.loaded.items()}}


def default_models(manifests: Iterable[Manifest], chosen: Sequence[str]) -> dict[DefaultTask, str]:
    """Return the model of requests that name no model, by task.

    It is the first model of the setting `default_model` (`chosen`) that can do the task (see
    `models_for`), or else the only model that can, apart from those whose manifest has `lazy`. A
    task has no default if several models can do it, or while a model of the setting is missing.
    """
    manifests = list(manifests)
    by_task, lazy = models_by_task(manifests), {manifest.name for manifest in manifests if manifest.lazy}
    is_complete = set(chosen) <= set(by_task[None])
    defaults: dict[DefaultTask, str] = {}
    for task in by_task:
        names = models_for(task, manifests, chosen)
        first = next((name for name in chosen if name in names), None)
        others = [name for name in names if name not in lazy]
        if first is None and len(others) == 1 and is_complete:
            (first,) = others
        if task is not None and first is not None:
            defaults[task] = first
    return defaults


def models_for(task: DefaultTask | None, manifests: Sequence[Manifest], chosen: Sequence[str]) -> list[str]:
    """Return the models among which the default of a task is chosen.

    Almost every model can encode texts. If some were trained for it, only these count; a lazy one
    must be in the setting.
    """
    candidates = [manifest for manifest in manifests if not manifest.lazy or manifest.name in chosen]
    trained = [manifest.name for manifest in candidates if task == "encode" and _is_embedding_model(manifest)]
    return trained or models_by_task(manifests).get(task, [])


def _is_embedding_model(manifest: Manifest) -> bool:
    """Return True for models with settings of sentence-transformers, or with an encoder alone."""
    default = SentenceEmbedding(pooling="mean", normalize=False)  # of an encoder without such settings, or with a head
    embedding = None if "encode" not in manifest.tasks else manifest.embedding
    return embedding is not None and (embedding != default or set(manifest.tasks) <= ENCODER_TASKS)


def models_by_task(manifests: Iterable[Manifest]) -> dict[DefaultTask | None, list[str]]:
    """Return the names of the models that can do each task; None has all models."""
    names: dict[DefaultTask | None, list[str]] = {None: []}
    for manifest in manifests:
        tasks: list[DefaultTask | None] = [None, *manifest.tasks]
        if manifest.chat is not None:
            tasks.append("chat")
        if manifest.entailment is not None:
            tasks.append("zero-shot")
        for task in tasks:
            names.setdefault(task, []).append(manifest.name)
    return names


class Service:
    """State that all calls share. It is used only on the event loop's thread."""

    def __init__(self, settings: Settings, metrics: Metrics, peers: Peers) -> None:
        self.settings = settings
        self.metrics = metrics
        metrics.process_gauges["workers"].set_function(lambda: self.unavailable_code is None and not self.is_retiring)
        self.peers = peers
        self.keys = None if settings.keys is None else KeyRing(settings.keys)
        self.traces = Traces() if traces_endpoint() else None
        self.is_retiring = False  # connections close after their next response, so that clients leave
        self.rejection_pacer = RejectionPacer(2 * settings.max_waiting_sequences)
        self.response_memory = ResponseMemory(settings.max_response_bytes)
        self.documents = DocumentStore(MAX_BODIES * settings.max_body_bytes)
        self.unavailable_code: ErrorCode | None = "loading"  # None while calls are served
        # Reported by the health checks although calls are served: until all workers are ready, and
        # in the drain window.
        self.not_ready_code: ErrorCode | None = None
        self.models: dict[str, Model] = {}  # those that clients can name, sorted by name
        self._known: dict[str, Model] = {}  # also those that are not served
        self.default_models: dict[DefaultTask, str] = {}  # model of requests that name none, by task
        self.default_model: str | None = None  # model of requests that name none and have no task of their own
        self.failed_models: list[str] = []  # folder names of the bundles that failed to load
        self.is_loaded = False  # True from the end of loading on
        self.worker: Worker  # set when the models are loaded
        self.repository: Repository  # set when the models are loaded
        self.repository_lock = asyncio.Lock()  # held while a model is loaded for which no memory is reserved yet

    def attach(self, backend: Backend) -> None:
        """Start to serve the models of a backend."""
        self.metrics.set_limits({"max_rows": backend.max_rows})
        self.worker, self.repository = backend.worker, backend.repository
        for loaded in backend.loaded.values():
            self.list_model(loaded.model.manifest, loaded.model.max_rows, loaded)
        for manifest in backend.lazy.values():
            rows = self.settings.max_rows or fitted_rows(backend.max_rows, self.settings.max_state_bytes, manifest)
            self.list_model(manifest, rows)
            self.model(manifest.name).is_lazy = True
        self.failed_models = sorted(backend.failed)
        self.metrics.process_gauges["models_failed"].set(len(backend.failed))
        backend.worker.on_close = self._set_unavailable
        self.is_loaded = True
        if self.unavailable_code == "loading":
            self.unavailable_code = None

    def model(self, name: str) -> Model:
        """Return what the process knows of a model; it is absent if it was never served."""
        return self._known.setdefault(name, Model(name))

    def list_model(self, manifest: Manifest, max_rows: int, loaded: LoadedModel | None = None) -> None:
        """Let clients name a model. The worker has its engine, or its first call loads it."""
        model, settings, metrics = self.model(manifest.name), self.settings, self.metrics.for_model(manifest.name)
        model.manifest, model.max_rows, model.loaded, model.retry_at = manifest, max_rows, loaded, None
        if loaded is None:
            model.state = "unloaded"
            metrics.unwatch()  # the gauges are 0 until the model is loaded
        else:
            model.state = "ready"
            metrics.watch(loaded.engine, loaded.memory, loaded.model.load_seconds)
        model.admission = AdmissionController(
            (0 if loaded is None else max_rows) + settings.max_waiting_sequences,
            settings.max_waiting_bytes,
            settings.max_waiting_tokens,
            Throughput() if loaded is None else loaded.engine.throughput,
            settings.queue_timeout_s,
        )
        self.models = dict(sorted({**self.models, model.name: model}.items()))
        self._choose_defaults()

    def unlist_model(self, model: Model, state: Literal["absent", "replaced"]) -> None:
        """Reject new calls of a model from now on. Its metrics stay, and its gauges become 0."""
        del self.models[model.name]
        model.state, model.loaded = state, None
        self._choose_defaults()
        self.metrics.for_model(model.name).unwatch()

    def _choose_defaults(self) -> None:
        chosen = self.settings.default_model_names
        self.default_models = default_models(self.manifests, chosen)
        only = next(iter(self.models)) if len(self.models) == 1 and not chosen else None
        self.default_model = chosen[0] if chosen else only

    @property
    def manifests(self) -> list[Manifest]:
        """The manifests of all models, sorted by name; lazy models are included."""
        return [model.manifest for model in self.models.values()]

    def state_of(self, name: str) -> ModelState:
        """Return the state of a model; "unloaded" if clients cannot name it."""
        state = self.models[name].state if name in self.models else "unloaded"
        return "unloaded" if state == "absent" or state == "replaced" else state

    def reserved_bytes(self, name: str) -> int:
        """Return the decoder state in bytes of all models except one, in all their rows.

        Memory of lazy models is reserved before they are loaded.
        """
        return sum(model.max_rows * row_bytes(model.manifest) for other, model in self.models.items() if other != name)

    def begin_drain(self) -> None:
        """Let load balancers and clients leave: calls are served, but the service is not ready."""
        self.not_ready_code = "draining"
        self.is_retiring = True

    def drain(self) -> None:
        """Reject new calls from now on."""
        self._set_unavailable("draining")

    def _set_unavailable(self, code: ErrorCode) -> None:
        if self.unavailable_code != "draining":
            self.unavailable_code = code

    def check_ready(self) -> None:
        """Check that the service is ready. Raises `loading`, `draining` or `engine_dead`."""
        code = self.unavailable_code or self.not_ready_code
        if code is not None:
            raise ApiError(code)

    def require_manifests(self) -> list[Manifest]:
        """Return `manifests`; raises `loading` until the service has loaded its models."""
        if not self.is_loaded:
            raise ApiError("loading")
        return self.manifests

    def find_manifest(
        self, name: str | None, task: Task | None = None, default_for: DefaultTask | None = None
    ) -> Manifest:
        """Return the manifest of the model that a call names, or of a default model. Loads nothing.

        The model must be able to do `task`; the default is that of `default_for`, if it is given.
        Fails with `loading`, `model_not_found`, `unsupported_task`, or with `invalid_parameter` if
        the call must name a model.
        """
        if name is None:
            name = self._require_default_name(default_for or task)
        model = self.models.get(name)
        if model is None:
            self._check_loaded(name)
            raise ApiError("model_not_found", f"There is no model of this name; {self._names_text()}.", field="model")
        if task is not None and task not in model.manifest.tasks:
            able = models_by_task(self.manifests).get(task)
            advice = f"the models that can are {list_of(able)}" if able else "no model of this service can"
            raise ApiError("unsupported_task", f"{name} cannot do the task {task}; {advice}.", field="model")
        return model.manifest

    def default_name(self, task: DefaultTask | None) -> str | None:
        """Return the model of requests that name none; None if they must name one."""
        return self.default_model if task is None else self.default_models.get(task)

    def _require_default_name(self, task: DefaultTask | None) -> str:
        """Return the model of requests that name none, or raise the reason why there is none."""
        name = self.default_name(task)
        if name is not None and name in self.models:
            return name
        for chosen in self.settings.default_model_names:
            if chosen not in self.models:
                self._check_loaded(chosen)
                raise ApiError(
                    "model_not_found", f"The default model {chosen} is not loaded; {self._names_text()}.", field="model"
                )
        self._check_loaded("")
        if not self.models:
            raise ApiError("model_not_found", "No model is loaded.", field="model")
        able = models_for(task, self.manifests, self.settings.default_model_names)
        if not able:
            need = NEEDS.get(task, "GET /v1/models lists the tasks of each model")
            message = f"No model of this service can do the task {task}; {need}."
            raise ApiError("unsupported_task", message, field="model")
        message = (
            f"It is required, because several models can do this: {list_of(able)}. Name one of them, or set a default "
            "with `sightline models default` or SIGHTLINE_DEFAULT_MODEL."
        )
        raise ApiError("invalid_parameter", message, field="model")

    def _check_loaded(self, name: str) -> None:
        """Check that the models are loaded, and that one is not being replaced."""
        if not self.is_loaded or (name in self._known and self._known[name].state == "replaced"):
            raise ApiError("loading")

    def _names_text(self) -> str:
        return f"the models are {list_of(self.models)}" if self.models else "no model is loaded"

    async def stop(self) -> None:
        """Wait for requests in progress until the shutdown timeout, then fail the rest."""
        for model in list(self.models.values()):
            if model.load is not None:
                model.load.cancel()
                await asyncio.wait([model.load])
        for task in self.documents.running:
            task.cancel()
        if self.is_loaded:
            await self.worker.stop(self.settings.shutdown_timeout_s)
        if self.traces is not None:
            try:
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await run_in_daemon_thread(self.traces.shutdown)
            except TimeoutError:
                self.traces.stop_sending()
