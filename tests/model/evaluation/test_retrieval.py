import pytest
import torch
from tokenizers import Tokenizer

from sightline.model.architectures.encoder import TextEncoder
from sightline.model.config import EncoderConfig
from sightline.model.data.records import PairRecord
from sightline.model.evaluation.ranking import evaluate_encoder, ranks, text_vectors


@pytest.fixture
def model() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(EncoderConfig(400, d_model=16, num_heads=2, d_ff=32, max_positions=32)).eval()


def test_the_vectors_keep_the_order_of_the_texts(
    model: TextEncoder, tokenizer: Tokenizer, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.model.evaluation.length_groups.grouped.__defaults__", (64,))
    texts = [text for text in sentences if len(tokenizer.encode(text)) <= 32][:12]
    for text, vector in zip(texts, text_vectors(model, tokenizer, texts), strict=True):
        ids = tokenizer.encode(text).ids
        torch.testing.assert_close(vector, model(torch.tensor([ids]), torch.tensor([len(ids)]))[0])


def test_ranks_are_those_by_hand() -> None:
    pairs = [PairRecord("a", "x"), PairRecord("b", "y"), PairRecord("c", "z"), PairRecord("a", "z")]
    targets = ["x", "y", "z"]
    # Scores of x, y and z for each source.
    sources = torch.tensor([[0.5, 0.9, 0.1], [0.3, 0.3, 0.1], [0.1, 0.2, 0.7], [0.5, 0.9, 0.1]])
    # b and y: the equal score of x ranks first. a: x and z are right, and x is second.
    assert ranks(sources, torch.eye(3), pairs, targets) == [2, 2, 1, 2]


def test_a_target_that_is_the_source_itself_is_no_candidate() -> None:
    pairs = [PairRecord("a", "b"), PairRecord("c", "a")]
    sources = torch.tensor([[0.2, 1.0], [0.1, 0.9]])
    assert ranks(sources, torch.eye(2), pairs, ["b", "a"]) == [1, 1]


def test_equal_texts_are_found_and_equal_vectors_are_not(
    model: TextEncoder, tokenizer: Tokenizer, sentences: list[str]
) -> None:
    texts = [text for text in sentences if len(tokenizer.encode(text)) <= 30][:12]
    pairs = [PairRecord(f"{text} ", text) for text in texts]  # one more token than the target
    found = evaluate_encoder(model, tokenizer, pairs)
    assert found.metrics["recall@1"] == found.metrics["MRR"] == 100
    assert (len(found.predictions), found.details["targets"]) == (12, 12)
    low, high = found.methods["recall@1"].interval or (0, 0)
    assert low < 100 == high
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.encoder[-1].feed_forward_norm.norm.bias.fill_(1.0)  # type: ignore[union-attr, operator]
    collapsed = evaluate_encoder(model, tokenizer, pairs).metrics
    assert collapsed["recall@1"] == 0
    assert collapsed["MRR"] == pytest.approx(100 / 12, abs=0.01)


def test_the_metric_during_training_truncates_texts_that_are_too_long(model: TextEncoder, tokenizer: Tokenizer) -> None:
    pairs = [PairRecord("A dog. ", "A dog."), PairRecord("A cat. ", "A cat."), PairRecord("word " * 50, "word " * 40)]
    found = evaluate_encoder(model, tokenizer, pairs)
    assert found.metrics == {"recall@1": 100.0, "recall@10": 100.0, "MRR": 100.0}
    assert len(found.samples) == 3
    assert found.samples[0] == "source: A dog. | target: A dog. | nearest: A dog. | rank: 1"
