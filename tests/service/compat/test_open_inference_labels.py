"""POST .../infer of rerankers and of models that label tokens."""

import json
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import MakeBackend, Running, Start
from tests.support.fake_runner import fake_classifier_manifest

pytestmark = pytest.mark.anyio

QUERY = "who"
DOCUMENTS = ["a dog", "Hund und a dog", "x", "xy"]
TEXTS = ["a dog runs", "Größe 🙂 und  Hund", " x"]
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ENTITIES = ("label", "score", "text", "start", "end")
TAGGED = ["num_entities", *(f"entity_{name}s" for name in ENTITIES)]


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    backend = make_backend()
    sizes: dict[str, Any] = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
    backend.manifests = (
        fake_classifier_manifest("ranker", "score", ["LABEL_0"], **sizes),
        fake_classifier_manifest("tagger", "tokens", LABELS, **sizes),
    )
    async with start(backend) as running:
        yield running


def tensor(name: str, texts: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts), 1], "datatype": "BYTES", "data": list(texts)}


def rerank_body(queries: Sequence[str], documents: Sequence[str], *outputs: str, **parameters: Any) -> dict[str, Any]:
    inputs = [tensor("query", queries), tensor("text_input", documents)]
    return {"inputs": inputs, "outputs": [{"name": name} for name in outputs], "parameters": parameters}


def tag_body(texts: Sequence[str], *outputs: str, **parameters: Any) -> dict[str, Any]:
    return {
        "inputs": [tensor("text_input", texts)],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
    }


async def infer(running: Running, model: str, body: Any) -> dict[str, Any]:
    content = await running.result(f"/v2/models/{model}/infer", body)
    return {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in content["outputs"]}


async def relevance(running: Running, query: str, documents: Sequence[str], **options: Any) -> list[float]:
    """Return the scores of `/v1/rerank` in the order of the documents."""
    body = {"model": "ranker", "query": query, "documents": documents, **options}
    results = (await running.post("/v1/rerank", body)).json()["results"]
    return [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]


async def test_scores_of_a_reranker_are_those_of_rerank_in_the_order_of_the_texts(running: Running) -> None:
    expected = np.array(await relevance(running, QUERY, DOCUMENTS), np.float32)
    for queries in ([QUERY], [QUERY] * len(DOCUMENTS)):
        outputs = await infer(running, "ranker", rerank_body(queries, DOCUMENTS))
        assert list(outputs) == ["relevance_score"]
        assert np.array_equal(outputs["relevance_score"].astype(np.float32), expected)
    raw = await infer(running, "ranker", rerank_body([QUERY], DOCUMENTS, raw_scores=True))
    assert np.array_equal(raw["relevance_score"], await relevance(running, QUERY, DOCUMENTS, raw_scores=True))


async def test_each_text_may_have_its_own_query(running: Running) -> None:
    outputs = await infer(running, "ranker", rerank_body(["who", "Hund"], ["a dog", "x"]))
    expected = [(await relevance(running, query, [text]))[0] for query, text in (("who", "a dog"), ("Hund", "x"))]
    assert np.array_equal(outputs["relevance_score"].astype(np.float32), np.array(expected, np.float32))


async def test_attention_of_a_reranker_is_that_of_the_pair(running: Running) -> None:
    names = ("relevance_score", "attention_encoder", "attention_encoder_shape", "source_tokens")
    outputs = await infer(running, "ranker", rerank_body([QUERY], DOCUMENTS, *names))
    widths = outputs["attention_encoder_shape"][:, -1]
    usage = [
        (await running.post("/v1/rerank", {"model": "ranker", "query": QUERY, "documents": [one]})).json()["usage"]
        for one in DOCUMENTS
    ]
    assert list(widths) == [one["prompt_tokens"] for one in usage]
    assert outputs["attention_encoder"].shape[0] == outputs["source_tokens"].shape[0] == len(DOCUMENTS)


async def test_inputs_may_be_binary_in_any_order(running: Running) -> None:
    def packed(texts: Sequence[str]) -> bytes:
        return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)

    async def send(tail: bytes, sizes: Sequence[int]) -> Any:
        inputs = [
            {"name": name, "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
            for name, count, size in zip(("text_input", "query"), (len(DOCUMENTS), 1), sizes, strict=True)
        ]
        header = json.dumps({"inputs": inputs}).encode()
        length = {"inference-header-content-length": str(len(header))}
        return await running.client.post("/v2/models/ranker/infer", content=header + tail, headers=length)

    documents, query = packed(DOCUMENTS), packed([QUERY])
    response = await send(documents + query, (len(documents), len(query)))
    expected = np.array(await relevance(running, QUERY, DOCUMENTS), np.float32)
    assert np.array_equal(np.array(response.json()["outputs"][0]["data"], np.float32), expected)
    tail, size = documents + query, len(documents) + len(query)
    for sizes, message in (
        (
            (size + 1, 0),
            f"inputs[0].parameters.binary_data_size must be at most the number of bytes after the JSON ({size}), "
            f"got {size + 1}.",
        ),
        (
            (len(documents), len(query) + 1),
            "inputs[1].parameters.binary_data_size must be the number of bytes after the JSON and the inputs before "
            f"it ({len(query)}), got {len(query) + 1}.",
        ),
    ):
        response = await send(tail, sizes)
        assert (response.status_code, response.json()["error"]) == (422, message)


async def test_long_pairs_are_truncated_on_request(running: Running) -> None:
    long = "x" * 70
    outputs = await infer(running, "ranker", rerank_body([QUERY], [long], truncate=True))
    expected = await relevance(running, QUERY, [long], truncate=True)
    assert np.array_equal(outputs["relevance_score"].astype(np.float32), np.array(expected, np.float32))


@pytest.mark.parametrize("options", [{}, {"aggregation": "none", "ignore_labels": []}, {"ignore_labels": ["PER"]}])
async def test_entities_are_those_of_tag_padded_to_one_tensor(running: Running, options: dict[str, Any]) -> None:
    outputs = await infer(running, "tagger", tag_body(TEXTS, **options))
    assert list(outputs) == TAGGED
    own = (await running.post("/v1/tag", {"model": "tagger", "inputs": TEXTS, **options})).json()["outputs"]
    counts = [len(one["entities"]) for one in own]
    assert list(outputs["num_entities"]) == counts
    assert max(counts) > 0
    for row, one in enumerate(own):
        for name in ENTITIES:
            found = outputs[f"entity_{name}s"][row]
            assert found.shape == (max(counts),)
            expected = [entity[name] for entity in one["entities"]]
            if name == "score":  # the tensor has float32 numbers, the JSON float64 numbers
                found, expected = found.astype(np.float32), [np.float32(score) for score in expected]
            assert list(found[: counts[row]]) == expected
            assert set(found[counts[row] :]) <= {0, ""}


async def test_texts_without_entities_have_empty_rows(running: Running) -> None:
    names = ["O", "PER", "LOC"]
    outputs = await infer(running, "tagger", tag_body(TEXTS, ignore_labels=names))
    assert list(outputs["num_entities"]) == [0, 0, 0]
    assert outputs["entity_labels"].shape == outputs["entity_scores"].shape == (3, 0)


async def test_metadata_and_configuration_list_the_tensors(running: Running) -> None:
    query = {"name": "query", "datatype": "BYTES", "shape": [-1, 1]}
    text_input = {**query, "name": "text_input"}
    for model, inputs, main in (("ranker", [query, text_input], ["relevance_score"]), ("tagger", [text_input], TAGGED)):
        metadata = (await running.client.get(f"/v2/models/{model}")).json()
        assert metadata["inputs"] == inputs
        assert [one["name"] for one in metadata["outputs"]][: len(main)] == main
        config = (await running.client.get(f"/v2/models/{model}/config")).json()
        assert [one["name"] for one in config["input"]] == [one["name"] for one in inputs]
        assert [one["name"] for one in config["output"]] == [one["name"] for one in metadata["outputs"]]
        names = [one["name"] for one in metadata["outputs"]]
        body = rerank_body([QUERY], TEXTS, *names) if model == "ranker" else tag_body(TEXTS, *names)
        response = await running.post(f"/v2/models/{model}/infer", body)
        for found, described in zip(response.json()["outputs"], metadata["outputs"], strict=True):
            assert found["datatype"] == described["datatype"]
            pairs = zip(found["shape"], described["shape"], strict=True)
            assert all(size == expected or expected == -1 for size, expected in pairs), found["name"]
