"""OpenAI's POST /v1/embeddings."""

from sightline.service.api.endpoint import Call
from sightline.service.compat.common import model_of_body
from sightline.service.compat.openai.schemas import Embedding, EmbeddingBody, EmbeddingList, EmbeddingUsage
from sightline.service.inference.encode import embed_texts


async def embeddings(call: Call, body: EmbeddingBody) -> EmbeddingList:
    """Encode each input to one vector of length 1, with the model's pooling and default prompt."""
    result = await embed_texts(
        call,
        await model_of_body(call, body.model, "encode"),
        body.inputs,
        normalize=True,
        encoding=body.encoding_format or "float",
        truncate=bool(body.truncate),
        dimensions=body.dimensions,
    )
    num_tokens = result.usage.input_tokens
    data = [Embedding("embedding", index, embedding) for index, embedding in enumerate(result.embeddings)]
    return EmbeddingList("list", result.model, data, EmbeddingUsage(num_tokens, num_tokens))
