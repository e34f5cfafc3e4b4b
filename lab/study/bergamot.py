"""Bergamot's engine in Node.js, with the files of a Firefox model as Mozilla publishes them."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.bench.peers import ENVIRONMENTS

VERSION = "@browsermt/bergamot-translator@0.4.9"
FOLDER = ENVIRONMENTS / "bergamot"
PACKAGE = FOLDER / "node_modules/@browsermt/bergamot-translator"
SCRIPT = Path(__file__).with_suffix(".mjs")
Translate = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def bergamot(model: Path, workers: int = 1) -> Iterator[Translate]:
    """Yield a function that translates texts; the package is installed if it is missing.

    Raises `FileNotFoundError` without Node.js and npm, and `CalledProcessError` if the package
    cannot be installed.
    """
    if not PACKAGE.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", VERSION], cwd=FOLDER, check=True)
        (PACKAGE / "worker/package.json").write_text('{"type": "commonjs"}\n')  # else Node.js rejects its script
    command = ["node", str(SCRIPT), str(PACKAGE), str(model), str(workers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        tasks, results = process.stdin, process.stdout
        assert tasks is not None and results is not None

        def translate(texts: Sequence[str], *, html: bool, clients: int = 8, pairs: int = 1) -> dict[str, Any]:
            tasks.write(json.dumps({"texts": texts, "html": html, "clients": clients, "pairs": pairs}) + "\n")
            tasks.flush()
            result: dict[str, Any] = json.loads(results.readline())
            return result

        yield translate
        tasks.close()
