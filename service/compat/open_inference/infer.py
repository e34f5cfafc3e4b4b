"""The endpoint infer of the Open Inference Protocol v2."""

from collections.abc import Mapping
from typing import Any

from sightline.service.api.endpoint import Call, PathModel, Raw, Tail
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts, construct
from sightline.service.compat.open_inference import schemas
from sightline.service.compat.open_inference.outputs import (
    PARAMETERS,
    Output,
    attention_selection,
    check_effects,
    generate_parameters,
    main_outputs,
    outputs_of,
)
from sightline.service.compat.open_inference.tensors import Tensor, read_inputs, tensor_response
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.tasks.classify import ClassifyBody, classify
from sightline.service.tasks.encode import EncodeBody, encode
from sightline.service.tasks.tag import TagBody, tag_texts


async def infer(call: Call, model_name: PathModel, body: schemas.InferBody, tail: Tail) -> schemas.InferResponse | Raw:
    """Compute the requested tensors of each text, or of each pair of a query and a text.

    Binary tensors follow the JSON of the response as bytes.
    """
    model = await call.model(model_name)
    call.field_names = {**call.field_names, "inputs": "text_input"}
    available = outputs_of(model.manifest)
    requested = _requested_outputs(body, model.name, available)
    outputs, parameters = {name: available[name] for name in requested}, body.parameters
    check_effects(parameters, outputs.values())
    tasks = dict.fromkeys(output.task for output in outputs.values())
    inputs = read_inputs(body.inputs, tail)
    texts, pairs = _texts_of(inputs, has_query="rerank" in tasks)
    results: dict[str, Any] = {}
    for task in tasks:
        of_task = [output for output in outputs.values() if output.task == task]
        options = {name: getattr(parameters, name) for name in PARAMETERS[task]}
        match task:
            case "generate":
                generation_parameters = generate_parameters(model, parameters, of_task)
                is_whole = "logprobs" in {output.name for output in body.outputs or ()}
                results[task] = await generate_texts(call, model, texts, generation_parameters, is_whole=is_whole)
            case "classify" | "rerank":
                is_rerank, selection = task == "rerank", attention_selection(model, parameters, of_task)
                read = pairs if is_rerank else texts
                labeled = construct(ClassifyBody, inputs=read, return_attention=selection, truncate=parameters.truncate)
                raw_scores = is_rerank and parameters.raw_scores
                results[task] = await classify(call, model, labeled, raw_scores=raw_scores)
            case "tag":
                tagged = construct(TagBody, model=model.name, inputs=texts, **options)
                results[task] = await tag_texts(call, tagged)
            case "encode":
                encoded = construct(EncodeBody, model=model.name, inputs=texts, **options)
                results[task] = await encode(call, encoded)
    head = {"model_name": model.name, "model_version": schemas.VERSION}
    return tensor_response(
        head if body.id is None else {"id": body.id, **head},
        [
            Tensor(name, output.datatype, output.read(result), requested[name], output.parameters(result))
            for name, output in outputs.items()
            for result in [results[output.task]]
        ],
    )


def _texts_of(inputs: Mapping[schemas.InputName, Texts], *, has_query: bool) -> tuple[Texts, Texts]:
    """Return the texts of a request, and the pairs of its queries and these texts."""
    texts, queries = inputs.get("text_input"), inputs.get("query")
    if texts is None:
        raise ApiError("invalid_parameter", "It must include text_input.", path="inputs")
    if not has_query:
        if queries is not None:
            raise ApiError("unsupported_parameter", "It has no effect on the requested outputs.", path="query")
        return texts, texts
    if queries is None:
        message = "It must include query, because the requested outputs depend on it."
        raise ApiError("invalid_parameter", message, path="inputs")
    if len(queries) not in (1, len(texts)):
        message = f"It must have 1 text or as many as text_input ({len(texts)}), got {len(queries)}."
        raise ApiError("invalid_parameter", message, path="query")
    repeated = queries.texts * len(texts) if len(queries) == 1 else queries.texts
    return texts, Texts(repeated, second_texts=texts.texts)


def _requested_outputs(body: schemas.InferBody, model_name: str, available: Mapping[str, Output]) -> dict[str, bool]:
    """Return the requested outputs: True for those that the client wants as binary data."""
    default = body.parameters.binary_data_output
    if not body.outputs:
        return dict.fromkeys(main_outputs(available), default)
    requested: dict[str, bool] = {}
    for index, output in enumerate(body.outputs):
        path = f"outputs[{index}].name"
        if output.name in requested:
            raise ApiError("invalid_parameter", "It must not repeat another output.", path=path)
        if output.name not in available:
            message = f"It must be an output of {model_name}: {', '.join(available)}."
            raise ApiError("invalid_parameter", message, path=path)
        is_binary = output.parameters.binary_data
        requested[output.name] = default if is_binary is None else is_binary
    return requested
