"""The operations of a client: each function makes the request of one of them.

Names and meanings of the arguments are those of the HTTP API. Arguments that are None are left out.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from sightline.client import outputs
from sightline.client.outputs import NamedArray, Output, RankedDocument, Results, read_array, read_attention, read_row
from sightline.client.transport import Request, require

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
) -> Request[Results[outputs.Translation]]:
    """Translate texts sentence by sentence, and keep what is none as it is.

    `markup` is "html" or "xml" for texts with tags. `glossary` has the translations of terms.
    `parameters` are those of a generation, such as `num_beams`.
    """
    parameters |= {"source_language": source_language, "target_language": target_language}
    body = _generation(inputs, parameters, model=model, markup=markup, glossary=glossary)
    return _request("/v1/translate", body, lambda raw, model: _output(outputs.Translation, raw))


def generate(inputs: Inputs, *, model: str | None = None, **parameters: Any) -> Request[Results[outputs.Generation]]:
    """Generate texts.

    `parameters` are those of `POST /v1/generate`, such as `max_new_tokens`, `num_beams` and
    `return_attention`.
    """

    def read(raw: Any, model: str) -> outputs.Generation:
        logprobs = read_row("token", raw["tokens"], "text", "logprob")
        attention = raw["attention"] and read_attention(raw["attention"], model, raw)
        return _output(outputs.Generation, raw, logprobs=logprobs, attention=attention)

    return _request("/v1/generate", _generation(inputs, parameters, model=model), read)


def stream(inputs: Inputs, *, model: str | None = None, **parameters: Any) -> Request[outputs.Piece]:
    """Generate texts, and yield their parts as they are written; see `generate`."""

    def read(raw: Any) -> outputs.Piece:
        reason = raw.get("finish_reason")
        text = raw["text"] if reason is None else ""  # the last event has the whole text
        return _output(outputs.Piece, raw, text=text, finish_reason=reason)

    return Request("/v1/generate", _generation(inputs, parameters, model=model, stream=True), read)


def embed(inputs: Inputs, *, model: str | None = None, **options: Any) -> Request[NamedArray]:
    """Return the embedding of each text as a row of an array (text, dimension).

    `options` are other fields of `POST /v1/encode`: `pooling`, `normalize`, `prompt_name` and
    `truncate`. By default, pooling and normalization are those of the model.
    """
    require(str(options.get("pooling")) != "none", "pooling must be mean, max, first or last, got none")
    inputs = [inputs] if isinstance(inputs, str) else inputs
    body = _body(inputs=inputs, model=model, **{"encoding": "base64", **options})

    def read(document: Any) -> NamedArray:
        rows = np.stack([read_array(data, [document["dimensions"]]) for data in document["embeddings"]])
        return NamedArray(rows, {"text": json.loads(body)["inputs"], "dimension": range(rows.shape[1])})

    return Request("/v1/encode", body, read)


def classify(
    inputs: Inputs | Pairs, *, model: str | None = None, candidate_labels: Iterable[str] | None = None, **options: Any
) -> Request[Results[outputs.Classification]]:
    """Return the probabilities of the model's labels, or of `candidate_labels` (zero-shot).

    `options` are other fields of `POST /v1/classify`, such as `return_attention` and `multi_label`.
    """

    def read(raw: Any, model: str) -> outputs.Classification:
        scores = read_row("label", raw["labels"], "label", "score")
        attention = None if raw["maps"] is None else read_attention(raw, model, raw)
        return _output(outputs.Classification, raw, scores=scores, attention=attention)

    body = _body(inputs=inputs, model=model, candidate_labels=candidate_labels, **options)
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
) -> Request[Results[outputs.Attention]]:
    """Return the attention of the model while it generates texts, or reads `targets`.

    By default, all kinds, layers and heads are returned. `units` are "tokens" or "words".
    `method` is "weights", or for bundles with contributions "norms", "value_zeroing" or "alti".
    `prompt_rows` adds the prompt of a model without an encoder. `parameters` are those of a
    generation.
    """
    selection = {"kinds": kinds, "layers": layers, "heads": heads, "units": units, "method": method}
    others = {"targets": targets, "prompt_rows": prompt_rows, "encoding": "base64"}
    body = _generation(inputs, parameters, model=model, **selection, **others)
    return _request("/v1/attention", body, lambda raw, model: read_attention(raw, model, raw))


def tag(inputs: Inputs, *, model: str | None = None, **options: Any) -> Request[Results[outputs.Entity]]:
    """Find the entities of texts.

    `options` are other fields of `POST /v1/tag`: `aggregation`, `ignore_labels` and `truncate`.
    """

    def read(document: Any) -> Results[outputs.Entity]:
        found = document["outputs"]
        entities = [_output(outputs.Entity, raw, index=each["index"]) for each in found for raw in each["entities"]]
        return Results(entities, document)

    return Request("/v1/tag", _body(inputs=inputs, model=model, **options), read)


def rerank(
    query: str, documents: Iterable[str], *, model: str | None = None, **options: Any
) -> Request[Results[RankedDocument]]:
    """Sort documents by their relevance to a query, the most relevant first.

    `options` are other fields of `POST /v1/rerank`, such as `top_n` and `instruction`.
    """
    body = _body(query=query, documents=documents, model=model, **options)

    def read(document: Any) -> Results[RankedDocument]:
        found, texts = document["results"], json.loads(body)["documents"]
        ranked = [_output(RankedDocument, raw, text=texts[raw["index"]], score=raw["relevance_score"]) for raw in found]
        return Results(ranked, document)

    return Request("/v1/rerank", body, read)


def _request(path: str, body: str, read: Callable[[Any, str], T]) -> Request[Results[T]]:
    """Return a request whose response has an output for each input; `read` also gets the model."""

    def read_all(document: Any) -> Results[T]:
        return Results([read(raw, document["model"]) for raw in document["outputs"]], document)

    return Request(path, body, read_all)


def _output(kind: type[T], raw: Mapping[str, Any], **values: Any) -> T:
    """Return an output; its other fields are those of the response with the same names."""
    others = {each.name: raw[each.name] for each in fields(kind) if each.name not in {"raw", *values}}
    return kind(raw=raw, **others, **values)


def _generation(inputs: Any, parameters: dict[str, Any], **values: Any) -> str:
    """Return a body with the parameters of a generation, among which can be other fields."""
    values |= {name: parameters.pop(name) for name in FIELDS & parameters.keys()}
    given = {name: value for name, value in parameters.items() if value is not None}
    return _body(inputs=inputs, **values, parameters=given or None)  # some models have no parameters


def _body(**values: Any) -> str:
    """Write fields that are not None as JSON, in which arrays and other iterables are lists."""
    texts = []
    for name, value in values.items():
        try:
            is_body = name == "parameters" and value is not None
            text = _body(**value) if is_body else json.dumps(value, default=_plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            require(False, f"{name} cannot be sent as JSON: {error}; use texts, finite numbers, lists and mappings")
        texts += [] if value is None else [f"{json.dumps(name)}: {text}"]
    return f"{{{', '.join(texts)}}}"


def _plain(value: Any) -> Any:
    """Return an array, a column or the rows of a data frame, or another iterable as a list."""
    if isinstance(value, bytes):
        raise TypeError("bytes are no text")
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else list(value)
