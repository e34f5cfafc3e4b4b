"""Reranking: the relevance of documents to a query, scored by a cross-encoder.

The encoder reads the query and one document as a pair of texts, and returns one logit (Nogueira and
Cho 2019, "Passage Re-ranking with BERT").
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Call
from sightline.service.inference.classify import apply_function, function_of
from sightline.service.inference.results import TimingsMs, Usage
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources


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


async def rerank(
    call: Call,
    model: ServedModel,
    query: str,
    documents: Texts,
    *,
    raw_scores: bool,
    truncate: bool,
    max_document_tokens: int | None = None,
    instruction: str | None = None,
) -> RerankResult:
    """Return all documents by descending relevance; ties keep the order of the request.

    Documents are cut after `max_document_tokens`; `truncate` truncates pairs of query and document.
    `raw_scores` are logits instead of probabilities. `instruction` is the task of a reranker that
    is a language model.
    """
    function = function_of(model.manifest.label_kind, raw_scores)
    if max_document_tokens is not None:
        await call.reserve(model, len(documents), field="documents")
        documents = await _cut(call, model, documents, max_document_tokens)
    pairs = Texts((query,) * len(documents), second_texts=documents.texts)
    options: dict[str, Any] = {"truncate": truncate, "instruction": instruction, "partner": "{query}"}
    sources = await read_sources(call, model, pairs, "documents", **options)

    def convert(index: int, result: Encoded) -> RankedDocument:
        assert result.label_scores is not None
        return RankedDocument(index, float(apply_function(result.label_scores, function)[0]))

    scored, usage, timings = await encode_sources(call, model, sources, convert, return_labels=True)
    return RerankResult(model.name, sorted(scored, key=lambda document: -document.score), usage, timings)


async def _cut(call: Call, model: ServedModel, documents: Texts, max_tokens: int) -> Texts:
    """Cut each document after its first `max_tokens` tokens."""
    tokenizer = model.source_tokenizer

    def run() -> Texts:
        return Texts(tuple(tokenizer.cut(text, max_tokens) for text in documents.texts))

    return await call.tokenize(run, documents.texts)
