"""The pages about training work from sample data to a response, with less data and few epochs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench.server import serving
from tests.e2e.test_documented_commands import read_blocks
from tests.export.chat_templates import TOOLS_AS_JSON
from tests.model.pretrained_folders import write_decoder

PAGES = {
    "train-a-translator": "trips",
    "train-a-classifier": "messages",
    "train-a-chat-model": "smalltalk",
    "train-an-embedding-model": "sentences",
    "train-an-entity-tagger": "names",
}

LABELS = {"billing", "delivery", "praise", "returns", "technical"}  # of the sample data
# After one epoch, the translator ends each translation before its first word.
EPOCHS = {"translation": 8}


def shortened(code: str) -> str:
    """Return the commands of a block with less data, few epochs and this Python."""
    code = re.sub(r"--examples \d+", "--examples 60", code)
    code = re.sub(
        r"sightline train (?!sample)(\S+) .*--run \S+",
        lambda match: f"{match[0]} --epochs {EPOCHS.get(match[1], 1)} --threads 1",
        code,
    )
    code = re.sub(r"\S*sightline serve .*\n", "", code)
    code = code.replace("--teacher bundles", f"--teacher {Path('bundles').resolve()}")
    return code.replace(".venv/bin/", f"{Path(sys.executable).parent}/")


def check(page: str, response: Any) -> None:
    """Check the response to the request of a page."""
    if page == "train-an-entity-tagger":  # after one epoch, there may be no entity
        assert isinstance(response, list) or isinstance(response["outputs"][0]["entities"], list)
        return
    if isinstance(response, list):  # Hugging Face or text-embeddings-inference
        (labels,) = response if isinstance(response[0], list) else (response,)
        assert {one["label"] for one in labels} == LABELS
        return
    assert response["model"] == PAGES[page]
    if page == "train-a-classifier":
        (output,) = response["outputs"]
        assert {one["label"] for one in output["labels"]} == LABELS
    elif page == "train-a-chat-model":
        message = response["choices"][0]["message"]
        assert message["role"] == "assistant" and message["content"].strip()
    elif page == "train-an-embedding-model":
        vectors = response["embeddings"] if "embeddings" in response else [one["embedding"] for one in response["data"]]
        assert [len(vector) for vector in vectors] == [128, 128]
        assert all(sum(value * value for value in vector) == pytest.approx(1, abs=1e-5) for vector in vectors)
    else:
        assert response["outputs"][0]["text"].strip()


def run(code: str, folder: Path) -> str:
    """Run commands in a folder, and return their output."""
    environment = {**os.environ, "SIGHTLINE_DEFAULT_MODEL": ""}
    command = ["sh", "-e", "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_recipe_of_tools_trains_a_checkpoint(tmp_path: Path) -> None:
    """Its checkpoint is replaced by a small one, whose chat template has calls in the same form."""
    write_decoder(tmp_path / "tiny", "qwen2", template=TOOLS_AS_JSON, max_position_embeddings=2048)
    (tmp_path / "data").mkdir()
    (block,) = [one for one in read_blocks(Path("docs/how-to/train-a-chat-model.md")) if "tool_calls" in one.code]
    run(shortened(block.code).replace("Qwen/Qwen2.5-0.5B-Instruct", "tiny"), tmp_path)
    assert json.loads((tmp_path / "runs/tools/record.json").read_text(encoding="utf-8"))["has_dialogues"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_train_export_and_serve(page: str, tmp_path: Path) -> None:
    blocks = [block for block in read_blocks(Path("docs/how-to") / f"{page}.md") if block.language == "sh"]
    commands = [shortened(block.code) for block in blocks if block.needs == "time"]
    requests = [code for code in commands if "curl" in code]
    for code in commands:
        if code not in requests:
            run(code, tmp_path)
    bundle = tmp_path / "bundles" / PAGES[page]
    assert (bundle / "MODEL_CARD.md").read_text(encoding="utf-8").startswith("---\n")
    assert requests
    with serving(tmp_path / "bundles") as server:
        for code in requests:
            code = code.replace("http://127.0.0.1:8000", server.url).replace("curl -s ", "curl -sf ")
            check(page, json.loads(run(code, tmp_path)))
