"""The README's code blocks do what the README says."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import RunningServer

README = Path("README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def pointed_at(server: RunningServer, code: str) -> str:
    return code.replace("http://127.0.0.1:8000", server.url)


CURLS = [block for block in blocks("sh") if block.startswith("curl")]


def test_the_readme_shows_generation_attention_and_streaming() -> None:
    assert len(CURLS) == 4
    assert len(blocks("python")) == 2


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the README's examples need curl")


@needs_curl
@pytest.mark.parametrize("block", [block for block in CURLS if "-sN" not in block])
def test_curl_examples_answer_with_json(shipped: RunningServer, block: str) -> None:
    done = subprocess.run(["sh", "-c", pointed_at(shipped, block)], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer
    text = answer["text"] if "text" in answer else answer["outputs"][0]["text"]
    assert "Hund" in text


@needs_curl
@pytest.mark.parametrize("block", [block for block in CURLS if "-sN" in block])
def test_the_streaming_example_ends_with_done(shipped: RunningServer, block: str) -> None:
    done = subprocess.run(["sh", "-c", pointed_at(shipped, block)], capture_output=True, text=True, check=True)
    events = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert "token" in json.loads(events[0].removeprefix("data: "))


def test_the_python_example_says_that_hund_looks_at_dog_or_brown(shipped: RunningServer) -> None:
    code = pointed_at(shipped, blocks("python")[0])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert re.search(r"Hund looks at +(dog|brown) ", done.stdout), done.stdout


def test_the_chat_example_answers_in_capitals(shipped: RunningServer) -> None:
    code = pointed_at(shipped, blocks("python")[1])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stdout.upper() != done.stdout.lower()
