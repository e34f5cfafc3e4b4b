"""The blocks of docs/clients.md run as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from bench.server import RunningServer

CLIENTS = Path("docs/clients.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)```", CLIENTS, flags=re.DOTALL | re.MULTILINE))


def printed(server: RunningServer, family: str) -> list[str]:
    code = BLOCKS[family].replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_openai(shipped: RunningServer) -> None:
    text, second, streamed, others = printed(shipped, "OpenAI")
    assert "Mann" in text and "Mann" in second and second != text
    *pieces, total, answer = streamed.split("|")
    assert "".join(pieces) == text
    assert int(total) > 10
    assert answer and answer == answer.upper()
    assert others.startswith("2 [") and "multi30k-en-de" in others


def test_libretranslate(shipped: RunningServer) -> None:
    text, languages, translated, alternatives = printed(shipped, "LibreTranslate")
    assert "Mann" in text
    assert languages == "[('de', []), ('en', ['de'])]"
    assert "Hund" in translated and "Katze" in translated
    assert "Hund" in alternatives and alternatives.startswith("[['")


def test_text_generation_inference(shipped: RunningServer) -> None:
    text, details, rest, *dialogue = printed(shipped, "Text Generation Inference")
    assert "Mann" in text
    assert details == "eos_token  Ein"
    *pieces, prompt = rest.split("|")
    assert len(pieces) > 4 and "".join(pieces) == text
    assert prompt == "User: Hello!" and dialogue[0].startswith("Bot: ")


def test_text_embeddings_inference(shipped: RunningServer) -> None:
    shape, similarities, label = printed(shipped, "Text Embeddings Inference")
    assert shape == "(2, 128)"
    near, far = json.loads(similarities)
    assert 1 > near > far
    assert label == "positive"


def test_open_inference_protocol(shipped: RunningServer) -> None:
    texts, shapes = printed(shipped, "Open Inference Protocol")
    man, dog = texts.split("|")
    assert "Mann" in man and "Hund" in dog
    assert shapes == "(4, 1, 5, 5) (2, 128)"
