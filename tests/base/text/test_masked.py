"""Texts with masks have the tokens that the `tokenizers` library gives them."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sightline.base.text.tokenizer import TextTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz<>"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: id_ for id_, word in enumerate(["</s>", "<mask>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<mask>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in LETTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["</s>", AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[PAD]", "[UNK]", "<mask>", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "<mask>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, unigram, word_piece])
@pytest.mark.parametrize("text", ["the <mask> a", "<mask> the", "a <mask><mask> b", "a  <mask>", "a<mask>b <mask> "])
def test_a_mask_is_one_token_and_takes_the_space_that_belongs_to_it(make: Callable[[], Tokenizer], text: str) -> None:
    expected, tokenizer = make(), TextTokenizer(make())
    mask_id = expected.token_to_id("<mask>")
    ids = expected.encode(text).ids
    assert mask_id is not None and tokenizer.encode_masked(text, mask_id) == ids
    assert mask_id in ids and mask_id not in tokenizer.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
