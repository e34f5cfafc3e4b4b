"""Collects attention maps: whole from the encoder, one row a step from the decoder."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest

Array = NDArray[Any]
Maps = NDArray[np.float32]

STEP_KINDS = ("cross", "decoder")
# A step's maps of several rows, (B, H, L, columns), and which row's is meant; it is cut out when it is used.
StepMap = tuple[Maps, int]


def encoder_map(manifest: Manifest, encoded: Mapping[str, Array], index: int, source_tokens: int) -> Maps:
    """Example `index` of the encoder's maps without its padding, (L, H, S, S)."""
    names = manifest.attention_of("encoder").outputs
    return np.stack([encoded[name][index, :, :source_tokens, :source_tokens] for name in names]).astype(np.float32)


def map_outputs(manifest: Manifest, kinds: frozenset[str]) -> frozenset[str]:
    """The step's outputs that hold maps of these kinds."""
    return frozenset(name for kind in STEP_KINDS if kind in kinds for name in manifest.attention_of(kind).outputs)


class MapRecorder:
    """The maps that one hypothesis keeps; with none wanted it does nothing and costs nothing."""

    def __init__(self, kinds: frozenset[str], source_tokens: int, encoder: Maps | None) -> None:
        """`encoder` is the encoder's map, (L, H, S, S), where it is wanted."""
        self._source_tokens = source_tokens
        self._encoder = encoder
        self.steps: dict[str, list[StepMap]] = {kind: [] for kind in STEP_KINDS if kind in kinds}

    def branch(self) -> "MapRecorder":
        """One that has recorded the same and goes its own way."""
        if not self.steps:
            return self
        other = MapRecorder(frozenset(), self._source_tokens, self._encoder)
        other.steps = {kind: steps[:] for kind, steps in self.steps.items()}
        return other

    def next_columns(self, kind: str) -> int:
        """How many columns the next row of a map has: the source's tokens, or what the decoder has read."""
        return self._source_tokens if kind == "cross" else len(self.steps[kind]) + 1

    @property
    def kinds(self) -> list[str]:
        """What was recorded."""
        return [*(() if self._encoder is None else ("encoder",)), *self.steps]

    def map_of(self, kind: str) -> Maps:
        """The whole map, (L, H, rows, columns)."""
        if kind == "encoder" and self._encoder is not None:
            return self._encoder
        steps = self.steps[kind]
        heads, layers = steps[0][0].shape[1:3]
        columns = [self._source_tokens] * len(steps) if kind == "cross" else range(1, len(steps) + 1)
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
