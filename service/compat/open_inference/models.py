"""Endpoints of the Open Inference Protocol for metadata, health, statistics and the repository.

The protocol defines most of their responses, which only its clients read: they have no types here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from sightline import __version__
from sightline.base.bundle import Manifest
from sightline.base.threads import run_in_daemon_thread
from sightline.service.api.endpoint import Call, PathModel
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody
from sightline.service.compat.open_inference.outputs import outputs_of
from sightline.service.compat.open_inference.schemas import VERSION, Datatype
from sightline.service.inference.service import ModelState, Service
from sightline.service.metrics import sums

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
TYPES: dict[Datatype, str] = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}
State = Literal["READY", "LOADING", "UNAVAILABLE"]
# State and reason in the index of the repository, by the state of the model.
STATES: dict[ModelState, tuple[State, str]] = {
    "ready": ("READY", ""),
    "loading": ("LOADING", "loading"),
    "unloaded": ("UNAVAILABLE", "unloaded"),
    "failed": ("UNAVAILABLE", "failed to load; the log has the reason"),
}
Info = dict[str, Any]


class RepositoryIndexBody(RequestBody):
    ready: bool = Field(default=False, description="Return only models that are ready.")

    EXAMPLES = ({"ready": True},)


class LoadParameters(RequestBody):
    """Parameters of a load request: none. Triton's `config` and `file:...` are rejected."""


class UnloadParameters(RequestBody):
    unload_dependents: bool = Field(default=False, description="Accepted for compatibility; ignored.")


class LoadBody(RequestBody):
    parameters: LoadParameters = Field(
        default=LoadParameters(), description="Must be empty: models are loaded by name from the bundles folder only."
    )

    EXAMPLES = ({},)


class UnloadBody(RequestBody):
    parameters: UnloadParameters = Field(default=UnloadParameters(), description="Parameters of the protocol.")

    EXAMPLES = ({"parameters": {"unload_dependents": False}},)


class RepositoryModel(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    version: Annotated[str, Field(description="Version of the model.")]
    state: Annotated[
        State,
        Field(description="READY if the model is loaded. Models of `lazy_models` are served in each of these states."),
    ]
    reason: Annotated[
        str,
        Field(
            description="`loading`, `unloaded`, or `failed to load; the log has the reason`; empty for a model that is "
            "ready."
        ),
    ]


async def server_metadata(call: Call) -> Info:
    """Describe the server."""
    return {"name": "sightline", "version": __version__, "extensions": EXTENSIONS}


async def server_live(call: Call) -> Info:
    """Return 200 while the process runs."""
    return {"live": True}


async def server_ready(call: Call) -> Info:
    """Return 200 if requests are served."""
    call.service.check_ready()
    return {"ready": True}


async def model_ready(call: Call, model_name: PathModel) -> Info:
    """Return 200 if requests to the model are served, also before its load on first use."""
    call.service.check_ready()
    return {"name": call.service.find_manifest(model_name).name, "ready": True}


async def model_metadata(call: Call, model_name: PathModel) -> Info:
    """Describe the input and output tensors of a model; -1 in a shape depends on the request."""
    manifest, inputs, outputs = _tensors(call, model_name)
    return {
        "name": manifest.name,
        "versions": [VERSION],
        "platform": "onnx_onnxv1",
        "inputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in inputs],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in outputs],
    }


async def model_config(call: Call, model_name: PathModel) -> Info:
    """Describe a model as a Triton configuration, whose dimensions have no first axis."""
    manifest, inputs, outputs = _tensors(call, model_name)
    return {
        "name": manifest.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": call.service.settings.max_inputs,
        "input": [{"name": name, "data_type": TYPES[kind], "dims": shape[1:]} for name, kind, shape in inputs],
        "output": [{"name": name, "data_type": TYPES[kind], "dims": shape[1:]} for name, kind, shape in outputs],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    }


Tensors = list[tuple[str, Datatype, tuple[int, ...]]]  # name, datatype, shape
INPUTS: Tensors = [("text_input", "BYTES", (-1, 1))]
RERANK_INPUTS: Tensors = [("query", "BYTES", (-1, 1)), *INPUTS]


def _tensors(call: Call, model_name: str) -> tuple[Manifest, Tensors, Tensors]:
    manifest = call.service.find_manifest(model_name)
    inputs = RERANK_INPUTS if "rerank" in manifest.tasks else INPUTS
    return manifest, inputs, [(name, one.datatype, one.shape) for name, one in outputs_of(manifest).items()]


async def model_statistics(call: Call, model_name: PathModel) -> Info:
    """Return the statistics of a model: counts of texts, graph runs and calls, and their times.

    `compute_input` and `compute_output` are not measured, and there is no cache.
    """
    name = call.service.find_manifest(model_name).name
    return {"model_stats": [_stats(await _sums(call), name)]}


async def all_statistics(call: Call) -> Info:
    """Return the statistics of all models."""
    names = [manifest.name for manifest in call.service.require_manifests()]
    metric_sums = await _sums(call)
    return {"model_stats": [_stats(metric_sums, name) for name in names]}


async def _sums(call: Call) -> Mapping[tuple[str, str], float]:
    return sums(await call.service.peers.call("metrics"))


def _stats(metric_sums: Mapping[tuple[str, str], float], name: str) -> Info:
    """Return the statistics of a model, from the sums of its metrics."""

    def total(histogram: str) -> dict[str, int]:
        count, seconds = (metric_sums.get((f"{histogram}_{part}", name), 0.0) for part in ("count", "sum"))
        return {"count": int(count), "ns": round(1e9 * seconds)}

    queue = total("request_queue_time_seconds")
    encoder, decoder = total("request_prefill_time_seconds"), total("request_decode_time_seconds")
    # Clients fail if one of these fields is missing. Times before and after the graphs are not
    # measured, but perf_analyzer needs equal counts.
    not_measured, no_cache = {"count": encoder["count"], "ns": 0}, {"count": 0, "ns": 0}
    return {
        "name": name,
        "version": VERSION,
        "inference_count": queue["count"],
        "execution_count": total("batch_padding_ratio")["count"] + total("engine_step_seconds")["count"],
        "inference_stats": {
            "success": total("e2e_request_latency_seconds"),
            "queue": queue,
            "compute_input": not_measured,
            "compute_infer": {"count": encoder["count"], "ns": encoder["ns"] + decoder["ns"]},
            "compute_output": not_measured,
            "cache_hit": no_cache,
            "cache_miss": no_cache,
        },
    }


# The bundles folder is the repository. A model is chosen by the name in its manifest; a request can
# give no path, URL or configuration.


async def repository_index(call: Call, body: RepositoryIndexBody) -> list[RepositoryModel]:
    """List the models, and the bundles that can be loaded."""
    service = call.service
    names = {manifest.name for manifest in service.require_manifests()}
    if not body.ready and service.settings.model_control == "explicit":
        names |= (await run_in_daemon_thread(service.repository.find)).keys()
    models = [_described(name, service.state_of(name)) for name in sorted(names)]
    return [model for model in models if model["state"] == "READY" or not body.ready]


async def repository_load(call: Call, model_name: PathModel, body: LoadBody) -> RepositoryModel:
    """Load a model of the bundles folder, or replace it if its bundle has changed.

    The model is chosen by the name in its manifest. Paths, URLs and configurations are rejected.
    The old model is served until the new one is loaded.
    """
    _check_allowed(call.service)
    await call.service.peers.call("load", model_name, False)
    return _described(model_name, "ready")


async def repository_unload(call: Call, model_name: PathModel, body: UnloadBody) -> RepositoryModel:
    """Unload a model after its running calls have finished."""
    _check_allowed(call.service)
    await call.service.peers.call("unload", model_name)
    return _described(model_name, "unloaded")


def _check_allowed(service: Service) -> None:
    if service.settings.model_control != "explicit":
        message = (
            "Models are loaded only when the service starts; set SIGHTLINE_MODEL_CONTROL=explicit to load and unload "
            "them by request."
        )
        raise ApiError("forbidden", message)


def _described(name: str, model_state: ModelState) -> RepositoryModel:
    state, reason = STATES[model_state]
    return {"name": name, "version": VERSION, "state": state, "reason": reason}
