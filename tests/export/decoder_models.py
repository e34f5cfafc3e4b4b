"""Imported graphs of decoder-only models, with states of rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from sightline.export.check.sessions import DecoderSession, zero_states
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.decoder import decoder_graph, states
from sightline.export.sources.checkpoint import Folder, open_folder
from tests.zoo.models import POSITIONS

Array = NDArray[Any]
Ids = Sequence[int]
VOCABULARY = 211


class Rows:
    """A decoder graph with the states of some rows."""

    def __init__(self, graph: Path, model: Description, rows: int, positions: int, fill: float = 0.0) -> None:
        self._decoder = DecoderSession(graph, states(model))
        self._buffers = zero_states(states(model), rows, positions)
        for buffer in self._buffers.values():
            buffer.fill(fill)

    def run(self, first: int, token_ids: Array, lengths: Sequence[int], outputs: Sequence[str]) -> dict[str, Array]:
        """Run the graph on consecutive rows from `first` on."""
        rows = {name: buffer[first : first + len(token_ids)] for name, buffer in self._buffers.items()}
        return self._decoder.run(rows, token_ids, lengths, outputs)


@dataclass(frozen=True)
class Imported:
    """A checkpoint of transformers and the graph that was built from it."""

    hf: Any
    folder: Path
    model: Description
    weights: Weights
    graph: Path

    def session(self, rows: int = 1, positions: int = POSITIONS, fill: float = 0.0) -> Rows:
        return Rows(self.graph, self.model, rows, positions, fill)


@contextmanager
def import_model(hf: Any, folder: Path) -> Iterator[Imported]:
    """Save a model of transformers, and build the graph of the checkpoint."""
    hf.save_pretrained(folder)
    with open_folder(folder) as opened:
        yield import_folder(hf, folder, opened)


def import_folder(hf: Any, folder: Path, opened: Folder) -> Imported:
    family = find_family(opened.config)
    model, weights = describe(family, opened.config, opened.tensors)
    graph = folder / "decoder.onnx"
    with WeightFile(folder / "weights.bin") as file:
        onnx.save_model(decoder_graph(model, weights, file), graph)
    opened.tensors.check_all_read()
    opened.config.check_all_read()
    return Imported(hf, folder, model, weights, graph)


def random_ids(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return [int(one) for one in np.random.default_rng((seed, length)).integers(vocabulary, size=length)]


def hf_outputs(hf: Any, texts: Sequence[Ids]) -> dict[str, Array]:
    """Run transformers on each text alone.

    Returns:
        `hidden.i` (S, M) after the final norm, `logits.i` (S, V) and `decoder.i` (L, H, S, S) of
        each text.
    """
    outputs: dict[str, Array] = {}
    for number, ids in enumerate(texts):
        with torch.no_grad():
            result = hf(torch.tensor([list(ids)]), output_attentions=True, output_hidden_states=True, use_cache=False)
        outputs[f"hidden.{number}"] = result.hidden_states[-1][0].numpy()
        outputs[f"logits.{number}"] = result.logits[0].numpy()
        outputs[f"decoder.{number}"] = np.stack([one[0].numpy() for one in result.attentions])
    return outputs


def graph_outputs(session: Rows, texts: Sequence[Ids], chunk: int, vocabulary: int = VOCABULARY) -> dict[str, Array]:
    """Prefill row 0 with each text in chunks, and return the arrays of `hf_outputs`.

    Logits exist only for the last token of a chunk; others are NaN.
    """
    outputs: dict[str, Array] = {}
    for number, ids in enumerate(texts):
        hidden, logits, maps = [], np.full((len(ids), vocabulary), np.nan, np.float32), None
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            given = session.run(0, np.array([part]), [start], ("hidden", "logits", "decoder_attention"))
            hidden.append(given["hidden"][0])
            end = start + len(part)
            logits[end - 1] = given["logits"][0]
            own = given["decoder_attention"][0].swapaxes(0, 1)  # (L, H, S, columns)
            if maps is None:
                maps = np.zeros((*own.shape[:2], len(ids), len(ids)), np.float32)
            maps[:, :, start:end, :end] = own[..., :end]
        outputs[f"hidden.{number}"], outputs[f"logits.{number}"] = np.concatenate(hidden), logits
        assert maps is not None
        outputs[f"decoder.{number}"] = maps
    return outputs
