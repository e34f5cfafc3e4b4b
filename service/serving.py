"""What is being served, and whether it is loading or draining. Every route reads it; only start and end write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from service.admission import AdmissionController, RefusalPace, ResponseMemory
from service.bundle import Manifest, Task
from service.engine.engine import Engine
from service.engine.worker import Worker
from service.errors import ApiError
from service.machine import usable_memory
from service.metrics import Metrics, ModelMetrics
from service.settings import Settings
from service.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ServedModel:
    """One bundle, as far as the HTTP side is concerned."""

    name: str
    manifest: Manifest
    source_tokenizer: TextTokenizer
    target_tokenizer: TextTokenizer
    provider: Literal["cpu", "cuda"]
    hidden_size: int  # M of `Encoded.hidden`


@dataclass(frozen=True)
class Backend:
    """All that start-up makes: the models by name, their engines, and the worker that runs these."""

    models: Mapping[str, ServedModel]
    engines: Mapping[str, Engine]
    worker: Worker


def response_bytes(memory: int) -> int:
    """Return the default of `max_response_bytes` for a process that may use `memory` bytes."""
    return min(max(memory // 8, 32 << 20), 1 << 30)


class Service:
    """The one object that the routes share. Used from the event loop's thread alone."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.refusal_pace = RefusalPace()
        self.is_draining = False
        self._backend: Backend | None = None
        self.response_memory = ResponseMemory(settings.max_response_bytes or response_bytes(usable_memory()))
        self._admissions: dict[str, AdmissionController] = {}
        self._model_metrics: dict[str, ModelMetrics] = {}
        self._default_model = ""

    def attach(self, backend: Backend, observers: Mapping[str, ModelMetrics]) -> None:
        """Begin to serve; `observers` are those that the engines tell."""
        settings = self.settings
        for name in backend.models:
            self._admissions[name] = AdmissionController(
                settings.max_rows + settings.max_waiting_sequences,
                settings.max_waiting_bytes,
                settings.max_waiting_tokens,
                backend.engines[name].throughput,
                settings.queue_timeout_s,
            )
            observers[name].watch(backend.engines[name])
        self._model_metrics.update(observers)
        self._default_model = settings.default_model or min(backend.models)
        self._backend = backend

    @property
    def refusal(self) -> ApiError | None:
        """Why nothing can be served now; None where it can."""
        if self.is_draining:
            return ApiError("draining")
        if self._backend is None:
            return ApiError("loading")
        return None if self._backend.worker.is_alive else ApiError("engine_dead")

    def check_ready(self) -> None:
        """Raise the refusal, if there is one."""
        refusal = self.refusal
        if refusal is not None:
            raise refusal

    @property
    def backend(self) -> Backend:
        """Raises ApiError `loading` before there is one."""
        if self._backend is None:
            raise ApiError("loading")
        return self._backend

    @property
    def models(self) -> list[ServedModel]:
        """All, by name."""
        return sorted(self.backend.models.values(), key=lambda model: model.name)

    def model(self, name: str | None, task: Task | None = None) -> ServedModel:
        """The model that a call names.

        Raises:
            ApiError: `model_not_found`; `unsupported_task` where the model cannot do `task`.
        """
        model = self.backend.models.get(self._default_model if name is None else name)
        if model is None:
            raise ApiError("model_not_found", param="model")
        if task is not None and task not in model.manifest.tasks:
            message = f"{model.name} cannot do the task {task}; GET /v1/models lists the tasks of each model."
            raise ApiError("unsupported_task", message, param="model")
        return model

    def admission(self, model: ServedModel) -> AdmissionController:
        return self._admissions[model.name]

    def metrics_of(self, model: ServedModel) -> ModelMetrics:
        return self._model_metrics[model.name]

    async def stop(self) -> None:
        """Let work in flight finish up to the shutdown timeout; the rest fails with `draining`."""
        if self._backend is not None:
            await self._backend.worker.stop(self.settings.shutdown_timeout_s)
