"""`sightline translate` with the shipped bundle gives what the service gives, also after a kill."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench.server import RunningServer

COMMAND = [sys.executable, "-m", "sightline", "translate", "--bundle", "bundles/multi30k-en-de"]


def served(server: RunningServer, sentences: list[str], **parameters: Any) -> list[str]:
    texts = []
    for first in range(0, len(sentences), 30):
        split = {"split_sentences": True, **parameters}
        body = {"model": "multi30k-en-de", "inputs": sentences[first : first + 30], "parameters": split}
        request = urllib.request.Request(
            f"{server.url}/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            texts += [output["text"] for output in json.load(response)["outputs"]]
    return texts


@pytest.mark.parametrize("beams", [1, 4])
def test_lines_of_a_file_are_translated_as_the_service_translates_them(
    shipped: RunningServer, sentences: list[str], tmp_path: Path, beams: int
) -> None:
    out = tmp_path / "out.de"
    command = [*COMMAND, "tests/data/sentences.txt", "--out", str(out), "--beams", str(beams)]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
    assert out.read_text(encoding="utf-8").split("\n")[:-1] == served(shipped, sentences, num_beams=beams)


def test_a_killed_translation_is_continued_and_gives_the_same(
    shipped: RunningServer, sentences: list[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "source.en", tmp_path / "out.de"
    source.write_text("".join(f"{line}\n" for line in sentences * 4), encoding="utf-8")
    command = [*COMMAND, str(source), "--out", str(out)]
    with subprocess.Popen(command) as running:
        while not out.exists() or out.stat().st_size < 4000:
            assert running.poll() is None
            time.sleep(0.002)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    begun = out.read_bytes()
    assert 0 < begun.count(b"\n") < 4 * len(sentences)
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    num_lines = begun.count(b"\n")
    assert done.stderr == f"continuing {out} after line {num_lines}\n"
    assert out.read_bytes().startswith(begun)
    assert out.read_text(encoding="utf-8").split("\n")[:-1] == served(shipped, sentences) * 4
