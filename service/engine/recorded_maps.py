"""Collect attention maps: complete maps of the encoder, and rows of the decoder.

Each decoder step adds one row. A prefill adds the rows of the prompt if the request asks for them.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import Manifest
from sightline.service.engine.request import GenerateRequest, MapPart, Request
from sightline.service.runtime.runner import Array

Maps = NDArray[np.float32]

ENCODER_KINDS = ("encoder", "encoder_slots")
STEP_KINDS = ("cross", "decoder")
LOGGED_BYTES = 1024 * 1024  # memory of a log from which on it is full


def encoder_maps(manifest: Manifest, encoded: Mapping[str, Array], index: int, request: Request) -> dict[str, Maps]:
    """Return maps (L, H, S, columns), without padding, that a request selects, by kind."""
    source_tokens, maps = len(request.source_ids), dict[str, Maps]()
    for kind in request.attention.intersection(ENCODER_KINDS):
        attention = manifest.attention_of(kind)
        columns = attention.columns or source_tokens
        layers = [encoded[name][index, :, :source_tokens, :columns] for name in attention.outputs]
        maps[kind] = np.stack(layers).astype(np.float32)
    return maps


def map_outputs(manifest: Manifest, kinds: frozenset[str], among: Sequence[str]) -> frozenset[str]:
    """Return the graph outputs with maps of some kinds among `ENCODER_KINDS` or `STEP_KINDS`."""
    return frozenset(name for kind in kinds.intersection(among) for name in manifest.attention_of(kind).outputs)


def prompt_block(names: Sequence[str], outputs: Mapping[str, Array], num_read: int, part: MapPart | None) -> Maps:
    """Return the decoder maps of one chunk of a prompt, (H, L, S, columns).

    There are `num_read` columns: the prompt tokens read so far, this chunk included.
    """
    # The result is a copy, so that the outputs can be freed.
    return _select(np.concatenate([outputs[name][..., :num_read] for name in names], axis=1, dtype=np.float32), part)


def _select(maps: Maps, part: MapPart | None) -> Maps:
    """Return the heads and layers of a part from maps (H, L, ...)."""
    return maps if part is None else maps[part.heads_and_layers].copy()


class MapRecorder(Mapping[str, Maps]):
    """Attention maps (L, H, rows, columns) of one hypothesis by kind, if the kind is requested.

    They are assembled when they are read. The reader is not the engine's thread, so the assembly
    does not delay running generations.
    """

    def __init__(self, request: GenerateRequest, encoder: Mapping[str, Maps], prompt_tokens: int) -> None:
        """Create a recorder of the maps that a request selects.

        `prompt_tokens` is the number of decoder inputs before the first new token, which is the
        number of columns in the first step's row of a decoder map.
        """
        self._request = request
        self.parts = request.map_parts  # layers and heads to record, by kind; all of a kind that is absent
        self._prompt_tokens = prompt_tokens
        self._encoder = encoder
        # Decoder maps of the prompt's chunks from `prompt_block`, set when the prompt has been
        # read. All hypotheses of a prompt share them. Empty unless they are requested.
        self.prompt_blocks: Sequence[Maps] = ()
        self.steps: dict[str, list[Maps]] = {kind: [] for kind in STEP_KINDS if kind in request.attention}

    def fork(self) -> "MapRecorder":
        """Return a copy that records independently from now on."""
        if not self.steps:
            return self
        other = copy.copy(self)
        other.steps = {kind: steps[:] for kind, steps in self.steps.items()}
        return other

    def extend(self, log: "StepLog", row: int, first: int) -> None:
        """Add the maps of a row from a log, from the step `first` on."""
        for kind, recorded in self.steps.items():
            part = self.parts.get(kind)
            chosen = (slice(None), slice(None)) if part is None else part.heads_and_layers
            columns, growth = self.next_columns(kind), int(kind == "decoder")
            for block, index in log.steps_of(row, first, kind):
                # A copy, so that the maps of other rows, heads and layers can be freed.
                recorded.append(block[(index, *chosen, slice(columns))].copy())
                columns += growth

    def next_columns(self, kind: str) -> int:
        """Return the number of columns of the next row: source tokens, or decoder inputs so far."""
        if kind == "cross":
            return self._request.num_visible_source_tokens
        return self._prompt_tokens + len(self.steps[kind])

    def __iter__(self) -> Iterator[str]:
        return iter([*self._encoder, *self.steps])

    def __len__(self) -> int:
        return len(self._encoder) + len(self.steps)

    def __getitem__(self, kind: str) -> Maps:
        """Return the complete map of one kind, (L, H, rows, columns)."""
        if kind in self._encoder:
            return self._encoder[kind]
        rows = list[Maps]()  # each (H, L, columns)
        if kind == "decoder":
            # A prompt token attends to itself and to the tokens before it.
            prompt = chain.from_iterable(block.transpose(2, 0, 1, 3) for block in self.prompt_blocks)
            rows += [row[:, :, : index + 1] for index, row in enumerate(prompt)][:-1]  # the first step has the last
        rows += self.steps[kind]
        if kind == "cross":
            stacked = np.array(rows, np.float32)
        else:
            stacked = np.zeros((len(rows), *rows[-1].shape), np.float32)
            for number, row in enumerate(rows):
                stacked[number, :, :, : row.shape[2]] = row
        if kind == "cross" and self._request.hidden_source_tokens:
            visible = stacked  # the hidden source tokens have columns of zeros
            stacked = np.zeros((*visible.shape[:-1], len(self._request.source_ids)), np.float32)
            stacked[..., self._request.visible_source_tokens] = visible
        return np.ascontiguousarray(stacked.transpose(2, 1, 0, 3))


class StepLog:
    """Maps of decoder steps that are not yet in the recorders of their rows.

    Recording those of many steps at once takes a fraction of the time that it takes after each one.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        """Create an empty log of the maps in the given outputs of the decoder graph, by kind."""
        self._names = names
        self._outputs = [name for kind in STEP_KINDS for name in names.get(kind, ())]
        self._steps: list[tuple[range, dict[str, Array]]] = []  # rows, and maps by output, later also by kind
        self._step_bytes = 0  # memory of the first step

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, rows: range, outputs: Mapping[str, Array]) -> bool:
        """Append the maps of a step, and return True if the log is full."""
        maps = {name: outputs[name].copy() for name in self._outputs if name in outputs}
        if not self._steps:
            self._step_bytes = sum(array.nbytes for array in maps.values())
        self._steps.append((rows, maps))
        return len(self._steps) * self._step_bytes >= LOGGED_BYTES

    def steps_of(self, row: int, first: int, kind: str) -> list[tuple[Maps, int]]:
        """Return maps (B, H, L, columns) since step `first`, each with the index of a row."""
        names = self._names[kind]
        found = []
        for rows, maps in self._steps[first:]:
            if row in rows:
                if kind not in maps:
                    parts = [maps[name] for name in names]
                    maps[kind] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
                found.append((maps[kind], row - rows.start))
        return found

    def clear(self) -> None:
        self._steps.clear()
