from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.tasks.tag import Entity, label_tokens, merge_tokens, spans_of
from tests.base.text.kinds import byte_level
from tests.service.conftest import MakeBackend, Running, Start, classifying
from tests.support.fake_runner import fake_token_label_logprobs

pytestmark = pytest.mark.anyio
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TEXTS = ["a dog runs", "Größe 🙂 und  Hund", " x"]


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    backend = classifying(make_backend(), "tagger", "tokens", LABELS)
    async with start(backend, default_model="tagger") as running:
        yield running


async def tag(running: Running, inputs: Any, **fields: Any) -> Any:
    return (await running.result("/v1/tag", {"inputs": inputs, **fields}))["outputs"]


async def test_each_token_has_its_label_and_its_characters(running: Running, tokenizer: TextTokenizer) -> None:
    outputs = await tag(running, TEXTS, aggregation="none", ignore_labels=[])
    assert [output["index"] for output in outputs] == [0, 1, 2]
    for text, output in zip(TEXTS, outputs, strict=True):
        spans = tokenizer.encode_spans(text)
        scores = np.exp(fake_token_label_logprobs([span.id for span in spans], len(LABELS)))
        plain = [index for index, span in enumerate(spans) if not span.is_special]
        assert [one["token"] for one in output["entities"]] == plain
        for one, index in zip(output["entities"], plain, strict=True):
            assert one["label"] == LABELS[scores[index].argmax()]
            assert one["score"] == pytest.approx(scores[index].max(), rel=1e-5)
            assert one["text"] == text[one["start"] : one["end"]].strip()


@pytest.mark.parametrize("trims", [False, True])
def test_the_characters_of_tokens_equal_those_of_transformers(trims: bool) -> None:
    """With some tokenizers, the space before a word belongs to the word."""
    import torch
    from transformers import (
        BertConfig,
        BertForTokenClassification,
        PreTrainedTokenizerFast,
        TokenClassificationPipeline,
    )

    made = byte_level()
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    config = BertConfig(vocab_size=made.get_vocab_size(), hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=8, num_labels=3)  # fmt: skip
    torch.manual_seed(3)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    pipeline = TokenClassificationPipeline(model=BertForTokenClassification(config), tokenizer=fast, ignore_labels=[])
    for text in TEXTS:
        tokens = TextTokenizer(made).encode_offsets(text)
        expected = [(one["start"], one["end"]) for one in pipeline(text)]
        assert [(one.start, one.end) for one in tokens if not one.is_special] == expected


async def test_entities_are_merged_tokens_without_those_outside(running: Running) -> None:
    tokens = await tag(running, TEXTS, aggregation="none", ignore_labels=[])
    outputs = await tag(running, TEXTS)
    for text, of_tokens, output in zip(TEXTS, tokens, outputs, strict=True):
        labeled = [Entity(**one) for one in of_tokens["entities"]]
        expected = [one for one in merge_tokens(text, labeled) if one.label != "O"]
        assert [tuple(one.values()) for one in output["entities"]] == [tuple(vars(one).values()) for one in expected]
    assert any(output["entities"] for output in outputs)


@pytest.mark.parametrize(
    "labels",
    [
        ["O", "B-PER", "I-PER", "I-PER", "O", "I-LOC"],
        ["B-PER", "B-PER", "I-LOC", "B-LOC", "I-LOC", "O"],
        ["PER", "PER", "LOC", "O", "O", "I-PER"],
        ["I-PER", "O", "I-PER", "I-PER", "B-LOC", "I-PER"],
    ],
)
def test_merged_tokens_equal_those_of_transformers(labels: Sequence[str]) -> None:
    from transformers import TokenClassificationPipeline

    text = "ab cd ef gh ij kl"
    scores = np.random.default_rng(0).dirichlet(np.ones(3), len(labels)).max(axis=1).tolist()
    tokens = [
        Entity(label, score, text[3 * index : 3 * index + 2], 3 * index, 3 * index + 2, index)
        for index, (label, score) in enumerate(zip(labels, scores, strict=True))
    ]
    pipeline: Any = TokenClassificationPipeline.__new__(TokenClassificationPipeline)
    pipeline.tokenizer = type("Tokenizer", (), {"convert_tokens_to_string": staticmethod(" ".join)})
    expected = pipeline.group_entities(
        [
            {
                "entity": one.label,
                "score": one.score,
                "index": one.token,
                "word": one.text,
                "start": one.start,
                "end": one.end,
            }
            for one in tokens
        ]
    )
    found = merge_tokens(text, tokens)
    assert [(one.label, one.text, one.start, one.end) for one in found] == [
        (one["entity_group"], one["word"], one["start"], one["end"]) for one in expected
    ]
    assert [one.score for one in found] == pytest.approx([float(one["score"]) for one in expected], rel=1e-12)


async def test_the_token_classification_of_hugging_face(running: Running) -> None:
    (own,) = await tag(running, TEXTS[1])
    expected = [
        {
            "entity_group": one["label"],
            "score": one["score"],
            "word": one["text"],
            "start": one["start"],
            "end": one["end"],
        }
        for one in own["entities"]
    ]
    assert await running.result("/?model=tagger", {"inputs": TEXTS[1]}) == expected != []
    assert await running.result("/?model=tagger", {"inputs": [TEXTS[1]], "parameters": {"stride": None}}) == [expected]
    (plain,) = await tag(running, TEXTS[1], aggregation="none", ignore_labels=[])
    options = {"aggregation_strategy": "none", "ignore_labels": []}
    tokens = await running.result("/?model=tagger", {"inputs": TEXTS[1], "parameters": options})
    named = [(one["label"], one["token"]) for one in plain["entities"]]
    assert [(one["entity"], one["index"]) for one in tokens] == named
    assert (await running.client.get("/info")).json()["model_pipeline_tag"] == "token-classification"


async def test_a_truncated_input_keeps_the_characters_of_its_tokens(running: Running) -> None:
    body = {"inputs": "xy" * 40, "aggregation": "none", "ignore_labels": [], "truncate": True}
    response = await running.result("/v1/tag", body)
    # The tokenizer puts a space before the text, and the end token is kept.
    assert [one["start"] for one in response["outputs"][0]["entities"]] == [0, *range(62)]
    assert response["usage"]["input_tokens"] == 64


def test_spans_of_a_truncated_text_keep_its_last_special_token(tokenizer: TextTokenizer) -> None:
    text = "dog " * 50
    ids = tuple(tokenizer.encode_truncated(text, 8))
    assert [span.id for span in spans_of(tokenizer, text, ids)] == list(ids)


def test_special_tokens_have_no_label(tokenizer: TextTokenizer) -> None:
    spans = tokenizer.encode_spans("x")
    scores = fake_token_label_logprobs([span.id for span in spans], 2)
    assert [one.token for one in label_tokens("x", spans, scores, ("a", "b"))] == [0, 1]
