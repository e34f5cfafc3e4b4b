from collections.abc import AsyncIterator

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.inference.labels import apply_function
from tests.service.conftest import MakeBackend, Running, Start, classifying
from tests.support.fake_runner import fake_label_logits

pytestmark = pytest.mark.anyio
QUERY = "who"
DOCUMENTS = ["a dog", "Hund und a dog", "x", "xy", "xyz"]


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    backend = classifying(make_backend(), "ranker", "score", ["LABEL_0"])
    async with start(backend, default_model="ranker") as running:
        yield running


def logits_of(tokenizer: TextTokenizer, texts: list[str]) -> list[float]:
    """Return the logit of each pair, computed one at a time."""
    return [float(fake_label_logits(tokenizer.encode_pair(QUERY, text, None), 1)[0]) for text in texts]


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


async def test_documents_are_sorted_by_the_sigmoid_of_their_logit(running: Running, tokenizer: TextTokenizer) -> None:
    body = await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    logits = logits_of(tokenizer, DOCUMENTS)
    assert len(set(logits)) > 2  # the order is not trivial
    expected = sorted(range(len(DOCUMENTS)), key=lambda index: -logits[index])
    assert [one["index"] for one in body["results"]] == expected
    for one in body["results"]:
        # Both compute in float64; the result has at most a few roundings of 2 ** -53.
        assert one["relevance_score"] == pytest.approx(sigmoid(logits[one["index"]]), rel=1e-15)
        assert one["document"] is None
    num_tokens = sum(len(tokenizer.encode_pair(QUERY, text, None)) for text in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (body["object"], body["model"], body["id"][:7]) == ("list", "ranker", "rerank-")


async def test_a_document_has_the_same_score_alone(running: Running) -> None:
    body = await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    for one in body["results"]:
        alone = await running.result("/v1/rerank", {"query": QUERY, "documents": [DOCUMENTS[one["index"]]]})
        assert alone["results"] == [{**one, "index": 0}]


async def test_raw_scores_are_the_logits(running: Running, tokenizer: TextTokenizer) -> None:
    body = await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True})
    logits = logits_of(tokenizer, DOCUMENTS)
    assert [one["relevance_score"] for one in body["results"]] == sorted(logits, reverse=True)


async def test_fields_of_cohere_and_jina_are_accepted(running: Running) -> None:
    plain = await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    options = {"return_documents": True, "top_n": 2, "rank_fields": None, "model": "ranker", "max_tokens_per_doc": 4096}
    body = await running.result("/v1/rerank", {"query": QUERY, "documents": documents, **options})
    texts = [{**one, "document": {"text": DOCUMENTS[one["index"]]}} for one in plain["results"][:2]]
    assert body["results"] == texts
    more = await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 99})
    assert more["results"] == plain["results"]


async def test_documents_are_cut_to_a_number_of_tokens(running: Running, tokenizer: TextTokenizer) -> None:
    text = "a dog dog dog"
    cut = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:2])
    first = await running.result("/v1/rerank", {"query": QUERY, "documents": [text], "max_tokens_per_doc": 2})
    second = await running.result("/v1/rerank", {"query": QUERY, "documents": [cut]})
    assert first["results"] == second["results"]
    assert first["usage"] == second["usage"]


async def test_a_pair_that_is_too_long_is_truncated_on_request(running: Running, tokenizer: TextTokenizer) -> None:
    long = "x" * 70
    body = await running.result("/v1/rerank", {"query": QUERY, "documents": [long], "truncate": True})
    assert body["usage"]["total_tokens"] == 64 == len(tokenizer.encode_pair(QUERY, long, 64))


async def test_version_2_of_the_path_returns_the_same(running: Running) -> None:
    body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "max_tokens_per_doc": 3}
    own, found = [await running.result(path, body) for path in ("/v1/rerank", "/v2/rerank")]
    assert found["results"] == own["results"] and len(found["results"]) == 2
    assert found.keys() == own.keys() >= {"id", "results"}


async def test_the_rerank_endpoint_of_tei_returns_the_same_order(running: Running) -> None:
    own = await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    expected = [{"index": one["index"], "score": one["relevance_score"]} for one in own["results"]]
    for path in ("/rerank", "/"):
        assert await running.result(path, {"query": QUERY, "texts": DOCUMENTS}) == expected
    with_text = await running.result("/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True})
    assert with_text == [{**one, "text": DOCUMENTS[one["index"]]} for one in expected]
    raw = await running.result("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True})
    assert [sigmoid(one["score"]) for one in raw] == pytest.approx([one["score"] for one in expected], rel=1e-15)
    info = (await running.client.get("/info")).json()
    assert info["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    assert info["model_pipeline_tag"] == "text-ranking"


async def test_a_reranker_predicts_the_score_of_a_pair(running: Running) -> None:
    (own,) = (await running.result("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS[:1]}))["results"]
    expected = [{"score": own["relevance_score"], "label": "LABEL_0"}]
    assert await running.result("/predict", {"inputs": [QUERY, DOCUMENTS[0]]}) == expected
    alone = await running.result("/predict", {"inputs": "x"})
    assert await running.result("/predict", {"inputs": [[QUERY, DOCUMENTS[0]], ["x"]]}) == [expected, alone]
    with_function = {"inputs": [QUERY, DOCUMENTS[0]], "parameters": {"function_to_apply": "sigmoid"}}
    assert await running.result("/predict", with_function) == [expected]


def test_the_sigmoid_neither_overflows_nor_loses_small_values() -> None:
    values = np.array([-1000, -30, 0, 30, 1000], np.float32)
    with np.errstate(all="raise", under="ignore"):
        scores = apply_function(values, "sigmoid")
    assert scores.tolist() == [0.0, pytest.approx(np.exp(-30.0), rel=1e-12), 0.5, pytest.approx(1.0), 1.0]
