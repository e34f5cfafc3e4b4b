import dataclasses
import re
from pathlib import Path

import pytest
import torch

from sightline.base.errors import UsageError
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.encoder import TextEncoder
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model, save_checkpoint
from sightline.model.config import CausalConfig, EncoderConfig
from sightline.model.data.chat_template import CHAT_TOKENS
from sightline.model.data.records import DialogueMessage, DialogueRecord, LabelledRecord, PairRecord, Record, TextRecord
from sightline.model.data.tokenizer_training import encode_lines, train_tokenizer
from sightline.model.decoding import translate_batch
from sightline.model.evaluation.bleu import evaluate_translation, translate
from sightline.model.evaluation.evaluate import evaluate_model
from sightline.model.evaluation.length_groups import grouped

PAIRS = [PairRecord("A dog sleeps.", "Ein Hund schläft."), PairRecord("The girl sings.", "Das Mädchen singt.")]


@pytest.mark.parametrize("max_tokens", [1, 7, 12, 1000])
def test_groups_have_each_index_once_within_their_size(max_tokens: int) -> None:
    lengths = [3, 1, 5, 2, 2, 5, 7]
    groups = list(grouped(lengths, max_tokens))
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert all(len(one) == 1 or len(one) * max(lengths[index] for index in one) <= max_tokens for one in groups)
    assert len(groups) == {1: 7, 7: 5, 12: 3, 1000: 1}[max_tokens]
    assert list(grouped([], max_tokens)) == []


def test_a_translation_model_is_scored_by_beam_search(checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint)
    found = evaluate_model(model, tokenizer, PAIRS, num_beams=2)
    assert found.details["outputs"] == translate(model, tokenizer, [pair.source for pair in PAIRS], 2, 1.0)
    bleu, chrf = found.methods["BLEU"], found.methods["chrF"]
    assert (bleu.examples, bleu.search) == (2, "2 beams, length penalty 1")
    assert str(bleu.signature).startswith("nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a")
    low, high = chrf.interval or (1, 0)
    assert low <= high


def test_the_metric_of_translation_during_training_is_that_of_greedy_outputs(checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    sources = encode_lines(tokenizer, [pair.source for pair in PAIRS])
    limit = 2 * max(map(len, sources)) + 10
    (first, second) = (tokenizer.decode(ids).removeprefix(" ") for ids in translate_batch(model, sources, limit))
    long = PairRecord("word " * 200, "Wort")
    own = [PairRecord(PAIRS[0].source, first), long, PairRecord(PAIRS[1].source, second)]
    found = evaluate_translation(model, tokenizer, own)
    assert list(found.metrics) == ["chrF", "BLEU"]
    assert found.metrics["chrF"] == pytest.approx(100)  # BLEU needs outputs of four words
    assert evaluate_translation(model, tokenizer, PAIRS).metrics["chrF"] < 50
    assert len(found.samples) == 2
    assert found.samples[0].startswith("source: A dog sleeps. | reference: ")
    assert evaluate_translation(model, tokenizer, [long]).metrics == {}


def test_a_classifier_is_scored_by_label(classifier_checkpoint: Path, toy_sentences: list[str]) -> None:
    records = [LabelledRecord(text, ("fair",)) for text in toy_sentences]
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)
    found = evaluate_model(model, tokenizer, records)
    labels = found.details["labels"]
    assert found.methods["accuracy"].examples == labels["fair"]["texts"] == len(toy_sentences)
    assert found.metrics["accuracy"] == pytest.approx(labels["fair"]["recall"], abs=0.01)
    assert list(labels) == ["bad", "fair", "good"]
    assert bool(found.samples) == (found.metrics["accuracy"] < 100)
    several = Classifier(dataclasses.replace(model.config, multi_label=True)).eval()
    assert list(evaluate_model(several, tokenizer, records).metrics) == ["micro F1", "macro F1", "exact match"]


def test_a_language_model_is_scored_by_perplexity_and_exact_answers(tmp_path: Path, sentences: list[str]) -> None:
    tokenizer = train_tokenizer(sentences[:50], 400, CHAT_TOKENS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=1, max_positions=64)
    save_checkpoint(
        tmp_path / "run", config, CausalModel(config).state_dict(), tmp_path / "tokenizer.json", {"epoch": 3}
    )
    messages = (DialogueMessage("user", "How are you?"), DialogueMessage("assistant", "Fine."))
    records: list[Record] = [TextRecord("A dog. " * 100), DialogueRecord(messages), DialogueRecord(messages * 20)]
    loaded = load_model(tmp_path / "run")
    found = evaluate_model(*loaded, records)
    assert found.metrics["perplexity"] > 100
    assert found.methods["exact answers"].examples == 1
    assert len(found.samples) == 2
    with pytest.raises(UsageError, match="evaluated on texts or dialogues, but the data has pairs"):
        evaluate_model(*loaded, PAIRS)


def test_an_encoder_is_scored_by_recall(tmp_path: Path, sentences: list[str]) -> None:
    tokenizer = train_tokenizer(sentences[:50], 400)
    torch.manual_seed(0)
    model = TextEncoder(EncoderConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=32)).eval()
    found = evaluate_model(model, tokenizer, PAIRS)
    assert found.methods["recall@1"].examples == 2
    assert found.metrics["recall@1"] in (0, 50, 100)


def test_other_records_and_no_records_are_rejected(checkpoint: Path) -> None:
    loaded = load_model(checkpoint)
    with pytest.raises(UsageError, match="evaluated on pairs, but the data has labelled texts"):
        evaluate_model(*loaded, [*PAIRS, LabelledRecord("x", ("y",))])
    with pytest.raises(UsageError, match=re.escape("there is nothing to evaluate: the data has no records")):
        evaluate_model(*loaded, [])
