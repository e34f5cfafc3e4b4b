"""POST /v1/encode."""

from typing import Annotated

from pydantic import ConfigDict, Field

from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName, PromptName, Truncate
from sightline.service.body_fields import RequestBody
from sightline.service.inference.encode import EncodeResult, Pooling, embed_texts
from sightline.service.parameters import Encoding


class EncodeBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    pooling: Annotated[
        Pooling | None,
        Field(
            description="Reduction of the token vectors to one vector; `none` returns a vector for each token. The "
            "model's own if absent, or `mean` if it has none."
        ),
    ] = None
    normalize: bool | None = Field(
        default=None,
        description="Give each vector length 1. If absent, the model's own setting, or false if it has none or with "
        "pooling `none`.",
    )
    prompt_name: PromptName = None
    encoding: Annotated[
        Encoding, Field(description="Encoding of the vectors: numbers, or base64 of little-endian float32.")
    ] = "float"
    truncate: Truncate = False

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": ["A dog runs."], "pooling": "mean", "normalize": True}]}
    )


async def encode_texts(call: Call, body: EncodeBody) -> EncodeResult:
    """Encode each input to vectors.

    With pooling `none` an embedding has a row for each token, row-major, and `shapes` has the
    numbers of rows and columns.
    """
    return await embed_texts(
        call,
        await call.model(body.model, "encode"),
        body.inputs,
        pooling=body.pooling,
        normalize=body.normalize,
        encoding=body.encoding,
        truncate=body.truncate,
        prompt_name=body.prompt_name,
    )


ENDPOINTS = (Endpoint("POST", "/v1/encode", encode_texts, EncodeResult, errors=OUTPUT_ERRORS),)
