"""The classifier: PyTorch, ONNX Runtime and the service agree, alone and in a batch."""

from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.base.bundle_files import read_bundle
from sightline.model.architectures.classifier import Classifier
from sightline.model.checkpoint import load_model
from sightline.model.config import ClassifierConfig
from sightline.model.data.tokenizer_training import encode_lines
from sightline.model.rounding import Reference, reference
from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Encoded, EncodeRequest, Event
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.neighbours import assert_bits_do_not_depend_on_batch
from tests.equality.running import FAR
from tests.equality.systems import MakeConfig, small, small_systems
from tests.rounding import assert_within_rounding

pytestmark = pytest.mark.anyio
ENCODER = frozenset({"encoder"})
SYSTEMS: dict[str, MakeConfig] = {
    "three-labels": small("sentiment", labels=("bad", "fair", "good")),
    **small_systems(ClassifierConfig),
}
NOISE = 0.3  # of the weights of the fixture `folder`


@pytest.fixture(scope="module", params=SYSTEMS)
def name(request: pytest.FixtureRequest) -> str:
    system: str = request.param
    return system


@pytest.fixture(scope="module")
def model(folder: Path, name: str) -> Classifier:
    model, _ = load_model(folder / "checkpoints" / name)
    assert isinstance(model, Classifier)
    return model


@pytest.fixture(scope="module")
def models(model: Classifier) -> Reference[Classifier]:
    return reference(model)


@pytest.fixture(scope="module")
def texts_ids(folder: Path, name: str, toy_sentences: list[str]) -> list[list[int]]:
    return encode_lines(load_model(folder / "checkpoints" / name)[1], toy_sentences)


def pytorchs(model: Classifier, ids: list[int]) -> dict[str, NDArray[Any]]:
    """Return log-probabilities (C,) and attention weights (L, H, S, S) of one source."""
    source, lengths = torch.tensor([ids]), torch.tensor([len(ids)])
    with torch.inference_mode():
        _, maps = model.encode(source, lengths, need_weights=True)
        assert maps is not None
        return {"logprobs": model(source, lengths)[0].numpy(), "encoder": maps[:, 0].numpy()}


def run(runner: OnnxRunner, sources: list[list[int]], max_batch_tokens: int) -> list[Encoded]:
    engine, events = Engine(runner, max_batch_tokens=max_batch_tokens), list[list[Event]]()
    for ids in sources:
        events.append([])
        request = EncodeRequest("equality", tuple(ids), FAR, return_labels=True, attention=ENCODER)
        engine.submit(request, events[-1].append)
    while engine.has_work:
        engine.step()
    results = [result for (result,) in events if isinstance(result, Encoded)]
    assert len(results) == len(sources)
    return results


def test_the_engine_gives_pytorchs_labels_and_maps_alone_and_in_a_batch(
    name: str, models: Reference[Classifier], folder: Path, texts_ids: list[list[int]]
) -> None:
    bundle = folder / "bundles" / name
    runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=1)
    runner.warm_up(256)
    for max_batch_tokens in (1, 1024):
        for ids, result in zip(texts_ids, run(runner, texts_ids, max_batch_tokens), strict=True):
            assert result.label_scores is not None
            found = {"logprobs": result.label_scores, **result.attention}
            assert_within_rounding(models, lambda model, ids=ids: pytorchs(model, ids), found)  # type: ignore[misc]


async def test_every_output_has_the_same_bits_alone_and_in_any_batch(name: str, folder: Path) -> None:
    bundle = folder / "bundles" / name
    assert_bits_do_not_depend_on_batch(OnnxRunner(bundle, read_bundle(bundle), num_threads=1))


async def test_the_service_returns_the_probabilities_of_pytorch(
    name: str,
    models: Reference[Classifier],
    client: httpx.AsyncClient,
    toy_sentences: list[str],
    texts_ids: list[list[int]],
) -> None:
    asked = {"model": name, "inputs": toy_sentences, "return_attention": True}
    response = (await client.post("/v1/classify", json=asked)).json()
    for ids, text, output in zip(texts_ids, toy_sentences, response["outputs"], strict=True):
        scores = {one["label"]: one["score"] for one in output["labels"]}
        found = {
            "logprobs": np.log([scores[label] for label in models.exact.config.labels]),
            "encoder": np.reshape(output["maps"][0]["data"], output["maps"][0]["shape"]),
        }
        assert_within_rounding(models, lambda model, ids=ids: pytorchs(model, ids), found)  # type: ignore[misc]
        alone = (await client.post("/v1/classify", json={"model": name, "inputs": text})).json()["outputs"][0]["labels"]
        assert alone == output["labels"]


async def test_a_service_with_only_classifiers_rejects_generation(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/generate", json={"inputs": "A dog."})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "unsupported_task")
