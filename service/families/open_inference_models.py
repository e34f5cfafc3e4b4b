"""GET routes of the Open Inference Protocol about the server and its models, and the index of its repository."""

from typing import Any, NoReturn

from starlette.responses import Response

from service import __version__
from service.calls import Call, json_answer
from service.errors import ApiError
from service.families.open_inference_outputs import outputs_of
from service.families.open_inference_schemas import VERSION, RepositoryIndexBody
from service.fields import MAX_INPUTS
from service.serving import ServedModel

EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters", "statistics")
TEXT_INPUT = ("text_input", "BYTES", (-1, 1))
TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}


async def server_metadata(call: Call) -> Response:
    """Describe the server."""
    return json_answer({"name": "sightline", "version": __version__, "extensions": EXTENSIONS})


async def server_live(call: Call) -> Response:
    """Say that the process runs."""
    return json_answer({"live": True})


async def server_ready(call: Call) -> Response:
    """Say whether requests are served."""
    call.service.check_ready()
    return json_answer({"ready": True})


async def model_ready(model_name: str, call: Call) -> Response:
    """Say whether requests to a model are served."""
    call.service.check_ready()
    return json_answer({"name": call.service.model(model_name).name, "ready": True})


async def model_metadata(model_name: str, call: Call) -> Response:
    """Describe the tensors that a model takes and gives."""
    model = call.service.model(model_name)
    inputs, outputs = _tensors(model)
    return json_answer(
        {
            "name": model.name,
            "versions": [VERSION],
            "platform": "onnx_onnxv1",
            "inputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in inputs],
            "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in outputs],
        }
    )


async def model_config(model_name: str, call: Call) -> Response:
    """Describe a model as a Triton configuration."""
    model = call.service.model(model_name)
    inputs, outputs = _tensors(model)
    return json_answer(
        {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": MAX_INPUTS,
            "input": [{"name": name, "data_type": TYPES[kind], "dims": shape[1:]} for name, kind, shape in inputs],
            "output": [{"name": name, "data_type": TYPES[kind], "dims": shape[1:]} for name, kind, shape in outputs],
            "dynamic_batching": {},
            "model_transaction_policy": {"decoupled": False},
        }
    )


Tensors = list[tuple[str, str, tuple[int, ...]]]  # name, datatype, shape


def _tensors(model: ServedModel) -> tuple[Tensors, Tensors]:
    outputs = outputs_of(model.manifest).items()
    return [TEXT_INPUT], [(name, output.datatype, output.shape) for name, output in outputs]


async def model_statistics(model_name: str, call: Call) -> Response:
    """Count what a model has done."""
    return json_answer({"model_stats": [_stats(call, call.service.model(model_name))]})


async def all_statistics(call: Call) -> Response:
    """Count what each model has done."""
    return json_answer({"model_stats": [_stats(call, model) for model in call.service.models]})


def _stats(call: Call, model: ServedModel) -> dict[str, Any]:
    """The sums of the metrics. What Triton has besides is not counted by model, and left out."""

    def total(histogram: str) -> dict[str, int]:
        count, seconds = call.service.metrics.total(histogram, model.name)
        return {"count": count, "ns": round(1e9 * seconds)}

    queue = total("request_queue_time_seconds")
    encoder, decoder = total("request_prefill_time_seconds"), total("request_decode_time_seconds")
    # Clients fail without these. What comes before and after the graphs is not measured, but perf_analyzer
    # wants it to be counted as often as they are; and there is no cache.
    graphs = {"count": encoder["count"], "ns": encoder["ns"] + decoder["ns"]}
    not_measured, no_cache = graphs | {"ns": 0}, {"count": 0, "ns": 0}
    return {
        "name": model.name,
        "version": VERSION,
        "inference_count": queue["count"],
        "execution_count": total("batch_padding_ratio")["count"] + total("engine_step_seconds")["count"],
        "inference_stats": {
            "success": total("e2e_request_latency_seconds"),
            "queue": queue,
            "compute_input": not_measured,
            "compute_infer": graphs,
            "compute_output": not_measured,
            "cache_hit": no_cache,
            "cache_miss": no_cache,
        },
    }


async def repository_index(body: RepositoryIndexBody, call: Call) -> Response:
    """List the models."""
    return json_answer(
        [{"name": model.name, "version": VERSION, "state": "READY", "reason": ""} for model in call.service.models]
    )


async def repository_change(model_name: str, call: Call) -> NoReturn:
    """Refuse to load or unload a model: the repository is read when the service starts."""
    message = "Models are loaded when the service starts, and neither loaded nor unloaded later."
    raise ApiError("unsupported_parameter", message)
