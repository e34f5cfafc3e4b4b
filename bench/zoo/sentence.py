"""One sentence through every served model that translates, and what each looks at."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import DIGITS, Result
from bench.zoo.sentence_picture import draw_sentence
from bench.zoo.served import Served, serve
from bench.zoo.step import no_tables
from bench.zoo.systems import translates
from service.bundle import Attention, Manifest
from service.loading import find_bundles

NAME = "sentence"
MAX_NEW_TOKENS = 32  # of a translation that finds no end
SENTENCE = "A man in a red jacket is skiing down a steep slope."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of bundles; those that do not translate are passed over, and names that came before"
    parser.add_argument("bundles", type=Path, nargs="+", help=text)
    parser.add_argument("--sentence", default=SENTENCE)


def measure(arguments: argparse.Namespace) -> Result:
    """Ask each model for its translation and its maps, over the service's HTTP API.

    Raises:
        ValueError: the bundles cannot be served.
    """
    rows: list[Mapping[str, Any]] = []
    for folder in arguments.bundles:
        names = {row["model"] for row in rows}
        with serve(folder) as served:
            for manifest in find_bundles(folder, default_model=None).values():
                if translates(manifest) and manifest.name not in names:
                    rows += _asked(served, manifest, arguments.sentence)
    return Result(rows=rows)


def _asked(served: Served, manifest: Manifest, sentence: str) -> list[Mapping[str, Any]]:
    facts = {"model": manifest.name, "description": manifest.description, "sentence": sentence}
    request = {"model": manifest.name, "parameters": {"max_new_tokens": MAX_NEW_TOKENS}}
    if not manifest.attention:
        (answer,) = served.post("/v1/generate", {**request, "inputs": sentence})
        return [{**facts, "text": answer["outputs"][0]["text"], "kind": None}]
    kinds = [maps.kind for maps in _telling(manifest.attention)]
    (answer,) = served.post("/v1/attention", {**request, "input": sentence, "kinds": kinds})
    names = ("text", "source_tokens", "target_tokens")
    return [{**facts, **{name: answer[name] for name in names}, **_drawn(entry)} for entry in answer["maps"]]


def _telling(maps: Sequence[Attention]) -> list[Attention]:
    """The cross-attention; and the encoder's, where that is not the usual one: of one head, or of slots."""
    has_slots = any(one.kind == "encoder_slots" for one in maps)
    return [one for one in maps if one.kind == "cross" or (one.kind != "decoder" and (has_slots or one.heads == 1))]


def _drawn(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A map as it is drawn: the mean over layers and heads, (rows, columns)."""
    maps = np.reshape(entry["data"], entry["shape"])  # (L, H, rows, columns)
    mean = maps.mean(axis=(0, 1), dtype=np.float64)
    return {
        **{name: entry[name] for name in ("kind", "normalized")},
        "layers": len(entry["layers"]),
        "heads": len(entry["heads"]),
        # By digits, not by places: what is small must not become 0, which says that a model cannot look there.
        "map": [[float(f"{value:.{DIGITS}g}") for value in row] for row in mean],
    }


tables = no_tables
draw = draw_sentence
