"""POST /v1/encode."""

from typing import Annotated

from pydantic import ConfigDict, Field

from service.api.endpoint import TASK_ERRORS, Endpoint
from service.api.types import Inputs, ModelName, Truncate
from service.fields import RequestBody
from service.inference.call import Call
from service.inference.encode import EncodeInput, EncodeResult, Pooling, encode
from service.parameters import Encoding


class EncodeBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    pooling: Annotated[
        Pooling,
        Field(description="Reduction of the token vectors to one vector; `none` returns a vector for each token."),
    ] = "mean"
    normalize: bool = Field(default=False, description="Give each vector length 1.")
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
    request = EncodeInput(body.model, body.inputs, body.pooling, body.normalize, body.encoding, body.truncate)
    return await encode(call, request)


ENDPOINTS = (Endpoint("POST", "/v1/encode", encode_texts, EncodeResult, errors=(*TASK_ERRORS, "response_too_large")),)
