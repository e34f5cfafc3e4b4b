"""`sightline translate` with the shipped bundle gives what the service gives, also after a kill."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lab.bench.server import RunningServer
from tests.e2e.asking import post

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
    source, out = tmp_path / "source.en", tmp_path / "out.de"
    sentences = sentences[:: 2 * beams]
    source.write_text("".join(f"{line}\n" for line in sentences), encoding="utf-8")
    command = [*COMMAND, str(source), "--out", str(out), "--beams", str(beams)]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
    assert out.read_text(encoding="utf-8").split("\n")[:-1] == served(shipped, sentences, num_beams=beams)


def test_the_command_and_both_apis_translate_a_text_as_its_sentences_one_by_one(
    shipped: RunningServer, sentences: list[str], tmp_path: Path
) -> None:
    """The reference translates each sentence in a request of its own, and puts the gaps back."""
    random = Random(7)
    parts = [one for one in sentences if re.fullmatch(r"[A-Z][A-Za-z ,]+\.", one)][:40]
    gaps = [random.choice([" ", "  ", "\t", "\n", " \n", "\n\n", "\r\n", "\n \t\n  "]) for _ in parts]
    assert len(parts) == 40
    twin = "".join(
        gap + post(shipped, "/v1/generate", {"model": "multi30k-en-de", "inputs": part})["outputs"][0]["text"]
        for gap, part in zip(gaps, parts, strict=True)
    )
    text = "".join(gap + part for gap, part in zip(gaps, parts, strict=True))
    assert served(shipped, [text]) == [twin]
    body = {"q": text, "source": "en", "target": "de"}
    assert post(shipped, "/translate", body) == {"translatedText": twin}
    (tmp_path / "source").write_bytes(f"{text}\n".encode())
    command = subprocess.run([*COMMAND, str(tmp_path / "source")], capture_output=True, check=True)
    assert command.stdout.decode() == f"{twin}\n"


def test_a_killed_translation_is_continued_and_gives_the_same(
    shipped: RunningServer, sentences: list[str], tmp_path: Path
) -> None:
    source, out, progress = tmp_path / "source.en", tmp_path / "out.de", tmp_path / "out.de.progress"
    sentences = sentences[::2]
    source.write_text("".join(f"{line}\n" for line in sentences), encoding="utf-8")
    command = [*COMMAND, str(source), "--out", str(out)]
    with subprocess.Popen(command) as running:
        while not progress.exists() or progress.stat().st_size < 2000:
            assert running.poll() is None
            time.sleep(0.002)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    begun = [json.loads(line) for line in progress.read_bytes().split(b"\n")[1:-1]]
    assert not out.exists() and 0 < len(begun) < len(sentences)
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stderr == f"continuing {out} after line {len(begun)}\n"
    lines = out.read_text(encoding="utf-8").split("\n")[:-1]
    assert lines[: len(begun)] == begun and lines == served(shipped, sentences)
