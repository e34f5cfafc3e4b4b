"""Response that OpenAI's two text endpoints share, whole or as a stream."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sightline.service.api.endpoint import EventEncoder, EventStream, event_of
from sightline.service.compat.openai.schemas import CompletionUsage, DecodingBody
from sightline.service.inference.call import AnyInputs, Call
from sightline.service.inference.generate import DoubtfulResult, GenerateOutput, GenerateResult
from sightline.service.inference.results import CachedUsage, Usage
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.service import ServedModel
from sightline.service.inference.streaming import Stream, StreamedSequence, StreamEnd, StreamToken, stream
from sightline.service.parameters import GenerateParameters
from sightline.service.tasks.generate import DONE


class Choice(Protocol):
    """Writes one text of a response."""

    def whole(self, output: GenerateOutput) -> Any: ...

    def token(self, event: StreamToken) -> Any: ...

    def end(self, event: StreamEnd) -> Any: ...


@dataclass(eq=False)
class TextResponse(EventEncoder):
    """One response, whole or as the events of a stream."""

    call: Call
    model: ServedModel
    body: DecodingBody
    make_choice: Callable[[int], Choice]  # takes its index; called after the request is checked
    kind: str  # field `object`
    prefix: str  # of the id
    choices: Sequence[Choice] = ()  # of a stream

    def __post_init__(self) -> None:
        self._options = self.body.stream_options
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{self.call.request_id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model.name,
        }

    async def of(self, inputs: AnyInputs, parameters: GenerateParameters, *, is_whole: bool = False) -> Any:
        """Generate from the inputs and return the response; see `generate_texts` for `is_whole`."""
        call = self.call
        if self.body.stream:
            events = await stream(call, self.model, inputs, parameters, is_whole=is_whole)
            self.choices = [self.make_choice(sequence.number) for sequence in events.sequences]
            return EventStream(events, self)
        result = await generate_texts(call, self.model, inputs, parameters, is_whole=is_whole)
        return self.whole(result)

    def whole(self, result: GenerateResult) -> Any:
        choices = [self.make_choice(index).whole(output) for index, output in enumerate(result.outputs)]
        response = {**self._head, "choices": choices, "usage": usage_of(result.usage)}
        if isinstance(result, DoubtfulResult):
            response["warnings"] = result.warnings
        return response

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        return self._event(sequence, self.choices[sequence.number].token(event))

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        warning = self.call.warnings.get(event.index)
        more = {} if warning is None else {"warnings": [warning]}
        return self._event(sequence, self.choices[sequence.number].end(event), more)

    def _event(self, sequence: StreamedSequence, choice: Any, more: Mapping[str, Any] | None = None) -> bytes:
        content = {**self._head, "choices": [choice], **(more or {})}
        if self._options and self._options.continuous_usage_stats:
            content["usage"] = usage_of(Usage(sequence.num_input_tokens, sequence.num_tokens))
        elif self._options and self._options.include_usage:
            content["usage"] = None
        return event_of(content)

    def close(self, stream: Stream) -> bytes:
        if not (self._options and self._options.include_usage):
            return DONE
        return event_of({**self._head, "choices": [], "usage": usage_of(stream.usage)}) + DONE


def usage_of(usage: Usage) -> CompletionUsage:
    completion_usage: CompletionUsage = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
    if isinstance(usage, CachedUsage):
        completion_usage["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return completion_usage
