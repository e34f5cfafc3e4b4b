"""Measure the memory of many translators, and the speed beside other ways to translate markup."""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from shutil import copytree
from typing import Any

from lab.bench.load import measure_load, with_client
from lab.bench.record import Result, Row
from lab.bench.report import cell, table
from lab.bench.server import RunningServer, serving
from lab.study.bergamot import bergamot
from lab.study.tags import with_phrases
from sightline.base.bundle import Languages
from sightline.base.bundle_files import read_manifest, record_files, write_manifest
from sightline.loadtest.client import Client
from sightline.loadtest.load import Load
from sightline.model.data.text import read_lines

NAME = "pairs"
PATH = "/v1/translate"
TARGETS = (
    "de", "fr", "es", "it", "nl", "pl", "cs", "sv", "da", "fi",
    "el", "hu", "ro", "bg", "hr", "sk", "sl", "et", "lv", "lt",
)  # fmt: skip
FEW = 10  # pairs that stay in memory
CLIENTS = (1, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="bundle of a translator, of which all pairs are copies")
    parser.add_argument("--sentences", type=Path, default=Path("loadtest/sentences.txt"))
    parser.add_argument("--megabytes", type=int, default=512, help="memory for all pairs")
    parser.add_argument("--requests", type=int, default=300, help="number of requests of a load")
    parser.add_argument("--firefox", type=Path, help="files of the Firefox model that the bundle has, for Bergamot")


def measure(arguments: argparse.Namespace) -> Result:
    """Translate with one pair after another, then with one on all cores."""
    tagged = list(with_phrases(read_lines(arguments.sentences)).values())
    with tempfile.TemporaryDirectory() as folder:
        folders = {count: Path(folder, str(count)) for count in (1, FEW, len(TARGETS))}
        for count, pairs in folders.items():
            for target in TARGETS[:count]:
                _copy(arguments.bundle, pairs / target)
        one: dict[str, int] = {"workers": 1, "threads": 1}
        memory_bytes = arguments.megabytes * 1_000_000
        with serving(folders[len(TARGETS)], lazy_models="*", memory_bytes=memory_bytes, **one) as server:
            rows: list[Row] = [with_client(server.url, lambda client: _visit(client, server, tagged[0].text))]
        with serving(folders[FEW], **one) as server:
            memory = server.memory_mb("Pss")
        with serving(folders[1]) as server:
            inputs_of: dict[str, list[dict[str, Any]]] = {
                "Sightline": [{"inputs": each.html, "markup": "html"} for each in tagged],
                "cut at tags": [{"inputs": [piece for piece in each.pieces if piece.strip()]} for each in tagged],
            }
            for method, inputs in inputs_of.items():
                bodies = [json.dumps({"model": TARGETS[0], **body}).encode() for body in inputs]
                loads = [Load(PATH, bodies, clients=count, requests=arguments.requests) for count in (64, *CLIENTS)]
                _, *speeds = [measure_load(server.url, load).requests_per_s for load in loads]
                rows.append({"method": method, "megabytes": memory, "per_s": speeds})
    if arguments.firefox is not None:
        texts = [each.html for each in islice(cycle(tagged), arguments.requests)]
        with bergamot(arguments.firefox, workers=2) as translate:
            seconds = [translate(texts, html=True, clients=count)["seconds"] for count in (64, *CLIENTS)]
        with bergamot(arguments.firefox) as translate:
            memory = translate(texts[:1], html=True, pairs=FEW)["megabytes"]
        rows.append({"method": "Bergamot", "megabytes": memory, "per_s": [len(texts) / each for each in seconds[1:]]})
    return Result(rows=rows)


def _copy(bundle: Path, folder: Path) -> None:
    """Copy a bundle as the model of another pair, with a tokenizer that no other pair has."""
    copytree(bundle, folder)
    manifest = read_manifest(folder)
    names = {manifest.source_tokenizer, manifest.target_tokenizer}
    for name in names:
        with (folder / name).open("a") as file:
            file.write("\n" * (1 + TARGETS.index(folder.name)))
    files = {**manifest.files, **record_files(folder, names)}
    languages = Languages(sources=("en",), targets=(folder.name,))
    changes = {"name": folder.name, "languages": languages, "files": files}
    write_manifest(folder, manifest.model_copy(update=changes))


async def _visit(client: Client, server: RunningServer, text: str) -> Row:
    """Translate with one pair after another, twice."""
    seconds, megabytes = list[float](), list[float]()
    for target in 2 * TARGETS:
        body = json.dumps({"inputs": text, "parameters": {"source_language": "en", "target_language": target}})
        started = time.perf_counter()
        response = await client.post(PATH, body.encode())
        seconds.append(time.perf_counter() - started)
        if response.status != 200:
            raise ValueError(f"{PATH} failed with {response.status}: {response.body[:300]!r}")
        megabytes.append(server.memory_mb("Pss"))
    return {"pairs": len(TARGETS), "ms": [round(1000 * each, 1) for each in seconds], "megabytes": megabytes}


def tables(result: Result) -> Mapping[str, str]:
    visit, *methods = result.rows
    rounds = visit["ms"][: visit["pairs"]], visit["ms"][visit["pairs"] :]
    first, second = (f"{min(times):.0f} to {max(times):.0f} ms, median {cell(times)} ms" for times in rounds)
    text = (
        f"One translation with each of {visit['pairs']} pairs in turn: {first}, and the second time {second}. The "
        f"service has at most {max(visit['megabytes']):.0f} MB."
    )
    head = ["method", f"MB for {FEW} pairs", *(f"sentences/s, {count} clients" for count in CLIENTS)]
    body = [[row["method"], cell(row["megabytes"]), *map(cell, row["per_s"])] for row in methods]
    return {NAME: text, "pairs-speed": table(head, body)}
