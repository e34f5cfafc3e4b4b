"""Output tensors of a model: the task that computes each, and the function that reads it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from numpy.typing import NDArray

from sightline.base.bundle import Manifest, MapKind
from sightline.service.api_errors import ApiError
from sightline.service.compat.open_inference.schemas import Datatype, InferParameters
from sightline.service.compat.open_inference.tensors import padded
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.maps import AttentionMap
from sightline.service.inference.results import alternatives_of
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import AttentionSelection, GenerateParameters, TextParameters, given_parameters
from sightline.service.tasks.encode import EncodeResult

Task = Literal["generate", "classify", "rerank", "tag", "encode"]
Result = Any  # result of the task that computes the output
Rows = Callable[[Result], Sequence[Any]]
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
    rows: Rows
    padding: Any = 0  # of rows of different lengths
    beside: Literal["alternatives", "maps"] | None = None  # additional result that the task must return
    kind: MapKind | None = None  # of attention map
    parameters: Callable[[Result], Mapping[str, bool]] = lambda result: {}  # facts about the tensor

    def read(self, result: Result) -> NDArray[Any]:
        return padded(self.rows(result), self.datatype, self.padding)


def of_each(read: Callable[[Any], Any]) -> Rows:
    """Return the function that reads one row of each output of a result."""
    return lambda result: list(map(read, result.outputs))


def of_parts(parts: str, read: Callable[[Any], Any]) -> Rows:
    """Return the function that reads each of the `parts` of each output, such as its tokens."""
    return of_each(lambda output: list(map(read, getattr(output, parts))))


def outputs_of(manifest: Manifest) -> dict[str, Output]:
    """Return all outputs of a model by name."""
    outputs: dict[str, Output] = {}
    if "generate" in manifest.tasks:
        outputs |= _generated(manifest.tokens.pad_id) | _maps(manifest, "generate")
    if "classify" in manifest.tasks:
        shape = (-1, len(manifest.labels))
        outputs |= {
            "labels": Output("BYTES", shape, "classify", of_parts("labels", attrgetter("label"))),
            "label_scores": Output("FP32", shape, "classify", of_parts("labels", attrgetter("score"))),
            **_maps(manifest, "classify"),
        }
    if "rerank" in manifest.tasks:
        score = Output("FP32", (-1,), "rerank", of_each(lambda output: output.labels[0].score))
        outputs |= {"relevance_score": score, **_maps(manifest, "rerank")}
    if "tag" in manifest.tasks:
        outputs |= _tagged()
    if "encode" in manifest.tasks:
        outputs |= {
            "embedding": Output("FP32", (-1, -1), "encode", _embeddings),
            "embedding_shape": Output("INT64", (-1, -1), "encode", _embedding_shapes),
        }
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
    requested = given_parameters(parameters) | {"return_attention": attention_selection(model, parameters, outputs)}
    if any(output.beside == "alternatives" for output in outputs):
        requested["top_logprobs"] = parameters.top_logprobs
    return parameters_for(model, requested)


def attention_selection(
    model: ServedModel, parameters: InferParameters, outputs: Sequence[Output]
) -> AttentionSelection | None:
    """Return the selection of attention maps for the outputs; None if none of them is a map."""
    maps = [output for output in outputs if output.beside == "maps"]
    if not maps:
        return None
    kinds = [output.kind for output in maps if output.kind is not None]
    kinds = kinds or [model.manifest.attention[0].kind]  # token names come with the maps of any kind
    return AttentionSelection.model_validate(
        {"kinds": list(dict.fromkeys(kinds))} | {name: getattr(parameters, name) for name in PARAMETERS["maps"]}
    )


def _generated(pad_id: int) -> dict[str, Output]:
    """Return outputs with a row for each generated sequence."""

    def alternatives(key: str) -> Rows:
        return of_parts("tokens", lambda token: list(map(attrgetter(key), alternatives_of(token))))

    ids, logprobs, size = of_parts("tokens", attrgetter("id")), of_parts("tokens", attrgetter("logprob")), (-1, -1, -1)
    return {
        "text_output": Output("BYTES", (-1,), "generate", of_each(attrgetter("text"))),
        "finish_reason": Output("BYTES", (-1,), "generate", of_each(attrgetter("finish_reason"))),
        "score": Output("FP32", (-1,), "generate", of_each(attrgetter("score"))),
        "num_tokens": Output("INT64", (-1,), "generate", of_each(lambda output: len(output.tokens))),
        "token_ids": Output("INT64", (-1, -1), "generate", ids, pad_id),
        "logprobs": Output("FP32", (-1, -1), "generate", logprobs),
        "top_token_ids": Output("INT64", size, "generate", alternatives("id"), pad_id, "alternatives"),
        "top_logprobs": Output("FP32", size, "generate", alternatives("logprob"), beside="alternatives"),
    }


def _tagged() -> dict[str, Output]:
    """Return outputs with a row of entities for each text."""

    def of_entities(key: str, datatype: Datatype, padding: Any = 0) -> Output:
        return Output(datatype, (-1, -1), "tag", of_parts("entities", attrgetter(key)), padding)

    return {
        "num_entities": Output("INT64", (-1,), "tag", of_each(lambda output: len(output.entities))),
        "entity_labels": of_entities("label", "BYTES", ""),
        "entity_scores": of_entities("score", "FP32"),
        "entity_texts": of_entities("text", "BYTES", ""),
        "entity_starts": of_entities("start", "INT64"),
        "entity_ends": of_entities("end", "INT64"),
    }


def _embedding_shapes(result: EncodeResult) -> Sequence[Sequence[int]]:
    return result.shapes or [(result.dimensions,)] * len(result.embeddings)


def _embeddings(result: EncodeResult) -> Sequence[Any]:
    pairs = zip(result.embeddings, _embedding_shapes(result), strict=True)
    return [embedding.reshape(shape) for embedding, shape in pairs]


def _maps(manifest: Manifest, task: Literal["generate", "classify", "rerank"]) -> dict[str, Output]:
    """Return outputs for the maps of each kind, their unpadded shapes, and their tokens."""

    def attention(output: Any) -> Any:
        return output.attention if task == "generate" else output

    def of_kind(kind: MapKind) -> dict[str, Output]:
        def rows(read: Callable[[AttentionMap], Any]) -> Rows:
            return of_each(lambda output: next(read(one) for one in attention(output).maps if one.kind == kind))

        are_normalized, data = rows(attrgetter("normalized")), rows(lambda one: one.data.reshape(one.shape))
        return {
            f"attention_{kind}": Output(
                "FP32",
                (-1,) * 5,
                task,
                data,
                beside="maps",
                kind=kind,
                parameters=lambda result: {"normalized": all(are_normalized(result))},
            ),
            f"attention_{kind}_shape": Output("INT64", (-1, 4), task, rows(attrgetter("shape")), 0, "maps", kind),
        }

    def names(key: str) -> Output:
        return Output("BYTES", (-1, -1), task, of_each(lambda output: getattr(attention(output), key)), "", "maps")

    if not manifest.attention:
        return {}
    of_kinds = {name: output for maps in manifest.attention for name, output in of_kind(maps.kind).items()}
    of_target = ("target_tokens", "decoder_input_tokens") if task == "generate" else ()
    return of_kinds | {key: names(key) for key in ("source_tokens", *of_target)}
