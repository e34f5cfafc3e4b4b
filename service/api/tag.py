"""POST /v1/tag."""

from typing import Annotated

from pydantic import ConfigDict, Field

from sightline.service.api.endpoint import TASK_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName, Truncate
from sightline.service.body_fields import RequestBody
from sightline.service.inference.tag import OUTSIDE, Aggregation, TagResult, tag

AggregationName = Annotated[
    Aggregation,
    Field(
        description="`simple` merges adjacent tokens with the same label, whose prefixes B- and I- mark the first and "
        "the further tokens of an entity; `none` returns each token."
    ),
]
IgnoreLabels = Annotated[
    list[Annotated[str, Field(max_length=128)]],
    Field(max_length=1024, fail_fast=True, description="Labels of entities that are left out."),
]


class TagBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    aggregation: AggregationName = "simple"
    ignore_labels: IgnoreLabels = Field(default=list(OUTSIDE))
    truncate: Truncate = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog runs in Berlin."},
                {"inputs": ["A dog runs in Berlin."], "aggregation": "none", "ignore_labels": []},
            ]
        }
    )


async def tag_texts(call: Call, body: TagBody) -> TagResult:
    """Find the entities of each input, with their positions in the text."""
    return await tag(
        call,
        await call.model(body.model, "tag"),
        body.inputs,
        aggregation=body.aggregation,
        ignore_labels=body.ignore_labels,
        truncate=body.truncate,
    )


ENDPOINTS = (Endpoint("POST", "/v1/tag", tag_texts, TagResult, errors=TASK_ERRORS),)
