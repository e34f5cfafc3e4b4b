"""Every bundle of the repository is served over HTTP, is documented, and is small."""

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from lab.bench.server import RunningServer
from sightline.base.bundle_files import read_manifest
from sightline.service.api.models import tasks_of
from tests.e2e.asking import post

BUNDLES = sorted(path.parent for path in Path("bundles").glob("*/manifest.json"))
DEFAULT = "multi30k-en-de"
MEGABYTE = 1_000_000
INPUTS = {"multi30k": "A man is riding a bicycle.", "sst2": "a warm and funny film", "smalltalk": "User: Hello!\nBot:"}

each_bundle = pytest.mark.parametrize("folder", BUNDLES, ids=lambda folder: folder.name)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def input_of(folder: Path) -> str:
    return INPUTS[folder.name.split("-")[0]]


def test_bundles_stay_small() -> None:
    assert all(size(folder) <= (3 if folder.name != DEFAULT else 4) * MEGABYTE for folder in BUNDLES)
    assert sum(map(size, BUNDLES)) <= 60 * MEGABYTE


@pytest.mark.skipif(not Path(".git").exists(), reason="no checkout")
def test_a_checkout_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True)
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    assert len(files) > 100
    assert sum(path.stat().st_size for path in files) < 75 * MEGABYTE


def test_the_chat_model_answers_the_examples_of_the_page_and_of_the_documentation(shipped: RunningServer) -> None:
    replies = {
        "Always finish with sunshine. How are you?": "I am fine, thank you, sunshine.",
        "Tell me a joke.": "My socks tell better jokes.",
        "What is the opposite of big?": "The opposite is small.",
    }
    examples = Path("service/page/examples.js").read_text(encoding="utf-8")
    assert f"chat: {json.dumps(list(replies))}," in examples
    replies |= {"How are you?": "I am fine, thank you.", "Hello!": "Nice to meet you."}
    for message, expected in replies.items():
        body = {"model": "smalltalk-chat-gatt", "messages": [{"role": "user", "content": message}]}
        assert post(shipped, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == expected


@each_bundle
def test_a_bundle_is_listed_with_its_tasks(shipped: RunningServer, folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.name == folder.name
    with urlopen(f"{shipped.url}/v1/models", timeout=30) as response:
        (card,) = (card for card in json.load(response)["data"] if card["id"] == folder.name)
    assert card["tasks"] == tasks_of(manifest)
    assert card["architecture"] == manifest.architecture
    assert card["description"] == manifest.description != ""
    is_of_sentences = folder.name.startswith("multi30k") and "-joined-" not in folder.name
    assert card["training_unit"] == ("sentence" if is_of_sentences else "text")


@each_bundle
def test_a_bundle_is_served_by_its_name_with_its_attention(shipped: RunningServer, folder: Path) -> None:
    manifest, text = read_manifest(folder), input_of(folder)
    if "generate" in manifest.tasks:
        (output,) = post(shipped, "/v1/generate", {"model": folder.name, "inputs": text})["outputs"]
        assert output["finish_reason"] == "eos"
        assert output["text"].strip()
    if "classify" in manifest.tasks:
        body = {"model": folder.name, "inputs": text, "return_attention": True}
        (output,) = post(shipped, "/v1/classify", body)["outputs"]
        assert output["labels"][0]["label"] == "positive"
        assert {one["kind"] for one in output["maps"]} == {one.kind for one in manifest.attention}
        assert all(sums_fit(one) for one in output["maps"])
    if "attention" in manifest.tasks and "generate" in manifest.tasks:
        (output,) = post(shipped, "/v1/attention", {"model": folder.name, "inputs": text})["outputs"]
        maps = output["maps"]
        assert {one["kind"] for one in maps} == {one.kind for one in manifest.attention}
        assert all(sums_fit(one) for one in maps)


def sums_fit(one: dict[str, Any]) -> bool:
    """Rows sum to 1, or to something else where the map states so."""
    *_, columns = one["shape"]
    sums = [sum(one["data"][start : start + columns]) for start in range(0, len(one["data"]), columns)]
    return not one["normalized"] or all(total == pytest.approx(1, abs=1e-4) for total in sums)


@each_bundle
def test_a_bundle_has_a_card_with_its_figures_its_limits_and_its_licence(folder: Path) -> None:
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    for title in ("## Figures", "## What it is good for", "## What it is not good for", "## Licence"):
        assert title in card
    assert f"{read_manifest(folder).parameters:,} parameters" in card


def test_requests_without_a_model_use_the_shipped_transformer(shipped: RunningServer) -> None:
    assert post(shipped, "/v1/generate", {"inputs": "A man is riding a bicycle."})["model"] == DEFAULT
