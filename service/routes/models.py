"""GET /v1/models and /v1/models/{id}: what is served, and what each model can do."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import ModelDetails, ModelsAnswer
from service.calls import Call, json_answer
from service.routing import add_route
from service.serving import ServedModel


async def list_models(call: Call) -> Response:
    """List the models."""
    return json_answer({"object": "list", "data": [_card(model) for model in call.service.models]})


async def show_model(model_id: str, call: Call) -> Response:
    """Describe one model: its limits, its attention, what runs it."""
    model = call.service.model(model_id)
    manifest = model.manifest
    details = {
        "license": manifest.license,
        "parameters": manifest.parameters,
        "dtype": manifest.dtype,
        "provider": model.provider,
        "limits": {
            "max_input_tokens": manifest.limits.max_source_tokens,
            "max_output_tokens": manifest.limits.max_target_tokens,
            "vocabulary": manifest.limits.vocabulary,
        },
        "labels": manifest.labels,
        "sha256": manifest.digest,
    }
    return json_answer(_card(model) | details)


def _card(model: ServedModel) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "id": model.name,
        "object": "model",
        "created": manifest.created,
        "owned_by": "sightline",
        "architecture": manifest.architecture,
        "description": manifest.description,
        "tasks": manifest.tasks,
        "chat": manifest.chat is not None,
        "attention": [
            {"kind": one.kind, "layers": one.layers, "heads": one.heads, "normalized": one.normalized}
            | one.model_dump(include={"columns", "window"}, exclude_none=True)
            for one in manifest.attention
        ],
    } | ({"languages": manifest.languages.model_dump()} if manifest.languages else {})


def add_routes(app: FastAPI) -> None:
    add_route(app, "GET", "/v1/models", list_models, ModelsAnswer, errors=("loading",))
    add_route(app, "GET", "/v1/models/{model_id}", show_model, ModelDetails, errors=("model_not_found", "loading"))
