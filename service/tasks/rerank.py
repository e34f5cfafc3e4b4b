"""POST /v1/rerank and /v2/rerank: the relevance of documents to a query, by a cross-encoder.

The encoder reads the query and one document as a pair of texts, and returns one logit (Nogueira and
Cho 2019, "Passage Re-ranking with BERT"). The fields are those of Cohere, Jina AI and vLLM.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from sightline.service.api.endpoint import PARAMETER_ERRORS, Call, Endpoint
from sightline.service.api.types import ModelName, Truncate
from sightline.service.body_fields import (
    TEXT_SCHEMA,
    ListOfInputs,
    RequestBody,
    Text,
    Texts,
    check_texts,
    field_error,
    must_equal,
)
from sightline.service.engine.request import Encoded
from sightline.service.inference.labels import apply_function, function_of
from sightline.service.inference.results import TimingsMs
from sightline.service.inference.source_encoding import encode_sources, read_sources

DOCUMENTS = (
    "Documents to rank, as strings or as objects with the field `text`; SIGHTLINE_MAX_INPUTS can limit their number "
    "further."
)


def _check_documents(value: Any) -> Texts:
    if not isinstance(value, list):
        raise field_error("invalid_parameter", "It must be a list of documents.")
    for index, document in enumerate(value):
        if isinstance(document, dict) and set(document) != {"text"}:
            raise field_error("invalid_parameter", "It must have the field text and no others.", index)
    return check_texts([document["text"] if isinstance(document, dict) else document for document in value])


_DOCUMENT = {
    "type": "object",
    "properties": {"text": {**TEXT_SCHEMA, "description": "Text of the document."}},
    "required": ["text"],
    "additionalProperties": False,
}
Document = Annotated[dict[str, str], WithJsonSchema(_DOCUMENT)]
Documents = Annotated[Texts, PlainValidator(_check_documents, json_schema_input_type=ListOfInputs[Text | Document])]


class RerankBody(RequestBody):
    model: ModelName = None
    query: Annotated[Text, Field(description="Text to which the documents are compared.")]
    documents: Annotated[Documents, Field(description=DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Number of most relevant documents to return; all if absent."
    )
    return_documents: bool = Field(default=False, description="Return the text of each document.")
    raw_scores: bool = Field(
        default=False, description="Return the logits of the model instead of their sigmoid, a probability."
    )
    truncate: Annotated[
        Truncate, Field(description="Cut pairs of query and document that are too long instead of rejecting them.")
    ] = False
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Cut each document after this many tokens."
    )
    instruction: Text | None = Field(
        default=None,
        description="Task that the documents should serve, for rerankers that are language models, such as "
        "Qwen3-Reranker; by default that of the model.",
    )
    priority: Annotated[Any, must_equal(0)] = None
    rank_fields: Annotated[Any, must_equal()] = None
    max_chunks_per_doc: Annotated[Any, must_equal()] = None

    EXAMPLES = (
        {"query": "Who runs?", "documents": ["A dog runs.", "A man sleeps."], "top_n": 1},
        {
            "query": "Who runs?",
            "documents": [{"text": "A dog runs."}, "A man sleeps."],
            "return_documents": True,
            "truncate": True,
        },
    )


@dataclass(frozen=True)
class RerankedText:
    """The text of a document."""

    text: Annotated[str, Field(description="Text of the document.")]


@dataclass(frozen=True)
class RerankedDocument:
    """A document and its relevance to the query."""

    index: Annotated[int, Field(description="Index of the document in the request.")]
    relevance_score: Annotated[
        float, Field(description="Probability that the document is relevant, or with raw_scores the logit.")
    ]
    document: Annotated[RerankedText | None, Field(description="The document; only with return_documents.")]


@dataclass(frozen=True)
class EncoderUsage:
    """Numbers of tokens in the form of OpenAI, special tokens included; none are generated."""

    prompt_tokens: Annotated[int, Field(description="Tokens of the inputs, or of all pairs of query and document.")]
    total_tokens: Annotated[int, Field(description="The same number.")]


@dataclass(frozen=True)
class RerankResponse:
    """Documents, the most relevant first."""

    id: Annotated[str, Field(description="Id of the response.")]
    object: Annotated[str, Field(description="Always `list`.")]
    model: Annotated[str, Field(description="Name of the model.")]
    results: Annotated[list[RerankedDocument], Field(description="Documents, the most relevant first.")]
    usage: Annotated[EncoderUsage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def rerank_documents(call: Call, body: RerankBody) -> RerankResponse:
    """Sort documents by their relevance to a query.

    The model reads the query and one document at a time as a pair of texts (a cross-encoder).
    """
    model = await call.model(body.model, "rerank")
    function = function_of(model.manifest.label_kind, body.raw_scores)
    documents = body.documents
    if body.max_tokens_per_doc is not None:
        await call.reserve(model, len(documents), field="documents")
        cut = partial(model.source_tokenizer.cut, max_tokens=body.max_tokens_per_doc)
        documents = await call.tokenize(lambda: Texts(tuple(map(cut, documents.texts))), documents.texts)
    pairs = Texts((body.query,) * len(documents), second_texts=documents.texts)
    admitted, sources = await read_sources(
        call, model, pairs, "documents", truncate=body.truncate, instruction=body.instruction, partner="{query}"
    )

    def convert(index: int, result: Encoded) -> RerankedDocument:
        assert result.label_scores is not None
        text = RerankedText(body.documents.texts[index]) if body.return_documents else None
        return RerankedDocument(index, float(apply_function(result.label_scores, function)[0]), text)

    scored, usage, timings = await encode_sources(admitted, sources, convert, return_labels=True)
    # Ties keep the order of the request.
    ranked = sorted(scored, key=lambda document: -document.relevance_score)[: body.top_n]
    of_pairs = EncoderUsage(usage.input_tokens, usage.input_tokens)
    return RerankResponse(f"rerank-{call.request_id}", "list", model.name, ranked, of_pairs, timings)


# Clients of version 2 of Cohere's API use the second path.
ENDPOINTS = tuple(
    Endpoint("POST", path, rerank_documents, RerankResponse, errors=PARAMETER_ERRORS, name=name)
    for path, name in (("/v1/rerank", None), ("/v2/rerank", "rerank_documents_v2"))
)
