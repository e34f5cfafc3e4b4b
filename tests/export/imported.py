"""Graphs of encoder-decoders, loaded for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import Manifest, Tokens
from sightline.export.check.sessions import Sessions, States, encode, initial_states, open_sessions, run_step
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family
from sightline.export.families.weights import Weights
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.model import build_graphs
from sightline.export.sources.generation_settings import GenerationSettings, read_generation
from sightline.export.sources.opened_checkpoint import Config, Folder
from sightline.export.writing import WEIGHTS, write_graphs

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Imported:
    """Encoder-decoder whose graphs were built from a checkpoint."""

    model: Description
    generation: GenerationSettings
    sessions: Sessions


@dataclass(frozen=True)
class Run:
    """Outputs of a decoder that reads given tokens."""

    hidden: Array  # (S, M) of the encoder
    logits: Array  # (T, V)
    encoder: Array  # (layers, H, S, S)
    cross: Array  # (layers, H, T, S)
    decoder: Array | None  # (layers, H, T, T), None for recurrent units


def import_folder(folder: Path, pad_id: int = 0, max_tokens: int | None = None) -> Imported:
    """Build the graphs of a checkpoint that Transformers saved, beside its files."""
    opened = Folder(folder)
    config = opened.config
    model, weights = describe(find_family(config), config, opened.tensors, max_tokens=max_tokens)
    settings = opened.json("generation_config.json")
    generation = read_generation(config, None if settings is None else Config(settings, "generation_config.json"))
    sessions = load(model, weights, folder, pad_id)
    config.check_all_read()
    opened.tensors.check_all_read()
    return Imported(model, generation, sessions)


def load(model: Description, weights: Weights, folder: Path, pad_id: int = 0) -> Sessions:
    """Build and load the graphs of an encoder-decoder."""
    with WeightFile(folder / WEIGHTS) as file:
        graphs = build_graphs(model, weights, file)
    entries: dict[str, Any] = dict(write_graphs(folder, vars(graphs)))
    manifest = Manifest.model_construct(
        tokens=Tokens(pad_id=pad_id, start_ids=(0,), end_ids=(0,)),
        decoder_start="start_token",
        states=graphs.states,
        **entries,
    )
    return open_sessions(folder, manifest)


def run_rows(
    sessions: Sessions, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> tuple[list[Run], States]:
    """Run the decoder over the targets of all rows in one batch; shorter rows stop earlier.

    Returns:
        The outputs of each row without padding, and the states.
    """
    encoded, rows = encode(sessions, sources), range(len(sources))
    memory = initial_states(sessions.manifest, encoded, max(map(len, targets)))
    outputs = [name for name in sessions.manifest.decoder_graph.outputs if name.endswith("attention")]
    logits: list[list[Array]] = [[] for _ in rows]
    maps: dict[str, list[list[Array]]] = {name: [[] for _ in rows] for name in outputs}
    for step in range(max(map(len, targets))):
        active = [row for row in rows if step < len(targets[row])]
        picked = {name: state[active] for name, state in memory.items()}
        tokens, lengths = [targets[row][step] for row in active], [step] * len(active)
        source_lengths = [len(sources[row]) for row in active]
        values = run_step(sessions, picked, tokens, lengths, source_lengths, ["logits", *outputs])
        for name, state in picked.items():
            memory[name][active] = state
        for index, row in enumerate(active):
            logits[row].append(values["logits"][index])
            for name in outputs:
                maps[name][row].append(values[name][index].swapaxes(0, 1))  # (L, H, columns)
    results = []
    for row, source in enumerate(sources):
        size, columns = len(source), len(targets[row])
        of_encoder = [encoded[name][row, :, :size, :size] for name in sorted(encoded) if "encoder_attention" in name]
        cross = np.stack([one[..., :size] for one in maps["cross_attention"][row]], axis=2)
        own = (
            [np.pad(one, [(0, 0), (0, 0), (0, columns)])[..., :columns] for one in maps["decoder_attention"][row]]
            if ("decoder_attention" in maps)
            else None
        )
        results.append(
            Run(
                encoded["hidden"][row, :size],
                np.stack(logits[row]),
                np.stack(of_encoder),
                cross,
                None if own is None else np.stack(own, axis=2),
            )
        )
    return results, memory
