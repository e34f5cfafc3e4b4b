from pathlib import Path

import ctranslate2
import pytest
from tokenizers import Tokenizer

from lab.bench.ctranslate2_model import write_ctranslate2_model
from lab.bench.weights import read_model
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.decoding import one_thread
from tests.support.reference_decoding import greedy, pytorch_steps

SHIPPED = Path("bundles/multi30k-en-de")
MAX_NEW_TOKENS = 40


@pytest.mark.parametrize("count", [1, 6], ids=["alone", "in a batch"])
def test_the_converted_model_decodes_the_same_outputs(
    checkpoint: Path, toy_sentences: list[str], tmp_path: Path, count: int
) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    assert_decodes_the_same(model, tokenizer, toy_sentences[:count], tmp_path / "model")


def test_the_converted_shipped_model_decodes_the_same_outputs(sentences: list[str], tmp_path: Path) -> None:
    tokenizer = read_tokenizer(SHIPPED / "tokenizer.json")
    assert_decodes_the_same(read_model(SHIPPED), tokenizer, sentences[::60], tmp_path / "model")


def assert_decodes_the_same(model: Transformer, tokenizer: Tokenizer, sentences: list[str], folder: Path) -> None:
    write_ctranslate2_model(folder, model, tokenizer)
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)
    results = translator.translate_batch(
        [tokenizer.encode(sentence).tokens for sentence in sentences],
        beam_size=1,
        max_decoding_length=MAX_NEW_TOKENS,
        return_end_token=True,
    )
    found = [tuple(tokenizer.token_to_id(token) for token in result.hypotheses[0]) for result in results]
    config = model.config
    with one_thread():
        expected = [
            greedy(
                pytorch_steps(model, tokenizer.encode(sentence).ids), config.bos_id, config.eos_id, MAX_NEW_TOKENS
            ).ids
            for sentence in sentences
        ]
    assert found == expected
