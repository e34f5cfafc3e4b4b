"""Fault injection: wrappers of a runner and a tokenizer that fail at a given call."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sightline.base.text.tokenizer import TextTokenizer, TokenSpan
from sightline.service.runtime.runner import Array, Bools, Int32, Int64, Runner

GraphName = Literal["encoder", "step"]
# "raise": one call raises. "poison": all calls with the same row or example raise, as if its input
# were the cause. "nan": the scores of one row or example are NaN. "hang": the call waits for
# `release`.
FaultKind = Literal["raise", "poison", "nan", "hang"]


class FaultError(RuntimeError):
    """An injected fault."""


class Panic(BaseException):
    """A panic of a library that is written in Rust: no subclass of Exception."""


@dataclass
class Fault:
    """A fault at call `call` of a graph, counted from 1, for one row or example; -1 is the last."""

    graph: GraphName
    call: int
    kind: FaultKind
    row: int = -1
    release: threading.Event = field(default_factory=threading.Event)
    has_happened: bool = False


class FaultyRunner:
    """Wraps a runner and injects one fault at a time."""

    def __init__(self, inner: Runner, fault: Fault | None = None) -> None:
        self._inner = inner
        self.arm(fault)

    def arm(self, fault: Fault | None) -> None:
        """Set the fault and restart the count of calls; None removes the fault."""
        self._fault = fault or Fault("step", 0, "raise")
        self.num_calls: dict[GraphName, int] = {"encoder": 0, "step": 0}
        self._poisoned_row: int | None = None
        self._poisoned_source: list[int] | None = None

    def __getattr__(self, name: str) -> Any:
        """Leave all other methods to the wrapped runner."""
        return getattr(self._inner, name)

    def _is_due(self, graph: GraphName) -> bool:
        """Count a call; raise or hang on the fault, or return True if its result must be NaN."""
        self.num_calls[graph] += 1
        fault = self._fault
        if (fault.graph, fault.call) != (graph, self.num_calls[graph]):
            return False
        fault.has_happened = True
        if fault.kind == "raise":
            raise FaultError(graph)
        if fault.kind == "hang":
            fault.release.wait()
        return fault.kind != "hang"

    def terminate(self) -> None:
        """Do nothing: the call that hangs is no graph of ONNX Runtime."""

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        sources = [ids[:length].tolist() for ids, length in zip(source_ids, source_lengths, strict=True)]
        is_due = self._is_due("encoder")
        if is_due and self._fault.kind == "poison":
            self._poisoned_source = sources[self._fault.row]
        if self._poisoned_source in sources:
            raise FaultError("encoder")
        given = self._inner.run_encoder(source_ids, source_lengths, outputs)
        return _poisoned(given, self._fault.row) if is_due else given

    def step(
        self,
        token_ids: Int64,
        lengths: Int32,
        source_lengths: Int32,
        outputs: Sequence[str],
        *,
        first: int = 0,
        whole: Bools | None = None,
    ) -> Mapping[str, Array]:
        last = first + len(token_ids) - 1
        is_due = self._is_due("step")
        if is_due and self._fault.kind == "poison":
            self._poisoned_row = range(first, last + 1)[self._fault.row]
        if self._poisoned_row is not None and first <= self._poisoned_row <= last:
            if first == last:  # the row ran alone: its next sequence is another one
                self._poisoned_row = None
            raise FaultError("step")
        given = self._inner.step(token_ids, lengths, source_lengths, outputs, first=first, whole=whole)
        return _poisoned(given, self._fault.row) if is_due else given


def _poisoned(outputs: Mapping[str, Array], index: int) -> dict[str, Array]:
    """Return the outputs with NaN for one row or example."""
    given = {name: array.copy() for name, array in outputs.items()}
    for array in given.values():
        if np.issubdtype(array.dtype, np.floating):
            array[index] = np.nan
    return given


class FaultyTokenizer(TextTokenizer):
    """Wraps a tokenizer and raises at one call of a method."""

    def __init__(self, inner: TextTokenizer) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner = inner
        self.arm("", 0)

    def arm(self, method: str, call: int, error: type[BaseException] = FaultError) -> None:
        """Set the method and the number of the call that raises, counted from 1 from now on."""
        self._method = method
        self._error = error
        self._call = call
        self._num_calls = 0
        self.has_happened = False

    def _count(self, method: str) -> None:
        if method != self._method:
            return
        self._num_calls += 1
        if self._num_calls == self._call:
            self.has_happened = True
            raise self._error(method)

    def encode(self, text: str, *, add_special_tokens: bool = True, is_start: bool = True) -> list[int]:
        self._count("encode")
        return self._inner.encode(text, add_special_tokens=add_special_tokens, is_start=is_start)

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        self._count("encode_spans")
        return self._inner.encode_spans(text, add_special_tokens=add_special_tokens)

    def name(self, token_id: int) -> str:
        self._count("name")
        return self._inner.name(token_id)

    def bytes_of(self, token_id: int, *, is_first: bool = False) -> bytes:
        self._count("bytes_of")
        return self._inner.bytes_of(token_id, is_first=is_first)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self._count("decode")
        return self._inner.decode(ids, **options)
