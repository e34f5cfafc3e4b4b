"""The attention maps of an answer: which of them are wanted, how large they are, and how they are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.admission import ResponseReservation
from service.bundle import Attention
from service.calls import Call
from service.engine.attention import ENCODER_KINDS
from service.engine.request import Encoded, EncodeRequest, GenerateRequest, MapBudget, SourceRequest, Target
from service.errors import ApiError
from service.outputs import BYTES_PER_NUMBER, MAX_NUMBERS, check_size, numbers
from service.parameters import Encoding, MapSelection, Reduce
from service.serving import ServedModel


@dataclass(frozen=True)
class Selection:
    """Which part of one kind's maps is wanted."""

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

    def entry(self, maps: NDArray[np.float32], encoding: Encoding) -> dict[str, Any]:
        """One of the answer's `maps`; `maps` is (L, H, rows, columns) of all layers and heads."""
        chosen = maps[np.ix_(self.layers, self.heads)]
        if self.reduce != "none":
            reduction = np.mean if self.reduce == "mean" else np.max
            chosen = reduction(chosen, axis=1, keepdims=True)
        return {
            "kind": self.attention.kind,
            "layers": self.layers,
            "heads": self.heads,
            "rows": chosen.shape[2],
            "columns": chosen.shape[3],
            **({} if self.attention.columns is None else {"columns_are": "slots"}),
            **({} if self.attention.window is None else {"window": self.attention.window.model_dump()}),
            "shape": chosen.shape,
            # The largest of several rows that sum to 1 does not sum to 1.
            "normalized": self.attention.normalized and (self.reduce != "max" or len(self.heads) == 1),
            "data": numbers(chosen, encoding),
        }


class MapWriter:
    """Writes the maps of one answer, and refuses it as soon as it is too large."""

    def __init__(self, model: ServedModel, wanted: MapSelection, memory: ResponseReservation, path: str = "") -> None:
        """Select the maps of a call.

        Args:
            model: which model.
            wanted: the maps that the call asks for.
            memory: of the call's response.
            path: that of `wanted` in an error, with a dot at its end.

        Raises:
            ApiError: the model has no such kind, layer or head.
        """
        self._model = model
        self._encoding = wanted.encoding
        self._selections = _select(model, wanted, path)
        self._count = 0  # numbers that have been written
        self._memory = memory
        self._bytes: dict[str, int] = {
            one.attention.kind: one.bytes_per_column(wanted.encoding) for one in self._selections
        }
        per_column: dict[str, int] = {one.attention.kind: one.shown_maps for one in self._selections}
        self.budget = MapBudget(MAX_NUMBERS, per_column, self._bytes, memory.use)  # of the call's requests

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
                num_targets = request.parameters.num_return_sequences
                self.budget.left -= num_targets * self._count_of(request, 0)
                self.budget.use_bytes(num_targets * self._bytes_of(request, 0))

    def _least_count(self, request: SourceRequest) -> int:
        if isinstance(request, EncodeRequest):
            return self._count_of(request, 0)
        return request.parameters.num_return_sequences * self._count_of(request, _least_target_tokens(request))

    def _least_bytes(self, request: SourceRequest) -> int:
        """Bytes that the maps of a request are certain to take."""
        of_encoder = self._bytes_of(request, 0)
        if isinstance(request, EncodeRequest):
            return of_encoder
        of_hypothesis = self._bytes_of(request, _least_target_tokens(request)) - of_encoder
        parameters = request.parameters
        return parameters.num_return_sequences * of_encoder + parameters.num_beams * of_hypothesis

    def write(self, request: GenerateRequest, target: Target) -> dict[str, Any]:
        """The maps of one target, with the tokens that their rows and columns stand for.

        Raises:
            ApiError: `response_too_large`, together with what was written before.
        """
        maps = self._entries(request, len(target.tokens), target.attention)
        tokenizer = self._model.target_tokenizer
        beginning = self._model.manifest.beginning(request.source_ids)
        names = [tokenizer.name(token.id) for token in target.tokens]
        return {
            "source_tokens": self._source_tokens(request),
            "target_tokens": names,
            "decoder_input_tokens": [*map(tokenizer.name, beginning), *names[:-1]],
            "maps": maps,
        }

    def write_encoded(self, request: EncodeRequest, encoded: Encoded) -> dict[str, Any]:
        """As `write`, of the encoder alone."""
        maps = self._entries(request, 0, encoded.attention)
        return {"source_tokens": self._source_tokens(request), "maps": maps}

    def _source_tokens(self, request: SourceRequest) -> list[str]:
        return [self._model.source_tokenizer.name(id_) for id_ in request.source_ids]

    def _entries(
        self, request: SourceRequest, target_tokens: int, attention: Mapping[str, NDArray[np.float32]]
    ) -> list[dict[str, Any]]:
        self._count += self._count_of(request, target_tokens)
        self._check_count(self._count)
        return [one.entry(attention[one.attention.kind], self._encoding) for one in self._selections]

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

    def _check_count(self, count: int) -> None:
        check_size("maps", count, "Choose fewer kinds, layers or heads, or reduce the heads.")


def map_writer(call: Call, model: ServedModel, wanted: MapSelection | None, param: str) -> MapWriter | None:
    """Return the writer of the maps that a field asks for; None if it asks for none.

    Args:
        call: in which they are returned.
        model: which model.
        wanted: the field's value.
        param: its path in an error.

    Raises:
        ApiError: the model has no maps, or no such kind, layer or head.
    """
    if wanted is None:
        return None
    if not model.manifest.attention:
        raise ApiError("unsupported_parameter", f"{model.name} has no attention maps.", param=param)
    return MapWriter(model, wanted, call.response_memory, f"{param}.")


def _least_target_tokens(request: GenerateRequest) -> int:
    """Target tokens that a request is certain to have; a stop string may end it at the first generated one."""
    parameters = request.parameters
    least_new = min(parameters.max_new_tokens, 1 if request.stop else max(1, parameters.min_new_tokens))
    return len(request.target_prefix) + least_new


def _select(model: ServedModel, wanted: MapSelection, path: str) -> list[Selection]:
    available = {attention.kind: attention for attention in model.manifest.attention}
    selections = []
    for place, kind in enumerate(wanted.kinds or available):
        if kind not in available:
            message = f"{model.name} has no attention maps of this kind; it has {', '.join(available) or 'none'}."
            raise ApiError("unsupported_parameter", message, param=f"{path}kinds[{place}]")
        maps = available[kind]
        layers = _chosen(wanted.layers, maps.layers, f"{path}layers", kind)
        selections.append(
            Selection(maps, layers, _chosen(wanted.heads, maps.heads, f"{path}heads", kind), wanted.reduce)
        )
    return selections


def _chosen(wanted: Sequence[int] | None, available: int, param: str, kind: str) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(available))
    for place, index in enumerate(wanted):
        if index >= available:
            message = f"The model's {kind} attention has only 0 to {available - 1}."
            raise ApiError("invalid_parameter", message, param=f"{param}[{place}]")
    return tuple(wanted)
