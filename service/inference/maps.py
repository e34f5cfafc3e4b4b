"""Attention maps of a response: selection, size limit and format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sightline.base.bundle import AlignmentStep, AttentionMaps, Manifest, MapKind
from sightline.base.text.tokenizer import Offsets, TextTokenizer
from sightline.base.text.words import Span, Word, merge_weights, rows_that_read, words_of
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import IdLists, Texts
from sightline.service.engine.recorded_maps import ENCODER_KINDS
from sightline.service.engine.request import (
    Encoded,
    EncodeRequest,
    GenerateRequest,
    MapBudget,
    MapPart,
    Request,
    Target,
)
from sightline.service.inference.call import AnyInputs, Call, Ids
from sightline.service.inference.results import BYTES_PER_NUMBER, FLOAT_BYTES, MAX_NUMBERS, Numbers, check_size, numbers
from sightline.service.inference.service import ServedModel
from sightline.service.inference.statistics import HeadStatistics, MapAxes, head_statistics
from sightline.service.parameters import AttentionSelection, Method

# Tokens of an input or a text with contributions: memory and time grow with their square.
MAX_CONTRIBUTING_TOKENS = 128
MAX_ZEROING = 500_000_000_000  # their square times the parameters of a model, for some seconds of the engine


@dataclass(frozen=True)
class AttentionWindow:
    """The columns that each row of an attention map can attend to."""

    centre: Annotated[
        Literal["monotonic", "predicted"],
        Field(
            description="Centre p of the window: the index of the row, at most that of the last column (monotonic), or "
            "computed by the model (predicted)."
        ),
    ]
    radius: Annotated[
        int, Field(description="A row attends to the columns p - radius to p + radius; all other weights are 0.")
    ]


def window_of(attention: AttentionMaps) -> AttentionWindow | None:
    window = attention.window
    return None if window is None else AttentionWindow(window.centre, window.radius)


@dataclass(frozen=True)
class AttentionMap:
    """The selected attention maps of one kind."""

    kind: Annotated[MapKind, Field(description="Kind of attention.")]
    layers: Annotated[Sequence[int], Field(description="Indices of the layers in `data`.")]
    heads: Annotated[Sequence[int], Field(description="Indices of the heads in `data`, or those that were reduced.")]
    rows: Annotated[int, Field(description="Number of rows: the tokens or words that attend.")]
    columns: Annotated[int, Field(description="Number of columns: the tokens or words that are attended to.")]
    columns_are: Annotated[
        Literal["slots"] | None, Field(description="Set to slots if the columns are projected keys instead of tokens.")
    ]
    window: Annotated[
        AttentionWindow | None, Field(description="Set if each row can attend to a part of the columns only.")
    ]
    shape: Annotated[tuple[int, int, int, int], Field(description="Shape of `data`: layers, heads, rows, columns.")]
    normalized: Annotated[bool, Field(description="True if each row sums to 1.")]
    statistics: Annotated[
        list[HeadStatistics] | None, Field(description="Statistics of each selected head; only with statistics.")
    ]
    data: Annotated[Numbers, Field(description="Attention weights, row-major.")]


@dataclass(frozen=True)
class EncoderAttention:
    """Attention maps of an encoder, with the tokens or words of their rows and columns."""

    source_tokens: Annotated[list[str], Field(description="Tokens of the input; with units words, its words.")]
    source_offsets: Annotated[
        Offsets,
        Field(
            description="Start and end of each source token or word in the input, in Unicode characters; null for "
            "special tokens, and for all tokens of messages and of pairs of texts."
        ),
    ]
    maps: Annotated[list[AttentionMap], Field(description="Attention maps, one entry for each kind.")]


@dataclass(frozen=True)
class TargetAttention(EncoderAttention):
    """Attention maps of one target, with the tokens or words of their rows and columns."""

    target_tokens: Annotated[
        list[str],
        Field(
            description="Tokens of the target, with units words its words, one for each row. Starts with those of "
            "the prefix; with prompt_rows, with those of the prompt from its second token on."
        ),
    ]
    target_offsets: Annotated[
        Offsets,
        Field(
            description="Start and end of each target token or word in the output text, in Unicode characters; null "
            "for tokens that are not in it: special tokens, those of the prompt, and those cut off by a stop string."
        ),
    ]
    decoder_input_tokens: Annotated[
        list[str], Field(description="Tokens that the decoder reads at each step; with units words, their words.")
    ]


@dataclass(frozen=True)
class SourceText:
    """The tokens and words of a source."""

    offsets: Offsets  # ranges of the tokens in the input; all None if the input is not a single text
    text_offsets: Offsets  # ranges in the input, or in the decoded tokens of other inputs
    words: Sequence[Word]


@dataclass(frozen=True)
class AxisWord:
    """A word of the rows or columns of a map."""

    text: str
    offsets: Span | None  # character range in the input or in the output text, if it is in one of them
    tokens: tuple[int, ...]  # indices of its rows or columns


@dataclass(frozen=True)
class MapLayout:
    """The tokens and words that the rows and columns of maps stand for."""

    source: SourceText
    target_offsets: Offsets
    target_words: Sequence[Word]
    prompt_tokens: int  # number of decoder inputs before the first token of the target
    is_decoder_only: bool  # True if the prompt is the source
    has_prompt_rows: bool  # True if decoder maps start with the rows of the prompt

    @property
    def source_axis(self) -> list[AxisWord]:
        has_text = any(span is not None for span in self.source.offsets)
        return [
            AxisWord(word.text, (word.start, word.end) if has_text else None, word.tokens) for word in self.source.words
        ]

    @property
    def target_axis(self) -> list[AxisWord]:
        """The words of the rows of cross-attention and of decoder maps.

        Row i of a prompt's rows belongs to token i + 1 of the prompt.
        """
        num_rows = self.prompt_tokens - 1 if self.has_prompt_rows else 0
        prompt = [
            AxisWord(word.text, None, tuple(token - 1 for token in word.tokens if token))
            for word in (self.source.words if self.has_prompt_rows else ())
            if any(word.tokens)
        ]
        targets = [
            AxisWord(word.text, (word.start, word.end), tuple(num_rows + token for token in word.tokens))
            for word in self.target_words
        ]
        return [*prompt, *targets]

    @property
    def input_axis(self) -> list[AxisWord]:
        """The words of the decoder's inputs; the last token of the target is no input."""
        words = self.source_axis if self.is_decoder_only else []
        last = len(self.target_offsets) - 1
        for word in self.target_words:
            tokens = tuple(self.prompt_tokens + token for token in word.tokens if token != last)
            if tokens:
                words.append(AxisWord(word.text, (word.start, word.end), tokens))
        return words

    def groups(self, kind: MapKind) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]] | None]:
        """Return the rows and the columns of each word; None if the columns are not tokens."""
        sources = [word.tokens for word in self.source_axis]
        if kind in ENCODER_KINDS:
            return sources, None if kind == "encoder_slots" else sources
        columns = [word.tokens for word in self.input_axis] if kind == "decoder" else sources
        return [word.tokens for word in self.target_axis], columns

    def axes(self, kind: MapKind) -> MapAxes:
        """Return the special tokens of the rows and columns."""
        sources = _are_special(self.source.text_offsets)
        if kind in ENCODER_KINDS:
            return MapAxes(sources, None) if kind == "encoder_slots" else MapAxes(sources, sources, 0)
        targets = _are_special(self.target_offsets)
        if kind == "cross":
            return MapAxes(targets, sources)
        prompt = sources if self.is_decoder_only else np.ones(self.prompt_tokens, np.bool_)
        columns = np.concatenate([prompt, targets[:-1]])
        if self.has_prompt_rows:
            return MapAxes(np.concatenate([prompt[1:], targets]), columns, 0)
        return MapAxes(targets, columns, self.prompt_tokens - 1)


def _are_special(offsets: Offsets) -> NDArray[np.bool_]:
    return np.array([span is None for span in offsets], np.bool_)


@dataclass(frozen=True)
class WordMap:
    """Mean attention weights of some heads between words."""

    source_words: Sequence[Word]
    target_words: Sequence[Word]
    weights: NDArray[np.float32]  # (target words, source words)


@dataclass(frozen=True)
class Selection:
    """The selected layers and heads of one kind of attention maps."""

    attention: AttentionMaps
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    requested: AttentionSelection
    # Layers and heads that are recorded: those of the encoder, or all if other readers need them.
    part: MapPart | None
    step: AlignmentStep  # whose row of cross-attention each target token has

    def cost(self, source_tokens: int, prompt_tokens: int, target_tokens: int) -> NDArray[np.int64]:
        """Return the number of values in the response, and the memory of the maps in bytes.

        The tokens of the prompt precede those of the target.
        """
        if self.attention.kind == "decoder":
            columns = prompt_tokens - 1 + target_tokens
            rows = columns if self.requested.prompt_rows else target_tokens
        else:
            rows = source_tokens if self.attention.kind in ENCODER_KINDS else target_tokens
            columns = self.attention.columns or source_tokens
        return rows * columns * np.array([self.num_maps, self.bytes_per_column])

    @property
    def bytes_per_column(self) -> int:
        """Memory of one column of a row: the recorded values, and the response."""
        num_recorded = self.attention.layers * self.attention.heads
        if self.part is not None:
            num_recorded = len(self.layers) * len(self.heads)
        return FLOAT_BYTES * num_recorded + BYTES_PER_NUMBER[self.requested.encoding] * self.num_maps

    def selected(self, maps: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the selected layers and heads of recorded maps (L, H, rows, columns)."""
        maps = maps[np.ix_(self.layers, self.heads)] if self.part is None else maps
        return rows_that_read(maps) if self.step == "reads" else maps

    @property
    def num_maps(self) -> int:
        """Number of maps in the response, over layers and heads."""
        return len(self.layers) * (len(self.heads) if self.requested.reduce == "none" else 1)

    def map_of(
        self, maps: NDArray[np.float32], layout: MapLayout | None, alignment: NDArray[np.float32] | None
    ) -> AttentionMap:
        """Return the selected part of recorded maps (L, H, rows, columns).

        Maps of tokens without statistics need no `layout`. `alignment` has the weights (rows,
        columns) of the heads that align words, for the statistics of cross-attention.
        """
        kind, requested = self.attention.kind, self.requested
        selected = self.selected(maps)
        chosen = selected
        if requested.units == "words":
            assert layout is not None, "maps of words need the words"
            chosen = merge_weights(chosen, *layout.groups(kind))
        if requested.reduce != "none":
            reduction = np.mean if requested.reduce == "mean" else np.max
            chosen = reduction(chosen, axis=1, keepdims=True)
        statistics: list[HeadStatistics] | None = None
        if requested.statistics:
            assert layout is not None, "statistics need the special tokens"
            statistics = head_statistics(selected, self.layers, self.heads, layout.axes(kind), alignment)
        return AttentionMap(
            kind=kind,
            layers=self.layers,
            heads=self.heads,
            rows=chosen.shape[2],
            columns=chosen.shape[3],
            columns_are=None if self.attention.columns is None else "slots",
            window=window_of(self.attention),
            shape=chosen.shape,
            # A maximum over several heads does not sum to 1, nor do words without special tokens.
            normalized=self.attention.normalized
            and (requested.reduce != "max" or len(self.heads) == 1)
            and (requested.units == "tokens" or kind == "encoder_slots"),
            statistics=statistics,
            data=numbers(chosen, requested.encoding),
        )


class MapWriter:
    """Builds the attention maps of one response, and rejects the response if it is too large."""

    def __init__(
        self,
        call: Call,
        model: ServedModel,
        selection: AttentionSelection,
        *,
        records_all: bool = False,
        step: AlignmentStep = "writes",
        num_attempts: int = 1,
    ) -> None:
        """Select the maps of a call, or reject a selection that the model does not have.

        With `records_all`, others read layers and heads that are not selected. `step` is that whose
        weights the target tokens of cross-attention have. Of `num_attempts` targets of an input,
        the response has one.
        """
        if not model.manifest.attention:
            raise ApiError("unsupported_parameter", f"{model.name} has no attention maps.", field="return_attention")
        self._model = model
        if selection.prompt_rows and not model.manifest.is_decoder_only:
            message = f"It is supported only by decoder-only models, and {model.name} is not one; leave it out."
            raise ApiError("unsupported_parameter", message, field="prompt_rows")
        self.has_prompt_rows = selection.prompt_rows
        # Method of the maps of a target; None for the weights that its steps record.
        self.contributions = None if selection.method == "weights" else selection.method
        if self.contributions is not None and records_all:
            message = "Coverage needs attention weights; leave out {method}, or request the coverage alone."
            raise ApiError("unsupported_parameter", message, field="method")
        self._selections = _select(model, selection, step, records_all=records_all)
        self._units = selection.units
        self._has_layout = selection.units == "words" or selection.statistics
        self._sources: list[SourceText] = []  # of each input, see `read_offsets`
        self._requests: Sequence[Request] = ()  # see `check`
        self._count, self._num_attempts = 0, num_attempts  # number of values so far
        self._memory = call.response_memory
        num_bytes: dict[str, int] = {of_kind.attention.kind: of_kind.bytes_per_column for of_kind in self._selections}
        per_column: dict[str, int] = {of_kind.attention.kind: of_kind.num_maps for of_kind in self._selections}
        self.budget = MapBudget(num_attempts * MAX_NUMBERS, per_column, num_bytes, self._memory.use)  # of all requests

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of attention weights to record."""
        return frozenset(one.attention.kind for one in self._selections if self.contributions is None)

    @property
    def parts(self) -> dict[str, MapPart]:
        """The layers and heads to record of each kind, see `GenerateRequest.map_parts`."""
        return {one.attention.kind: one.part for one in self._selections if one.part is not None}

    async def read_offsets(
        self, call: Call, inputs: AnyInputs, sources: Sequence[Ids], num_added: tuple[int, int] = (0, 0)
    ) -> None:
        """Find the character ranges and words of the source tokens, which the maps need.

        `num_added` are the numbers of ids in `sources` before those of each text, and after them.
        """
        tokenizer = self._model.source_tokenizer

        def run() -> list[SourceText]:
            return [
                read_source(tokenizer, source, num_added, _single_text(inputs, index), self._has_layout)
                for index, source in enumerate(sources)
            ]

        self._sources = await call.tokenize(run, () if isinstance(inputs, IdLists) else inputs.texts)

    def check(self, requests: Sequence[Request]) -> None:
        """Reject a response that is certain to be too large; otherwise reserve its memory."""
        self._requests = requests
        if self.contributions is not None:
            limit = MAX_CONTRIBUTING_TOKENS
            if self.contributions == "value_zeroing":
                limit = min(limit, math.isqrt(MAX_ZEROING // max(1, self._model.manifest.parameters)))
            _check_contributions(requests, limit)
        count, num_bytes = sum(map(self._min_cost, requests), np.zeros(2, np.int64)).tolist()
        self._check_count(count)
        self._memory.reserve(num_bytes)
        for request in requests:
            if isinstance(request, GenerateRequest):  # the encoder's maps are repeated for each target
                count, num_bytes = (request.num_targets * self._cost(request, 0)).tolist()
                self.budget.remaining -= count
                self.budget.use_bytes(num_bytes)

    def _min_cost(self, request: Request) -> NDArray[np.int64]:
        """Return the minimum cost of all targets: values count for each, memory for each beam."""
        of_encoder = self._cost(request, 0)
        if isinstance(request, EncodeRequest):
            return of_encoder
        of_target = self._cost(request, self._min_target_tokens(request)) - of_encoder
        counts = np.array([request.num_targets, request.parameters.num_beams])
        least: NDArray[np.int64] = request.num_targets * of_encoder + counts * of_target
        return least

    def write(self, index: int, request: GenerateRequest, target: Target, text: str) -> TargetAttention:
        """Return the maps of one target, which has no forced tokens of the language.

        Its text may be cut before a stop string. The limit of the size includes earlier maps.
        """
        ids = [token.id for token in target.tokens]
        layout = self._layout(index, request, ids, text) if self._has_layout else None
        maps = self._maps(request, len(ids), target.attention, layout)
        if layout is not None and self._units == "words":
            sources, targets = layout.source_axis, layout.target_axis
            return TargetAttention(
                source_tokens=[word.text for word in sources],
                source_offsets=[word.offsets for word in sources],
                maps=maps,
                target_tokens=[word.text for word in targets],
                target_offsets=[word.offsets for word in targets],
                decoder_input_tokens=[word.text for word in layout.input_axis],
            )
        tokenizer, prompt_ids = self._model.target_tokenizer, self._decoder_prompt_ids(request)
        offsets = [within(span, text) for span in tokenizer.decoded_offsets(ids)]
        prompt, names = list(map(tokenizer.name, prompt_ids)), list(map(tokenizer.name, ids))
        inputs = [*prompt, *names[:-1]]
        if self.has_prompt_rows:
            names, offsets = [*prompt[1:], *names], [*[None] * len(prompt[1:]), *offsets]
        return TargetAttention(
            source_tokens=self._source_tokens(request),
            source_offsets=self._sources[index].offsets,
            maps=maps,
            target_tokens=names,
            target_offsets=offsets,
            decoder_input_tokens=inputs,
        )

    def word_map(self, index: int, request: GenerateRequest, target: Target, text: str) -> WordMap:
        """Return mean weights between words in the selected layer; see `write`."""
        (selection,) = self._selections
        kind = selection.attention.kind
        self._charge(request, len(target.tokens))
        layout = self._layout(index, request, [token.id for token in target.tokens], text)
        maps = selection.selected(target.attention[kind])
        (weights,) = merge_weights(maps, *layout.groups(kind)).mean(axis=1)
        return WordMap(layout.source.words, layout.target_words, weights)

    def write_encoded(self, index: int, encoded: Encoded) -> EncoderAttention:
        """Return the encoder maps of the input with an index."""
        request = self._requests[index]
        layout = self._layout(index, request) if self._has_layout else None
        maps = self._maps(request, 0, encoded.attention, layout)
        if layout is not None and self._units == "words":
            words = layout.source_axis
            return EncoderAttention([word.text for word in words], [word.offsets for word in words], maps)
        return EncoderAttention(self._source_tokens(request), self._sources[index].offsets, maps)

    def _layout(self, index: int, request: Request, ids: Sequence[int] = (), text: str = "") -> MapLayout:
        offsets = self._model.target_tokenizer.decoded_offsets(ids)
        return MapLayout(
            self._sources[index],
            offsets,
            words_of(text, [within(span, text) for span in offsets]),
            len(self._decoder_prompt_ids(request)),
            self._model.manifest.is_decoder_only,
            self.has_prompt_rows,
        )

    def _decoder_prompt_ids(self, request: Request) -> Sequence[int]:
        """Return the ids before the target; forced tokens count as the last ones of the prompt."""
        prompt_ids = self._model.manifest.decoder_prompt_ids(request.source_ids)
        if isinstance(request, EncodeRequest):
            return prompt_ids
        return (*prompt_ids, *request.target_prefix[: request.num_forced])

    def _source_tokens(self, request: Request) -> list[str]:
        return [self._model.source_tokenizer.name(id_) for id_ in request.source_ids]

    def _maps(
        self,
        request: Request,
        target_tokens: int,
        attention: Mapping[str, NDArray[np.float32]],
        layout: MapLayout | None,
    ) -> list[AttentionMap]:
        self._charge(request, target_tokens)
        maps = []
        for selection in self._selections:
            recorded, alignment = attention[selection.attention.kind], None
            if selection.requested.statistics and selection.attention.kind == "cross" and self.contributions is None:
                step, layer, heads = self._model.manifest.alignment_heads
                alignment = recorded[layer, list(heads)].mean(axis=0)
                if step == "reads":
                    alignment = rows_that_read(alignment)
            maps.append(selection.map_of(recorded, layout, alignment))
        return maps

    def _cost(self, request: Request, target_tokens: int) -> NDArray[np.int64]:
        """Return the number of values of a request's maps, and their memory in bytes."""
        sizes = len(request.source_ids), len(self._decoder_prompt_ids(request)), target_tokens
        return sum((selection.cost(*sizes) for selection in self._selections), np.zeros(2, np.int64))

    def _charge(self, request: Request, target_tokens: int) -> None:
        """Count the values of maps, and reject the response if it has too many."""
        self._count += int(self._cost(request, target_tokens)[0])
        self._check_count(self._count)

    def _min_target_tokens(self, request: GenerateRequest) -> int:
        """Return the minimum number of target tokens; a stop string may match after one."""
        parameters = request.parameters
        least_new = min(parameters.num_new_tokens, 1 if request.stop else max(1, parameters.min_new_tokens))
        most = self._model.manifest.max_new_tokens_for(len(request.source_ids))
        return min(len(request.target_prefix) + least_new, most) - request.num_forced

    def _check_count(self, count: int) -> None:
        count //= self._num_attempts
        num_layers = sum(len(selection.layers) for selection in self._selections)
        num_fitting = MAX_NUMBERS * num_layers // max(1, count)
        hint = f" (about {num_fitting} of the {num_layers} fit)" if num_fitting else ""
        check_size("attention maps", count, f"Select fewer kinds, layers{hint} or heads, or reduce the heads.")


def read_source(
    tokenizer: TextTokenizer, ids: Sequence[int], num_added: tuple[int, int], text: str | None, with_words: bool
) -> SourceText:
    """Return the character ranges of the tokens of a source, and its words if they are needed.

    `num_added` are the numbers of ids before those of the text, and after them. If the input is not
    a single text, `text` is None, and the words are those of the decoded ids.
    """
    before, after = num_added
    if text is not None:
        spans = tokenizer.offsets(text, len(ids) - before - after)
        offsets = [*[None] * before, *spans, *[None] * after]
        return SourceText(offsets, offsets, words_of(text, offsets) if with_words else ())
    unknown: Offsets = [None] * len(ids)
    if not with_words:
        return SourceText(unknown, unknown, ())
    text, spans = tokenizer.decode_parts(ids[before : len(ids) - after])
    offsets = [*[None] * before, *spans, *[None] * after]
    return SourceText(unknown, offsets, words_of(text, offsets))


def _single_text(inputs: AnyInputs, index: int) -> str | None:
    """Return an input; None if it is a dialogue, a pair of texts, or token ids."""
    if not isinstance(inputs, Texts) or (inputs.second_texts is not None and inputs.second_texts[index] is not None):
        return None
    return inputs.texts[index]


def _select(
    model: ServedModel, selection: AttentionSelection, step: AlignmentStep, *, records_all: bool
) -> list[Selection]:
    available = {attention.kind: attention for attention in _maps_of(model, selection.method)}
    selections = []
    for position, kind in enumerate(selection.kinds or available):
        if kind not in available:
            message = f"{model.name} has no attention maps of kind {kind}; available: {', '.join(available)}."
            raise ApiError("unsupported_parameter", message, field="kinds", index=position)
        maps = available[kind]
        layers = _select_indices(selection.layers, maps.layers, "layers", kind)
        heads = _select_indices(selection.heads, maps.heads, "heads", kind)
        # Statistics compare all maps with the heads that align words.
        is_whole = kind in ENCODER_KINDS or (kind == "cross" and (selection.statistics or records_all))
        is_whole |= selection.method != "weights"
        part = None if is_whole else MapPart(layers, heads)
        selections.append(Selection(maps, layers, heads, selection, part, step))
    return selections


def methods_of(manifest: Manifest) -> tuple[Method, ...]:
    """Return the methods of the attention maps of a model."""
    return ("weights",) if manifest.contributions is None else get_args(Method)


def _maps_of(model: ServedModel, method: Method) -> Sequence[AttentionMaps]:
    """Return the maps that a model has of a method, or reject the method."""
    maps = model.manifest.attention
    if method not in methods_of(model.manifest):
        message = (
            f"{model.name} has no {method}. Use the method weights, or make a float32 bundle of a Transformer with "
            "self-attention in encoder and decoder, with `sightline export --contributions` or `sightline models get "
            "--contributions`."
        )
        raise ApiError("unsupported_parameter", message, field="method")
    if method in ("weights", "norms"):
        return maps if method == "weights" else [one.model_copy(update={"normalized": False}) for one in maps]
    # All heads together. In the decoder, only the shares of both texts have the sum 1.
    are_all = {of_kind.kind: method != "alti" or of_kind.kind in ENCODER_KINDS for of_kind in maps}
    return [of_kind.model_copy(update={"heads": 1, "normalized": are_all[of_kind.kind]}) for of_kind in maps]


def _check_contributions(requests: Sequence[Request], limit: int) -> None:
    """Reject requests with hidden or too many tokens."""
    for request in requests:
        assert isinstance(request, GenerateRequest), "only encoder-decoders have contributions"
        most = len(request.target_prefix) - request.num_forced + request.parameters.num_new_tokens
        if request.hidden_source_tokens or max(len(request.source_ids), most) > limit:
            message = (
                f"Contributions need a whole input and a text of at most {limit} tokens each, got "
                f"{len(request.source_ids)} and up to {most}; leave out {{hidden_source_tokens}}, shorten the texts, "
                "lower {max_new_tokens}, or leave out {method}."
            )
            raise ApiError("unsupported_parameter", message, field="method")


def within(offsets: Span | None, text: str) -> Span | None:
    """Return the part of a character range within a text; None if the text ends before its word."""
    if offsets is None or (offsets[1] > len(text) and not text[offsets[0] :].strip()):
        return None
    return offsets[0], min(offsets[1], len(text))


def _select_indices(indices: Sequence[int] | None, available: int, field: str, kind: str) -> tuple[int, ...]:
    """Return the indices of selected layers or heads as non-negative numbers; all if None."""
    if indices is None:
        return tuple(range(available))
    repetition = f"a {field[:-1]} of {kind} attention: {{earlier}} and {{index}} are the same"
    return resolve_indices(indices, available, field, f"{kind} attention", repetition)


def resolve_indices(indices: Sequence[int], size: int, field: str, subject: str, repetition: str) -> tuple[int, ...]:
    """Return indices as non-negative numbers; negative ones count from the end, as in Python.

    For errors, `subject` names the owner of the things that are selected, and `repetition`
    describes the equal indices `{earlier}` and `{index}`.
    """
    resolved: dict[int, int] = {}  # each index by its non-negative number
    for position, index in enumerate(indices):
        if not -size <= index < size:
            message = f"It must be from {-size} to {size - 1} for {subject}, got {index}."
            raise ApiError("invalid_parameter", message, field=field, index=position)
        number = index % size
        if number in resolved:
            message = f"It must not repeat {repetition.format(earlier=resolved[number], index=index)}."
            raise ApiError("invalid_parameter", message, field=field, index=position)
        resolved[number] = index
    return tuple(resolved)
