"""Reranking: the relevance of documents to a query, scored by a cross-encoder.

The encoder reads the query and one document as a pair of texts, and returns one logit (Nogueira and
Cho 2019, "Passage Re-ranking with BERT").
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from service.engine.request import Encoded, EncodeRequest
from service.fields import Texts
from service.inference.call import Call
from service.inference.classify import apply_function, function_of
from service.inference.results import FLOAT_BYTES, TimingsMs, Usage
from service.inference.service import ServedModel


@dataclass(frozen=True)
class RerankInput:
    """A request for the relevance of documents to a query."""

    model: str | None
    query: str
    documents: Texts
    raw_scores: bool = False  # logits instead of probabilities
    truncate: bool = False
    max_document_tokens: int | None = None  # documents are cut after this many tokens


@dataclass(frozen=True)
class RankedDocument:
    """A document and its relevance."""

    index: Annotated[int, Field(description="Index of the document in the request.")]
    score: Annotated[float, Field(description="Relevance of the document.")]


@dataclass(frozen=True)
class RerankResult:
    """The documents of a call, the most relevant first."""

    model: Annotated[str, Field(description="Name of the model.")]
    ranking: Annotated[list[RankedDocument], Field(description="All documents, the most relevant first.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def rerank(call: Call, request: RerankInput) -> RerankResult:
    """Return all documents by descending relevance; ties keep the order of the request.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    model = await call.model(request.model, "rerank")
    function = function_of(model.manifest.label_kind, request.raw_scores)
    documents = request.documents
    if request.max_document_tokens is not None:
        call.reserve(model, len(documents), field="documents")
        documents = await _cut(call, model, documents, request.max_document_tokens)
    pairs = Texts((request.query,) * len(documents), seconds=documents.texts)
    sources = await call.read_sources(model, pairs, "documents", truncate=request.truncate)
    requests = [EncodeRequest(call.request_id, source, call.deadline, return_labels=True) for source in sources]
    call.response_memory.reserve(FLOAT_BYTES * model.hidden_size * sum(map(len, sources)))
    results: list[Encoded] = []

    def convert(index: int, result: Encoded) -> RankedDocument:
        results.append(result)
        assert result.label_scores is not None
        return RankedDocument(index, float(apply_function(result.label_scores, function)[0]))

    scored = await call.gather(model, requests, Encoded, convert)
    usage = Usage(sum(map(len, sources)), 0)
    timings = call.timings(results)
    call.record_usage(model, timings, usage.input_tokens, 0)
    return RerankResult(model.name, sorted(scored, key=lambda one: -one.score), usage, timings)


async def _cut(call: Call, model: ServedModel, documents: Texts, max_tokens: int) -> Texts:
    """Cut each document after its first `max_tokens` tokens."""
    tokenizer = model.source_tokenizer

    def run() -> Texts:
        return Texts(tuple(tokenizer.cut(text, max_tokens) for text in documents.texts))

    return await call.tokenize(run)
