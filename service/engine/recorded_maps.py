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
# Maps of one decoder step that are not copied: all rows that record them keep the whole array, of
# which the heads, layers and columns are extracted when the map is read.
SHARED_BYTES = 64 * 1024
# Maps of one decoder step, (B, H, L, columns), the index of one row of its batch in them, and the
# heads and layers that the map has of them.
StepMap = tuple[Maps, int, MapPart | None]


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
        self.steps: dict[str, list[StepMap]] = {kind: [] for kind in STEP_KINDS if kind in request.attention}

    def fork(self) -> "MapRecorder":
        """Return a copy that records independently from now on."""
        if not self.steps:
            return self
        other = copy.copy(self)
        other.steps = {kind: steps[:] for kind, steps in self.steps.items()}
        return other

    def next_columns(self, kind: str) -> int:
        """Return the number of columns of the next row: source tokens, or decoder inputs so far."""
        return self._columns(kind, len(self.steps[kind]))

    def _columns(self, kind: str, row: int) -> int:
        return self._request.num_visible_source_tokens if kind == "cross" else self._prompt_tokens + row

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
        for number, (block, index, part) in enumerate(self.steps[kind]):
            chosen = (slice(None), slice(None)) if part is None else part.heads_and_layers
            rows.append(block[(index, *chosen, slice(self._columns(kind, number)))])
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


def record_step(
    names: Mapping[str, Sequence[str]], recorders: Sequence[tuple[int, MapRecorder]], outputs: Mapping[str, Array]
) -> None:
    """Append the maps of a decoder step to recorders, each with its row in the outputs."""
    blocks = dict[str, Maps]()
    groups: dict[tuple[str, MapPart | None], list[tuple[int, MapRecorder]]] = {}
    for row, recorder in recorders:
        for kind, steps in recorder.steps.items():
            block, part = blocks.get(kind), recorder.parts.get(kind)
            if block is None:
                maps = [outputs[name] for name in names[kind]]
                block = blocks[kind] = maps[0] if len(maps) == 1 else np.concatenate(maps, axis=2)  # (B, H, L, columns)
            if block.nbytes <= SHARED_BYTES:
                steps.append((block, row, part))
            else:
                groups.setdefault((kind, part), []).append((row, recorder))
    for (kind, part), requesting in groups.items():
        indices = [row for row, _ in requesting]
        columns = max([recorder.next_columns(kind) for _, recorder in requesting])
        # A copy of the requested part, so that the rest of the output can be freed.
        block = blocks[kind] if part is None else blocks[kind][(slice(None), *part.heads_and_layers)]
        block = block[indices, :, :, :columns]
        for index, (_, recorder) in enumerate(requesting):
            recorder.steps[kind].append((block, index, None))
