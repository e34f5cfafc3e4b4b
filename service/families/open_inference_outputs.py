"""The tensors that a model can answer with: which route of the service computes each, and how it is read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest
from service.errors import ApiError
from service.families.open_inference_schemas import Datatype
from service.families.open_inference_tensors import DTYPES, padded
from service.fields import is_word
from service.parameters import MAX_TOP_LOGPROBS, TextParameters
from service.serving import ServedModel

Task = Literal["generate", "classify", "encode"]
Answer = Mapping[str, Any]  # of the service's own route
TASKS: tuple[Task, ...] = ("generate", "classify", "encode")  # the first that a model can do is what it is mainly for

# Parameters by what they belong to: a task, or something beside a task's own result.
PARAMETERS: Mapping[str, Collection[str]] = {
    "generate": TextParameters.model_fields.keys(),
    "encode": ("pooling", "normalize", "truncate"),
    "classify": ("truncate",),
    "alternatives": ("top_logprobs",),
    "maps": ("layers", "heads", "reduce"),
}
# Those of the protocol that have no meaning here.
RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
# How refusals of the service's own bodies are told.
NAMES = {name: f"parameters.{name}" for names in PARAMETERS.values() for name in names} | {
    "inputs": "text_input",
    "return_attention": "parameters",  # of which `layers` and so on are
}


@dataclass(frozen=True)
class Output:
    """One tensor."""

    datatype: Datatype
    shape: tuple[int, ...]  # -1 where it depends on the request
    task: Task
    read: Callable[[Answer], NDArray[Any]]
    beside: Literal["alternatives", "maps"] | None = None  # what the task must give beside its own result
    kind: str | None = None  # of attention map
    parameters: Callable[[Answer], Mapping[str, bool]] = lambda answer: {}  # what is true of the tensor


def outputs_of(manifest: Manifest) -> dict[str, Output]:
    """By name, all of a model."""
    outputs: dict[str, Output] = {}
    if "generate" in manifest.tasks:
        outputs |= _generated(manifest.tokens.pad_id) | _maps(manifest, "generate")
    if "classify" in manifest.tasks:
        outputs |= _classified(len(manifest.labels)) | _maps(manifest, "classify")
    if "encode" in manifest.tasks:
        outputs |= _encoded()
    return outputs


def main_outputs(outputs: Mapping[str, Output]) -> list[str]:
    """What is computed where a request names nothing: the results of the model's main task, and nothing beside."""
    main = next((task for task in TASKS if any(output.task == task for output in outputs.values())), None)
    return [name for name, output in outputs.items() if output.task == main and output.beside is None]


def check_parameters(parameters: Collection[str], used: Collection[str | None]) -> None:
    """Refuse what would have no effect.

    Args:
        parameters: names that a client sent.
        used: keys of PARAMETERS that the request has a use for.

    Raises:
        ApiError: `invalid_parameter` or `unsupported_parameter`.
    """
    for name in parameters:
        if name in RESERVED:
            message = "This service cannot do that: leave it out."
            raise ApiError("unsupported_parameter", message, param=f"parameters.{name}")
        if not any(name in names for names in PARAMETERS.values()):
            param = f"parameters.{name}" if is_word(name) else "parameters"
            raise ApiError("invalid_parameter", "There is no such parameter.", param=param)
        if not any(name in names for key, names in PARAMETERS.items() if key in used):
            message = "Nothing that is asked for depends on it."
            raise ApiError("unsupported_parameter", message, param=f"parameters.{name}")


def body_of(
    task: Task, model: ServedModel, texts: Sequence[Any], parameters: Mapping[str, Any], outputs: Sequence[Output]
) -> dict[str, Any]:
    """The body of the service's own route that computes these outputs, all of one task."""
    own = {name: value for name, value in parameters.items() if name in PARAMETERS.get(task, ())}
    beside: dict[str, Any] = {}
    if any(output.beside == "maps" for output in outputs):
        chosen = {name: value for name, value in parameters.items() if name in PARAMETERS["maps"]}
        kinds = list(dict.fromkeys(output.kind for output in outputs if output.kind))
        # Names of tokens alone come with any map.
        beside["return_attention"] = chosen | {"kinds": kinds or [model.manifest.attention[0].kind]}
    if any(output.beside == "alternatives" for output in outputs):
        beside["top_logprobs"] = parameters.get("top_logprobs", MAX_TOP_LOGPROBS)
    body = {"model": model.name, "inputs": texts}
    return body | {"parameters": own | beside} if task == "generate" else body | own | beside


def _generated(pad_id: int) -> dict[str, Output]:
    """One row a text, or `num_return_sequences` rows."""

    def of_each(read: Callable[[Answer], Any], datatype: Datatype) -> Callable[[Answer], NDArray[Any]]:
        return lambda answer: np.asarray([read(output) for output in answer["outputs"]], DTYPES[datatype])

    def of_tokens(read: Callable[[Answer], Any], datatype: Datatype, padding: int = 0) -> Callable[[Answer], Any]:
        return lambda answer: padded([list(map(read, one["tokens"])) for one in answer["outputs"]], datatype, padding)

    def alternatives(key: str) -> Callable[[Answer], Any]:
        return lambda token: [alternative[key] for alternative in token.get("alternatives", ())]

    top: dict[str, Any] = {"shape": (-1, -1, -1), "task": "generate", "beside": "alternatives"}
    return {
        "text_output": Output("BYTES", (-1,), "generate", of_each(lambda one: one["text"], "BYTES")),
        "finish_reason": Output("BYTES", (-1,), "generate", of_each(lambda one: one["finish_reason"], "BYTES")),
        "score": Output("FP32", (-1,), "generate", of_each(lambda one: one["score"], "FP32")),
        "num_tokens": Output("INT64", (-1,), "generate", of_each(lambda one: len(one["tokens"]), "INT64")),
        "token_ids": Output("INT64", (-1, -1), "generate", of_tokens(lambda token: token["id"], "INT64", pad_id)),
        "logprobs": Output("FP32", (-1, -1), "generate", of_tokens(lambda token: token["logprob"], "FP32")),
        "top_token_ids": Output("INT64", read=of_tokens(alternatives("id"), "INT64", pad_id), **top),
        "top_logprobs": Output("FP32", read=of_tokens(alternatives("logprob"), "FP32"), **top),
    }


def _classified(num_labels: int) -> dict[str, Output]:
    def of_labels(key: str, datatype: Datatype) -> Callable[[Answer], NDArray[Any]]:
        return lambda answer: np.asarray(
            [[label[key] for label in output["labels"]] for output in answer["outputs"]], DTYPES[datatype]
        )

    return {
        "labels": Output("BYTES", (-1, num_labels), "classify", of_labels("label", "BYTES")),
        "label_scores": Output("FP32", (-1, num_labels), "classify", of_labels("score", "FP32")),
    }


def _encoded() -> dict[str, Output]:
    def shapes(answer: Answer) -> Sequence[Sequence[int]]:
        return answer.get("shapes") or [(answer["dimensions"],)] * len(answer["embeddings"])

    def vectors(answer: Answer) -> NDArray[Any]:
        rows = zip(answer["embeddings"], shapes(answer), strict=True)
        return padded([embedding.reshape(shape) for embedding, shape in rows], "FP32")

    return {
        "embedding": Output("FP32", (-1, -1), "encode", vectors),
        "embedding_shape": Output("INT64", (-1, -1), "encode", lambda answer: np.asarray(shapes(answer), "<i8")),
    }


def _maps(manifest: Manifest, task: Literal["generate", "classify"]) -> dict[str, Output]:
    """The maps of each kind, their shapes without padding, and the tokens that their rows and columns stand for."""

    def attention(output: Answer) -> Answer:
        found: Answer = output["attention"] if task == "generate" else output
        return found

    def of_kind(kind: str) -> Callable[[Answer], list[Answer]]:
        return lambda answer: [
            one for output in answer["outputs"] for one in attention(output)["maps"] if one["kind"] == kind
        ]

    def data(kind: str) -> Callable[[Answer], NDArray[Any]]:
        maps = of_kind(kind)
        return lambda answer: padded([one["data"].reshape(one["shape"]) for one in maps(answer)], "FP32")

    def facts(kind: str) -> Callable[[Answer], Mapping[str, bool]]:
        maps = of_kind(kind)
        return lambda answer: {"normalized": all(one["normalized"] for one in maps(answer))}

    def shape(kind: str) -> Callable[[Answer], NDArray[Any]]:
        maps = of_kind(kind)
        return lambda answer: np.asarray([one["shape"] for one in maps(answer)], "<i8")

    def names(key: str) -> Callable[[Answer], NDArray[Any]]:
        return lambda answer: padded([attention(output)[key] for output in answer["outputs"]], "BYTES", "")

    outputs: dict[str, Output] = {}
    for kind in (one.kind for one in manifest.attention):
        outputs[f"attention_{kind}"] = Output("FP32", (-1,) * 5, task, data(kind), "maps", kind, facts(kind))
        outputs[f"attention_{kind}_shape"] = Output("INT64", (-1, 4), task, shape(kind), "maps", kind)
    if outputs:
        of_target = ("target_tokens", "decoder_input_tokens") if task == "generate" else ()
        for key in ("source_tokens", *of_target):
            outputs[key] = Output("BYTES", (-1, -1), task, names(key), "maps")
    return outputs
