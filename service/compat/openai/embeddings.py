"""OpenAI's POST /v1/embeddings."""

from sightline.service.api.endpoint import Call
from sightline.service.body_fields import construct
from sightline.service.compat.common import named_model
from sightline.service.compat.openai.schemas import Embedding, EmbeddingBody, EmbeddingList
from sightline.service.tasks.encode import EncodeBody, encode
from sightline.service.tasks.rerank import EncoderUsage


async def embeddings(call: Call, body: EmbeddingBody) -> EmbeddingList:
    """Encode each input to one vector of length 1, with the model's pooling and default prompt."""
    options = construct(
        EncodeBody,
        model=named_model(call, body.model),
        inputs=body.inputs,
        normalize=True,
        encoding=body.encoding_format or "float",
        truncate=bool(body.truncate),
    )
    result = await encode(call, options, body.dimensions)
    num_tokens = result.usage.input_tokens
    data = [Embedding("embedding", index, embedding) for index, embedding in enumerate(result.embeddings)]
    return EmbeddingList("list", result.model, data, EncoderUsage(num_tokens, num_tokens))
