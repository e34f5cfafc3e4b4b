"""OpenAI's POST /v1/embeddings."""

from starlette.responses import Response

from service.bodies import check_body
from service.calls import Call, json_answer
from service.families.common import check_dimensions
from service.families.naming import naming
from service.families.openai_schemas import EmbeddingBody
from service.routes.encode import encoded
from service.schemas import EncodeBody


async def embeddings(body: EmbeddingBody, call: Call) -> Response:
    """Encode each input to one vector: the mean over its tokens, of length 1."""
    with naming({"inputs": "input", "encoding": "encoding_format"}):
        wanted = {
            "model": body.model,
            "inputs": body.input.copies(1),
            "normalize": True,
            "encoding": body.encoding_format or "float",
        }
        answer = await encoded(check_body(wanted, EncodeBody), call)
    check_dimensions(body.dimensions, answer)
    input_tokens = answer["usage"]["input_tokens"]
    data = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(answer["embeddings"])
    ]
    usage = {"prompt_tokens": input_tokens, "total_tokens": input_tokens}
    return json_answer({"object": "list", "model": answer["model"], "data": data, "usage": usage})
