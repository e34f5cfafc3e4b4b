"""Attention maps of a response: their selection, their size, and the form in which they are returned."""

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
from service.inference.call import Call
from service.inference.results import BYTES_PER_NUMBER, MAX_NUMBERS, Numbers, check_size, numbers
from service.inference.service import ServedModel
from service.parameters import AttentionSelection, Encoding, Kind, Reduce


@dataclass(frozen=True)
class AttentionWindow:
    """The columns that each row of a map can attend to."""

    centre: Annotated[
        Literal["monotonic", "predicted"],
        Field(description="p is the row's own number, from 0 and at most the last column's; or the model computes it."),
    ]
    radius: Annotated[
        int, Field(description="A row attends to the columns p - radius to p + radius; all others are 0.")
    ]


def window_of(attention: Attention) -> AttentionWindow | None:
    window = attention.window
    return None if window is None else AttentionWindow(window.centre, window.radius)


@dataclass(frozen=True)
class AttentionMap:
    """The selected maps of one kind."""

    kind: Kind
    layers: Sequence[int]
    heads: Sequence[int]
    rows: int
    columns: int
    columns_are: Annotated[Literal["slots"] | None, Field(description="Only if columns are not tokens.")]
    window: Annotated[AttentionWindow | None, Field(description="Only if a row attends to a part of the columns.")]
    shape: tuple[int, int, int, int]
    normalized: Annotated[bool, Field(description="True if each row sums to 1.")]
    data: Numbers


@dataclass(frozen=True)
class EncoderAttention:
    """Attention maps of an encoder, with the tokens of their rows and columns."""

    source_tokens: list[str]
    maps: list[AttentionMap]


@dataclass(frozen=True)
class TargetAttention(EncoderAttention):
    """Attention maps of one target, with the tokens of their rows and columns."""

    target_tokens: Annotated[list[str], Field(description="Those of the prefix first.")]
    decoder_input_tokens: list[str]


@dataclass(frozen=True)
class Selection:
    """The selected part of one kind's maps."""

    attention: Attention
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    reduce: Reduce

    def count(self, source_tokens: int, beginning_tokens: int, target_tokens: int) -> int:
        """Numbers in the response; `beginning_tokens` are those that the decoder reads before it writes."""
        return self.shown_maps * self.positions(source_tokens, beginning_tokens, target_tokens)

    def positions(self, source_tokens: int, beginning_tokens: int, target_tokens: int) -> int:
        """Numbers in one map."""
        rows = source_tokens if self.attention.kind in ENCODER_KINDS else target_tokens
        columns = self.attention.columns or source_tokens
        if self.attention.kind == "decoder":
            columns = beginning_tokens - 1 + target_tokens
        return rows * columns

    def bytes_per_column(self, encoding: Encoding) -> int:
        """Bytes that one column of a row takes, over layers and heads: as float32 of all, and in the response."""
        recorded = np.dtype(np.float32).itemsize * self.attention.layers * self.attention.heads
        return recorded + BYTES_PER_NUMBER[encoding] * self.shown_maps

    @property
    def shown_maps(self) -> int:
        """How many maps stand in the answer, of all layers and heads."""
        return len(self.layers) * (len(self.heads) if self.reduce == "none" else 1)

    def map_of(self, maps: NDArray[np.float32], encoding: Encoding) -> AttentionMap:
        """Return the selected part of `maps`, (L, H, rows, columns) of all layers and heads."""
        chosen = maps[np.ix_(self.layers, self.heads)]
        if self.reduce != "none":
            reduction = np.mean if self.reduce == "mean" else np.max
            chosen = reduction(chosen, axis=1, keepdims=True)
        return AttentionMap(
            kind=self.attention.kind,
            layers=self.layers,
            heads=self.heads,
            rows=chosen.shape[2],
            columns=chosen.shape[3],
            columns_are=None if self.attention.columns is None else "slots",
            window=window_of(self.attention),
            shape=chosen.shape,
            # The largest of several rows that sum to 1 does not sum to 1.
            normalized=self.attention.normalized and (self.reduce != "max" or len(self.heads) == 1),
            data=numbers(chosen, encoding),
        )


class MapWriter:
    """Makes the attention maps of one response, and refuses the response as soon as it is too large."""

    def __init__(self, call: Call, model: ServedModel, selection: AttentionSelection) -> None:
        """Select the maps of a call.

        Raises:
            ApiError: the model has no attention maps, or no such kind, layer or head.
        """
        if not model.manifest.attention:
            raise ApiError("unsupported_parameter", f"{model.name} has no attention maps.", field="return_attention")
        self._model = model
        self._encoding = selection.encoding
        self._selections = _select(model, selection)
        self._count = 0  # numbers that have been written
        self._memory = call.response_memory
        self._bytes: dict[str, int] = {
            one.attention.kind: one.bytes_per_column(selection.encoding) for one in self._selections
        }
        per_column: dict[str, int] = {one.attention.kind: one.shown_maps for one in self._selections}
        self.budget = MapBudget(MAX_NUMBERS, per_column, self._bytes, self._memory.use)  # of the call's requests

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(selection.attention.kind for selection in self._selections)

    def check(self, requests: Sequence[SourceRequest]) -> None:
        """Refuse what is certain to be too large before anything is computed, and reserve memory for what is not.

        Raises:
            ApiError: `response_too_large`, `overloaded`.
        """
        self._check_count(sum(map(self._least_count, requests)))
        self._memory.reserve(sum(map(self._least_bytes, requests)))
        for request in requests:
            if isinstance(request, GenerateRequest):  # the encoder's maps are shown with each target
                num_targets = request.num_targets
                self.budget.left -= num_targets * self._count_of(request, 0)
                self.budget.use_bytes(num_targets * self._bytes_of(request, 0))

    def _least_count(self, request: SourceRequest) -> int:
        if isinstance(request, EncodeRequest):
            return self._count_of(request, 0)
        return request.num_targets * self._count_of(request, self._least_target_tokens(request))

    def _least_bytes(self, request: SourceRequest) -> int:
        """Bytes that the maps of a request are certain to take."""
        of_encoder = self._bytes_of(request, 0)
        if isinstance(request, EncodeRequest):
            return of_encoder
        of_hypothesis = self._bytes_of(request, self._least_target_tokens(request)) - of_encoder
        return request.num_targets * of_encoder + request.parameters.num_beams * of_hypothesis

    def write(self, request: GenerateRequest, target: Target) -> TargetAttention:
        """Return the maps of one target.

        Raises:
            ApiError: `response_too_large`, together with those that were returned before.
        """
        maps = self._maps(request, len(target.tokens), target.attention)
        tokenizer = self._model.target_tokenizer
        beginning = self._model.manifest.beginning(request.source_ids)
        names = [tokenizer.name(token.id) for token in target.tokens]
        inputs = [*map(tokenizer.name, beginning), *names[:-1]]
        return TargetAttention(self._source_tokens(request), maps, names, inputs)

    def write_encoded(self, request: EncodeRequest, encoded: Encoded) -> EncoderAttention:
        """Return the maps of one input of an encoder.

        Raises:
            ApiError: `response_too_large`, together with those that were returned before.
        """
        return EncoderAttention(self._source_tokens(request), self._maps(request, 0, encoded.attention))

    def _source_tokens(self, request: SourceRequest) -> list[str]:
        return [self._model.source_tokenizer.name(id_) for id_ in request.source_ids]

    def _maps(
        self, request: SourceRequest, target_tokens: int, attention: Mapping[str, NDArray[np.float32]]
    ) -> list[AttentionMap]:
        self._count += self._count_of(request, target_tokens)
        self._check_count(self._count)
        return [one.map_of(attention[one.attention.kind], self._encoding) for one in self._selections]

    def _count_of(self, request: SourceRequest, target_tokens: int) -> int:
        source_tokens = len(request.source_ids)
        beginning_tokens = len(self._model.manifest.beginning(request.source_ids))
        return sum(one.count(source_tokens, beginning_tokens, target_tokens) for one in self._selections)

    def _bytes_of(self, request: SourceRequest, target_tokens: int) -> int:
        source_tokens = len(request.source_ids)
        beginning_tokens = len(self._model.manifest.beginning(request.source_ids))
        return sum(
            self._bytes[one.attention.kind] * one.positions(source_tokens, beginning_tokens, target_tokens)
            for one in self._selections
        )

    def _least_target_tokens(self, request: GenerateRequest) -> int:
        """Target tokens that a request is certain to have; a stop string may end it at the first generated one."""
        parameters, num_forced = request.parameters, len(request.target_prefix)
        least_new = min(parameters.num_new_tokens, 1 if request.stop else max(1, parameters.min_new_tokens))
        return min(num_forced + least_new, self._model.manifest.room(len(request.source_ids)))

    def _check_count(self, count: int) -> None:
        check_size("maps", count, "Choose fewer kinds, layers or heads, or reduce the heads.")


def _select(model: ServedModel, selection: AttentionSelection) -> list[Selection]:
    available = {attention.kind: attention for attention in model.manifest.attention}
    selections = []
    for place, kind in enumerate(selection.kinds or available):
        if kind not in available:
            message = f"{model.name} has no attention maps of this kind; it has {', '.join(available)}."
            raise ApiError("unsupported_parameter", message, field="kinds", index=place)
        maps = available[kind]
        layers = _chosen(selection.layers, maps.layers, "layers", kind)
        selections.append(
            Selection(maps, layers, _chosen(selection.heads, maps.heads, "heads", kind), selection.reduce)
        )
    return selections


def _chosen(indices: Sequence[int] | None, available: int, field: str, kind: str) -> tuple[int, ...]:
    if indices is None:
        return tuple(range(available))
    for place, index in enumerate(indices):
        if index >= available:
            message = f"The model's {kind} attention has only 0 to {available - 1}."
            raise ApiError("invalid_parameter", message, field=field, index=place)
    return tuple(indices)
