"""Output tensors of a model: the task that computes each, and the function that reads it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import Manifest, MapKind
from sightline.service.api_errors import ApiError
from sightline.service.compat.open_inference.schemas import Datatype, InferParameters
from sightline.service.compat.open_inference.tensors import DTYPES, padded
from sightline.service.inference.generate import GenerateOutput, GenerateResult, parameters_for
from sightline.service.inference.maps import AttentionMap
from sightline.service.inference.results import OutputToken, alternatives_of
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import AttentionSelection, GenerateParameters, TextParameters, given_parameters
from sightline.service.tasks.classify import ClassifyResult
from sightline.service.tasks.encode import EncodeResult
from sightline.service.tasks.tag import Entity, TagResult

Task = Literal["generate", "classify", "rerank", "tag", "encode"]
Result = Any  # result of the task that computes the output
# The first of these that a model can do is its main task.
TASKS: tuple[Task, ...] = ("generate", "classify", "rerank", "tag", "encode")

# Parameters by the task, or the additional result of a task, that they belong to.
PARAMETERS: Mapping[str, Collection[str]] = {
    "generate": tuple(TextParameters.model_fields),
    "encode": ("pooling", "normalize", "prompt_name", "truncate"),
    "classify": ("truncate",),
    "rerank": ("raw_scores", "truncate"),
    "tag": ("aggregation", "ignore_labels", "truncate"),
    "alternatives": ("top_logprobs",),
    "maps": ("layers", "heads", "reduce"),
}


@dataclass(frozen=True)
class Output:
    """One tensor."""

    datatype: Datatype
    shape: tuple[int, ...]  # -1 where it depends on the request
    task: Task
    read: Callable[[Result], NDArray[Any]]
    beside: Literal["alternatives", "maps"] | None = None  # additional result that the task must return
    kind: MapKind | None = None  # of attention map
    any_kind: MapKind | None = None  # of attention map that the model has
    parameters: Callable[[Result], Mapping[str, bool]] = lambda result: {}  # facts about the tensor


def outputs_of(manifest: Manifest) -> dict[str, Output]:
    """Return all outputs of a model by name."""
    outputs: dict[str, Output] = {}
    if "generate" in manifest.tasks:
        outputs |= _generated(manifest.tokens.pad_id) | _maps(manifest, "generate")
    if "classify" in manifest.tasks:
        outputs |= _classified(len(manifest.labels)) | _maps(manifest, "classify")
    if "rerank" in manifest.tasks:
        outputs |= _reranked() | _maps(manifest, "rerank")
    if "tag" in manifest.tasks:
        outputs |= _tagged()
    if "encode" in manifest.tasks:
        outputs |= _encoded()
    return outputs


def main_outputs(outputs: Mapping[str, Output]) -> list[str]:
    """Return the outputs of a request that names none: the results of the model's main task."""
    main = next((task for task in TASKS if any(output.task == task for output in outputs.values())), None)
    return [name for name, output in outputs.items() if output.task == main and output.beside is None]


def check_effects(parameters: InferParameters, outputs: Collection[Output]) -> None:
    """Reject parameters that have no effect on the requested outputs."""
    used = {key for output in outputs for key in (output.task, output.beside)}
    useful = {name for key, names in PARAMETERS.items() if key in used for name in names}
    for names in PARAMETERS.values():
        for name in names:
            if name in parameters.model_fields_set and name not in useful:
                message = "It has no effect on the requested outputs."
                raise ApiError("unsupported_parameter", message, field=name)


def generate_parameters(
    model: ServedModel, parameters: InferParameters, outputs: Sequence[Output]
) -> GenerateParameters:
    """Return the parameters of a generation that computes these outputs.

    Parameters that are absent have the defaults of the model.
    """
    requested = given_parameters(parameters) | {"return_attention": attention_selection(parameters, outputs)}
    if any(output.beside == "alternatives" for output in outputs):
        requested["top_logprobs"] = parameters.top_logprobs
    return parameters_for(model, requested)


def attention_selection(parameters: InferParameters, outputs: Sequence[Output]) -> AttentionSelection | None:
    """Return the selection of attention maps for the outputs; None if none of them is a map."""
    maps = [output for output in outputs if output.beside == "maps"]
    if not maps:
        return None
    # Token names come with the maps of any kind.
    kinds: list[MapKind | None] = [output.kind for output in maps if output.kind is not None] or [maps[0].any_kind]
    return AttentionSelection.model_validate(
        {"kinds": list(dict.fromkeys(kinds))} | {name: getattr(parameters, name) for name in PARAMETERS["maps"]}
    )


def _generated(pad_id: int) -> dict[str, Output]:
    """Return outputs with a row for each generated sequence."""

    def of_each(read: Callable[[GenerateOutput], Any], datatype: Datatype) -> Callable[[GenerateResult], NDArray[Any]]:
        return lambda result: np.asarray([read(output) for output in result.outputs], DTYPES[datatype])

    def of_tokens(
        read: Callable[[OutputToken], Any], datatype: Datatype, padding: int = 0
    ) -> Callable[[GenerateResult], NDArray[Any]]:
        return lambda result: padded([list(map(read, output.tokens)) for output in result.outputs], datatype, padding)

    top: dict[str, Any] = {"shape": (-1, -1, -1), "task": "generate", "beside": "alternatives"}
    top_ids = of_tokens(lambda token: [alternative.id for alternative in alternatives_of(token)], "INT64", pad_id)
    top_logprobs = of_tokens(lambda token: [alternative.logprob for alternative in alternatives_of(token)], "FP32")
    return {
        "text_output": Output("BYTES", (-1,), "generate", of_each(lambda output: output.text, "BYTES")),
        "finish_reason": Output("BYTES", (-1,), "generate", of_each(lambda output: output.finish_reason, "BYTES")),
        "score": Output("FP32", (-1,), "generate", of_each(lambda output: output.score, "FP32")),
        "num_tokens": Output("INT64", (-1,), "generate", of_each(lambda output: len(output.tokens), "INT64")),
        "token_ids": Output("INT64", (-1, -1), "generate", of_tokens(lambda token: token.id, "INT64", pad_id)),
        "logprobs": Output("FP32", (-1, -1), "generate", of_tokens(lambda token: token.logprob, "FP32")),
        "top_token_ids": Output("INT64", read=top_ids, **top),
        "top_logprobs": Output("FP32", read=top_logprobs, **top),
    }


def _classified(num_labels: int) -> dict[str, Output]:
    def of_labels(key: Literal["label", "score"], datatype: Datatype) -> Callable[[ClassifyResult], NDArray[Any]]:
        return lambda result: np.asarray(
            [[getattr(label, key) for label in output.labels] for output in result.outputs], DTYPES[datatype]
        )

    return {
        "labels": Output("BYTES", (-1, num_labels), "classify", of_labels("label", "BYTES")),
        "label_scores": Output("FP32", (-1, num_labels), "classify", of_labels("score", "FP32")),
    }


def _reranked() -> dict[str, Output]:
    def scores(result: ClassifyResult) -> NDArray[Any]:
        return np.asarray([output.labels[0].score for output in result.outputs], DTYPES["FP32"])

    return {"relevance_score": Output("FP32", (-1,), "rerank", scores)}


def _tagged() -> dict[str, Output]:
    """Return outputs with a row of entities for each text."""

    def of_entities(
        read: Callable[[Entity], Any], datatype: Datatype, padding: Any = 0
    ) -> Callable[[TagResult], NDArray[Any]]:
        return lambda result: padded([list(map(read, output.entities)) for output in result.outputs], datatype, padding)

    def count(result: TagResult) -> NDArray[Any]:
        return np.asarray([len(output.entities) for output in result.outputs], DTYPES["INT64"])

    return {
        "num_entities": Output("INT64", (-1,), "tag", count),
        "entity_labels": Output("BYTES", (-1, -1), "tag", of_entities(lambda entity: entity.label, "BYTES", "")),
        "entity_scores": Output("FP32", (-1, -1), "tag", of_entities(lambda entity: entity.score, "FP32")),
        "entity_texts": Output("BYTES", (-1, -1), "tag", of_entities(lambda entity: entity.text, "BYTES", "")),
        "entity_starts": Output("INT64", (-1, -1), "tag", of_entities(lambda entity: entity.start, "INT64")),
        "entity_ends": Output("INT64", (-1, -1), "tag", of_entities(lambda entity: entity.end, "INT64")),
    }


def _encoded() -> dict[str, Output]:
    def shapes(result: EncodeResult) -> Sequence[Sequence[int]]:
        return result.shapes or [(result.dimensions,)] * len(result.embeddings)

    def vectors(result: EncodeResult) -> NDArray[Any]:
        rows = zip(result.embeddings, shapes(result), strict=True)
        return padded([embedding.reshape(shape) for embedding, shape in rows], "FP32")

    return {
        "embedding": Output("FP32", (-1, -1), "encode", vectors),
        "embedding_shape": Output("INT64", (-1, -1), "encode", lambda result: np.asarray(shapes(result), "<i8")),
    }


def _maps(manifest: Manifest, task: Literal["generate", "classify", "rerank"]) -> dict[str, Output]:
    """Return outputs for the maps of each kind, their unpadded shapes, and their tokens."""

    def attention(output: Any) -> Any:
        return output.attention if task == "generate" else output

    def of_kind(kind: MapKind) -> Callable[[Result], list[AttentionMap]]:
        return lambda result: [one for output in result.outputs for one in attention(output).maps if one.kind == kind]

    def data(kind: MapKind) -> Callable[[Result], NDArray[Any]]:
        maps = of_kind(kind)
        return lambda result: padded([weights.data.reshape(weights.shape) for weights in maps(result)], "FP32")

    def facts(kind: MapKind) -> Callable[[Result], Mapping[str, bool]]:
        maps = of_kind(kind)
        return lambda result: {"normalized": all(weights.normalized for weights in maps(result))}

    def shape(kind: MapKind) -> Callable[[Result], NDArray[Any]]:
        maps = of_kind(kind)
        return lambda result: np.asarray([weights.shape for weights in maps(result)], "<i8")

    def names(key: str) -> Callable[[Result], NDArray[Any]]:
        return lambda result: padded([getattr(attention(output), key) for output in result.outputs], "BYTES", "")

    outputs: dict[str, Output] = {}
    for kind in (maps.kind for maps in manifest.attention):
        of_maps: dict[str, Any] = {"beside": "maps", "kind": kind}
        outputs[f"attention_{kind}"] = Output("FP32", (-1,) * 5, task, data(kind), parameters=facts(kind), **of_maps)
        outputs[f"attention_{kind}_shape"] = Output("INT64", (-1, 4), task, shape(kind), **of_maps)
    if outputs:
        of_target = ("target_tokens", "decoder_input_tokens") if task == "generate" else ()
        first = manifest.attention[0].kind
        for key in ("source_tokens", *of_target):
            outputs[key] = Output("BYTES", (-1, -1), task, names(key), "maps", any_kind=first)
    return outputs
