"""POST /v1/classify: how likely each label of a text is, and what the encoder looked at."""

from typing import Any

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.responses import Response

from service.answers import ClassifyAnswer
from service.calls import Call, json_answer
from service.engine.request import Encoded, EncodeRequest
from service.inputs import read_sources
from service.maps import MapWriter, map_writer
from service.routing import TASK_ERRORS, add_route
from service.schemas import ClassifyBody
from service.serving import ServedModel


async def classify(body: ClassifyBody, call: Call) -> Response:
    """Say how likely each label of each input is.

    The scores of an input sum to 1; the likeliest label comes first.
    """
    return json_answer(await classified(body, call))


async def classified(body: ClassifyBody, call: Call) -> dict[str, Any]:
    """The answer, for any door."""
    model = call.service.model(body.model, "classify")
    maps = map_writer(call, model, body.return_attention, "return_attention")
    kinds = maps.kinds if maps else frozenset[str]()
    sources = await read_sources(call, model, body.inputs, truncate=body.truncate)
    requests = [
        EncodeRequest(call.record.request_id, source, call.deadline, wants_labels=True, attention=kinds)
        for source in sources
    ]
    if maps:
        maps.check(requests)
    results = await call.results(call.submit(model, requests), Encoded)
    pairs = zip(requests, results, strict=True)
    outputs = [{"index": index, **_output(model, *pair, maps)} for index, pair in enumerate(pairs)]
    input_tokens = sum(map(len, sources))
    timings_ms = call.account(model, [result.timings for result in results], input_tokens, 0)
    usage = {"input_tokens": input_tokens, "output_tokens": 0}
    return {"model": model.name, "outputs": outputs, "usage": usage, "timings_ms": timings_ms}


def _output(model: ServedModel, request: EncodeRequest, result: Encoded, maps: MapWriter | None) -> dict[str, Any]:
    assert result.label_logprobs is not None
    labels = {"labels": rank_labels(model.manifest.labels, result.label_logprobs)}
    return labels | maps.write_encoded(request, result) if maps else labels


def rank_labels(labels: tuple[str, ...], logprobs: NDArray[np.float32]) -> list[dict[str, Any]]:
    """Every label with its probability, the likeliest first; of equals the first of the model's."""
    scores = np.exp(logprobs.astype(np.float64))
    scores /= scores.sum()  # what float32 and other precisions leave
    return [{"label": labels[place], "score": float(scores[place])} for place in np.argsort(-scores, kind="stable")]


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/v1/classify",
        classify,
        ClassifyAnswer,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
    )
