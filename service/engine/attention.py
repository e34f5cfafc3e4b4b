"""Collects attention maps: whole from the encoder, one row a step from the decoder."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest
from service.engine.request import SourceRequest

Array = NDArray[Any]
Maps = NDArray[np.float32]

ENCODER_KINDS = ("encoder", "encoder_slots")
STEP_KINDS = ("cross", "decoder")
# A step's maps of several rows, (B, H, L, columns), and which row's is meant; it is cut out when it is used.
StepMap = tuple[Maps, int]


def encoder_maps(
    manifest: Manifest, encoded: Mapping[str, Array], index: int, request: SourceRequest
) -> dict[str, Maps]:
    """The encoder's maps that a request wants, of example `index` without its padding: kind to (L, H, S, columns)."""
    source_tokens, maps = len(request.source_ids), dict[str, Maps]()
    for kind in request.attention.intersection(ENCODER_KINDS):
        attention = manifest.attention_of(kind)
        columns = attention.columns or source_tokens
        layers = [encoded[name][index, :, :source_tokens, :columns] for name in attention.outputs]
        maps[kind] = np.stack(layers).astype(np.float32)
    return maps


def map_outputs(manifest: Manifest, kinds: frozenset[str], among: Sequence[str]) -> frozenset[str]:
    """The outputs that hold maps of these kinds; `among` are those of the encoder or of the step."""
    return frozenset(name for kind in kinds.intersection(among) for name in manifest.attention_of(kind).outputs)


class MapRecorder:
    """The maps that one hypothesis keeps; with none wanted it does nothing and costs nothing."""

    def __init__(
        self, kinds: frozenset[str], source_tokens: int, encoder: Mapping[str, Maps], beginning_tokens: int = 1
    ) -> None:
        """What is recorded of one hypothesis.

        Args:
            kinds: of maps.
            source_tokens: columns of a cross map.
            encoder: the maps of the encoder that are wanted, from `encoder_maps`.
            beginning_tokens: what the decoder reads before it writes, the first row's columns of its own map.
        """
        self._source_tokens = source_tokens
        self._beginning_tokens = beginning_tokens
        self._encoder = encoder
        self.steps: dict[str, list[StepMap]] = {kind: [] for kind in STEP_KINDS if kind in kinds}

    def branch(self) -> "MapRecorder":
        """One that has recorded the same and goes its own way."""
        if not self.steps:
            return self
        other = MapRecorder(frozenset(), self._source_tokens, self._encoder, self._beginning_tokens)
        other.steps = {kind: steps[:] for kind, steps in self.steps.items()}
        return other

    def next_columns(self, kind: str) -> int:
        """How many columns the next row of a map has: the source's tokens, or what the decoder has read."""
        return self._columns(kind, len(self.steps[kind]))

    def _columns(self, kind: str, row: int) -> int:
        return self._source_tokens if kind == "cross" else self._beginning_tokens + row

    @property
    def kinds(self) -> list[str]:
        """What was recorded."""
        return [*self._encoder, *self.steps]

    def map_of(self, kind: str) -> Maps:
        """The whole map, (L, H, rows, columns)."""
        if kind in self._encoder:
            return self._encoder[kind]
        steps = self.steps[kind]
        heads, layers = steps[0][0].shape[1:3]
        columns = [self._columns(kind, row) for row in range(len(steps))]
        stacked = np.zeros((len(steps), heads, layers, columns[-1]), np.float32)
        for row, (count, (block, place)) in enumerate(zip(columns, steps, strict=True)):
            stacked[row, :, :, :count] = block[place, :, :, :count]
        return np.ascontiguousarray(stacked.transpose(2, 1, 0, 3))


class RecordedMaps(Mapping[str, Maps]):
    """Kind to (L, H, rows, columns), put together when it is read: that is not the time of the rows that still run."""

    def __init__(self, recorder: MapRecorder) -> None:
        self._recorder = recorder

    def __getitem__(self, kind: str) -> Maps:
        return self._recorder.map_of(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorder.kinds)

    def __len__(self) -> int:
        return len(self._recorder.kinds)


def record_step(
    names: Mapping[str, Sequence[str]], recorders: Sequence[tuple[int, MapRecorder]], outputs: Mapping[str, Array]
) -> None:
    """Give each recorder its part of a step's maps.

    Args:
        names: of the outputs that hold maps, by kind.
        recorders: each with its row.
        outputs: the step's.
    """
    for kind in STEP_KINDS:
        wanting = [pair for pair in recorders if kind in pair[1].steps]
        if not wanting:
            continue
        maps = [outputs[name] for name in names[kind]]
        block = maps[0] if len(maps) == 1 else np.concatenate(maps, axis=2)  # (B, H, L, columns)
        places = [row for row, _ in wanting]
        columns = max([recorder.next_columns(kind) for _, recorder in wanting])
        if len(wanting) < len(block) or columns < block.shape[3]:
            # What nobody wanted must not stay in memory with the rest.
            block, places = block[places, :, :, :columns], list(range(len(places)))
        for place, (_, recorder) in zip(places, wanting, strict=True):
            recorder.steps[kind].append((block, place))
