"""The served models, and the state of the process: loading, ready or draining."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from service.bundle import Manifest
from service.engine.engine import Engine
from service.engine.worker import Worker
from service.errors import ApiError, ErrorCode
from service.inference.admission import AdmissionController, RefusalPace, ResponseMemory
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
    max_rows: int  # sequences that are decoded at once; a beam search counts once for each beam
    threads: Mapping[str, int]  # that run each graph


@dataclass(frozen=True)
class Backend:
    """The models by name, their engines, and the worker that runs these."""

    models: Mapping[str, ServedModel]
    engines: Mapping[str, Engine]
    worker: Worker


def response_bytes(memory: int) -> int:
    """Return the default of `max_response_bytes` for a process that may use `memory` bytes."""
    return min(max(memory // 8, 32 << 20), 1 << 30)


def state_bytes(settings: Settings) -> int:
    """Return the bytes that the decoder state of all models together may take."""
    return settings.max_state_bytes or usable_memory() // 2


class Service:
    """State that all calls share. It belongs to the event loop's thread."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.refusal_pace = RefusalPace()
        self.response_memory = ResponseMemory(settings.max_response_bytes or response_bytes(usable_memory()))
        self.refusal: ErrorCode | None = "loading"  # the reason why nothing can be served now
        self.models: dict[str, ServedModel] = {}  # sorted by name
        self.default_model = ""
        self.admissions: dict[str, AdmissionController] = {}  # by the model's name
        self.model_metrics: dict[str, ModelMetrics] = {}
        self.worker: Worker  # of the engines, once the models are loaded

    def attach(self, backend: Backend, observers: Mapping[str, ModelMetrics]) -> None:
        """Begin to serve; `observers` are those of the engines."""
        settings = self.settings
        max_rows = max(model.max_rows for model in backend.models.values())  # all have the same
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
        self.model_metrics.update(observers)
        self.default_model = settings.default_model or min(backend.models)
        self.worker = backend.worker
        backend.worker.on_close = self._refuse
        if self.refusal == "loading":
            self.refusal = None

    def drain(self) -> None:
        """Refuse new work from now on."""
        self._refuse("draining")

    def _refuse(self, code: ErrorCode) -> None:
        if self.refusal != "draining":
            self.refusal = code

    def check_ready(self) -> None:
        """Check that requests are served.

        Raises:
            ApiError: `loading`, `draining` or `engine_dead`.
        """
        if self.refusal is not None:
            raise ApiError(self.refusal)

    async def stop(self) -> None:
        """Let work in flight finish up to the shutdown timeout; the rest fails with `draining`."""
        if self.models:
            await self.worker.stop(self.settings.shutdown_timeout_s)
