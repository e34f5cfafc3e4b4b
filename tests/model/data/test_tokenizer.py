import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sightline.model.data.tokenizer_training import (
    SPECIAL_TOKENS,
    decode_ids,
    encode_lines,
    read_tokenizer,
    train_tokenizer,
)


def test_the_sentences_are_300_different_ones_of_3_to_60_words(sentences: list[str]) -> None:
    assert len(sentences) == len(set(sentences)) == 300
    assert all(3 <= len(sentence.split()) <= 60 for sentence in sentences)


def test_every_sentence_is_decoded_from_its_ids(tokenizer: Tokenizer, sentences: list[str]) -> None:
    for sentence, ids in zip(sentences, encode_lines(tokenizer, sentences), strict=True):
        assert decode_ids(tokenizer, ids) == unicodedata.normalize("NFC", sentence)
        assert ids[-1] == 2
        assert min(ids[:-1]) > 2


def test_decomposed_letters_become_composed_ones(tokenizer: Tokenizer) -> None:
    (ids,) = encode_lines(tokenizer, ["cafe\u0301"])
    assert decode_ids(tokenizer, ids) == "caf\u00e9"


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_text_that_spells_a_special_token_is_text(tokenizer: Tokenizer, token: str) -> None:
    (ids,) = encode_lines(tokenizer, [f"a {token} b"])
    assert min(ids[:-1]) > 2
    assert decode_ids(tokenizer, ids) == f"a {token} b"


def test_a_word_is_the_same_token_at_the_start_and_within(tokenizer: Tokenizer) -> None:
    (ids,) = encode_lines(tokenizer, ["dog dog"])
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 : -1]


def test_ids_of_the_special_tokens_are_those_of_the_configuration(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]


def test_a_tokenizer_trained_again_is_the_same(sentences: list[str]) -> None:
    first, second = (train_tokenizer(sentences[:50], 300) for _ in range(2))
    assert first.to_str() == second.to_str()


def test_a_stored_tokenizer_encodes_as_before(tmp_path: Path, sentences: list[str]) -> None:
    trained = train_tokenizer(sentences, 300)
    trained.save(str(tmp_path / "tokenizer.json"))
    lines = [*sentences, "</s> is text"]
    assert encode_lines(read_tokenizer(tmp_path / "tokenizer.json"), lines) == encode_lines(trained, lines)


def test_a_vocabulary_too_small_for_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be at least 259 \(bytes and special tokens\), got 258"):
        train_tokenizer(["a"], 258)


def test_extremely_long_lines_are_not_used_for_training() -> None:
    """Training time grows with the square of the word length; such a word would take hours."""
    words = ["a small dog", "two small dogs"]
    assert train_tokenizer([*words, "x" * 500_000], 300).to_str() == train_tokenizer(words, 300).to_str()
