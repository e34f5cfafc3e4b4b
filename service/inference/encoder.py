"""The engine's part of use cases that run only the encoder."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from service.engine.request import Encoded, EncodeRequest
from service.inference.call import Call, Ids
from service.inference.maps import MapWriter
from service.inference.results import FLOAT_BYTES, TimingsMs, Usage
from service.inference.service import ServedModel

T = TypeVar("T")


async def run_encoder(
    call: Call,
    model: ServedModel,
    sources: Sequence[Ids],
    convert: Callable[[int, Encoded], T],
    *,
    return_labels: bool = False,
    maps: MapWriter | None = None,
) -> tuple[list[T], Usage, TimingsMs]:
    """Run the encoder over each source, and record the usage of the call.

    Args:
        call: the call.
        model: the model.
        sources: token ids of each input, from `Call.read_sources`.
        convert: called with the index of an input and its result; returns an output.
        return_labels: return the scores of labels.
        maps: the attention maps of the response, after `MapWriter.read_offsets`.

    Returns:
        The outputs in the order of the inputs, the token counts, and the durations.

    Raises:
        ApiError: the response is certain to be too large, or the call fails.
        ClientGoneError: the client closed the connection.
    """
    kinds = maps.kinds if maps else frozenset[str]()
    requests = [EncodeRequest(call.request_id, source, call.deadline, return_labels, kinds) for source in sources]
    if maps:
        maps.check(requests)
    usage = Usage(sum(map(len, sources)), 0)
    call.response_memory.reserve(FLOAT_BYTES * model.hidden_size * usage.input_tokens)
    results: list[Encoded] = []

    def convert_result(index: int, result: Encoded) -> T:
        results.append(result)
        return convert(index, result)

    outputs = await call.gather(model, requests, Encoded, convert_result)
    timings = call.timings(results)
    call.record_usage(model, timings, usage.input_tokens, 0)
    return outputs, usage, timings
