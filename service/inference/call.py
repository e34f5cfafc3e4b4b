"""One call of a client: its deadline, reservations, texts and timings."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel

from sightline.base.bundle import PairTemplate, Task
from sightline.base.text.prompt import Dialogue, Prompt, tokenize_with_template
from sightline.base.text.tokenizer import LONG_TEXT, MAX_CHARACTERS_PER_TOKEN, TextTokenizer
from sightline.service.api_errors import ApiError, ClientGoneError
from sightline.service.body_fields import IdLists, Texts
from sightline.service.engine.request import Request, Timings
from sightline.service.inference.admission import SLICES, AdmissionController, Reservation, ResponseReservation
from sightline.service.inference.changes import load_on_first_use
from sightline.service.inference.results import TimingsMs, Usage
from sightline.service.inference.service import DefaultTask, ServedModel, Service
from sightline.service.inference.submission import Submission
from sightline.service.keys import Key, Quota
from sightline.service.quotas import GRANT, RETRY_SEQUENCES_S, Grant, QuotaExceededError

Ids = tuple[int, ...]
AnyInputs = Texts | Dialogue | IdLists  # texts, the messages of a chat, or token ids
T = TypeVar("T")

# A call has at most a quarter of the sequences that may wait for a model, or 32 if that is more.
LEAST_SLICE = 32
# Longer texts are tokenized in a thread. This many characters take about ten milliseconds.
INLINE_CHARACTERS = 16_384


class Call:
    """A client's call from its arrival until its response was sent."""

    def __init__(self, service: Service, request_id: str) -> None:
        self.service = service
        self.request_id = request_id
        self.key: Key | None = None  # API key of the client; None if the service needs none
        self.caller = ""  # label of the key
        self.address = ""  # address or network of the client
        self.quota = Quota()  # of the key, once it counts the call
        self.grant: Grant | None = None  # use of the quota; None if the key has none
        self._num_held = 0  # sequences that count towards the quota
        self._reserved = 0  # tokens that count towards the quota until the call ends
        self._reserved_until = 0.0  # end of the minute in which they count
        self.started = time.monotonic()
        self.deadline = float("inf")  # on the engines' clock, `time.monotonic`
        self.num_bytes = 0  # size of the request body
        self.field_names: Mapping[str, str] = {}  # canonical field name to the API's name, for errors
        self.model_name: str | None = None
        self.task: DefaultTask | None = None  # of the model
        self.parameters: BaseModel | None = None  # of a generation
        self.warnings: dict[int, Any] = {}  # reasons to doubt outputs, by the index of the input
        self.details: dict[str, Any] = {}  # fields for the access log: tokens, times, finish reasons
        self.counts_texts = True  # in the metrics of omissions; False for attempts to repair a text
        self.phases: Mapping[str, float] = {}  # milliseconds of each, once the results are complete
        self.computed = self.started  # time at which the results were complete
        self.response_memory = ResponseReservation(service.response_memory)
        # Of the model, once the call is admitted. It outlives the model.
        self.controller: AdmissionController | None = None
        self._reservation: Reservation | None = None  # of the controller
        self.submission: Submission | None = None  # the last one
        self.is_client_gone = False
        self._tokenize_s = 0.0
        # Records the latency of the response, once it can no longer fail.
        self.observe_latency: Callable[[], None] = lambda: None

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def close(self) -> None:
        """Cancel unfinished engine requests and release all reservations."""
        if self.submission is not None:
            self.submission.close()
        if self.controller is not None and self._reservation is not None:
            self.controller.release(self._reservation)
        self.response_memory.release()
        if self.grant is not None:
            self.release_sequences()
            tokens = self.details.get("input_tokens", 0) + self.details.get("output_tokens", 0)
            limit, used = self.quota.tokens_per_minute, (tokens, self._reserved, self._reserved_until)
            if limit is not None and (tokens or self._reserved):
                self.service.peers.notify("end_quota", self.caller, limit, *used)

    # Admission

    async def begin_quota(self) -> None:
        """Count the call towards the quota of its key, if any. Raises `QuotaExceededError`."""
        if self.key is not None and self.key.quota is not None:
            self.quota = self.key.quota
            found = await self.service.peers.call("begin_quota", self.caller, self.quota.model_dump())
            self.grant = GRANT.validate_python(found)
            self.grant.check()

    async def _hold_sequences(self, sequences: int) -> int:
        """Count sequences towards the quota; return how many may be in the engine at once."""
        limit = self.quota.concurrent_sequences
        if limit is None:
            return sequences
        sequences = min(sequences, limit)
        more = sequences - self._num_held
        if more <= 0:
            self.release_sequences(-more)
            return sequences
        self._num_held += more  # before the wait, so that a call that is cancelled meanwhile releases them
        if not await self.service.peers.call("hold_quota", self.caller, more, limit):
            self._num_held -= more
            raise QuotaExceededError("sequences", limit, RETRY_SEQUENCES_S)
        return sequences

    def release_sequences(self, sequences: int | None = None) -> None:
        """Count sequences, or all, towards the quota no more."""
        sequences = self._num_held if sequences is None else sequences
        if sequences:
            self._num_held -= sequences
            self.service.peers.notify("hold_quota", self.caller, -sequences, 0)

    async def reserve_tokens(self, tokens: int) -> None:
        """Count the most tokens that the call can use towards the quota of its key, if any."""
        limit = self.quota.tokens_per_minute
        if limit is not None:
            found = await self.service.peers.call("reserve_quota", self.caller, limit, tokens)
            grant = GRANT.validate_python(found)
            grant.check()
            if grant.windows:
                self._reserved, self._reserved_until = tokens, grant.ends_at

    async def model(
        self, name: str | None, task: Task | None = None, default_for: DefaultTask | None = None
    ) -> ServedModel:
        """Return the model that the call names, or a default model, and load it if necessary.

        For the parameters and the errors, see `Service.find_manifest` and `load_on_first_use`.
        """
        service = self.service
        self.task = default_for or task
        requested = service.default_name(default_for or task) if name is None else name
        listed = service.models.get(requested or "")
        # Usually the model is loaded and can do the task: then `find_manifest` returns the same.
        if listed is not None:
            self.model_name, listed.used_at = requested, self.started
        if listed is not None and listed.loaded is not None and (task is None or task in listed.manifest.tasks):
            return listed.loaded.model
        requested = self.model_name = service.find_manifest(name, task, default_for).name
        model = await load_on_first_use(service, requested, self.num_bytes, self.seconds_left)
        service.find_manifest(requested, task)  # the bundle may have changed since the service started
        return model

    async def reserve(
        self,
        model: ServedModel,
        sequences: int,
        units: float = 0.0,
        field: str = "inputs",
        *,
        is_counted: bool = True,
    ) -> "AdmittedCall":
        """Reserve the call's share of a model's limits, before the call is tokenized.

        The reservation is held until the call is closed, or reserves at another model. A call that
        reserves again changes the size of its reservation. Of many sequences, only a slice is
        reserved, and the engine gets only as many at a time. `units` is the work as in
        `AdmissionController.reserve`; 0 if the engine is not used. The setting `max_inputs` limits
        the sequences if `is_counted`.

        Raises `invalid_parameter` (too many sequences), `overloaded` or `rate_limit_exceeded`.
        """
        settings = self.service.settings
        limit = settings.max_inputs
        if is_counted and sequences > limit:
            raise too_many_sequences(sequences, limit, field)
        sequences = min(sequences, limit, max(LEAST_SLICE, settings.max_waiting_sequences // SLICES))
        if self.grant is not None:
            sequences = await self._hold_sequences(sequences)
        seconds_left = self.deadline - time.monotonic()
        if self.controller is not None and self._reservation is not None and self.model_name != model.name:
            self.controller.release(self._reservation)
            self.controller = self._reservation = None
        if self.controller is not None and self._reservation is not None:
            self.controller.resize(self._reservation, sequences, units, seconds_left)
            return AdmittedCall(self, model, self.controller, self._reservation)
        listed = self.service.models.get(model.name)
        served = model.original or model
        if listed is None or listed.loaded is None or listed.loaded.model is not served:  # it was unloaded meanwhile
            raise ApiError("model_not_found", field="model")
        self.model_name, self.controller = model.name, listed.admission
        self.service.metrics.for_model(model.name).use()
        self._reservation = self.controller.reserve(
            sequences, self.num_bytes, units, seconds_left, self.caller, self.address
        )
        return AdmittedCall(self, model, self.controller, self._reservation)

    async def tokenize(self, work: Callable[[], T], texts: Iterable[Sized] | None) -> T:
        """Run a tokenization of `texts` or of lists of ids: of long ones in another thread, as work
        that takes long whatever the texts are (None).

        At the deadline it raises `deadline_exceeded`, and the thread finishes in the background.
        """
        started = time.perf_counter()
        try:
            if texts is not None and sum(map(len, texts)) <= INLINE_CHARACTERS:
                return work()
            async with asyncio.timeout(self.seconds_left):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise ApiError("deadline_exceeded") from None
        finally:
            self._tokenize_s += time.perf_counter() - started

    def on_client_gone(self) -> None:
        """End the call with `ClientGoneError`, because the client closed its connection."""
        self.is_client_gone = True
        if self.submission is not None:
            self.submission.fail(ClientGoneError())

    # The end

    def timings(self, parts: Sequence[Timings]) -> TimingsMs:
        """Return the durations of the phases: maxima over the sequences, which run concurrently."""
        queue = encode = decode = 0.0
        for times in parts:
            queue, encode = max(queue, times.queue), max(encode, times.encode)
            decode = max(decode, times.decode)
        total = 1000 * (time.monotonic() - self.started)
        tokenize = 1000 * self._tokenize_s
        return TimingsMs(round(tokenize, 3), round(queue, 3), round(encode, 3), round(decode, 3), total=round(total, 3))

    def record_usage(
        self, model: ServedModel, timings: TimingsMs, input_tokens: int, output_tokens: int, reasons: Sequence[str] = ()
    ) -> None:
        """Record tokens, durations and finish reasons for the access log and the metrics."""
        phases = {name: duration for name, duration in vars(timings).items() if name != "total"}
        self.details |= {"input_tokens": input_tokens, "output_tokens": output_tokens, "finish_reasons": reasons}
        self.details |= {f"{name}_ms": duration for name, duration in phases.items()}
        encode = "prefill" if model.manifest.is_decoder_only else "encode"
        self.phases = {encode if name == "encode" else name: duration for name, duration in phases.items()}
        self.computed = time.monotonic()
        observe = self.service.metrics.for_model(model.name).observe
        self.observe_latency = partial(observe, "e2e_request_latency_seconds", timings.total / 1000)


@dataclass(frozen=True)
class AdmittedCall:
    """A call with its share of a model's limits, which it holds until it is closed."""

    call: Call
    model: ServedModel
    controller: AdmissionController  # of the model, which it outlives
    reservation: Reservation

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Submit requests to the engine; `Call.close` cancels those that have not finished.

        Raises `model_not_found` if the model was unloaded, and `loading` if its step was ended.
        """
        call = self.call
        if call.is_client_gone:
            raise ClientGoneError
        if self.controller.close_code is not None:
            raise ApiError(self.controller.close_code, field="model")
        call.submission = Submission(call.service.worker, self.model.name, requests, self.reservation, call.deadline)
        return call.submission


class UsageRecord:
    """The tokens of all sentences of a call, its durations, and how each translation ended."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._usage, self._timings, self._reasons = Usage(0, 0), list[TimingsMs](), list[str]()

    def add(self, usage: Usage, timings: TimingsMs, reasons: Sequence[str]) -> None:
        self._usage = Usage(
            self._usage.input_tokens + usage.input_tokens, self._usage.output_tokens + usage.output_tokens
        )
        self._timings.append(timings)
        self._reasons += reasons

    def write(self, model: ServedModel) -> tuple[Usage, TimingsMs]:
        """Record and return the tokens and the durations; `model` is the last one."""
        sums = {name: sum(getattr(part, name) for part in self._timings) for name in ("queue", "encode", "decode")}
        timings = replace(self._call.timings([]), **{name: round(value, 3) for name, value in sums.items()})
        usage = self._usage
        self._call.record_usage(model, timings, usage.input_tokens, usage.output_tokens, self._reasons)
        return usage, timings


def too_many_sequences(sequences: int, limit: int, field: str) -> ApiError:
    message = f"It must have at most {limit} entries (SIGHTLINE_MAX_INPUTS), got {sequences}."
    if field == "num_return_sequences":
        message = (
            f"A call generates at most {limit} sequences (SIGHTLINE_MAX_INPUTS), got {sequences}: "
            "{num_return_sequences} for each input."
        )
    return ApiError("invalid_parameter", message, field=field)


@dataclass(frozen=True)
class SingleText:
    """A text, in which the names of special tokens are plain text, except that of `mask_id`."""

    text: str
    is_cut: bool = False
    mask_id: int | None = None
    add_special_tokens: bool = True  # that the model expects
    partner: ClassVar[str] = ""

    @property
    def long_texts(self) -> Sequence[str]:
        return () if self.is_cut or len(self.text) < LONG_TEXT else (self.text,)

    def encode(self, tokenizer: TextTokenizer, max_tokens: int) -> Sequence[int]:
        if self.is_cut:
            return tokenizer.encode_truncated(self.text, max_tokens)
        if self.mask_id is not None:
            return tokenizer.encode_masked(self.text, self.mask_id)
        return tokenizer.encode(self.text, add_special_tokens=self.add_special_tokens)


@dataclass(frozen=True)
class TextPair:
    """Two texts, formatted by the tokenizer or by a template, of which one may be cut."""

    text: str
    second: str
    partner: str  # name of the second text, for errors
    cut: Literal["none", "first", "longest"] = "none"  # `longest` is the second one with a template
    template: PairTemplate | None = None

    @property
    def long_texts(self) -> Sequence[str]:
        return [text for text in (self.text, self.second) if self.cut == "none" and len(text) >= LONG_TEXT]

    def encode(self, tokenizer: TextTokenizer, max_tokens: int) -> Sequence[int]:
        limit = None if self.cut == "none" else max_tokens
        if self.template is not None and self.cut != "first":
            return tokenize_with_template(tokenizer, self.template, self.text, self.second, limit)
        return tokenizer.encode_pair(self.text, self.second, limit, cuts_first=self.cut == "first")


@dataclass(frozen=True)
class PromptText:
    """The prompt of a chat, or a text in which the names of special tokens stand for them."""

    prompt: Prompt
    partner: ClassVar[str] = ""

    @property
    def long_texts(self) -> Sequence[str]:
        return self.prompt.texts

    def encode(self, tokenizer: TextTokenizer, max_tokens: int) -> Sequence[int]:
        return self.prompt.encode(tokenizer)


def tokenize_within_limits(
    tokenizer: TextTokenizer,
    inputs: Iterable[SingleText | TextPair | PromptText],
    index_of: Callable[[int], int | None],
    field: str,
    limits: Sequence[int],
    deadline: float,
    way_out: str = "",
) -> list[Ids]:
    """Tokenize inputs, each with its own maximum number of tokens.

    After `deadline`, a time of `time.monotonic`, it raises `deadline_exceeded`. Errors have the
    index that `index_of` returns for a position, and the advice `way_out`.
    """
    sequences: list[Ids] = []
    for position, (item, max_tokens) in enumerate(zip(inputs, limits, strict=True)):
        if time.monotonic() > deadline:
            raise ApiError("deadline_exceeded")
        together = f" together with {item.partner}" if item.partner else ""
        if texts := item.long_texts:  # those that are certain to have too many tokens are not tokenized
            index = index_of(position)
            check_characters(sum(map(len, texts)), max_tokens, field, index, together=together, way_out=way_out)
            least = sum(tokenizer.min_num_tokens(text, max_tokens) for text in texts)
            if least > max_tokens:
                number = f"at least {least}"
                raise input_too_long(number, max_tokens, field, index, together=together, way_out=way_out)
        try:
            ids = item.encode(tokenizer, max_tokens)
        except ValueError:  # the texts before the document leave no token for it
            number = f"more than {max_tokens}"
            raise input_too_long(number, max_tokens, field, index_of(position), together=together) from None
        if len(ids) > max_tokens:
            index, number = index_of(position), str(len(ids))
            raise input_too_long(number, max_tokens, field, index, together=together, way_out=way_out)
        sequences.append(tuple(ids))
    return sequences


def check_ids(inputs: IdLists, num_ids: int, max_tokens: int) -> list[Ids]:
    """Return inputs that are token ids; reject those that are too long, and unknown ids."""
    for index, ids in enumerate(inputs.lists):
        if len(ids) > max_tokens:
            raise input_too_long(str(len(ids)), max_tokens, "inputs", inputs.index(index))
        if max(ids) >= num_ids:
            message = f"It must have ids of the model's tokens, from 0 to {num_ids - 1}, got {max(ids)}."
            raise ApiError("invalid_parameter", message, field="inputs", index=inputs.index(index))
    return list(inputs.lists)


def check_characters(num_characters: int, max_tokens: int, field: str, index: int | None, **words: str) -> None:
    """Check that a text is not so long that even its tokenization would take too much time."""
    limit = MAX_CHARACTERS_PER_TOKEN * max_tokens
    if num_characters > limit:
        most = f", and so at most {limit} characters"
        raise input_too_long(f"{num_characters} characters", max_tokens, field, index, most=most, **words)


def input_too_long(
    number: str, max_tokens: int, field: str, index: int | None, together: str = "", way_out: str = "", most: str = ""
) -> ApiError:
    message = f"It must have at most {max_tokens} tokens for this model{together}{most}, got {number}"
    return ApiError("input_too_long", f"{message}; shorten or split it{way_out}.", field=field, index=index)
