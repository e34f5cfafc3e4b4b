"""POST /v1/attention: what the model looks at, for what it generates or for a target that is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.responses import Response

from service.answers import AttentionAnswer
from service.bundle import Attention
from service.calls import Call, json_answer, timings_of
from service.engine.request import Generated, GenerateRequest
from service.errors import ApiError
from service.inputs import decoding_parameters, read_sources, tokenize
from service.outputs import check_size, numbers, text_of
from service.routing import add_route
from service.schemas import AttentionBody, Encoding, Parameters, Reduce, Texts
from service.serving import ServedModel
from service.tokenizer import StopStrings


@dataclass(frozen=True)
class Selection:
    """Which part of one kind's maps is wanted."""

    attention: Attention
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    reduce: Reduce

    def shape(self, source_tokens: int, target_tokens: int) -> tuple[int, int, int, int]:
        """Layers, heads, rows, columns of the map."""
        rows = source_tokens if self.attention.kind == "encoder" else target_tokens
        columns = target_tokens if self.attention.kind == "decoder" else source_tokens
        return len(self.layers), len(self.heads) if self.reduce == "none" else 1, rows, columns

    def entry(self, maps: NDArray[np.float32], encoding: Encoding) -> dict[str, Any]:
        """One of the answer's `maps`; `maps` is (L, H, rows, columns) of all layers and heads."""
        chosen = maps[np.ix_(self.layers, self.heads)]
        if self.reduce != "none":
            reduction = np.mean if self.reduce == "mean" else np.max
            chosen = reduction(chosen, axis=1, keepdims=True)
        return {
            "kind": self.attention.kind,
            "layers": self.layers,
            "heads": self.heads,
            "rows": chosen.shape[2],
            "columns": chosen.shape[3],
            "shape": chosen.shape,
            # The largest of several rows that sum to 1 does not sum to 1.
            "normalized": self.attention.normalized and (self.reduce != "max" or len(self.heads) == 1),
            "data": numbers(chosen, encoding),
        }


async def attention(body: AttentionBody, call: Call) -> Response:
    """Show the attention of one input's generation, or of a given target.

    Without `target` the maps are those of the pass that generates; with it, the target is forced.
    """
    model = call.service.model(body.model, "attention")
    selections = select(body, model)
    parameters = decoding_parameters(body.parameters or Parameters(), model)
    sources, tokenize_ms = await read_sources(call, model, Texts((body.input,), "input", is_list=False))
    forced = None if body.target is None else await _read_target(body.target, model)
    if forced is not None:  # what is too large for certain is not even computed
        _check_size(selections, len(sources[0]), len(forced))
    stop = body.parameters.stop if body.parameters else ()
    request = GenerateRequest(
        request_id=call.record.request_id,
        source_ids=sources[0],
        deadline=call.deadline,
        parameters=parameters,
        stop=StopStrings(model.target_tokenizer, stop) if stop else None,
        forced_target=forced,
        attention=frozenset(selection.attention.kind for selection in selections),
    )
    result = (await call.results(call.submit(model, [request])))[0]
    assert isinstance(result, Generated)
    _check_size(selections, len(sources[0]), len(result.tokens))
    maps = [selection.entry(result.attention[selection.attention.kind], body.encoding) for selection in selections]
    return json_answer(_answer(call, model, request, result, stop, maps, tokenize_ms))


def select(body: AttentionBody, model: ServedModel) -> list[Selection]:
    """What the body asks for, in its order.

    Raises:
        ApiError: the model has no such kind, layer or head.
    """
    available = {attention.kind: attention for attention in model.manifest.attention}
    selections = []
    for place, kind in enumerate(body.kinds or available):
        if kind not in available:
            message = f"{model.name} has no attention maps of this kind; it has {', '.join(available) or 'none'}."
            raise ApiError("unsupported_parameter", message, param=f"kinds[{place}]")
        maps = available[kind]
        layers = _chosen(body.layers, maps.layers, "layers", kind)
        selections.append(Selection(maps, layers, _chosen(body.heads, maps.heads, "heads", kind), body.reduce))
    return selections


def _chosen(wanted: Sequence[int] | None, available: int, name: str, kind: str) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(available))
    for place, index in enumerate(wanted):
        if index >= available:
            message = f"The model's {kind} attention has {name} 0 to {available - 1}."
            raise ApiError("invalid_parameter", message, param=f"{name}[{place}]")
    return tuple(wanted)


async def _read_target(text: str, model: ServedModel) -> tuple[int, ...]:
    target = Texts((text,), "target", is_list=False)
    return tuple((await tokenize(model.target_tokenizer, target, model.manifest.limits.max_target_tokens))[0])


def _check_size(selections: Sequence[Selection], source_tokens: int, target_tokens: int) -> None:
    count = sum(int(np.prod(selection.shape(source_tokens, target_tokens))) for selection in selections)
    check_size("maps", count, "Choose fewer kinds, layers or heads, or reduce the heads.")


def _answer(
    call: Call,
    model: ServedModel,
    request: GenerateRequest,
    result: Generated,
    stop: Sequence[str],
    maps: list[dict[str, Any]],
    tokenize_ms: float,
) -> dict[str, Any]:
    source, target = model.source_tokenizer, model.target_tokenizer
    ids = [token.id for token in result.tokens]
    timings_ms = timings_of(call, tokenize_ms, [result.timings])
    call.tell_result(len(request.source_ids), len(ids), timings_ms, result.finish_reason)
    call.service.metrics_of(model).call_seconds.observe(timings_ms["total"] / 1000)
    seed = {"seed": request.parameters.seed} if request.parameters.do_sample else {}
    return {
        "model": model.name,
        "text": text_of(target, ids, stop),
        "source_tokens": [source.name(id_) for id_ in request.source_ids],
        "target_tokens": [target.name(id_) for id_ in ids],
        "decoder_input_tokens": [target.name(id_) for id_ in (model.manifest.tokens.start_id, *ids[:-1])],
        "finish_reason": result.finish_reason,
        **seed,
        "maps": maps,
        "usage": {"input_tokens": len(request.source_ids), "output_tokens": len(ids)},
        "timings_ms": timings_ms,
    }


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/v1/attention",
        attention,
        AttentionAnswer,
        errors=(
            *("empty_input", "input_too_long", "unsupported_parameter", "unsupported_task", "response_too_large"),
            *("queue_timeout", "loading", "draining", "engine_dead", "deadline_exceeded"),
        ),
    )
