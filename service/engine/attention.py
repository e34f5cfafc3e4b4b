"""Collects attention maps: whole from the encoder, one row a step from the decoder."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest

Array = NDArray[Any]
Maps = NDArray[np.float32]

STEP_KINDS = ("cross", "decoder")


def encoder_map(manifest: Manifest, encoded: Mapping[str, Array], index: int, source_tokens: int) -> Maps:
    """Example `index` of the encoder's maps without its padding, (L, H, S, S)."""
    names = manifest.attention_of("encoder").outputs
    return np.stack([encoded[name][index, :, :source_tokens, :source_tokens] for name in names]).astype(np.float32)


class MapRecorder:
    """The maps that one request keeps; with none wanted it does nothing and costs nothing."""

    def __init__(self, manifest: Manifest, kinds: frozenset[str], source_tokens: int, encoder: Maps | None) -> None:
        self._source_tokens = source_tokens
        self._encoder = encoder
        self.steps: dict[str, list[Maps]] = {kind: [] for kind in STEP_KINDS if kind in kinds}  # each (H, L, columns)
        self.outputs = frozenset(name for kind in self.steps for name in manifest.attention_of(kind).outputs)

    def columns(self, kind: str, row: int) -> int:
        """How many columns row `row` of a map has: the source's tokens, or what the decoder has read."""
        return self._source_tokens if kind == "cross" else row + 1

    def result(self) -> dict[str, Maps]:
        """Kind to (L, H, rows, columns)."""
        maps = {} if self._encoder is None else {"encoder": self._encoder}
        return maps | {kind: self._stack(kind, steps) for kind, steps in self.steps.items()}

    def _stack(self, kind: str, steps: list[Maps]) -> Maps:
        heads, layers, _ = steps[0].shape
        stacked = np.zeros((layers, heads, len(steps), self.columns(kind, len(steps) - 1)), np.float32)
        for row, step in enumerate(steps):
            columns = self.columns(kind, row)
            stacked[:, :, row, :columns] = step[:, :, :columns].swapaxes(0, 1)
        return stacked


def record_step(manifest: Manifest, recorders: Sequence[MapRecorder], outputs: Mapping[str, Array]) -> None:
    """Give each row's recorder its part of a step's maps; `recorders` are those of rows 0 to B-1."""
    for kind in STEP_KINDS:
        wanting = [row for row, recorder in enumerate(recorders) if kind in recorder.steps]
        if not wanting:
            continue
        columns = max(recorders[row].columns(kind, len(recorders[row].steps[kind])) for row in wanting)
        names = manifest.attention_of(kind).outputs
        # Copies, for the runner overwrites its outputs; of all rows at once, for one copy a row would cost far more.
        block = np.concatenate([outputs[name][..., :columns] for name in names], axis=2)  # (B, H, L, columns)
        if len(wanting) < len(recorders):
            block = block[wanting]  # what others did not want must not stay in memory with it
        for row, maps in zip(wanting, block, strict=True):
            recorders[row].steps[kind].append(maps)
