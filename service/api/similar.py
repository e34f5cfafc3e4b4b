"""POST /v1/similar."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, StrictInt, model_validator

from sightline.service.api.endpoint import ENGINE_ERRORS, Call, Endpoint
from sightline.service.api.types import ModelName
from sightline.service.body_fields import RequestBody, Texts, Word, field_error
from sightline.service.inference.similar import SimilarResult, similar
from sightline.service.inference.tokens import Side


class SimilarBody(RequestBody):
    model: ModelName = None
    token: Annotated[Word | None, Field(description="Find the tokens nearest to this one.")] = None
    analogy: Annotated[
        list[Word] | None, Field(min_length=3, max_length=3, description="a, b, c: find d as in a : b :: c : d.")
    ] = None
    side: Annotated[Side, Field(description="Vocabulary to search.")] = "source"
    top_k: Annotated[StrictInt, Field(description="Number of tokens to return.")] = Field(default=10, ge=1, le=100)

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"token": "dog"}, {"analogy": ["boy", "boys", "dog"], "top_k": 3}],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.token is None) == (self.analogy is None):
            raise field_error("invalid_parameter", "Give one of token and analogy.", "token")
        return self


async def find_similar(call: Call, body: SimilarBody) -> SimilarResult:
    """Find the tokens nearest to one, or to the solution of an analogy.

    Nearness is the cosine of embeddings; the tokens of the request and special tokens are left out.
    """
    words = Texts(tuple(body.analogy)) if body.analogy else Texts.one(body.token or "")
    return await similar(call, await call.model(body.model, "similar"), words, side=body.side, top_k=body.top_k)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/similar",
        find_similar,
        SimilarResult,
        errors=("model_not_found", "unsupported_task", *ENGINE_ERRORS),
    ),
)
