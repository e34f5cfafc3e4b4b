"""Attention maps of a response: selection, size limit and format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from service.bundle import Attention
from service.engine.attention import ENCODER_KINDS
from service.engine.request import Encoded, EncodeRequest, GenerateRequest, MapBudget, SourceRequest, Target
from service.errors import ApiError
from service.fields import Texts
from service.inference.call import Call, Ids
from service.inference.languages import NO_LANGUAGES, LanguageChoice
from service.inference.results import BYTES_PER_NUMBER, MAX_NUMBERS, Numbers, check_size, numbers
from service.inference.service import ServedModel
from service.inference.statistics import HeadStatistics, MapAxes, head_statistics
from service.parameters import AttentionSelection, Encoding, Kind, Reduce, Units
from service.text.chat import Prompt
from service.text.tokenizer import Offsets, TextTokenizer
from service.text.words import Word, merge_weights, words_of

INLINE_TOKENS = 4096  # finding the ranges of this many tokens takes a few milliseconds


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


def window_of(attention: Attention) -> AttentionWindow | None:
    window = attention.window
    return None if window is None else AttentionWindow(window.centre, window.radius)


@dataclass(frozen=True)
class AttentionMap:
    """The selected attention maps of one kind."""

    kind: Annotated[Kind, Field(description="Kind of attention.")]
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
    maps: Annotated[list[AttentionMap], Field(description="Attention maps, one entry for each kind.")]


@dataclass(frozen=True)
class TargetAttention(EncoderAttention):
    """Attention maps of one target, with the tokens or words of their rows and columns."""

    target_tokens: Annotated[
        list[str],
        Field(description="Tokens of the target, with units words its words. Starts with those of the prefix."),
    ]
    decoder_input_tokens: Annotated[
        list[str], Field(description="Tokens that the decoder reads at each step; with units words, their words.")
    ]


@dataclass(frozen=True)
class MapLayout:
    """The tokens and words that the rows and columns of maps stand for."""

    source_offsets: Offsets
    source_words: Sequence[Word]
    target_offsets: Offsets
    target_words: Sequence[Word]
    prompt_tokens: int  # number of decoder inputs before the first token of the target
    is_decoder_only: bool  # True if the prompt is the source

    def groups(self, kind: Kind) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]] | None]:
        """Return the rows and the columns of each word; None if the columns are not tokens."""
        sources = [word.tokens for word in self.source_words]
        if kind in ENCODER_KINDS:
            return sources, None if kind == "encoder_slots" else sources
        columns = [tokens for _, tokens in self.decoder_input_words] if kind == "decoder" else sources
        return [word.tokens for word in self.target_words], columns

    @property
    def decoder_input_words(self) -> list[tuple[str, tuple[int, ...]]]:
        """The words of the decoder's inputs, each with the indices of its tokens among them.

        The last token of the target is no input.
        """
        words = [(word.text, word.tokens) for word in self.source_words] if self.is_decoder_only else []
        last = len(self.target_offsets) - 1
        for word in self.target_words:
            tokens = tuple(self.prompt_tokens + token for token in word.tokens if token != last)
            if tokens:
                words.append((word.text, tokens))
        return words

    def axes(self, kind: Kind) -> MapAxes:
        sources = _are_special(self.source_offsets)
        if kind in ENCODER_KINDS:
            return MapAxes(sources, None) if kind == "encoder_slots" else MapAxes(sources, sources, 0)
        targets = _are_special(self.target_offsets)
        if kind == "cross":
            return MapAxes(targets, sources)
        prompt = sources if self.is_decoder_only else np.ones(self.prompt_tokens, np.bool_)
        return MapAxes(targets, np.concatenate([prompt, targets[:-1]]), self.prompt_tokens - 1)


def _are_special(offsets: Offsets) -> NDArray[np.bool_]:
    return np.array([one is None for one in offsets], np.bool_)


@dataclass(frozen=True)
class WordMap:
    """Mean attention weights of some heads between words."""

    source_words: Sequence[Word]
    target_words: Sequence[Word]
    weights: NDArray[np.float32]  # (target words, source words)


@dataclass(frozen=True)
class Selection:
    """The selected layers and heads of one kind of attention maps."""

    attention: Attention
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    reduce: Reduce
    units: Units
    statistics: bool

    def count(self, source_tokens: int, prompt_tokens: int, target_tokens: int) -> int:
        """Return the number of values in the response.

        Args:
            source_tokens: length of the source.
            prompt_tokens: number of decoder inputs that precede the target.
            target_tokens: length of the target.
        """
        return self.num_maps * self.positions(source_tokens, prompt_tokens, target_tokens)

    def positions(self, source_tokens: int, prompt_tokens: int, target_tokens: int) -> int:
        """Return the number of values in one map: rows times columns."""
        rows = source_tokens if self.attention.kind in ENCODER_KINDS else target_tokens
        columns = self.attention.columns or source_tokens
        if self.attention.kind == "decoder":
            columns = prompt_tokens - 1 + target_tokens
        return rows * columns

    def bytes_per_column(self, encoding: Encoding) -> int:
        """Return the memory of one column of a row over all layers and heads.

        It consists of the recorded float32 values of all heads and the selected values in the
        response.
        """
        recorded = np.dtype(np.float32).itemsize * self.attention.layers * self.attention.heads
        return recorded + BYTES_PER_NUMBER[encoding] * self.num_maps

    @property
    def num_maps(self) -> int:
        """Number of maps in the response, over layers and heads."""
        return len(self.layers) * (len(self.heads) if self.reduce == "none" else 1)

    def map_of(
        self,
        maps: NDArray[np.float32],
        encoding: Encoding,
        layout: MapLayout | None,
        alignment: NDArray[np.float32] | None,
    ) -> AttentionMap:
        """Return the selected part of the maps of all layers and heads.

        Args:
            maps: (L, H, rows, columns).
            encoding: format of the values.
            layout: the tokens and words of the maps; not needed for maps of tokens without
                statistics.
            alignment: weights (rows, columns) of the heads that align words, for the statistics of
                cross-attention.
        """
        kind = self.attention.kind
        chosen = maps[np.ix_(self.layers, self.heads)]
        if self.units == "words":
            assert layout is not None, "maps of words need the words"
            chosen = merge_weights(chosen, *layout.groups(kind))
        if self.reduce != "none":
            reduction = np.mean if self.reduce == "mean" else np.max
            chosen = reduction(chosen, axis=1, keepdims=True)
        statistics: list[HeadStatistics] | None = None
        if self.statistics:
            assert layout is not None, "statistics need the special tokens"
            statistics = head_statistics(maps, self.layers, self.heads, layout.axes(kind), alignment)
        return AttentionMap(
            kind=kind,
            layers=self.layers,
            heads=self.heads,
            rows=chosen.shape[2],
            columns=chosen.shape[3],
            columns_are=None if self.attention.columns is None else "slots",
            window=window_of(self.attention),
            shape=chosen.shape,
            # The maximum over several heads does not sum to 1, and neither do words without the
            # special tokens.
            normalized=self.attention.normalized
            and (self.reduce != "max" or len(self.heads) == 1)
            and (self.units == "tokens" or kind == "encoder_slots"),
            statistics=statistics,
            data=numbers(chosen, encoding),
        )


class MapWriter:
    """Builds the attention maps of one response, and rejects the response if it is too large."""

    def __init__(
        self,
        call: Call,
        model: ServedModel,
        selection: AttentionSelection,
        languages: LanguageChoice = NO_LANGUAGES,
    ) -> None:
        """Select the maps of a call.

        Rows of the forced tokens of the target language are left out; these tokens count as the
        last ones of the decoder's prompt.

        Raises:
            ApiError: the model has no attention maps, or not the selected kind, layer or head.
        """
        if not model.manifest.attention:
            raise ApiError("unsupported_parameter", f"{model.name} has no attention maps.", field="return_attention")
        self._model = model
        self._encoding = selection.encoding
        self._language_ids = languages.target_prefix
        self._num_prefix = len(languages.source_prefix)
        self._units = selection.units
        self._has_layout = selection.units == "words" or selection.statistics
        self._selections = _select(model, selection)
        self._sources: list[tuple[Offsets, list[Word]]] = []  # of each input, see `read_offsets`
        self._count = 0  # number of values returned so far
        self._memory = call.response_memory
        self._bytes: dict[str, int] = {
            one.attention.kind: one.bytes_per_column(selection.encoding) for one in self._selections
        }
        per_column: dict[str, int] = {one.attention.kind: one.num_maps for one in self._selections}
        self.budget = MapBudget(MAX_NUMBERS, per_column, self._bytes, self._memory.use)  # shared by the call's requests

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(selection.attention.kind for selection in self._selections)

    def check(self, requests: Sequence[SourceRequest]) -> None:
        """Reject a response that is certain to be too large, and reserve memory for it otherwise.

        Raises:
            ApiError: `response_too_large` or `overloaded`.
        """
        self._check_count(sum(map(self._min_count, requests)))
        self._memory.reserve(sum(map(self._min_bytes, requests)))
        for request in requests:
            if isinstance(request, GenerateRequest):  # the encoder's maps are repeated for each target
                num_targets = request.num_targets
                self.budget.remaining -= num_targets * self._count_of(request, 0)
                self.budget.use_bytes(num_targets * self._bytes_of(request, 0))

    def _min_count(self, request: SourceRequest) -> int:
        if isinstance(request, EncodeRequest):
            return self._count_of(request, 0)
        return request.num_targets * self._count_of(request, self._min_target_tokens(request))

    def _min_bytes(self, request: SourceRequest) -> int:
        """Return the minimum memory of a request's maps in bytes."""
        of_encoder = self._bytes_of(request, 0)
        if isinstance(request, EncodeRequest):
            return of_encoder
        of_hypothesis = self._bytes_of(request, self._min_target_tokens(request)) - of_encoder
        return request.num_targets * of_encoder + request.parameters.num_beams * of_hypothesis

    async def read_offsets(self, call: Call, inputs: Texts | Prompt, sources: Sequence[Ids]) -> None:
        """Find the character ranges and the words of the source tokens, if the maps need them.

        Args:
            call: the call.
            inputs: its inputs. The ranges of a dialogue or of a pair of texts belong to the decoded
                tokens.
            sources: the source ids of each input.

        Raises:
            ApiError: `deadline_exceeded`.
        """
        if not self._has_layout:
            return
        tokenizer, num_prefix = self._model.source_tokenizer, self._num_prefix

        def run() -> list[tuple[Offsets, list[Word]]]:
            return [
                source_words(tokenizer, source, num_prefix, _single_text(inputs, index))
                for index, source in enumerate(sources)
            ]

        is_short = sum(map(len, sources)) <= INLINE_TOKENS
        self._sources = call.tokenize_now(run) if is_short else await call.tokenize(run)

    def write(self, index: int, request: GenerateRequest, target: Target, text: str) -> TargetAttention:
        """Return the maps of one target.

        Args:
            index: index of the input.
            request: the request.
            target: its result.
            text: text of the target.

        Raises:
            ApiError: `response_too_large` if they exceed the limit together with earlier maps.
        """
        num_hidden = len(self._language_ids)
        attention = {
            kind: maps if kind in ENCODER_KINDS else maps[:, :, num_hidden:] for kind, maps in target.attention.items()
        }
        ids = [token.id for token in target.tokens[num_hidden:]]
        layout = self._layout(index, request, ids, text) if self._has_layout else None
        maps = self._maps(request, len(target.tokens), attention, layout)
        if layout is not None and self._units == "words":
            words = [word.text for word in layout.source_words], maps, [word.text for word in layout.target_words]
            return TargetAttention(*words, [text for text, _ in layout.decoder_input_words])
        tokenizer = self._model.target_tokenizer
        names = [tokenizer.name(id_) for id_ in ids]
        inputs = [*map(tokenizer.name, self._decoder_prompt_ids(request)), *names[:-1]]
        return TargetAttention(self._source_tokens(request), maps, names, inputs)

    def word_map(self, index: int, request: GenerateRequest, target: Target, text: str) -> WordMap:
        """Return the mean weights between words in the selected layer; arguments as in `write`.

        Raises:
            ApiError: `response_too_large` if they exceed the limit together with earlier maps.
        """
        (one,) = self._selections
        kind, num_hidden = one.attention.kind, len(self._language_ids)
        self._count += self._count_of(request, len(target.tokens))
        self._check_count(self._count)
        layout = self._layout(index, request, [token.id for token in target.tokens[num_hidden:]], text)
        maps = target.attention[kind][np.ix_(one.layers, one.heads)][:, :, num_hidden:]
        (weights,) = merge_weights(maps, *layout.groups(kind)).mean(axis=1)
        return WordMap(layout.source_words, layout.target_words, weights)

    def write_encoded(self, index: int, request: EncodeRequest, encoded: Encoded) -> EncoderAttention:
        """Return the encoder maps of one input.

        Raises:
            ApiError: `response_too_large` if they exceed the limit together with earlier maps.
        """
        layout = self._layout(index, request) if self._has_layout else None
        maps = self._maps(request, 0, encoded.attention, layout)
        if layout is not None and self._units == "words":
            return EncoderAttention([word.text for word in layout.source_words], maps)
        return EncoderAttention(self._source_tokens(request), maps)

    def _layout(self, index: int, request: SourceRequest, ids: Sequence[int] = (), text: str = "") -> MapLayout:
        source_offsets, source_words = self._sources[index]
        target_offsets = self._model.target_tokenizer.decoded_offsets(ids)
        return MapLayout(
            source_offsets,
            source_words,
            target_offsets,
            words_of(text, clip_offsets(target_offsets, len(text))),
            len(self._decoder_prompt_ids(request)),
            self._model.manifest.is_decoder_only,
        )

    def _decoder_prompt_ids(self, request: SourceRequest) -> Sequence[int]:
        return (*self._model.manifest.decoder_prompt_ids(request.source_ids), *self._language_ids)

    def _source_tokens(self, request: SourceRequest) -> list[str]:
        return [self._model.source_tokenizer.name(id_) for id_ in request.source_ids]

    def _maps(
        self,
        request: SourceRequest,
        target_tokens: int,
        attention: Mapping[str, NDArray[np.float32]],
        layout: MapLayout | None,
    ) -> list[AttentionMap]:
        self._count += self._count_of(request, target_tokens)
        self._check_count(self._count)
        maps = []
        for one in self._selections:
            found, alignment = attention[one.attention.kind], None
            if one.statistics and one.attention.kind == "cross":
                layer, heads = self._model.manifest.alignment_heads
                alignment = found[layer, list(heads)].mean(axis=0)
            maps.append(one.map_of(found, self._encoding, layout, alignment))
        return maps

    def _count_of(self, request: SourceRequest, target_tokens: int) -> int:
        source_tokens, prompt_tokens = len(request.source_ids), len(self._decoder_prompt_ids(request))
        num_rows = max(0, target_tokens - len(self._language_ids))
        return sum(one.count(source_tokens, prompt_tokens, num_rows) for one in self._selections)

    def _bytes_of(self, request: SourceRequest, target_tokens: int) -> int:
        source_tokens, prompt_tokens = len(request.source_ids), len(self._decoder_prompt_ids(request))
        num_rows = max(0, target_tokens - len(self._language_ids))
        return sum(
            self._bytes[one.attention.kind] * one.positions(source_tokens, prompt_tokens, num_rows)
            for one in self._selections
        )

    def _min_target_tokens(self, request: GenerateRequest) -> int:
        """Return the minimum number of target tokens; a stop string may match after one."""
        parameters, num_forced = request.parameters, len(request.target_prefix)
        least_new = min(parameters.num_new_tokens, 1 if request.stop else max(1, parameters.min_new_tokens))
        return min(num_forced + least_new, self._model.manifest.max_new_tokens_for(len(request.source_ids)))

    def _check_count(self, count: int) -> None:
        check_size("attention maps", count, "Select fewer kinds, layers or heads, or reduce the heads.")


def source_words(
    tokenizer: TextTokenizer, ids: Sequence[int], num_prefix: int, text: str | None
) -> tuple[Offsets, list[Word]]:
    """Return the character range of each source token, and the words of the source.

    Args:
        tokenizer: tokenizer of the source.
        ids: ids of the source.
        num_prefix: number of ids before those of the text.
        text: the input. If it is None, ranges and words are those of the decoded ids.
    """
    own = ids[num_prefix:]
    text, offsets = tokenizer.decode_parts(own) if text is None else (text, tokenizer.offsets(text, len(own)))
    offsets = [*[None] * num_prefix, *offsets]
    return offsets, words_of(text, offsets)


def clip_offsets(offsets: Offsets, length: int) -> Offsets:
    """Return the ranges in a text that was cut before a stop string; None for tokens after it."""
    return [None if one is None or one[0] >= length else (one[0], min(one[1], length)) for one in offsets]


def _single_text(inputs: Texts | Prompt, index: int) -> str | None:
    """Return an input; None if it is a dialogue or a pair of texts."""
    if isinstance(inputs, Prompt) or (inputs.seconds is not None and inputs.seconds[index] is not None):
        return None
    return inputs.texts[index]


def _select(model: ServedModel, selection: AttentionSelection) -> list[Selection]:
    available = {attention.kind: attention for attention in model.manifest.attention}
    selections = []
    for position, kind in enumerate(selection.kinds or available):
        if kind not in available:
            message = f"{model.name} has no attention maps of kind {kind}; available: {', '.join(available)}."
            raise ApiError("unsupported_parameter", message, field="kinds", index=position)
        maps = available[kind]
        layers = _select_indices(selection.layers, maps.layers, "layers", kind)
        selections.append(
            Selection(
                maps,
                layers,
                _select_indices(selection.heads, maps.heads, "heads", kind),
                selection.reduce,
                selection.units,
                selection.statistics,
            )
        )
    return selections


def _select_indices(indices: Sequence[int] | None, available: int, field: str, kind: str) -> tuple[int, ...]:
    """Return non-negative indices; negative ones count from the end, as in Python.

    Raises:
        ApiError: an index is out of range, or two select the same layer or head.
    """
    if indices is None:
        return tuple(range(available))
    selected: list[int] = []
    for position, index in enumerate(indices):
        if not -available <= index < available:
            message = f"It must be from {-available} to {available - 1} for {kind} attention, got {index}."
            raise ApiError("invalid_parameter", message, field=field, index=position)
        resolved = index % available
        if resolved in selected:
            same = indices[selected.index(resolved)]
            message = f"It must not repeat a {field[:-1]} of {kind} attention: {same} and {index} are the same."
            raise ApiError("invalid_parameter", message, field=field, index=position)
        selected.append(resolved)
    return tuple(selected)
