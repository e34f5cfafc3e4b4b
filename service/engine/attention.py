"""Collect attention maps: complete maps of the encoder, and one row per step of the decoder."""

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
# Maps of one decoder step, (B, H, L, columns), and the index of one row of its batch in them. The
# part of the row is extracted when the map is read.
StepMap = tuple[Maps, int]


def encoder_maps(
    manifest: Manifest, encoded: Mapping[str, Array], index: int, request: SourceRequest
) -> dict[str, Maps]:
    """Return the encoder maps that a request selects, by kind.

    Args:
        manifest: manifest of the model.
        encoded: outputs of the encoder for a batch.
        index: index of the request in the batch.
        request: the request.

    Returns:
        Maps (L, H, S, columns) without padding.
    """
    source_tokens, maps = len(request.source_ids), dict[str, Maps]()
    for kind in request.attention.intersection(ENCODER_KINDS):
        attention = manifest.attention_of(kind)
        columns = attention.columns or source_tokens
        layers = [encoded[name][index, :, :source_tokens, :columns] for name in attention.outputs]
        maps[kind] = np.stack(layers).astype(np.float32)
    return maps


def map_outputs(manifest: Manifest, kinds: frozenset[str], among: Sequence[str]) -> frozenset[str]:
    """Return the names of the graph outputs with maps of some kinds.

    Args:
        manifest: manifest of the model.
        kinds: requested kinds.
        among: kinds of the graph in question, `ENCODER_KINDS` or `STEP_KINDS`.
    """
    return frozenset(name for kind in kinds.intersection(among) for name in manifest.attention_of(kind).outputs)


class MapRecorder:
    """Attention maps of one hypothesis. Without requested kinds it records nothing."""

    def __init__(
        self, kinds: frozenset[str], source_tokens: int, encoder: Mapping[str, Maps], prompt_tokens: int = 1
    ) -> None:
        """Create a recorder.

        Args:
            kinds: kinds of maps to record.
            source_tokens: length of the source, the number of columns of a cross map.
            encoder: requested encoder maps, from `encoder_maps`.
            prompt_tokens: number of decoder inputs before the first new token, which is the number
                of columns in the first row of a decoder map.
        """
        self._source_tokens = source_tokens
        self._prompt_tokens = prompt_tokens
        self._encoder = encoder
        self.steps: dict[str, list[StepMap]] = {kind: [] for kind in STEP_KINDS if kind in kinds}

    def fork(self) -> "MapRecorder":
        """Return a copy that records independently from now on."""
        if not self.steps:
            return self
        other = MapRecorder(frozenset(), self._source_tokens, self._encoder, self._prompt_tokens)
        other.steps = {kind: steps[:] for kind, steps in self.steps.items()}
        return other

    def next_columns(self, kind: str) -> int:
        """Return the number of columns of the next row: source tokens, or decoder inputs so far."""
        return self._columns(kind, len(self.steps[kind]))

    def _columns(self, kind: str, row: int) -> int:
        return self._source_tokens if kind == "cross" else self._prompt_tokens + row

    @property
    def kinds(self) -> list[str]:
        """Kinds of the recorded maps."""
        return [*self._encoder, *self.steps]

    def map_of(self, kind: str) -> Maps:
        """Return the complete map of one kind, (L, H, rows, columns)."""
        if kind in self._encoder:
            return self._encoder[kind]
        steps = self.steps[kind]
        heads, layers = steps[0][0].shape[1:3]
        columns = [self._columns(kind, row) for row in range(len(steps))]
        stacked = np.zeros((len(steps), heads, layers, columns[-1]), np.float32)
        for row, (count, (block, index)) in enumerate(zip(columns, steps, strict=True)):
            stacked[row, :, :, :count] = block[index, :, :, :count]
        return np.ascontiguousarray(stacked.transpose(2, 1, 0, 3))


class RecordedMaps(Mapping[str, Maps]):
    """Maps (L, H, rows, columns) by kind, assembled when they are read.

    The reader is not the engine's thread, so the assembly does not delay running generations.
    """

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
    """Append the maps of a decoder step to the recorders.

    Args:
        names: names of the graph outputs with maps, by kind.
        recorders: recorders, each with the index of its row in the outputs.
        outputs: outputs of the step.
    """
    for kind in STEP_KINDS:
        requesting = [pair for pair in recorders if kind in pair[1].steps]
        if not requesting:
            continue
        maps = [outputs[name] for name in names[kind]]
        block = maps[0] if len(maps) == 1 else np.concatenate(maps, axis=2)  # (B, H, L, columns)
        indices = [row for row, _ in requesting]
        columns = max([recorder.next_columns(kind) for _, recorder in requesting])
        if len(requesting) < len(block) or columns < block.shape[3]:
            # A copy of the requested part, so that the rest of the output can be freed.
            block, indices = block[indices, :, :, :columns], list(range(len(indices)))
        for index, (_, recorder) in zip(indices, requesting, strict=True):
            recorder.steps[kind].append((block, index))
