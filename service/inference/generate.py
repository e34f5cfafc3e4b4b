"""Text generation: texts in, generated texts out, whole or as a stream of events."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.engine.request import Generated, GenerateRequest, Token, TokenEvent
from service.engine.throughput import Throughput
from service.errors import ApiError
from service.fields import MAX_INPUTS, Texts
from service.inference.call import Arrival, Call, Ids
from service.inference.maps import MapWriter, TargetAttention
from service.inference.results import BYTES_PER_TOKEN, OutputToken, OutputTokens, RankedToken, TimingsMs, Usage
from service.inference.service import ServedModel
from service.parameters import (
    BEAM_PARAMETERS,
    DEFAULT_NEW_TOKENS,
    MAX_SEED,
    SAMPLING_PARAMETERS,
    GenerateParameters,
)
from service.text.stream import StopStrings, TextStream
from service.text.tokenizer import TextTokenizer

FinishReason = Literal["eos", "length", "stop"]


@dataclass(frozen=True)
class GenerateInput:
    """A request for generated texts."""

    model: str | None
    inputs: Texts
    parameters: GenerateParameters = GenerateParameters()  # noqa: RUF009 - it is frozen


@dataclass(frozen=True)
class GenerateOutput:
    """One generated sequence."""

    index: Annotated[int, Field(description="Index of its input.")]
    rank: Annotated[int, Field(description="Rank among the sequences of its input; the best beam is 0.")]
    text: str
    tokens: OutputTokens
    finish_reason: FinishReason
    score: Annotated[
        float, Field(description="Sum of the log-probabilities; of beams, divided by length ** length_penalty.")
    ]
    seed: Annotated[int | None, Field(description="Only with do_sample.")]
    attention: Annotated[TargetAttention | None, Field(description="Only with return_attention.")]


@dataclass(frozen=True)
class GenerateResult:
    """The outputs of a call, by index and rank."""

    model: str
    outputs: list[GenerateOutput]
    usage: Usage
    timings_ms: TimingsMs


@dataclass(frozen=True)
class StreamToken:
    """A new token of a stream, and the text that it makes certain."""

    index: int
    rank: int
    token: OutputToken
    text: str


@dataclass(frozen=True)
class StreamEnd:
    """The end of one sequence of a stream, with its whole text."""

    index: int
    rank: int
    finish_reason: FinishReason
    score: float
    text: str
    usage: Usage
    timings_ms: TimingsMs
    seed: int | None
    attention: TargetAttention | None


@dataclass(frozen=True)
class Pending:
    """A call whose requests are ready for the engine."""

    model: ServedModel
    requests: list[GenerateRequest]
    parameters: GenerateParameters
    num_samples: int  # requests for each input
    num_input_tokens: int
    maps: MapWriter | None


async def generate(call: Call, request: GenerateInput) -> GenerateResult:
    """Generate one text or several from each input.

    Raises:
        ApiError: the request is not allowed, does not fit, or fails.
        ClientGoneError: the client has left.
    """
    pending = await _prepare(call, request)
    results: list[Generated] = []

    def convert(index: int, result: Generated) -> list[GenerateOutput]:
        results.append(result)
        return _outputs(pending, index, result)

    converted = await call.gather(pending.model, pending.requests, Generated, convert)
    outputs = [output for of_request in converted for output in of_request]
    usage = Usage(pending.num_input_tokens, sum([len(output.tokens) for output in outputs]))
    timings = call.timings(results)
    reasons = [output.finish_reason for output in outputs]
    call.record_usage(pending.model, timings, usage.input_tokens, usage.output_tokens, reasons)
    return GenerateResult(pending.model.name, outputs, usage, timings)


def _outputs(pending: Pending, index: int, result: Generated) -> list[GenerateOutput]:
    request, tokenizer, maps = pending.requests[index], pending.model.target_tokenizer, pending.maps
    place, first_rank = divmod(index, pending.num_samples)
    stop, prefix = pending.parameters.stop, request.target_prefix
    seed = request.seed if pending.parameters.do_sample else None
    outputs = []
    for rank, target in enumerate(result.targets, first_rank):
        tokens = target.tokens[len(prefix) :]
        ids = [token.id for token in tokens]
        text = text_of(tokenizer, ids, stop, prefix) if stop or prefix else tokenizer.decode(ids)
        reason = target.finish_reason
        assert reason != "forced"
        shown = [output_token(tokenizer, token) for token in tokens]
        attention = maps.write(request, target) if maps else None
        outputs.append(GenerateOutput(place, rank, text, shown, reason, target.score, seed, attention))
    return outputs


def text_of(tokenizer: TextTokenizer, ids: Sequence[int], stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> str:
    """Return the text of a prefix and the generated ids, cut before the stop string that ended it.

    It equals the joined pieces of a stream.
    """
    stream = TextStream(tokenizer, stop, prefix)
    pieces = [stream.push(id_) for id_ in ids]
    return "".join(pieces) + stream.finish()


def output_token(tokenizer: TextTokenizer, token: Token) -> OutputToken:
    if not token.alternatives:
        return OutputToken(token.id, tokenizer.name(token.id), token.logprob)
    alternatives = [OutputToken(id_, tokenizer.name(id_), logprob) for id_, logprob in token.alternatives]
    return RankedToken(token.id, tokenizer.name(token.id), token.logprob, alternatives)


# Checks and requests


async def _prepare(call: Call, request: GenerateInput, *, stream: bool = False) -> Pending:
    model, parameters = call.model(request.model, "generate"), request.parameters
    check_parameters(model, parameters, len(request.inputs.texts), stream=stream)
    maps = MapWriter(call, model, parameters.return_attention) if parameters.return_attention else None
    num_samples = parameters.num_return_sequences if parameters.do_sample else 1
    _, units = expected_work(call.service.admissions[model.name].throughput, parameters)
    sources = await call.read_sources(model, request.inputs, units=units, num_samples=num_samples)
    prefixes: list[Ids] | None = None
    if parameters.target_prefix is not None:
        prefixes = await read_prefixes(call, model, parameters.target_prefix, sources)
    requests = generate_requests(call, model, parameters, sources, prefixes, num_samples, maps=maps, stream=stream)
    return Pending(model, requests, parameters, num_samples, sum(map(len, sources)), maps)


def check_parameters(
    model: ServedModel, parameters: GenerateParameters, num_inputs: int, *, stream: bool = False
) -> None:
    """Check parameters against each other and against a model's limits.

    Raises:
        ApiError: `invalid_parameter` or `unsupported_parameter`.
    """
    _check_combination(parameters, num_inputs, stream=stream)
    limits = model.manifest.limits
    for field, number in (
        ("max_new_tokens", parameters.max_new_tokens or 0),
        ("min_new_tokens", parameters.min_new_tokens),
    ):
        if number > limits.max_target_tokens:
            message = "{" + field + "}" + f" must be at most {limits.max_target_tokens} for {model.name}, got {number}."
            raise ApiError("invalid_parameter", message, field=field)
    if parameters.num_beams > model.max_rows:
        message = f"{{num_beams}} must be at most {model.max_rows}, got {parameters.num_beams}."
        raise ApiError("invalid_parameter", message, field="num_beams")
    for place, token_id in enumerate(parameters.suppress_tokens):
        if token_id >= limits.vocabulary:
            message = f"A token id of this model is below {limits.vocabulary}."
            raise ApiError("invalid_parameter", message, field="suppress_tokens", index=place)


def _check_combination(parameters: GenerateParameters, num_inputs: int, *, stream: bool) -> None:
    count, has_beams = parameters.num_return_sequences, parameters.num_beams > 1
    for fields, has_effect, needed in (
        (SAMPLING_PARAMETERS, parameters.do_sample, "{do_sample}: true"),
        (BEAM_PARAMETERS, has_beams, "{num_beams} above 1"),
    ):
        for field in () if has_effect else fields:
            if getattr(parameters, field) != getattr(GenerateParameters, field):
                raise ApiError("invalid_parameter", f"{{{field}}} has no effect without {needed}.", field=field)
    if has_beams and parameters.do_sample:
        message = "{num_beams} above 1 cannot be combined with {do_sample}: true."
        raise ApiError("invalid_parameter", message, field="num_beams")
    if has_beams and stream:
        message = "A beam search knows its text only at its end: set {num_beams} to 1, or do not stream."
        raise ApiError("unsupported_parameter", message, field="num_beams")
    if parameters.do_sample and num_inputs * count > MAX_INPUTS:
        message = f"A call generates at most {MAX_INPUTS} sequences, got {num_inputs * count}."
        raise ApiError("invalid_parameter", message, field="num_return_sequences")
    if not parameters.do_sample and count > parameters.num_beams:
        message = (
            f"{{num_return_sequences}} must be at most {{num_beams}} ({parameters.num_beams}) without "
            f"{{do_sample}}: true, got {count}."
        )
        raise ApiError("invalid_parameter", message, field="num_return_sequences")
    if parameters.max_new_tokens is not None and parameters.min_new_tokens > parameters.max_new_tokens:
        message = (
            f"{{min_new_tokens}} must be at most {{max_new_tokens}} ({parameters.max_new_tokens}), "
            f"got {parameters.min_new_tokens}."
        )
        raise ApiError("invalid_parameter", message, field="min_new_tokens")
    prefix = parameters.target_prefix
    if prefix is not None and prefix.is_list and len(prefix.texts) != num_inputs:
        message = f"There are {len(prefix.texts)} prefixes for {num_inputs} inputs."
        raise ApiError("invalid_parameter", message, field="target_prefix")


def expected_work(throughput: Throughput, parameters: GenerateParameters) -> tuple[float, float]:
    """Return the expected tokens of a generation and their work, see `Throughput`: the mean, within its own limits."""
    limit = DEFAULT_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens
    num_tokens = min(limit, max(parameters.min_new_tokens, throughput.mean_tokens))
    return num_tokens, 1 + parameters.num_beams * num_tokens


async def read_targets(call: Call, model: ServedModel, targets: Texts, field: str, sources: Sequence[Ids]) -> list[Ids]:
    """Tokenize one target for each source, the end token last.

    Raises:
        ApiError: `input_too_long`.
    """
    limits = [model.manifest.room(len(source)) for source in sources]
    return await call.read_texts(model.target_tokenizer, targets, field, limits)


async def read_prefixes(call: Call, model: ServedModel, prefix: Texts, sources: Sequence[Ids]) -> list[Ids]:
    """Tokenize the prefix of each source's target; one string is for all sources.

    Raises:
        ApiError: `input_too_long`; at least one token must still fit after it.
    """
    limits = [model.manifest.room(len(source)) - 1 for source in sources]
    if not prefix.is_list:
        limits = [min(limits)]
    prefixes = await call.read_texts(model.target_tokenizer, prefix, "target_prefix", limits, add_special_tokens=False)
    return prefixes if prefix.is_list else prefixes * len(sources)


def generate_requests(
    call: Call,
    model: ServedModel,
    parameters: GenerateParameters,
    sources: Sequence[Ids],
    prefixes: Sequence[Ids] | None,
    num_samples: int = 1,
    *,
    maps: MapWriter | None = None,
    stream: bool = False,
) -> list[GenerateRequest]:
    """Make the engine's requests: `num_samples` for each source and its prefix.

    Each has its own seed, and so gives the same result when it is sent alone. To score a target, let it be the prefix,
    its end token included, and `parameters.max_new_tokens` 0.

    Raises:
        ApiError: `response_too_large` if the requested maps certainly are; `overloaded` if the responses in progress
            leave no room for this one.
    """
    seed = secrets.randbelow(MAX_SEED + 1) if parameters.do_sample and parameters.seed is None else parameters.seed or 0
    stop = parameters.stop
    requests: list[GenerateRequest] = []
    for place, source in enumerate(sources):
        prefix = prefixes[place] if prefixes else ()
        for _ in range(num_samples):
            request = GenerateRequest(
                request_id=call.request_id,
                source_ids=source,
                deadline=call.deadline,
                parameters=parameters,
                seed=(seed + len(requests)) % (MAX_SEED + 1),
                target_prefix=prefix,
                stop=StopStrings(TextStream(model.target_tokenizer, stop, prefix)) if stop else None,
                attention=maps.kinds if maps else frozenset(),
                map_budget=maps.budget if maps else None,
                stream=stream,
            )
            requests.append(request)
    num_forced = num_samples * sum(map(len, prefixes)) if prefixes else 0
    if num_forced:
        call.add_work(parameters.num_beams * num_forced)
    num_tokens = (
        num_forced + len(requests) * expected_work(call.service.admissions[model.name].throughput, parameters)[0]
    )
    num_targets = parameters.num_return_sequences if parameters.num_beams > 1 else 1
    num_tokens *= num_targets * (1 + parameters.top_logprobs)
    call.response_memory.reserve(int(num_tokens) * BYTES_PER_TOKEN)
    if maps:
        maps.check(requests)
    return requests


# Streams


class Stream:
    """The events of a generation as they come."""

    def __init__(self, call: Call, pending: Pending, arrived: list[Arrival]) -> None:
        """`arrived` are events that were taken from the call already."""
        self._call = call
        self._arrived = arrived
        self.sequences = [StreamedSequence(call, pending, index) for index in range(len(pending.requests))]
        self.num_input_tokens = pending.num_input_tokens
        self._model = pending.model

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    async def __aiter__(self) -> AsyncGenerator[Iterator[tuple["StreamedSequence", StreamToken | StreamEnd]]]:
        """Yield events in groups: those that came at once, each with its sequence as it is after that event.

        Raises:
            ApiError: a sequence failed, or the call's deadline has passed.
            ClientGoneError: the client has left.
        """
        try:
            while not all(sequence.has_ended for sequence in self.sequences):
                arrived = self._arrived or await self._call.next_arrivals()
                self._arrived = []
                yield self._take(arrived)
        finally:
            self._record()

    def _take(self, arrived: Sequence[Arrival]) -> Iterator[tuple["StreamedSequence", StreamToken | StreamEnd]]:
        for index, event, time in arrived:
            sequence = self.sequences[index]
            yield sequence, sequence.take(event, time)

    def _record(self) -> None:
        """Keep for the log what is known of the stream, also if it was broken off."""
        ends = [sequence.end for sequence in self.sequences if sequence.end is not None]
        timings = [end.timings_ms for end in ends]
        longest = TimingsMs(*map(max, zip((0.0,) * 5, *map(astuple, timings), strict=True)))
        reasons = [end.finish_reason for end in ends]
        self._call.record_usage(self._model, longest, self.num_input_tokens, self.num_output_tokens, reasons)
        if len(ends) == len(self.sequences):
            self._call.observe_latency()


class StreamedSequence:
    """One sequence of a stream: its text so far."""

    def __init__(self, call: Call, pending: Pending, index: int) -> None:
        self._call = call
        self._model = pending.model
        self._metrics = call.service.model_metrics[pending.model.name]
        self._request = pending.requests[index]
        self._seed = self._request.seed if pending.parameters.do_sample else None
        room = pending.model.manifest.room(len(self._request.source_ids)) - len(self._request.target_prefix)
        self._max_tokens = min(room, self._request.parameters.num_new_tokens)
        self.index, self.rank = divmod(index, pending.num_samples)
        self.number = index
        self._text = TextStream(pending.model.target_tokenizer, pending.parameters.stop, self._request.target_prefix)
        self._maps = pending.maps
        self._pieces: list[str] = []
        self._last_arrival = 0.0
        self.num_tokens = 0
        self.has_last_token = False  # and is about to end
        self.has_ended = False
        self.end: StreamEnd | None = None

    @property
    def num_input_tokens(self) -> int:
        return len(self._request.source_ids)

    def take(self, event: TokenEvent | Generated, arrived: float) -> StreamToken | StreamEnd:
        """Return what a client is told of an event that arrived then."""
        return self._token(event.token, arrived) if isinstance(event, TokenEvent) else self._end(event)

    def _token(self, token: Token, arrived: float) -> StreamToken:
        self._observe_arrival(arrived)
        self.num_tokens += 1
        piece = self._text.push(token.id)
        self.has_last_token = (
            token.id == self._model.manifest.tokens.end_id
            or self._text.has_stopped
            or self.num_tokens == self._max_tokens
        )
        if self.has_last_token:  # no other token will bring what is still held back
            piece += self._text.finish()
        self._pieces.append(piece)
        return StreamToken(self.index, self.rank, output_token(self._model.target_tokenizer, token), piece)

    def _end(self, result: Generated) -> StreamEnd:
        (target,) = result.targets
        reason = target.finish_reason
        assert reason != "forced"
        self.has_ended = True
        self.end = StreamEnd(
            self.index,
            self.rank,
            reason,
            target.score,
            "".join(self._pieces),
            Usage(self.num_input_tokens, self.num_tokens),
            self._call.timings([result]),
            self._seed,
            self._maps.write(self._request, target) if self._maps else None,
        )
        return self.end

    def _observe_arrival(self, arrived: float) -> None:
        if self.num_tokens:
            self._metrics.between_tokens.observe(arrived - self._last_arrival)
        else:
            seconds = arrived - self._call.started
            self._metrics.first_token.observe(seconds)
            self._call.details.setdefault("ttft_ms", round(1000 * seconds, 3))
        self._last_arrival = arrived


async def stream(call: Call, request: GenerateInput) -> Stream:
    """Generate texts as a stream; wait for the first event, so that an early failure has its own status.

    Raises:
        ApiError: the request is not allowed, does not fit, or fails before its first token.
        ClientGoneError: the client has left.
    """
    pending = await _prepare(call, request, stream=True)
    call.start_stream(pending.model, pending.requests)
    return Stream(call, pending, await call.next_arrivals())
