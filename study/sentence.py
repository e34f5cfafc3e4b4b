"""One sentence through every served model that translates or classifies, and what each looks at."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import DIGITS, Result
from model.systems import MULTI30K
from service.bundle import Attention, Manifest
from service.loading import find_bundles
from study.runs import translates
from study.sentence_picture import draw_sentence
from study.served import Served, serve
from study.step import add_keep, no_tables, with_kept

NAME = "sentence"
MAX_NEW_TOKENS = 32  # of a translation that finds no end
USUAL = MULTI30K.name  # of all encoders with many heads the one that is drawn: that of the model that ships
SENTENCE = "A man in a red jacket is skiing down a steep slope."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of bundles; those that neither translate nor classify are passed over, and names that came before"
    parser.add_argument("bundles", type=Path, nargs="+", help=text)
    parser.add_argument("--sentence", default=SENTENCE)
    add_keep(parser, "models")


def measure(arguments: argparse.Namespace) -> Result:
    """Ask each model for its answer and its maps, over the service's HTTP API.

    Raises:
        FileNotFoundError: there is no result to keep anything of.
        ValueError: the bundles cannot be served; what is kept is of another sentence.
    """
    rows: list[Mapping[str, Any]] = []
    for folder in arguments.bundles:
        names = {row["model"] for row in rows}
        with serve(folder) as served:
            for manifest in find_bundles(folder, default_model=None).values():
                if (translates(manifest) or manifest.labels) and manifest.name not in names:
                    rows += _asked(served, manifest, arguments.sentence)
    if arguments.keep:
        rows = with_kept(arguments.results, NAME, rows, lambda row: row["model"])
    if len({row["sentence"] for row in rows}) > 1:
        raise ValueError(f"the result in {arguments.results} is of another sentence")
    return Result(rows=rows)


def _asked(served: Served, manifest: Manifest, sentence: str) -> list[Mapping[str, Any]]:
    facts = {"model": manifest.name, "description": manifest.description, "sentence": sentence}
    if manifest.labels:
        body = {"model": manifest.name, "inputs": sentence, "return_attention": True}
        (output,) = served.post("/v1/classify", body)[0]["outputs"]
        label, source_tokens = output["labels"][0], output["source_tokens"]
        facts |= {"text": f"{label['label']}, {label['score']:.0%}", "source_tokens": source_tokens}
        return [{**facts, **_drawn(entry)} for entry in output["maps"]]
    request = {"model": manifest.name, "parameters": {"max_new_tokens": MAX_NEW_TOKENS}}
    if not manifest.attention:
        (answer,) = served.post("/v1/generate", {**request, "inputs": sentence})
        return [{**facts, "text": answer["outputs"][0]["text"], "kind": None}]
    kinds = [maps.kind for maps in _telling(manifest)]
    (answer,) = served.post("/v1/attention", {**request, "input": sentence, "kinds": kinds})
    names = ("text", "source_tokens", "target_tokens")
    return [{**facts, **{name: answer[name] for name in names}, **_drawn(entry)} for entry in answer["maps"]]


def _telling(manifest: Manifest) -> list[Attention]:
    """The cross-attention; and the encoder's, where it is of one head or of slots, and one model's usual one."""
    maps = manifest.attention
    is_told = manifest.name == USUAL or any(one.kind == "encoder_slots" for one in maps)
    return [one for one in maps if one.kind == "cross" or (one.kind != "decoder" and (is_told or one.heads == 1))]


def _drawn(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A map as it is drawn: the mean over layers and heads, (rows, columns)."""
    maps = np.reshape(entry["data"], entry["shape"])  # (L, H, rows, columns)
    mean = maps.mean(axis=(0, 1), dtype=np.float64)
    return {
        **{name: entry[name] for name in ("kind", "normalized")},
        "layers": len(entry["layers"]),
        "heads": len(entry["heads"]),
        "largest": float(f"{np.abs(maps).max():.{DIGITS}g}"),  # of all layers and heads
        # By digits, not by places: what is small must not become 0, which says that a model cannot look there.
        "map": [[float(f"{value:.{DIGITS}g}") for value in row] for row in mean],
    }


tables = no_tables
draw = draw_sentence
