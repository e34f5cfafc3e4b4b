"""Streamed text generation: the events of its sequences as they arrive."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import astuple, dataclass

from sightline.base.text.stream import TextStream
from sightline.service.engine.request import Generated, Token, TokenEvent
from sightline.service.inference.call import AnyInputs, Call
from sightline.service.inference.generate import Decoding, FinishReason, begin, output_token, usage_for, without_forced
from sightline.service.inference.maps import TargetAttention
from sightline.service.inference.results import CachedUsage, OutputToken, TimingsMs, Usage
from sightline.service.inference.service import ServedModel
from sightline.service.inference.submission import Arrival, Submission
from sightline.service.parameters import GenerateParameters


@dataclass(frozen=True)
class StreamToken:
    """A new token of a stream, and the text that became final with it."""

    index: int
    rank: int
    token: OutputToken
    text: str


@dataclass(frozen=True)
class StreamEnd:
    """The end of one sequence of a stream, with its complete text."""

    index: int
    rank: int
    finish_reason: FinishReason
    score: float
    text: str
    usage: Usage | CachedUsage
    timings_ms: TimingsMs
    seed: int | None
    attention: TargetAttention | None


class Stream:
    """The events of a streamed generation."""

    def __init__(self, decoding: Decoding, submission: Submission, arrived: list[Arrival]) -> None:
        """Create a stream; `arrived` are the first events, already taken from the submission."""
        self._call = decoding.call
        self._submission = submission
        self._arrived = arrived
        self.sequences = [StreamedSequence(decoding, index) for index in range(len(decoding.requests))]
        self.num_input_tokens = decoding.num_input_tokens
        self._model = decoding.model

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def usage(self) -> Usage:
        """Token counts of the whole call, at its end."""
        # The samples of an input count its tokens once.
        cached = sum(sequence.num_cached_tokens for sequence in self.sequences if sequence.rank == 0)
        return usage_for(self._model, self.num_input_tokens, self.num_output_tokens, cached)

    async def __aiter__(self) -> AsyncGenerator[Iterator[tuple["StreamedSequence", StreamToken | StreamEnd]]]:
        """Yield groups of events that arrived together, each with its updated sequence.

        Raises:
            ApiError: a sequence failed, or the call's deadline has passed.
            ClientGoneError: the client closed the connection.
        """
        try:
            while not all(sequence.has_ended for sequence in self.sequences):
                arrived = self._arrived or await self._submission.next_arrivals()
                self._arrived = []
                yield self._take(arrived)
        finally:
            self._record()

    def _take(self, arrived: Sequence[Arrival]) -> Iterator[tuple["StreamedSequence", StreamToken | StreamEnd]]:
        for index, event, time in arrived:
            sequence = self.sequences[index]
            yield sequence, sequence.take(event, time)

    def _record(self) -> None:
        """Record the usage of the stream for the access log, also if the stream was interrupted."""
        ends = [sequence.end for sequence in self.sequences if sequence.end is not None]
        timings = [end.timings_ms for end in ends]
        longest = TimingsMs(*map(max, zip((0.0,) * 5, *map(astuple, timings), strict=True)))
        reasons = [end.finish_reason for end in ends]
        self._call.record_usage(self._model, longest, self.num_input_tokens, self.num_output_tokens, reasons)
        if len(ends) == len(self.sequences):
            self._call.observe_latency()


class StreamedSequence:
    """One sequence of a stream and its text so far."""

    def __init__(self, decoding: Decoding, index: int) -> None:
        request = self._request = decoding.requests[index]
        self._model = decoding.model
        self._decoding = decoding
        self._call = decoding.call
        self._metrics = self._call.service.metrics.for_model(self._model.name)
        max_target_tokens = self._model.manifest.max_new_tokens_for(len(request.source_ids))
        self._max_tokens = min(max_target_tokens - len(request.target_prefix), request.parameters.num_new_tokens)
        self.index, self.rank = divmod(index, decoding.num_samples)
        self.number = index
        self.num_input_tokens = len(request.source_ids)
        prefix = request.target_prefix[request.num_forced :]
        self._text = TextStream(self._model.target_tokenizer, request.parameters.stop, prefix)
        self._pieces: list[str] = []
        self._last_arrival = 0.0
        self.num_tokens = 0
        self.num_cached_tokens = 0  # known at its end
        self.has_last_token = False  # True if only the end event is missing
        self.has_ended = False
        self.end: StreamEnd | None = None

    def take(self, event: TokenEvent | Generated, arrived: float) -> StreamToken | StreamEnd:
        """Convert an event to the event that the client receives.

        Args:
            event: event of the engine.
            arrived: its arrival time, in seconds of `time.monotonic`.
        """
        return self._token(event.token, arrived) if isinstance(event, TokenEvent) else self._end(event)

    def _token(self, token: Token, arrived: float) -> StreamToken:
        self._observe_arrival(arrived)
        self.num_tokens += 1
        piece = self._text.push(token.id)
        self.has_last_token = (
            token.id in self._model.manifest.tokens.end_ids
            or self._text.has_stopped
            or self.num_tokens == self._max_tokens
        )
        if self.has_last_token:  # no further token will release the text that is held back
            piece += self._text.finish()
        self._pieces.append(piece)
        return StreamToken(self.index, self.rank, output_token(self._model.target_tokenizer, token), piece)

    def _end(self, result: Generated) -> StreamEnd:
        (target,) = result.targets
        request, maps = self._request, self._decoding.maps
        reason = target.finish_reason
        assert reason != "forced"
        self.has_ended = True
        self.num_cached_tokens = result.num_cached_tokens
        text = "".join(self._pieces)
        self.end = StreamEnd(
            self.index,
            self.rank,
            reason,
            target.score,
            text,
            usage_for(self._model, self.num_input_tokens, self.num_tokens, self.num_cached_tokens),
            self._call.timings([result.timings]),
            request.seed if request.parameters.do_sample else None,
            maps.write(self.index, request, without_forced(request, target), text) if maps else None,
        )
        return self.end

    def _observe_arrival(self, arrived: float) -> None:
        if self.num_tokens:
            self._metrics.observe("inter_token_latency_seconds", arrived - self._last_arrival)
        else:
            seconds = arrived - self._call.started
            self._metrics.observe("time_to_first_token_seconds", seconds)
            self._call.details.setdefault("ttft_ms", round(1000 * seconds, 3))
        self._last_arrival = arrived


async def stream(call: Call, model: ServedModel, inputs: AnyInputs, parameters: GenerateParameters) -> Stream:
    """Start a streamed generation and wait for its first event.

    A failure before the first token is raised here, so that it gets its own HTTP status.

    Raises:
        ApiError: the request is invalid, is rejected, or fails before its first token.
        ClientGoneError: the client closed the connection.
    """
    decoding = begin(call, model, inputs, parameters, stream=True)
    await decoding.read(inputs, stream=True)
    submission = call.submit(model, decoding.requests)
    return Stream(decoding, submission, await submission.next_arrivals())
