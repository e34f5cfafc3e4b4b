"""Record the attention of one sentence by every served model that translates or classifies."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.record import Result, rounded
from lab.study.runs import translates
from lab.study.sentence_picture import draw_sentence
from lab.study.served import Served, served_models
from lab.study.step import add_keep, keep_last_rows
from lab.zoo.systems import MULTI30K
from sightline.base.bundle import AttentionMaps, Manifest

NAME = "sentence"
MAX_NEW_TOKENS = 32  # of a translation that does not end by itself
USUAL = MULTI30K.name  # the only model whose multi-head encoder attention is drawn: the shipped one
SENTENCE = "A man in a red jacket is skiing down a steep slope."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of bundles; models that neither translate nor classify, and repeated names, are skipped"
    parser.add_argument("bundles", type=Path, nargs="+", help=text)
    parser.add_argument("--sentence", default=SENTENCE)
    add_keep(parser, "models")


def measure(arguments: argparse.Namespace) -> Result:
    """Get each model's output and attention maps. Raises `ValueError` if the earlier result to keep
    is for another sentence.
    """
    rows: list[Mapping[str, Any]] = []
    for served, manifest in served_models(*arguments.bundles):
        is_new = manifest.name not in {row["model"] for row in rows}
        if (translates(manifest) or manifest.labels) and is_new:
            rows += _query(served, manifest, arguments.sentence)
    if arguments.keep:
        rows = keep_last_rows(arguments.results, NAME, rows, lambda row: row["model"])
    if len({row["sentence"] for row in rows}) > 1:
        raise ValueError(f"the result in {arguments.results} is for another sentence; run without --keep")
    return Result(rows=rows)


def _query(served: Served, manifest: Manifest, sentence: str) -> list[Mapping[str, Any]]:
    facts = {"model": manifest.name, "description": manifest.description, "sentence": sentence}
    if manifest.labels:
        body = {"model": manifest.name, "inputs": sentence, "return_attention": True}
        (output,) = served.post("/v1/classify", body)[0]["outputs"]
        label, source_tokens = output["labels"][0], output["source_tokens"]
        facts |= {"text": f"{label['label']}, {label['score']:.0%}", "source_tokens": source_tokens}
        return [{**facts, **_mean_map(entry)} for entry in output["maps"]]
    request = {"model": manifest.name, "parameters": {"max_new_tokens": MAX_NEW_TOKENS}}
    if not manifest.attention:
        (response,) = served.post("/v1/generate", {**request, "inputs": sentence})
        return [{**facts, "text": response["outputs"][0]["text"], "kind": None}]
    kinds = [maps.kind for maps in _selected_attention(manifest)]
    (output,) = served.outputs("/v1/attention", {**request, "kinds": kinds}, [sentence])
    names = ("text", "source_tokens", "target_tokens")
    return [{**facts, **{name: output[name] for name in names}, **_mean_map(entry)} for entry in output["maps"]]


def _selected_attention(manifest: Manifest) -> list[AttentionMaps]:
    """Select cross-attention, and encoder attention with one head, with projected keys, or of the
    usual model.
    """
    maps = manifest.attention
    is_told = manifest.name == USUAL or any(map_.kind == "encoder_slots" for map_ in maps)
    return [map_ for map_ in maps if map_.kind == "cross" or (map_.kind != "decoder" and (is_told or map_.heads == 1))]


def _mean_map(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map to draw: the mean over layers and heads, (rows, columns)."""
    maps = np.reshape(entry["data"], entry["shape"])  # (L, H, rows, columns)
    mean = maps.mean(axis=(0, 1), dtype=np.float64)
    return {
        **{name: entry[name] for name in ("kind", "normalized")},
        "layers": len(entry["layers"]),
        "heads": len(entry["heads"]),
        "largest": rounded(np.abs(maps).max()),  # over all layers and heads
        # Round to significant digits: fixed decimals would turn small weights into 0, which means
        # "masked".
        "map": [[rounded(value) for value in row] for row in mean],
    }


def tables(result: Result) -> Mapping[str, str]:
    """Return no tables; the step has only pictures."""
    return {}


draw = draw_sentence
