"""Text generation, with the complete texts or a stream of events as the result."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from service.bundle import MAX_BEAMS
from service.engine.attention import reason_against_hiding
from service.engine.request import Generated, GenerateRequest, Token, TokenEvent
from service.engine.throughput import Throughput
from service.errors import ApiError
from service.fields import OnEmpty, Texts
from service.inference.call import Arrival, Call, Ids, too_many_sequences
from service.inference.languages import NO_LANGUAGES, LanguageChoice, choose_languages
from service.inference.maps import MapWriter, TargetAttention
from service.inference.results import BYTES_PER_TOKEN, OutputToken, OutputTokens, RankedToken, TimingsMs, Usage
from service.inference.service import ServedModel
from service.parameters import (
    BEAM_PARAMETERS,
    DEFAULT_NEW_TOKENS,
    MAX_SEED,
    NEUTRAL,
    SAMPLING_PARAMETERS,
    GenerateParameters,
    complete_parameters,
)
from service.text.chat import Prompt
from service.text.stream import StopStrings, TextStream
from service.text.tokenizer import TextTokenizer

FinishReason = Literal["eos", "length", "stop"]


@dataclass(frozen=True)
class GenerateInput:
    """A request for generated texts."""

    model: str | None
    inputs: Texts | Prompt
    parameters: GenerateParameters = NEUTRAL
    on_empty: OnEmpty = "error"  # with "pass" some inputs may be blank


@dataclass(frozen=True)
class GenerateOutput:
    """One generated sequence."""

    index: Annotated[int, Field(description="Index of its input.")]
    rank: Annotated[int, Field(description="Rank among the sequences of its input; the best beam is 0.")]
    text: Annotated[str, Field(description="Generated text, after the text of the prefix.")]
    tokens: Annotated[OutputTokens, Field(description="Generated tokens.")]
    finish_reason: Annotated[
        FinishReason | Literal["empty"],
        Field(
            description="Reason for the end: end token, maximum length or stop string; `empty` if the input is blank."
        ),
    ]
    score: Annotated[
        float,
        Field(description="Sum of the log-probabilities; with beam search, divided by length ** length_penalty."),
    ]
    seed: Annotated[int | None, Field(description="Only with do_sample.")]
    attention: Annotated[TargetAttention | None, Field(description="Only with return_attention.")]


@dataclass(frozen=True)
class GenerateResult:
    """The outputs of a call, sorted by index and rank."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[list[GenerateOutput], Field(description="Generated sequences, sorted by index and rank.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


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
    usage: Usage
    timings_ms: TimingsMs
    seed: int | None
    attention: TargetAttention | None


@dataclass(frozen=True)
class PendingGeneration:
    """A call whose engine requests are ready to be submitted."""

    model: ServedModel
    requests: list[GenerateRequest]
    parameters: GenerateParameters
    num_samples: int  # number of requests for each input
    num_input_tokens: int
    maps: MapWriter | None
    num_language_tokens: int  # first tokens of each target prefix, which are not part of the results


def parameters_for(
    model: ServedModel,
    given: Mapping[str, Any],
    *,
    stream: bool = False,
    is_lenient: bool = False,
) -> GenerateParameters:
    """Return the parameters of a request, completed with the defaults of its model.

    See `complete_parameters`.
    """
    return complete_parameters(
        given,
        model.manifest.generation,
        max_beams=max(1, min(MAX_BEAMS, model.max_rows)),
        max_new_tokens=model.manifest.limits.max_target_tokens,
        stream=stream,
        is_lenient=is_lenient,
    )


async def generate(call: Call, request: GenerateInput, *, in_batches: bool = False) -> GenerateResult:
    """Generate one or more texts for each input.

    Args:
        call: the call.
        request: inputs and parameters.
        in_batches: allow more sequences than `max_inputs`; the engine gets only as many at a time.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    if request.on_empty == "pass":
        return await generate_without_blanks(call, request, generate)
    pending = await _prepare(call, request, in_batches=in_batches)
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


async def generate_without_blanks(
    call: Call, request: GenerateInput, run: Callable[[Call, GenerateInput], Awaitable[GenerateResult]]
) -> GenerateResult:
    """Run a use case on the inputs that are not blank; each other input gets one empty output."""
    assert isinstance(request.inputs, Texts)  # prompts are not blank
    texts, limit = request.inputs.texts, call.service.settings.max_inputs
    if len(texts) > limit:
        raise too_many_sequences(len(texts), limit, "inputs")
    indices = [index for index, text in enumerate(texts) if text.strip()]
    blank = [
        GenerateOutput(index, 0, "", [], "empty", 0.0, None, None)
        for index, text in enumerate(texts)
        if not text.strip()
    ]
    model, parameters = await call.model(request.model, "generate"), request.parameters
    check_parameters(model, parameters, len(texts))
    if not indices:
        timings = call.timings([])
        call.record_usage(model, timings, 0, 0, ["empty"] * len(blank))
        return GenerateResult(model.name, blank, Usage(0, 0), timings)
    prefix = parameters.target_prefix
    if prefix is not None and prefix.is_list:
        parameters = parameters.model_copy(update={"target_prefix": prefix.select(indices)})
    result = await run(call, GenerateInput(model.name, request.inputs.select(indices), parameters))
    found = [replace(output, index=indices[output.index]) for output in result.outputs]
    outputs = sorted(blank + found, key=lambda output: (output.index, output.rank))
    return replace(result, outputs=outputs)


def _outputs(pending: PendingGeneration, index: int, result: Generated) -> list[GenerateOutput]:
    request, tokenizer, maps = pending.requests[index], pending.model.target_tokenizer, pending.maps
    input_index, first_rank = divmod(index, pending.num_samples)
    stop, prefix = pending.parameters.stop, request.target_prefix[pending.num_language_tokens :]
    seed = request.seed if pending.parameters.do_sample else None
    outputs = []
    for rank, target in enumerate(result.targets, first_rank):
        tokens = target.tokens[len(request.target_prefix) :]
        ids = [token.id for token in tokens]
        text = text_of(tokenizer, ids, stop, prefix) if stop or prefix else tokenizer.decode(ids)
        reason = target.finish_reason
        assert reason != "forced"
        shown = [output_token(tokenizer, token) for token in tokens]
        attention = maps.write(input_index, request, target, text) if maps else None
        outputs.append(GenerateOutput(input_index, rank, text, shown, reason, target.score, seed, attention))
    return outputs


def text_of(tokenizer: TextTokenizer, ids: Sequence[int], stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> str:
    """Return the text of a prefix and generated ids, truncated before the first stop string.

    It equals the concatenated pieces of a stream.
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


async def _prepare(
    call: Call, request: GenerateInput, *, stream: bool = False, in_batches: bool = False
) -> PendingGeneration:
    model, parameters = await call.model(request.model, "generate"), request.parameters
    num_inputs = len(request.inputs.texts) if isinstance(request.inputs, Texts) else 1
    check_parameters(model, parameters, num_inputs, stream=stream)
    languages = NO_LANGUAGES
    named = parameters.source_language, parameters.target_language
    if model.has_language_tokens or named != (None, None):
        languages = choose_languages(model, *named)
    maps = MapWriter(call, model, parameters.return_attention, languages) if parameters.return_attention else None
    num_samples = parameters.num_return_sequences if parameters.do_sample else 1
    _, units = expected_work(call.service.admissions[model.name].throughput, parameters)
    if isinstance(request.inputs, Prompt):
        sources = await call.read_prompt(model, request.inputs, units=units, num_samples=num_samples)
    else:
        sources = await call.read_sources(
            model,
            request.inputs,
            units=units,
            num_samples=num_samples,
            prefix=languages.source_prefix,
            in_batches=in_batches,
            suffix=languages.source_suffix,
        )
    if maps:
        await maps.read_offsets(call, request.inputs, sources)
    prefixes: list[Ids] | None = None
    if parameters.target_prefix is not None:
        prefixes = await read_prefixes(call, model, parameters.target_prefix, sources, languages)
    requests = generate_requests(
        call, model, parameters, sources, prefixes, num_samples, maps=maps, stream=stream, languages=languages
    )
    num_input_tokens, num_language_tokens = sum(map(len, sources)), len(languages.target_prefix)
    return PendingGeneration(model, requests, parameters, num_samples, num_input_tokens, maps, num_language_tokens)


def check_parameters(
    model: ServedModel, parameters: GenerateParameters, num_inputs: int, *, stream: bool = False
) -> None:
    """Check the combination of parameters, and their values against a model's limits.

    Raises:
        ApiError: `invalid_parameter` or `unsupported_parameter`.
    """
    _check_combination(parameters, num_inputs, stream=stream)
    if parameters.split_sentences:
        _check_split_sentences(model, parameters, stream=stream)
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
    for index, token_id in enumerate(parameters.suppress_tokens):
        if token_id >= limits.vocabulary:
            message = f"It must be at most {limits.vocabulary - 1} for {model.name}, got {token_id}."
            raise ApiError("invalid_parameter", message, field="suppress_tokens", index=index)


def _check_combination(parameters: GenerateParameters, num_inputs: int, *, stream: bool) -> None:
    count, has_beams = parameters.num_return_sequences, parameters.num_beams > 1
    for fields, has_effect, needed in (
        (SAMPLING_PARAMETERS, parameters.do_sample, "{do_sample}: true"),
        (BEAM_PARAMETERS, has_beams, "{num_beams} above 1"),
    ):
        for field in () if has_effect else fields:
            if getattr(parameters, field) != getattr(NEUTRAL, field):
                raise ApiError("invalid_parameter", f"{{{field}}} has no effect without {needed}.", field=field)
    if has_beams and parameters.do_sample:
        message = "{num_beams} above 1 cannot be combined with {do_sample}: true."
        raise ApiError("invalid_parameter", message, field="num_beams")
    if has_beams and stream:
        message = "Beam search cannot be streamed: set {num_beams} to 1, or do not stream."
        raise ApiError("unsupported_parameter", message, field="num_beams")
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
        message = (
            f"{{target_prefix}} must be one string, or a list with a string for each input ({num_inputs}), "
            f"got {len(prefix.texts)}."
        )
        raise ApiError("invalid_parameter", message, field="target_prefix")


def _check_split_sentences(model: ServedModel, parameters: GenerateParameters, *, stream: bool) -> None:
    if model.manifest.languages is None:
        message = f"{{split_sentences}} is supported only by models that translate, and {model.name} does not."
        raise ApiError("unsupported_parameter", message, field="split_sentences")
    if stream:
        message = "Texts split into sentences cannot be streamed: set {split_sentences} to false, or do not stream."
        raise ApiError("unsupported_parameter", message, field="split_sentences")
    for field in ("target_prefix", "return_attention", "hidden_source_tokens"):
        if getattr(parameters, field) not in (None, ()):
            message = f"{{split_sentences}} cannot be combined with {{{field}}}; leave out one of them."
            raise ApiError("unsupported_parameter", message, field="split_sentences")


def expected_work(throughput: Throughput, parameters: GenerateParameters) -> tuple[float, float]:
    """Estimate the length and work of a generation from the mean length of earlier ones.

    Returns:
        The expected number of generated tokens, and the work of the request in units of
        `Throughput`.
    """
    limit = DEFAULT_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens
    num_tokens = min(limit, max(parameters.min_new_tokens, throughput.mean_tokens))
    return num_tokens, 1 + parameters.num_beams * num_tokens


async def read_targets(
    call: Call, model: ServedModel, targets: Texts, sources: Sequence[Ids], languages: LanguageChoice
) -> list[Ids]:
    """Tokenize one target for each source; the last id of each target is the end token.

    Raises:
        ApiError: `input_too_long`.
    """
    num_language_tokens = len(languages.target_prefix)
    limits = [model.manifest.max_new_tokens_for(len(source)) - num_language_tokens for source in sources]
    return await call.read_texts(model.target_tokenizer, targets, "targets", limits)


async def read_prefixes(
    call: Call, model: ServedModel, prefix: Texts, sources: Sequence[Ids], languages: LanguageChoice
) -> list[Ids]:
    """Tokenize the target prefix of each source; a single string applies to all sources.

    Raises:
        ApiError: `input_too_long` if no new token fits after a prefix.
    """
    num_reserved = 1 + len(languages.target_prefix)
    limits = [model.manifest.max_new_tokens_for(len(source)) - num_reserved for source in sources]
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
    languages: LanguageChoice = NO_LANGUAGES,
) -> list[GenerateRequest]:
    """Create the engine's requests: `num_samples` for each source and its prefix.

    The forced tokens of the target language come before the prefix.

    Each request has its own seed, so that it gives the same result in a call of its own. To score a
    target, pass it as the prefix, with its end token, and the parameters `FORCED`.

    Raises:
        ApiError: `response_too_large` if the requested attention maps certainly exceed the limit;
            `overloaded` if the responses in progress leave too little memory; `invalid_parameter`
            or `unsupported_parameter` if source tokens cannot be hidden.
    """
    seed = secrets.randbelow(MAX_SEED + 1) if parameters.do_sample and parameters.seed is None else parameters.seed or 0
    stop = parameters.stop
    requests: list[GenerateRequest] = []
    indices = parameters.hidden_source_tokens
    for index, source in enumerate(sources):
        prefix = prefixes[index] if prefixes else ()
        hidden = hidden_tokens(model, indices, len(source)) if indices else ()
        for _ in range(num_samples):
            request = GenerateRequest(
                request_id=call.request_id,
                source_ids=source,
                deadline=call.deadline,
                parameters=parameters,
                seed=(seed + len(requests)) % (MAX_SEED + 1),
                target_prefix=(*languages.target_prefix, *prefix),
                num_forced=len(languages.target_prefix),
                stop=StopStrings(TextStream(model.target_tokenizer, stop, prefix)) if stop else None,
                hidden_source_tokens=hidden,
                attention=maps.kinds if maps else frozenset(),
                prompt_rows=maps is not None and maps.has_prompt_rows,
                decoder_part=maps.decoder_part if maps else None,
                map_budget=maps.budget if maps else None,
                stream=stream,
            )
            requests.append(request)
    num_forced = sum(len(request.target_prefix) for request in requests)
    if num_forced:
        call.add_work(parameters.num_beams * num_forced)
    assert call.throughput is not None, "the call was admitted"
    num_tokens = num_forced + len(requests) * expected_work(call.throughput, parameters)[0]
    num_targets = parameters.num_return_sequences if parameters.num_beams > 1 else 1
    num_tokens *= num_targets * (1 + parameters.top_logprobs)
    call.response_memory.reserve(int(num_tokens) * BYTES_PER_TOKEN)
    if maps:
        maps.check(requests)
    return requests


def hidden_tokens(model: ServedModel, indices: Sequence[int], source_tokens: int) -> tuple[int, ...]:
    """Return the indices of hidden source tokens as non-negative numbers in ascending order.

    Args:
        model: the model.
        indices: value of `hidden_source_tokens`; negative ones count from the end, as in Python.
        source_tokens: length of the source.

    Raises:
        ApiError: the model cannot hide source tokens, an index is out of range, two select the same
            token, or no token remains.
    """
    field = "hidden_source_tokens"
    reason = reason_against_hiding(model.manifest)
    if reason is not None:
        message = f"{{{field}}} is not supported by {model.name}: {reason}."
        raise ApiError("unsupported_parameter", message, field=field)
    found: set[int] = set()
    for position, index in enumerate(indices):
        if not -source_tokens <= index < source_tokens:
            message = (
                f"It must be from {-source_tokens} to {source_tokens - 1} for an input of {source_tokens} tokens, "
                f"got {index}."
            )
            raise ApiError("invalid_parameter", message, field=field, index=position)
        if index % source_tokens in found:
            message = (
                f"It must not repeat a token: {index} is the same token as an earlier index of an input of "
                f"{source_tokens} tokens."
            )
            raise ApiError("invalid_parameter", message, field=field, index=position)
        found.add(index % source_tokens)
    if len(found) == source_tokens:
        message = f"It must leave at least one of the {source_tokens} tokens of each input visible."
        raise ApiError("invalid_parameter", message, field=field)
    return tuple(sorted(found))


# Streams


class Stream:
    """The events of a streamed generation."""

    def __init__(self, call: Call, pending: PendingGeneration, arrived: list[Arrival]) -> None:
        """Create a stream; `arrived` are the first events, already taken from the call."""
        self._call = call
        self._arrived = arrived
        self.sequences = [StreamedSequence(call, pending, index) for index in range(len(pending.requests))]
        self.num_input_tokens = pending.num_input_tokens
        self._model = pending.model

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    async def __aiter__(self) -> AsyncGenerator[Iterator[tuple["StreamedSequence", StreamToken | StreamEnd]]]:
        """Yield groups of events that arrived together, each with its updated sequence.

        Raises:
            ApiError: a sequence failed, or the call's deadline has passed.
            ClientGoneError: the client closed the connection.
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

    def __init__(self, call: Call, pending: PendingGeneration, index: int) -> None:
        self._call = call
        self._model = pending.model
        self._metrics = call.service.model_metrics[pending.model.name]
        self._request = pending.requests[index]
        self._seed = self._request.seed if pending.parameters.do_sample else None
        max_new_tokens = pending.model.manifest.max_new_tokens_for(len(self._request.source_ids)) - len(
            self._request.target_prefix
        )
        self._max_tokens = min(max_new_tokens, self._request.parameters.num_new_tokens)
        self.index, self.rank = divmod(index, pending.num_samples)
        self.number = index
        prefix = self._request.target_prefix[pending.num_language_tokens :]
        self._text = TextStream(pending.model.target_tokenizer, pending.parameters.stop, prefix)
        self._maps = pending.maps
        self._pieces: list[str] = []
        self._last_arrival = 0.0
        self.num_tokens = 0
        self.has_last_token = False  # True if only the end event is missing
        self.has_ended = False
        self.end: StreamEnd | None = None

    @property
    def num_input_tokens(self) -> int:
        return len(self._request.source_ids)

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
        reason = target.finish_reason
        assert reason != "forced"
        self.has_ended = True
        text = "".join(self._pieces)
        self.end = StreamEnd(
            self.index,
            self.rank,
            reason,
            target.score,
            text,
            Usage(self.num_input_tokens, self.num_tokens),
            self._call.timings([result]),
            self._seed,
            self._maps.write(self.index, self._request, target, text) if self._maps else None,
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
    """Start a streamed generation and wait for its first event.

    A failure before the first token is raised here, so that it gets its own HTTP status.

    Raises:
        ApiError: the request is invalid, is rejected, or fails before its first token.
        ClientGoneError: the client closed the connection.
    """
    pending = await _prepare(call, request, stream=True)
    call.start_stream(pending.model, pending.requests)
    return Stream(call, pending, await call.next_arrivals())
