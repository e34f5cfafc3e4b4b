"""The served models and the state of the process: loading, ready or draining."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from service.bundle import Manifest
from service.engine.engine import Engine
from service.engine.worker import Worker
from service.errors import ApiError, ErrorCode
from service.inference.admission import AdmissionController, RejectionPacer, ResponseMemory
from service.machine import usable_memory
from service.metrics import Metrics, ModelMetrics
from service.settings import Settings
from service.text.tokenizer import TextTokenizer


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


@dataclass(frozen=True)
class Backend:
    """The models and engines by name, and the worker that runs the engines."""

    models: Mapping[str, ServedModel]
    engines: Mapping[str, Engine]
    worker: Worker
    failed: Mapping[str, str] = field(default_factory=dict)  # bundles that failed to load, with the reason


def response_bytes(memory: int) -> int:
    """Return the default of `max_response_bytes` for a process with `memory` bytes available."""
    return min(max(memory // 8, 32 << 20), 1 << 30)


def state_bytes(settings: Settings) -> int:
    """Return the maximum size of the decoder states of all models together in bytes."""
    return settings.max_state_bytes or usable_memory() // 2


class Service:
    """State that all calls share. It is used only on the event loop's thread."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.rejection_pacer = RejectionPacer()
        self.response_memory = ResponseMemory(settings.max_response_bytes or response_bytes(usable_memory()))
        self.unavailable_code: ErrorCode | None = "loading"  # None while the service is ready
        self.models: dict[str, ServedModel] = {}  # sorted by name
        self.default_model = ""
        self.failed_models: list[str] = []  # folder names of the bundles that failed to load
        self.admissions: dict[str, AdmissionController] = {}  # by model name
        self.model_metrics: dict[str, ModelMetrics] = {}
        self.worker: Worker  # set when the models are loaded

    def attach(self, backend: Backend, observers: Mapping[str, ModelMetrics]) -> None:
        """Start to serve the models of a backend; `observers` are the metrics of its engines."""
        settings = self.settings
        max_rows = max(model.max_rows for model in backend.models.values())  # equal for all models
        self.metrics.set_limits({"max_rows": max_rows, "max_state_bytes": state_bytes(settings)})
        for name, model in sorted(backend.models.items()):
            self.models[name] = model
            self.admissions[name] = AdmissionController(
                model.max_rows + settings.max_waiting_sequences,
                settings.max_waiting_bytes,
                settings.max_waiting_tokens,
                backend.engines[name].throughput,
                settings.queue_timeout_s,
            )
            observers[name].watch(backend.engines[name])
        self.failed_models = sorted(backend.failed)
        self.metrics.set_failed_models(len(backend.failed))
        self.model_metrics.update(observers)
        self.default_model = settings.default_model or min(backend.models)
        self.worker = backend.worker
        backend.worker.on_close = self._set_unavailable
        if self.unavailable_code == "loading":
            self.unavailable_code = None

    def drain(self) -> None:
        """Reject new calls from now on."""
        self._set_unavailable("draining")

    def _set_unavailable(self, code: ErrorCode) -> None:
        if self.unavailable_code != "draining":
            self.unavailable_code = code

    def check_ready(self) -> None:
        """Check that the service is ready.

        Raises:
            ApiError: `loading`, `draining` or `engine_dead`.
        """
        if self.unavailable_code is not None:
            raise ApiError(self.unavailable_code)

    async def stop(self) -> None:
        """Wait for requests in progress until the shutdown timeout, then fail the rest."""
        if self.models:
            await self.worker.stop(self.settings.shutdown_timeout_s)
