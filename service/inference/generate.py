"""Text generation, and the pipeline of all use cases that run the decoder (`Decoding`).

The pipeline is the only place that adds the forced tokens of a translation's languages to requests
and removes them from the results.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from sightline.base.bundle import MAX_BEAMS, AlignmentStep, Manifest
from sightline.base.text.prompt import ChatTemplateError, Dialogue, Prompt, raw_prompt
from sightline.base.text.stream import TextStream
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import IdLists, Texts
from sightline.service.constraints import Constraint
from sightline.service.engine.recorded_maps import ENCODER_KINDS
from sightline.service.engine.request import Generated, GenerateRequest, Matcher, Target, Timings, Token
from sightline.service.engine.throughput import Throughput
from sightline.service.inference.call import (
    AdmittedCall,
    AnyInputs,
    Call,
    Ids,
    PromptText,
    SingleText,
    check_ids,
    tokenize_within_limits,
)
from sightline.service.inference.coverage import CoverageReader, Repair, TextCoverage
from sightline.service.inference.language_choice import LanguageChoice, choose_languages
from sightline.service.inference.maps import MapWriter, TargetAttention, resolve_indices
from sightline.service.inference.results import (
    BYTES_PER_TOKEN,
    CachedUsage,
    DecoderOutputs,
    OutputToken,
    OutputTokens,
    RankedToken,
    TimingsMs,
    Usage,
)
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import (
    DEFAULT_NEW_TOKENS,
    FORCED,
    MAX_SEED,
    NEUTRAL,
    GenerateParameters,
    check_combination,
    complete_parameters,
)

T = TypeVar("T")
# Parameters that give several texts, or a part of the text.
REPAIR_CONFLICTS = ("do_sample", "num_return_sequences", "target_prefix", "constraint", "hidden_source_tokens", "stop")
# A chat template formats a message in at most the time that tokenizing this many characters takes.
CHARACTERS_PER_MESSAGE = 128
FinishReason = Literal["eos", "length", "stop"]


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
        Field(
            description="Sum of the log-probabilities, without that of an end token that the model is forced to "
            "generate at the maximum length; with beam search, divided by length ** length_penalty."
        ),
    ]
    seed: Annotated[int | None, Field(description="Only with do_sample.")]
    attention: Annotated[TargetAttention | None, Field(description="Only with return_attention.")]
    coverage: Annotated[TextCoverage | None, Field(description="Only with return_coverage or repair.")]
    repair: Annotated[
        Repair | None,
        Field(description="Only with repair, for a text that omitted words; `sentences` have their own ones."),
    ]


@dataclass(frozen=True)
class SentenceOutput:
    """The part of an output that was generated from one sentence of its input."""

    source: Annotated[str, Field(description="The sentence of the input.")]
    text: Annotated[str, Field(description="Text generated from it.")]
    num_tokens: Annotated[
        int, Field(description="Number of its tokens; `tokens` of the output has those of all sentences, in order.")
    ]
    score: Annotated[float, Field(description="Score of the text.")]
    attention: Annotated[
        TargetAttention | None, Field(description="Attention maps of the sentence; only with return_attention.")
    ]
    repair: Annotated[Repair | None, Field(description="Only with repair, for a sentence whose text omitted words.")]


@dataclass(frozen=True)
class SplitOutput(GenerateOutput):
    """One generated sequence, joined from those of several sentences."""

    sentences: Annotated[
        list[SentenceOutput],
        Field(
            description="Sentences of an input that is split, without copied ones; absent if it is just one sentence."
        ),
    ]


@dataclass(frozen=True)
class GenerateWarning:
    """A reason to doubt an output."""

    code: Annotated[Literal["several_sentences"], Field(description="Warning code.")]
    message: Annotated[str, Field(description="Explanation in full sentences, with the remedy.")]
    param: Annotated[str, Field(description="Path of the input.")]


@dataclass(frozen=True)
class GenerateResult(DecoderOutputs):
    """The outputs of a call, sorted by index and rank."""

    outputs: Annotated[
        Sequence[GenerateOutput | SplitOutput], Field(description="Generated sequences, sorted by index and rank.")
    ]


@dataclass(frozen=True)
class DoubtfulResult(GenerateResult):
    """The outputs of a call that may be incomplete."""

    warnings: Annotated[list[GenerateWarning], Field(description="Reasons to doubt outputs; absent if there are none.")]


def parameters_for(
    model: ServedModel,
    requested: Mapping[str, Any],
    *,
    stream: bool = False,
    is_lenient: bool = False,
) -> GenerateParameters:
    """Return the parameters of a request with the model's defaults, see `complete_parameters`."""
    return complete_parameters(
        requested,
        model.manifest.generation,
        max_beams=max(1, min(MAX_BEAMS, model.max_rows)),
        max_new_tokens=model.manifest.limits.max_target_tokens,
        stream=stream,
        is_lenient=is_lenient,
    )


def begin(
    call: Call, model: ServedModel, parameters: GenerateParameters, *, step: AlignmentStep = "writes"
) -> "Decoding":
    """Create the decoding of a generation, whose parameters were checked.

    For `step`, see `MapWriter`.
    """
    call.parameters = parameters
    languages = choose_languages(model, parameters.source_language, parameters.target_language)
    maps, coverage, selection = None, None, parameters.return_attention
    if parameters.return_coverage or parameters.repair:
        coverage = CoverageReader(call, model, "repair" if parameters.repair else "return_coverage")
    if selection:
        attempts = parameters.num_return_sequences if parameters.repair else 1
        maps = MapWriter(call, model, selection, records_all=coverage is not None, step=step, num_attempts=attempts)
    num_samples = parameters.num_return_sequences if parameters.do_sample else 1
    return Decoding(call, model, parameters, languages, maps, coverage, num_samples)


async def finish(decoding: "Decoding") -> GenerateResult:
    """Generate the texts of a decoding."""
    tokenizer, maps, reader = decoding.model.target_tokenizer, decoding.maps, decoding.coverage
    parameters = decoding.parameters

    def convert(number: int, result: Generated) -> list[GenerateOutput]:
        outputs = []
        for index, rank, request, target, written, text, seed in decoding.targets_of(number, result):
            reason, score = target.finish_reason, target.score
            assert reason != "forced"
            if parameters.repair and parameters.target_prefix:  # the model wrote the prefix, too
                written = target.tokens
                exponent = parameters.length_penalty if parameters.num_beams > 1 else 0.0
                score = sum(token.logprob for token in written) / len(written) ** exponent
            tokens = [output_token(tokenizer, token) for token in written]
            attention = maps.write(index, request, target, text) if maps else None
            coverage = reader.write(index, request, target, text) if reader else None
            outputs.append(GenerateOutput(index, rank, text, tokens, reason, score, seed, attention, coverage, None))
        return outputs

    by_request, usage, timings = await decoding.run(convert)
    return GenerateResult(decoding.model.name, [output for outputs in by_request for output in outputs], usage, timings)


def usage_for(model: ServedModel, input_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    """Return token counts; only those of decoder-only models include `cached_tokens`."""
    if model.manifest.is_decoder_only:
        return CachedUsage(input_tokens, output_tokens, cached_tokens)
    return Usage(input_tokens, output_tokens)


def output_token(tokenizer: TextTokenizer, token: Token) -> OutputToken:
    if not token.alternatives:
        return OutputToken(token.id, tokenizer.name(token.id), token.logprob)
    alternatives = [OutputToken(id_, tokenizer.name(id_), logprob) for id_, logprob in token.alternatives]
    return RankedToken(token.id, tokenizer.name(token.id), token.logprob, alternatives)


def check_parameters(
    model: ServedModel, parameters: GenerateParameters, num_inputs: int, *, stream: bool = False
) -> None:
    """Check the combination of parameters, and their values against a model's limits."""
    check_combination(parameters, num_inputs, stream=stream)
    if parameters.return_coverage or parameters.repair or parameters.confirm_omissions:  # seldom
        _check_coverage(parameters, stream=stream)
    if parameters.split_sentences:
        _check_split_sentences(model, parameters, stream=stream)
    limits = model.manifest.limits
    for field in ("max_new_tokens", "min_new_tokens"):
        if (number := getattr(parameters, field) or 0) > limits.max_target_tokens:
            message = "{" + field + "}" + f" must be at most {limits.max_target_tokens} for {model.name}, got {number}."
            raise ApiError("invalid_parameter", message, field=field)
    if parameters.num_beams > model.max_rows:
        message = (
            f"{{num_beams}} must be at most {model.max_rows}, the rows of {model.name} (SIGHTLINE_MAX_ROWS), got "
            f"{parameters.num_beams}."
        )
        raise ApiError("invalid_parameter", message, field="num_beams")
    token_ids = [("suppress_tokens", index, token_id) for index, token_id in enumerate(parameters.suppress_tokens)]
    token_ids += [("logit_bias", token_id, token_id) for token_id, _ in parameters.logit_bias or ()]
    for field, index, token_id in token_ids:
        if token_id >= limits.vocabulary:
            message = f"It must be at most {limits.vocabulary - 1} for {model.name}, got {token_id}."
            raise ApiError("invalid_parameter", message, field=field, index=index)


def _check_coverage(parameters: GenerateParameters, *, stream: bool) -> None:
    if not (parameters.return_coverage or parameters.repair):
        message = "{confirm_omissions} needs {return_coverage} or {repair}; set one of them to true, or leave it out."
        raise ApiError("invalid_parameter", message, field="confirm_omissions")
    for field in ("return_coverage", "repair"):
        if stream and getattr(parameters, field):
            message = f"A stream has no {{{field}}}; leave it out, or do not stream."
            raise ApiError("unsupported_parameter", message, field=field)
    for field in REPAIR_CONFLICTS if parameters.repair else ():
        if getattr(parameters, field) != getattr(NEUTRAL, field):
            message = f"{{repair}} cannot be combined with {{{field}}}; leave out one of them."
            raise ApiError("unsupported_parameter", message, field="repair")


def _check_split_sentences(model: ServedModel, parameters: GenerateParameters, *, stream: bool) -> None:
    if not model.translates:
        message = f"{{split_sentences}} is supported only by models that translate, and {model.name} does not."
        raise ApiError("unsupported_parameter", message, field="split_sentences")
    if stream and parameters.return_attention is not None:
        message = "{split_sentences} has no {return_attention} in a stream; leave out one of them, or do not stream."
        raise ApiError("unsupported_parameter", message, field="split_sentences")
    for field in ("target_prefix", "hidden_source_tokens", "constraint"):
        if getattr(parameters, field) not in (None, ()):
            message = f"{{split_sentences}} cannot be combined with {{{field}}}; leave out one of them."
            raise ApiError("unsupported_parameter", message, field="split_sentences")


# The pipeline


class DecodedTarget(NamedTuple):
    """A target of an input, without the forced tokens of the language."""

    input_index: int
    rank: int  # among the targets of its input
    request: GenerateRequest
    target: Target  # its tokens start with the client's prefix
    generated: Sequence[Token]  # the tokens after the prefix
    text: str  # of the prefix and the generated tokens, cut before the first stop string
    seed: int | None  # only if the tokens were sampled


@dataclass(eq=False)
class Decoding:
    """The decoder's work for one call: its requests to the engine, and their results."""

    call: Call
    model: ServedModel
    parameters: GenerateParameters  # checked against the model; `read` replaces those of forced targets
    languages: LanguageChoice
    maps: MapWriter | None = None  # attention maps of the response
    coverage: CoverageReader | None = None
    num_samples: int = 1  # number of requests for each input
    admitted: AdmittedCall | None = None  # see `read`; None if all inputs are copied, so that nothing is read
    requests: Sequence[GenerateRequest] = ()  # see `read`
    num_input_tokens: int = 0

    async def read(
        self,
        inputs: AnyInputs,
        targets: Texts | None = None,
        *,
        stream: bool = False,
        split: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Reserve the call's share of the model's limits, tokenize, and create the requests.

        With `targets`, the decoder is forced to produce them. `split` returns the texts that are
        read instead of `inputs`; if there are none, nothing is reserved for the engine.
        """
        call, model, languages, num_samples = self.call, self.model, self.languages, self.num_samples
        throughput = (call.controller or call.service.models[model.name].admission).throughput
        units = expected_work(throughput, self.parameters)[1]
        field = "inputs" if not isinstance(inputs, Dialogue) and num_samples == 1 else "num_return_sequences"
        count = len(inputs) * num_samples
        admitted = await call.reserve(model, count, units * count, field)
        if split is not None:
            assert isinstance(inputs, Texts)
            inputs = Texts(tuple(await call.tokenize(split, inputs.texts)))
            count = len(inputs) * num_samples
            if not count:
                return
            admitted = await call.reserve(model, count, units * count, field, is_counted=False)
        self.admitted = admitted
        max_tokens, tokenizer = model.manifest.limits.max_source_tokens, model.source_tokenizer
        num_added = len(languages.source_prefix), len(languages.source_suffix)
        if isinstance(inputs, IdLists):
            sources = check_ids(inputs, len(tokenizer), max_tokens - sum(num_added))
        else:
            items: Iterable[SingleText | PromptText]  # made in the thread that tokenizes them
            sizes = list[Sized](inputs.texts)
            if isinstance(inputs, Dialogue):
                items = (PromptText(format_dialogue(model, dialogue)) for dialogue in [inputs])
                sizes.append(range(CHARACTERS_PER_MESSAGE * len(inputs.messages)))
            elif inputs.are_prompts and not model.translates:
                items = (PromptText(raw_prompt(text, tokenizer)) for text in inputs.texts)
            else:
                items = map(SingleText, inputs.texts)
            limits = [max_tokens - sum(num_added)] * len(inputs)
            work = partial(tokenize_within_limits, tokenizer, items, inputs.index, "inputs", limits, call.deadline)
            sources = await call.tokenize(work, sizes)
        if any(num_added):
            sources = [(*languages.source_prefix, *source, *languages.source_suffix) for source in sources]
        self.num_input_tokens = sum(map(len, sources))
        admitted.controller.add_tokens(admitted.reservation, num_samples * self.num_input_tokens)
        if self.maps:
            await self.maps.read_offsets(call, inputs, sources, num_added)
        if self.coverage:
            await self.coverage.read_words(call, inputs, sources, num_added)
        prefixes: Sequence[Ids] | None = None
        if targets is not None:
            prefixes = await self._read_targets(targets, sources, is_cut=split is not None)
        elif self.parameters.target_prefix is not None:
            prefixes = await self._read_prefixes(self.parameters.target_prefix, sources)
        constraint = self.parameters.constraint
        matchers = await self._matchers(constraint, prefixes or [()]) if constraint else [None]
        self.requests = self._make_requests(sources, prefixes, matchers, stream=stream)
        num_known = sum([len(request.target_prefix) for request in self.requests])
        num_tokens, units = expected_work(throughput, self.parameters)  # without the tokens of a forced target
        admitted.reservation.units = units * count + self.parameters.num_beams * num_known
        num_targets = self.parameters.num_return_sequences if self.parameters.num_beams > 1 else 1
        num_tokens = (num_known + len(self.requests) * num_tokens) * num_targets * (1 + self.parameters.top_logprobs)
        bytes_per_token = BYTES_PER_TOKEN
        if self.coverage:
            bytes_per_token += self.coverage.bytes_per_token(sources)
        call.response_memory.reserve(int(num_tokens) * bytes_per_token)
        if call.grant is not None:
            most = sum(
                min(
                    len(request.target_prefix) + self.parameters.num_new_tokens,
                    model.manifest.max_new_tokens_for(len(request.source_ids)),
                )
                for request in self.requests
            )
            await call.reserve_tokens(self.num_input_tokens + num_targets * most)
        if self.maps:
            self.maps.check(self.requests)

    async def _read_targets(self, targets: Texts, sources: Sequence[Ids], *, is_cut: bool) -> list[Ids]:
        """Tokenize one target for each source; the last id of each target is the end token.

        Nothing is generated after it, so only some parameters remain. With `is_cut`, long targets
        are cut: one that the model wrote up to its limit has no place for the end token.
        """
        top_logprobs, hidden = self.parameters.top_logprobs, self.parameters.hidden_source_tokens
        self.parameters = FORCED.model_copy(update={"top_logprobs": top_logprobs, "hidden_source_tokens": hidden})
        limits, tokenizer, call = self._limits(sources), self.model.target_tokenizer, self.call
        items = [SingleText(text, is_cut) for text in targets.texts]
        work = partial(tokenize_within_limits, tokenizer, items, targets.index, "targets", limits, call.deadline)
        return await call.tokenize(work, targets.texts)

    async def _read_prefixes(self, prefix: Texts, sources: Sequence[Ids]) -> list[Ids]:
        """Tokenize the target prefix of each source; a single string applies to all sources."""
        limits = [limit - 1 for limit in self._limits(sources)]
        if not prefix.is_list:
            limits = [min(limits)]
        tokenizer, call = self.model.target_tokenizer, self.call
        items = [SingleText(text, add_special_tokens=False) for text in prefix.texts]
        work = partial(tokenize_within_limits, tokenizer, items, prefix.index, "target_prefix", limits, call.deadline)
        prefixes = await call.tokenize(work, prefix.texts)
        return prefixes if prefix.is_list else prefixes * len(sources)

    def _limits(self, sources: Sequence[Ids]) -> list[int]:
        """Return the maximum number of target tokens of each source, without the forced tokens."""
        num_forced = len(self.languages.target_prefix)
        return [self.model.manifest.max_new_tokens_for(len(source)) - num_forced for source in sources]

    async def _matchers(self, constraint: Constraint, prefixes: Sequence[Ids]) -> Sequence[Matcher]:
        """Return the state of a constraint after each prefix."""

        def work() -> list[Matcher]:
            compiled = self.model.compile_constraint(constraint)
            return [compiled.after(prefix) for prefix in prefixes]

        return await self.call.tokenize(work, None)

    def _make_requests(
        self,
        sources: Sequence[Ids],
        prefixes: Sequence[Ids] | None,
        matchers: Sequence[Matcher | None],
        *,
        stream: bool,
    ) -> list[GenerateRequest]:
        """Create `num_samples` requests for each source and its prefix.

        Each request has its own seed, so that it gives the same result in a call of its own.
        """
        call, parameters, maps, forced = self.call, self.parameters, self.maps, self.languages.target_prefix
        draws_seed = parameters.do_sample and parameters.seed is None
        seed = secrets.randbelow(MAX_SEED + 1) if draws_seed else parameters.seed or 0
        stop, tokenizer = parameters.stop, self.model.target_tokenizer
        requests: list[GenerateRequest] = []
        kinds, parts = (maps.kinds, maps.parts) if maps else (frozenset[str](), {})
        if self.coverage:
            kinds, parts = kinds | {"cross"}, self.coverage.parts | parts if "cross" not in kinds else parts
        indices = parameters.hidden_source_tokens
        for index, source in enumerate(sources):
            prefix = prefixes[index] if prefixes else ()
            hidden = hidden_tokens(self.model, indices, len(source)) if indices else ()
            for _ in range(self.num_samples):
                request = GenerateRequest(
                    request_id=call.request_id,
                    source_ids=source,
                    deadline=call.deadline,
                    parameters=parameters,
                    seed=(seed + len(requests)) % (MAX_SEED + 1),
                    target_prefix=(*forced, *prefix),
                    num_forced=len(forced),
                    stop=TextStream(tokenizer, stop, prefix) if stop else None,
                    matcher=matchers[index % len(matchers)],
                    hidden_source_tokens=hidden,
                    attention=kinds,
                    prompt_rows=maps is not None and maps.has_prompt_rows,
                    map_parts=parts,
                    map_budget=maps.budget if maps else None,
                    contributions=maps.contributions if maps else None,
                    caller=call.caller,
                    stream=stream,
                )
                requests.append(request)
        return requests

    async def run(self, convert: Callable[[int, Generated], T]) -> tuple[list[T], Usage, TimingsMs]:
        """Run the requests, and record the usage of the call.

        `convert` makes an output of the index of a request and its result, as soon as it arrives.
        The outputs are returned in the order of the requests.
        """
        call = self.call
        num_output_tokens = num_cached_tokens = 0
        reasons: dict[int, list[str]] = {}  # of the targets, by the index of the request

        def convert_and_count(index: int, result: Generated) -> T:
            nonlocal num_output_tokens, num_cached_tokens
            if index % self.num_samples == 0:  # the samples of an input count its tokens once
                num_cached_tokens += result.num_cached_tokens
            request, reasons[index] = self.requests[index], [target.finish_reason for target in result.targets]
            for target in result.targets:
                is_forced = target.finish_reason == "forced"
                num_known = request.num_forced if is_forced else len(request.target_prefix)
                num_output_tokens += len(target.tokens) - num_known
            return convert(index, result)

        outputs: list[T] = []
        times: list[Timings] = []
        if self.admitted is not None:
            outputs, times = await self.admitted.submit(self.requests).gather(convert_and_count)
        timings = call.timings(times)
        ordered = [reason for index in range(len(reasons)) for reason in reasons[index]]
        call.record_usage(self.model, timings, self.num_input_tokens, num_output_tokens, ordered)
        usage = usage_for(self.model, self.num_input_tokens, num_output_tokens, num_cached_tokens)
        return outputs, usage, timings

    def targets_of(self, index: int, result: Generated) -> list[DecodedTarget]:
        """Return the targets of a request with their texts, the best first."""
        request, tokenizer = self.requests[index], self.model.target_tokenizer
        prefix = request.target_prefix[request.num_forced :]
        stop, seed = request.parameters.stop, request.seed if request.parameters.do_sample else None
        input_index, first_rank = divmod(index, self.num_samples)
        targets = []
        for rank, target in enumerate(result.targets, first_rank):
            generated = target.tokens[len(request.target_prefix) :]
            ids = [token.id for token in generated]
            text = text_of(tokenizer, ids, stop, prefix) if stop or prefix else tokenizer.decode(ids)
            own = without_forced(request, target) if request.num_forced else target
            targets.append(DecodedTarget(input_index, rank, request, own, generated, text, seed))
        return targets


def without_forced(request: GenerateRequest, target: Target) -> Target:
    """Return a target without the forced tokens of the language.

    The rows of these tokens are removed from its attention maps, except from those with rows of the
    prompt: there, the forced tokens count as the last ones of the prompt.
    """
    num_forced, attention = request.num_forced, target.attention
    if not request.prompt_rows:
        attention = {
            kind: maps if kind in ENCODER_KINDS else maps[:, :, num_forced:] for kind, maps in attention.items()
        }
    return replace(target, tokens=target.tokens[num_forced:], attention=attention)


def text_of(tokenizer: TextTokenizer, ids: Sequence[int], stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> str:
    """Return the text of a prefix and ids as a stream has it, cut before the first stop string."""
    stream = TextStream(tokenizer, stop, prefix)
    pieces = [stream.push(id_) for id_ in ids]
    return "".join(pieces) + stream.finish()


def expected_work(throughput: Throughput, parameters: GenerateParameters) -> tuple[float, float]:
    """Estimate the number of new tokens by earlier calls, and the work in units of `Throughput`."""
    limit = DEFAULT_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens
    num_tokens = min(limit, max(parameters.min_new_tokens, throughput.mean_tokens))
    return num_tokens, 1 + parameters.num_beams * num_tokens


def hidden_tokens(model: ServedModel, indices: Sequence[int], source_tokens: int) -> tuple[int, ...]:
    """Return the indices of hidden source tokens as non-negative numbers in ascending order.

    Negative `indices` count from the end, as in Python.
    """
    field = "hidden_source_tokens"
    if reason := reason_against_hiding(model.manifest):
        message = f"{{{field}}} is not supported by {model.name}: {reason}."
        raise ApiError("unsupported_parameter", message, field=field)
    subject = f"an input of {source_tokens} tokens"
    repetition = f"a token: {{index}} is the same token as an earlier index of {subject}"
    hidden = resolve_indices(indices, source_tokens, field, subject, repetition)
    if len(hidden) == source_tokens:
        message = f"It must leave at least one of the {source_tokens} tokens of each input visible."
        raise ApiError("invalid_parameter", message, field=field)
    return tuple(sorted(hidden))


def reason_against_hiding(manifest: Manifest) -> str | None:
    """Return the reason why a model's source tokens cannot be hidden; None if they can be.

    The keys of hidden tokens are removed from the decoder's states when a row is initialized, so
    that the keys after them move. Attention must therefore not depend on the index of a key.
    """
    if manifest.decoder is None:
        return "it has no decoder"
    if manifest.is_decoder_only:
        return "it is a decoder-only model, without an encoder whose outputs could be hidden"
    if not any("source" in state.shape for state in manifest.states):
        return "its decoder does not attend to source tokens"
    if any(maps.kind == "cross" and (maps.window is not None or maps.by_position) for maps in manifest.attention):
        return "its attention depends on the positions of source tokens"
    return None


def format_dialogue(model: ServedModel, dialogue: Dialogue) -> Prompt:
    """Format a dialogue with the chat template of a model. Raises `ApiError` if it rejects it."""
    assert model.chat is not None, "only a model that chats gets a dialogue"
    try:
        return model.chat.prompt(dialogue)
    except ChatTemplateError as error:
        message = f"The chat template of {model.name} cannot format these messages: {error.reason[:200]}."
        raise ApiError("invalid_parameter", message, path="messages") from None
