"""The operations of a client: each function makes the request of one of them.

Names and meanings of the arguments are those of the HTTP API. Arguments that are None are left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from sightline.client.outputs import (
    Attention,
    Classification,
    Entity,
    Generation,
    NamedArray,
    Output,
    Piece,
    RankedDocument,
    Results,
    Translation,
    read_array,
    read_attention,
)
from sightline.client.transport import Request

Inputs = str | Iterable[str]
Pairs = Iterable[tuple[str, str]]
FIELDS = {"glossary_id", "on_empty", "reduce", "split_tags", "statistics"}  # of bodies, beside the parameters
T = TypeVar("T", bound=Output)


def translate(
    inputs: Inputs,
    *,
    model: str | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    markup: str | None = None,
    glossary: Mapping[str, str] | None = None,
    **parameters: Any,
) -> Request[Results[Translation]]:
    """Translate texts sentence by sentence, and keep what is none as it is.

    `markup` is "html" or "xml" for texts with tags. `glossary` has the translations of terms.
    `parameters` are those of a generation, such as `num_beams`.
    """
    parameters |= {"source_language": source_language, "target_language": target_language}
    body = _generation(inputs, parameters, model=model, markup=markup, glossary=glossary)
    return _request("/v1/translate", body, lambda raw, model: _output(Translation, raw))


def generate(inputs: Inputs, *, model: str | None = None, **parameters: Any) -> Request[Results[Generation]]:
    """Generate texts.

    `parameters` are those of `POST /v1/generate`, such as `max_new_tokens`, `num_beams` and
    `return_attention`.
    """

    def read(raw: Any, model: str) -> Generation:
        tokens = raw["tokens"]
        logprobs = read_array([token["logprob"] for token in tokens], [len(tokens)])
        return _output(
            Generation,
            raw,
            logprobs=NamedArray(logprobs, {"token": [token["text"] for token in tokens]}),
            attention=raw["attention"] and read_attention(raw["attention"], model, raw),
        )

    return _request("/v1/generate", _generation(inputs, parameters, model=model), read)


def stream(inputs: Inputs, *, model: str | None = None, **parameters: Any) -> Request[Piece]:
    """Generate texts, and yield their parts as they are written; see `generate`."""

    def read(raw: Any) -> Piece:
        reason = raw.get("finish_reason")
        text = raw["text"] if reason is None else ""  # the last event has the whole text
        return _output(Piece, raw, text=text, finish_reason=reason)

    return Request("/v1/generate", _generation(inputs, parameters, model=model, stream=True), read)


def embed(inputs: Inputs, *, model: str | None = None, **options: Any) -> Request[NamedArray]:
    """Return the embedding of each text as a row of an array (text, dimension).

    `options` are other fields of `POST /v1/encode`: `pooling`, `normalize`, `prompt_name` and
    `truncate`. By default, pooling and normalization are those of the model.
    """
    texts = _texts([inputs] if isinstance(inputs, str) else inputs)

    def read(document: Any) -> NamedArray:
        size = document["dimensions"]
        rows = [read_array(data, [size]) for data in document["embeddings"]]
        return NamedArray(np.stack(rows), {"text": texts, "dimension": range(size)})

    if options.get("pooling") == "none":
        raise ValueError("pooling must reduce the vectors of tokens to one: mean, max, first or last, got none")
    return Request("/v1/encode", _body(inputs=texts, model=model, **options, encoding="base64"), read)


def classify(
    inputs: Inputs | Pairs, *, model: str | None = None, candidate_labels: Iterable[str] | None = None, **options: Any
) -> Request[Results[Classification]]:
    """Return the probabilities of the model's labels, or of `candidate_labels` (zero-shot).

    `options` are other fields of `POST /v1/classify`, such as `return_attention` and `multi_label`.
    """

    def read(raw: Any, model: str) -> Classification:
        labels = raw["labels"]
        scores = read_array([label["score"] for label in labels], [len(labels)])
        return _output(
            Classification,
            raw,
            scores=NamedArray(scores, {"label": [label["label"] for label in labels]}),
            attention=None if raw["maps"] is None else read_attention(raw, model, raw),
        )

    body = _body(inputs=_texts(inputs), model=model, candidate_labels=candidate_labels, **options)
    return _request("/v1/classify", body, read)


def attention(
    inputs: Inputs | Pairs,
    *,
    targets: Inputs | None = None,
    model: str | None = None,
    kinds: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    units: str = "tokens",
    method: str | None = None,
    prompt_rows: bool = False,
    **parameters: Any,
) -> Request[Results[Attention]]:
    """Return the attention of the model while it generates texts, or reads `targets`.

    By default, all kinds, layers and heads are returned. `units` are "tokens" or "words".
    `method` is "weights", or for bundles with contributions "norms", "value_zeroing" or "alti".
    `prompt_rows` adds the prompt of a model without an encoder. `parameters` are those of a
    generation.
    """
    selection = _body(kinds=kinds, layers=layers, heads=heads, units=units, prompt_rows=prompt_rows, encoding="base64")
    selection |= {"model": model, "method": method, "targets": None if targets is None else _texts(targets)}
    body = _generation(inputs, parameters, **selection)
    return _request("/v1/attention", body, lambda raw, model: read_attention(raw, model, raw))


def tag(inputs: Inputs, *, model: str | None = None, **options: Any) -> Request[Results[Entity]]:
    """Find the entities of texts.

    `options` are other fields of `POST /v1/tag`: `aggregation`, `ignore_labels` and `truncate`.
    """

    def read(document: Any) -> Results[Entity]:
        outputs = document["outputs"]
        entities = [_output(Entity, raw, index=each["index"]) for each in outputs for raw in each["entities"]]
        return Results(entities, document)

    return Request("/v1/tag", _body(inputs=_texts(inputs), model=model, **options), read)


def rerank(
    query: str, documents: Iterable[str], *, model: str | None = None, **options: Any
) -> Request[Results[RankedDocument]]:
    """Sort documents by their relevance to a query, the most relevant first.

    `options` are other fields of `POST /v1/rerank`, such as `top_n` and `instruction`.
    """
    texts = _texts(documents)

    def read(document: Any) -> Results[RankedDocument]:
        found = document["results"]
        ranked = [_output(RankedDocument, raw, text=texts[raw["index"]], score=raw["relevance_score"]) for raw in found]
        return Results(ranked, document)

    return Request("/v1/rerank", _body(query=query, documents=texts, model=model, **options), read)


def _request(path: str, body: Mapping[str, Any], read: Callable[[Any, str], T]) -> Request[Results[T]]:
    """Return a request whose response has an output for each input; `read` also gets the model."""

    def read_all(document: Any) -> Results[T]:
        return Results([read(raw, document["model"]) for raw in document["outputs"]], document)

    return Request(path, body, read_all)


def _output(kind: type[T], raw: Mapping[str, Any], **values: Any) -> T:
    """Return an output; its other fields are those of the response with the same names."""
    others = {each.name: raw[each.name] for each in fields(kind) if each.name not in {"raw", *values}}
    return kind(raw=raw, **others, **values)


def _body(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _generation(inputs: Any, parameters: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a body with the parameters of a generation, among which can be other fields."""
    values |= {name: parameters.pop(name) for name in FIELDS & parameters.keys()}
    return _body(inputs=_texts(inputs), **values, parameters=_body(**parameters) or None)


def _texts(inputs: Any) -> Any:
    """Return a text, or a sequence of texts or pairs, such as a column of a data frame, as JSON."""
    return inputs if isinstance(inputs, str) else list(inputs)
