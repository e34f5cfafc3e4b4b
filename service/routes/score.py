"""POST /v1/score: how likely the model finds targets that are given."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import ScoreAnswer
from service.calls import Call, json_answer
from service.engine.request import DecodingParameters, Generated, Target
from service.inputs import generate_requests, read_sources, read_targets
from service.outputs import token_of
from service.routing import TASK_ERRORS, add_route
from service.schemas import ScoreBody
from service.tokenizer import TextTokenizer


async def score(body: ScoreBody, call: Call) -> Response:
    """Score the target of each input.

    Each target gets its end token; its score is the sum of the log-probabilities of all its tokens.
    """
    model = call.service.model(body.model, "generate")
    sources = await read_sources(call, model, body.inputs, parameters=DecodingParameters())
    targets = await read_targets(call, model, body.targets, sources)
    parameters = DecodingParameters(max_new_tokens=0, top_logprobs=body.top_logprobs)
    requests = generate_requests(call, model, parameters, sources, targets)
    results = await call.results(call.submit(model, requests), Generated)
    input_tokens, output_tokens = sum(map(len, sources)), sum(map(len, targets))
    usage = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    reasons = ["forced"] * len(results)
    timings_ms = call.account(model, [result.timings for result in results], input_tokens, output_tokens, *reasons)
    outputs = [
        {"index": index, **_scored(model.target_tokenizer, result.targets[0])} for index, result in enumerate(results)
    ]
    return json_answer({"model": model.name, "outputs": outputs, "usage": usage, "timings_ms": timings_ms})


def _scored(tokenizer: TextTokenizer, target: Target) -> dict[str, Any]:
    return {
        "score": sum(token.logprob for token in target.tokens),
        "tokens": [token_of(tokenizer, token) for token in target.tokens],
    }


def add_routes(app: FastAPI) -> None:
    add_route(app, "POST", "/v1/score", score, ScoreAnswer, errors=TASK_ERRORS)
