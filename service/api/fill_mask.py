"""POST /v1/fill-mask."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from sightline.service.api.endpoint import TASK_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName
from sightline.service.body_fields import RequestBody
from sightline.service.inference.fill_mask import FillMaskResult, fill_mask

Target = Annotated[str, Field(min_length=1, max_length=256)]
TopK = Annotated[int, Field(ge=1, le=100, description="Number of tokens for each mask.")]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Targets = Annotated[
    list[Target],
    BeforeValidator(_as_list, json_schema_input_type=Target | list[Target]),
    Field(
        min_length=1,
        max_length=1024,
        description="Words to choose from, or names of tokens in the vocabulary. Each must be one token.",
    ),
]


class FillMaskBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    top_k: TopK = 5
    targets: Targets | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog [MASK] in the park."},
                {"inputs": ["A dog [MASK] in the park."], "targets": ["runs", "sleeps"], "top_k": 1},
            ]
        }
    )


async def fill_masks(call: Call, body: FillMaskBody) -> FillMaskResult:
    """Find the most probable tokens for the masks of each input.

    A mask is the name of the model's mask token, such as `[MASK]` or `<mask>`.
    """
    model = await call.model(body.model, "fill-mask")
    return await fill_mask(call, model, body.inputs, top_k=body.top_k, targets=body.targets)


ENDPOINTS = (Endpoint("POST", "/v1/fill-mask", fill_masks, FillMaskResult, errors=TASK_ERRORS),)
