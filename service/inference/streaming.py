"""Streamed text generation: the events of its sequences as they arrive."""

from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import astuple, dataclass

from sightline.base.text.sentences import SplitText
from sightline.base.text.stream import TextStream
from sightline.service.engine.request import Generated, Token, TokenEvent
from sightline.service.inference.call import AnyInputs, Call
from sightline.service.inference.generate import (
    Decoding,
    FinishReason,
    begin,
    check_parameters,
    output_token,
    usage_for,
    without_forced,
)
from sightline.service.inference.maps import TargetAttention
from sightline.service.inference.results import CachedUsage, OutputToken, TimingsMs, Usage
from sightline.service.inference.sentence_splitting import joined_reason, read_by_sentence
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

    def __init__(
        self,
        decoding: Decoding,
        split_texts: Sequence[SplitText],
        submission: Submission | None,
        arrived: list[Arrival],
    ) -> None:
        """Create a stream of the sentences of `split_texts`.

        `arrived` are the first events of the submission, which is None if all inputs are copied.
        """
        self._call = decoding.call
        self._submission = submission
        self._arrived = arrived
        self.sequences: list[StreamedSequence] = []
        self._places: dict[int, tuple[StreamedSequence, int]] = {}  # by request: its sequence, and the sentence there
        first, num_samples = 0, decoding.num_samples
        for split_text in split_texts:
            end = first + len(split_text.sentences) * num_samples
            for sample in range(num_samples):
                numbers = range(first + sample, end, num_samples)
                sequence = StreamedSequence(decoding, len(self.sequences), split_text, numbers)
                self.sequences.append(sequence)
                self._places |= {number: (sequence, place) for place, number in enumerate(numbers)}
            first = end
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
        """Yield groups of events that arrived together, each with its updated sequence."""
        try:
            yield ((sequence, event) for sequence in self.sequences for event in sequence.copied())
            while not all(sequence.has_ended for sequence in self.sequences):
                assert self._submission is not None
                arrived = self._arrived or await self._submission.next_arrivals()
                self._arrived = []
                yield self._take(arrived)
        finally:
            self._record()

    def _take(self, arrived: Sequence[Arrival]) -> Iterator[tuple["StreamedSequence", StreamToken | StreamEnd]]:
        for index, event, time in arrived:
            sequence, place = self._places[index]
            for converted in sequence.take(place, event, time):
                yield sequence, converted

    def _record(self) -> None:
        """Record the usage of the stream for the access log, also if the stream was interrupted."""
        ends = [sequence.end for sequence in self.sequences if sequence.end is not None]
        longest = TimingsMs(*map(max, zip((0.0,) * 5, *(astuple(end.timings_ms) for end in ends), strict=True)))
        reasons = [end.finish_reason for end in ends]
        self._call.record_usage(self._model, longest, self.num_input_tokens, self.num_output_tokens, reasons)
        if len(ends) == len(self.sequences):
            self._call.observe_latency()


class StreamedSequence:
    """One sequence of a stream and its text so far.

    It joins the texts of the sentences of its input. They are generated at the same time, so the
    events of later ones wait here until the earlier ones are complete.
    """

    def __init__(self, decoding: Decoding, number: int, split_text: SplitText, numbers: Sequence[int]) -> None:
        """Create sequence `number` of a stream; `numbers` are the requests of its sentences."""
        self._requests = [decoding.requests[index] for index in numbers]
        self._gaps = split_text.with_separators(decoding.languages.target).gaps
        self._waiting: list[deque[tuple[TokenEvent | Generated, float]]] = [deque() for _ in numbers]
        self._results: list[Generated] = []  # of complete sentences
        self._model = decoding.model
        self._decoding = decoding
        self._call = decoding.call
        self._metrics = self._call.service.metrics.for_model(self._model.name)
        self.index, self.rank = divmod(number, decoding.num_samples)
        self.number = number
        self.num_input_tokens = sum(len(request.source_ids) for request in self._requests)
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0  # known at its end
        self.has_last_token = False  # True if only the end event is missing
        self.has_ended = False
        self.end: StreamEnd | None = None
        if numbers:
            self._begin_sentence()

    def _begin_sentence(self) -> None:
        request = self._requests[len(self._results)]
        max_target_tokens = self._model.manifest.max_new_tokens_for(len(request.source_ids))
        self._max_tokens = min(max_target_tokens - len(request.target_prefix), request.parameters.num_new_tokens)
        prefix = request.target_prefix[request.num_forced :]
        self._text = TextStream(self._model.target_tokenizer, request.parameters.stop, prefix)
        self._num_of_sentence = 0  # tokens
        self._last_arrival = 0.0

    def take(self, place: int, event: TokenEvent | Generated, arrived: float) -> Iterator[StreamToken | StreamEnd]:
        """Convert an event of the sentence `place` to those that the client can receive now."""
        self._waiting[place].append((event, arrived))
        while not self.has_ended and (waiting := self._waiting[len(self._results)]):
            event, arrived = waiting.popleft()
            if isinstance(event, TokenEvent):
                yield self._token(event.token, arrived)
                continue
            self._results.append(event)
            if len(self._results) == len(self._requests):
                yield self._end()
            else:
                self._begin_sentence()

    def copied(self) -> Iterator[StreamToken | StreamEnd]:
        """Return the events of an input that is copied as a whole: none of others.

        An event needs a token. That of the copied text is the end token, which was not generated.
        """
        if not self._requests:
            self.has_last_token = True
            self._pieces += self._gaps[:1]
            token = Token(self._model.manifest.tokens.end_ids[0], 0.0, ())
            shown = output_token(self._model.target_tokenizer, token)
            yield StreamToken(self.index, self.rank, shown, self._gaps[0])
            yield self._end()

    def _token(self, token: Token, arrived: float) -> StreamToken:
        self._observe_arrival(arrived)
        self.num_tokens += 1
        self._num_of_sentence += 1
        piece = self._text.push(token.id)
        is_last = (
            token.id in self._model.manifest.tokens.end_ids
            or self._text.has_stopped
            or self._num_of_sentence == self._max_tokens
        )
        if is_last:  # no further token will release the text that is held back
            piece += self._text.finish()
        if self._num_of_sentence == 1:
            piece = self._gaps[len(self._results)] + piece
        self.has_last_token = is_last and len(self._results) == len(self._requests) - 1
        if self.has_last_token:
            piece += self._gaps[-1]
        self._pieces.append(piece)
        return StreamToken(self.index, self.rank, output_token(self._model.target_tokenizer, token), piece)

    def _end(self) -> StreamEnd:
        targets = [target for result in self._results for target in result.targets]
        reasons = [target.finish_reason for target in targets]
        assert "forced" not in reasons
        maps, text, parameters = self._decoding.maps, "".join(self._pieces), self._decoding.parameters
        attention = None
        if maps:  # then the text is not split
            (request,), (target,) = self._requests, targets
            attention = maps.write(self.index, request, without_forced(request, target), text)
        self.has_ended = True
        self.num_cached_tokens = sum(result.num_cached_tokens for result in self._results)
        self.end = StreamEnd(
            self.index,
            self.rank,
            joined_reason(reasons),
            sum(target.score for target in targets),
            text,
            usage_for(self._model, self.num_input_tokens, self.num_tokens, self.num_cached_tokens),
            self._call.timings([result.timings for result in self._results]),
            self._requests[0].seed if self._requests and parameters.do_sample else parameters.seed,
            attention,
        )
        return self.end

    def _observe_arrival(self, arrived: float) -> None:
        if self._num_of_sentence:
            self._metrics.observe("inter_token_latency_seconds", arrived - self._last_arrival)
        elif not self.num_tokens:
            seconds = arrived - self._call.started
            self._metrics.observe("time_to_first_token_seconds", seconds)
            self._call.details.setdefault("ttft_ms", round(1000 * seconds, 3))
        self._last_arrival = arrived


async def stream(
    call: Call, model: ServedModel, inputs: AnyInputs, parameters: GenerateParameters, *, is_whole: bool = False
) -> Stream:
    """Start a streamed generation and wait for its first event.

    A failure before the first token is raised here, so that it gets its own HTTP status. For
    `is_whole`, see `generate_texts`.
    """
    check_parameters(model, parameters, len(inputs), stream=True)
    decoding = begin(call, model, parameters)
    split_texts = await read_by_sentence(decoding, inputs, is_whole=is_whole, stream=True)
    if decoding.admitted is None:
        return Stream(decoding, split_texts, None, [])
    submission = decoding.admitted.submit(decoding.requests)
    return Stream(decoding, split_texts, submission, await submission.next_arrivals())
